"""Layers on the executor: outputs and gradients against FP64, launches, how they may be used."""

from __future__ import annotations

import copy
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from kosmos_core.executor import PriorityRandom, Random
from kosmos_core.testing.checked import run_checked
from kosmos_core.worlds import World, cpu_world, reference_world
from kosmos_tpsp import (
    ColumnParallelLinear,
    LinearCall,
    ParallelAttention,
    ParallelMLP,
    RowParallelLinear,
    TpSpWorkspace,
    column_parallel_linear,
    destroy_workspaces,
    row_parallel_linear,
)
from kosmos_tpsp.cli import layer_check
from kosmos_tpsp.cli.layer_check import KINDS, LAYER_TOLERANCE, LayerCase, layer_errors
from kosmos_tpsp.ops import bulk_column, linear, linear_custom
from kosmos_tpsp.ops.bulk_rs import bulk_rs
from torch.utils._python_dispatch import TorchDispatchMode

TOKENS, HIDDEN, INNER = 32, 64, 96


def errors_on(world: World, case: LayerCase) -> dict[str, float]:
    """The largest error over ranks, by name."""

    def host(rank: int) -> dict[str, float]:
        found = layer_errors(case, world)
        destroy_workspaces(world)
        return found

    ranks = world.spmd(host)
    return {name: max(rank[name] for rank in ranks) for name in ranks[0]}


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


CASES = [
    *(LayerCase(kind, bias=bias) for kind in KINDS for bias in (False, True)),
    *(LayerCase(kind, frozen=frozen) for kind in KINDS for frozen in ("x", "w")),
    LayerCase(frozen="xw"),
    LayerCase(main_grad=True, steps=2),
    LayerCase(steps=3),
    LayerCase("attention", uses=2, steps=2),
    LayerCase(uses=2, main_grad=True),
    LayerCase(checkpointed=True, main_grad=True, steps=2),
    LayerCase("attention", checkpointed=True, uses=2),
    LayerCase(checkpointed=True, reentrant=True, main_grad=True),
    LayerCase(tokens=24, hidden=56, inner=72),  # rows of 18 elements at 4 ranks: declined
    LayerCase(tokens=24, hidden=40, inner=72, frozen="x", main_grad=True),
]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_outputs_and_gradients_are_right(size: int, case: LayerCase) -> None:
    with cpu_world(size, race="raise", strict=True) as world:
        errors = errors_on(world, case)
    assert "step 0 use 0 y" in errors
    assert {name: e for name, e in errors.items() if not e <= LAYER_TOLERANCE} == {}


@pytest.mark.parametrize("kind", ["column", "row", "mlp"])
def test_three_ranks(kind: str) -> None:
    case = LayerCase(kind, tokens=33, hidden=72, inner=96, bias=True, steps=2)
    with cpu_world(3, race="raise", strict=True, seed=5) as world:
        assert max(errors_on(world, case).values()) <= LAYER_TOLERANCE


@pytest.mark.parametrize("seed", range(6))
def test_steps_on_one_workspace_under_many_schedules(seed: int) -> None:
    """Calls of five kinds follow one another, with other shapes each time."""
    case = LayerCase(tokens=24, hidden=32, inner=48, steps=2, main_grad=True)

    def host(rank: int, world: World) -> dict[str, float]:
        return layer_errors(case, world) | layer_errors(replace(case, tokens=12), world)

    size = (2, 3, 4)[seed % 3]
    policy = PriorityRandom(seed) if seed % 2 else Random(seed)
    slots = {"slots": size} if seed == 2 else {}
    for errors in run_checked(size, host, seed=seed, policy=policy, **slots):
        assert max(errors.values()) <= LAYER_TOLERANCE


NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
COMPILED = [
    LayerCase("attention", bias=True),
    LayerCase(main_grad=True, steps=2, uses=2),
    LayerCase(checkpointed=True),
    LayerCase(frozen="w"),
    LayerCase(frozen="x"),
]


@pytest.mark.parametrize(
    ("case", "backend"),
    [
        *((case, "aot_eager") for case in COMPILED),
        pytest.param(COMPILED[1], "inductor", marks=NEEDS_COMPILER),
    ],
    ids=str,
)
def test_whole_graphs_compile(case: LayerCase, backend: str) -> None:
    case = replace(case, compiler=backend)
    with cpu_world(2, race="raise", strict=True) as world:
        assert max(errors_on(world, case).values()) <= LAYER_TOLERANCE


def reduces_nothing(
    x: torch.Tensor, dy: torch.Tensor, w: torch.Tensor, workspace: TpSpWorkspace, *rest: Any
) -> Any:
    """A backward that reduces nothing."""
    size = workspace.world.size
    return dy.chunk(size)[workspace.rank] @ w, dy.t() @ workspace.world.all_gather_tensor(x)


def test_one_compiled_graph_takes_any_number_of_tokens(on_cpu: Callable[..., list[Any]]) -> None:
    def host(rank: int, world: World) -> None:
        mlp = ParallelMLP(HIDDEN, INNER, group=world, max_tokens=TOKENS)
        seen: list[int] = []

        def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
            seen.append(len(inputs))
            return graph.forward

        compiled = torch.compile(mlp, fullgraph=True, dynamic=True, backend=backend)
        for rows in (8, 16, 4):
            x = torch.randn(rows, HIDDEN).bfloat16()
            assert torch.equal(compiled(x), mlp(x))
        assert len(seen) == 1
        with torch.inference_mode():
            assert torch.equal(mlp(x), mlp(x.clone()))

    on_cpu(2, host)


def own_rows_only(x: torch.Tensor, w: torch.Tensor, ws: TpSpWorkspace, **_: Any) -> torch.Tensor:
    """A reduction that forgets the other ranks."""
    return (x @ w.t()).chunk(ws.world.size)[ws.rank]


PLANTS: list[tuple[object, str, Any, LayerCase, str]] = [
    (linear, "column_backward", reduces_nothing, LayerCase("column"), "step 0 use 0 dx"),
    (linear, "gather", lambda x, ws: x.repeat(ws.world.size, 1), LayerCase(frozen="x"), "dw 0"),
    (linear, "gemm_rs", own_rows_only, LayerCase(frozen="w"), "dx"),
    (linear_custom, "gemm_rs", own_rows_only, LayerCase(), "y"),
    (layer_check, "reduce_replicated_grads", lambda *_: None, LayerCase("row", bias=True), "db 0"),
    (layer_check.sharding, "part_of", lambda wholes, *_: wholes[0], LayerCase("row"), "dw 0"),
]


@pytest.mark.parametrize(("place", "name", "instead", "case", "caught"), PLANTS)
def test_the_comparison_catches(
    place: Any,
    name: str,
    instead: Any,
    case: LayerCase,
    caught: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(place, name, instead)
    with cpu_world(2) as world:
        errors = errors_on(world, case)
    wrong = [n for n, e in errors.items() if not e <= LAYER_TOLERANCE]
    assert any(n.endswith(caught) for n in wrong), errors


def counted(world: World, counts: dict[int, Counter[str]]) -> None:
    """Counts the launches of each rank by kernel."""
    launch = world.launch

    def counting(kernel: Any, *args: Any, **keywords: Any) -> None:
        counts[world.rank][kernel.fn.__name__] += 1
        launch(kernel, *args, **keywords)

    world.launch = counting  # type: ignore[method-assign]


FORWARD = {
    "column": {"ag_gemm_kernel": 1},
    "row": {"gemm_rs_kernel": 1},
    "mlp": {"ag_gemm_kernel": 1, "gemm_rs_kernel": 1},
    "attention": {"ag_gemm_kernel": 1, "gemm_rs_kernel": 1},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_fused_op_is_one_launch(kind: str) -> None:
    counts = {rank: Counter[str]() for rank in range(2)}
    made: list[dict[str, int]] = []

    def host(rank: int) -> None:
        case = LayerCase(kind)
        layer = layer_check.build(case, world)
        features = INNER // 2 if kind == "row" else HIDDEN
        rows = TOKENS if kind == "row" else TOKENS // 2
        x = torch.randn(rows, features).bfloat16().requires_grad_()
        with torch.no_grad():
            layer(x)
        world.barrier()
        counts[rank].clear()
        y = layer(x)
        assert counts[rank] == FORWARD[kind]
        y.sum().backward()
        made.append(dict(counts[rank]))

    with cpu_world(2) as world:
        counted(world, counts)
        world.spmd(host)
    backward = {
        "column": {"bulk_ag_kernel": 1, "bulk_rs_kernel": 1},
        "row": {"ag_gemm_kernel": 1},
    }
    both = Counter(FORWARD[kind])
    for part in (kind,) if kind in backward else backward:
        both.update(backward[part])
    assert made == [both, both]


def test_the_input_gradient_is_handed_over_without_a_copy(
    on_cpu: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    handed = []

    def seen(dx: torch.Tensor, *operands: Any, **choices: Any) -> Any:
        handed.append(operands[2].is_handover(dx))
        return bulk_rs(dx, *operands, **choices)

    monkeypatch.setattr(bulk_column, "bulk_rs", seen)

    def host(rank: int, world: World) -> None:
        layer = ColumnParallelLinear(HIDDEN, INNER, group=world, max_tokens=TOKENS)
        x = torch.randn(TOKENS // 2, HIDDEN).bfloat16().requires_grad_()
        layer(x).sum().backward()

    on_cpu(2, host)
    assert handed == [True, True]


class Recorder(TorchDispatchMode):
    """Names of the operators that run, views left out."""

    VIEWS = ("view", "permute", "squeeze", "unsqueeze", "split", "split_with_sizes", "detach")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op.name().split("::")[1].split(".")[0]
        if name not in self.VIEWS:
            self.names.append(name)
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", [(8, HIDDEN), (8, 1, HIDDEN), (4, 2, HIDDEN)])
def test_nothing_is_copied_between_the_linears_but_gradients_that_are_joined(
    shape: tuple[int, ...],
) -> None:
    with Recorder() as selected:
        x = torch.zeros(8, 1, HIDDEN, requires_grad=True)
        x[:, 0].sum().backward()
    assert "select_backward" in selected.names  # zeros and a copy: the recorder would see it
    settings: dict[str, Any] = {"group": reference_world(), "max_tokens": TOKENS}
    attention, mlp = (
        ParallelAttention(HIDDEN, 8, **settings),
        ParallelMLP(HIDDEN, INNER, **settings),
    )
    sdpa = "_scaled_dot_product_flash_attention_for_cpu"
    inner = {
        attention: ([sdpa], [f"{sdpa}_backward", "cat"]),
        mlp: (["silu", "mul"], ["mul", "mul", "silu_backward", "cat"]),
    }
    for layer, (forward, backward) in inner.items():
        x, dy = (torch.randn(shape).bfloat16() for _ in range(2))
        x.requires_grad_()
        with Recorder() as recorded:
            y = layer(x)
        assert recorded.names == ["column_linear", *forward, "row_linear"]
        with Recorder() as recorded:
            torch.autograd.grad(y, (x, *layer.parameters()), dy)
        ends = ["row_linear_backward", *backward, "column_linear_backward"]
        assert recorded.names == ends


def test_no_grad_records_nothing_and_gives_the_same(on_cpu: Callable[..., list[Any]]) -> None:
    def host(rank: int, world: World) -> None:
        mlp = ParallelMLP(HIDDEN, INNER, group=world, max_tokens=TOKENS)
        x = torch.randn(TOKENS // 2, HIDDEN).bfloat16()
        recorded = mlp(x)
        with torch.no_grad():
            out = mlp(x)
        assert recorded.requires_grad
        assert not out.requires_grad
        assert torch.equal(out, recorded)
        mlp.requires_grad_(False)
        assert torch.equal(mlp(x), recorded)

    on_cpu(2, host)


def test_a_sequence_first_batch_is_a_matrix_of_its_rows(on_cpu: Callable[..., list[Any]]) -> None:
    def host(rank: int, world: World) -> None:
        mlp = ParallelMLP(HIDDEN, INNER, group=world, max_tokens=TOKENS, bias=True)
        x = torch.randn(4, 4, HIDDEN).bfloat16()
        out = mlp(x)
        assert out.shape == x.shape
        assert torch.equal(out.view(16, -1), mlp(x.view(16, -1)))
        assert mlp.gate_up(x).shape == (8, 4, INNER)
        assert mlp.down(torch.zeros(8, 4, INNER // 2).bfloat16()).shape == (4, 4, HIDDEN)

    on_cpu(2, host)


def test_attention_takes_batches_and_rotations(on_cpu: Callable[..., list[Any]]) -> None:
    def host(rank: int, world: World) -> None:
        attention = ParallelAttention(
            HIDDEN, 8, num_kv_heads=2, group=world, max_tokens=TOKENS, seed=1
        )
        x = torch.randn(TOKENS // 4, 2, HIDDEN).bfloat16()
        out = attention(x)
        assert out.shape == x.shape
        alone = attention(x[:, 1].contiguous())
        torch.testing.assert_close(out[:, 1], alone, rtol=2e-2, atol=1e-2)
        seen = []

        def rotate(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            seen.append((q.shape, k.shape))
            return -q, -k

        assert torch.equal(attention(x, rotate), out)
        assert seen == [((2, 4, TOKENS // 2, 8), (2, 1, TOKENS // 2, 8))]
        assert not torch.equal(attention(x, lambda q, k: (q, -k)), out)

    on_cpu(2, host)


def test_functional_forms_on_two_workspaces_by_turns(on_cpu: Callable[..., list[Any]]) -> None:
    def host(rank: int, world: World) -> None:
        first, second = (TpSpWorkspace(world, TOKENS, HIDDEN) for _ in range(2))
        calls = [LinearCall(first, cap=2), LinearCall(second)]
        assert len({call.handle for call in calls}) == 2
        x = torch.randn(TOKENS // 2, HIDDEN).bfloat16().requires_grad_()
        w = torch.randn(INNER, HIDDEN).bfloat16().requires_grad_()
        v = torch.randn(HIDDEN, INNER).bfloat16().requires_grad_()
        found = []
        for into, out_of in (calls, calls[::-1], calls[:1] * 2):
            y = row_parallel_linear(column_parallel_linear(x, w, None, into), v, None, out_of)
            found.append((y, *torch.autograd.grad(y.square().sum(), (x, w, v))))
        for other in found[1:]:
            assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
        first.destroy()
        second.destroy()

    on_cpu(2, host)


def test_a_copy_has_weights_of_its_own_and_the_same_memory(
    on_cpu: Callable[..., list[Any]],
) -> None:
    def host(rank: int, world: World) -> None:
        layer = ColumnParallelLinear(HIDDEN, INNER, group=world, max_tokens=TOKENS)
        other = copy.deepcopy(layer)
        assert other.call is layer.call
        with torch.no_grad():
            other.weight.mul_(2)
            x = torch.randn(TOKENS // 2, HIDDEN).bfloat16()
            zero = torch.zeros_like(layer.bias)
            torch.testing.assert_close(
                column_parallel_linear(x, other.weight, zero, other.call),
                2 * column_parallel_linear(x, layer.weight, zero, layer.call),
            )

    on_cpu(2, host)


def test_prepare_leaves_no_gradient(on_cpu: Callable[..., list[Any]]) -> None:
    def host(rank: int, world: World) -> None:
        for kind in (ColumnParallelLinear, RowParallelLinear):
            layer = kind(HIDDEN, INNER, group=world, max_tokens=TOKENS)
            layer.weight.main_grad = torch.ones(layer.weight.shape)
            layer.prepare(TOKENS)
            assert layer.weight.grad is None
            assert torch.equal(layer.weight.main_grad, torch.ones(layer.weight.shape))
            assert not hasattr(layer.weight, "grad_added_to_main_grad")

    on_cpu(2, host)


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        (ColumnParallelLinear, {"ag_gemm": 1, "gemm_rs": 1}),
        (RowParallelLinear, {"gemm_rs": 1, "ag_gemm": 1}),
    ],
)
def test_prepare_makes_the_calls_of_a_frozen_weight(
    kind: Any, wanted: dict[str, int], on_cpu: Callable[..., list[Any]]
) -> None:
    def host(rank: int, world: World) -> None:
        with TpSpWorkspace(world, TOKENS, INNER) as workspace:
            layer = kind(HIDDEN, INNER, workspace=workspace)
            layer.weight.requires_grad_(False)
            layer.prepare(TOKENS)
            assert workspace.launches == wanted
            known = len(workspace.prepared)
            features = HIDDEN if kind is ColumnParallelLinear else HIDDEN // 2
            rows = TOKENS // 2 if kind is ColumnParallelLinear else TOKENS
            x = torch.ones(rows, features).bfloat16().requires_grad_()
            layer(x).sum().backward()
            assert len(workspace.prepared) == known

    on_cpu(2, host)


def test_gradients_of_gradients_are_refused(on_cpu: Callable[..., list[Any]]) -> None:
    def host(rank: int, world: World) -> None:
        layer = ColumnParallelLinear(HIDDEN, INNER, group=world, max_tokens=TOKENS)
        x = torch.randn(TOKENS // 2, HIDDEN).bfloat16().requires_grad_()
        y = layer(x)
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)
        with pytest.raises(RuntimeError, match="no autograd formula was registered"):
            dx.sum().backward()

    on_cpu(2, host)


@pytest.mark.parametrize("layer_type", [ColumnParallelLinear, RowParallelLinear])
def test_who_looks_on_sees_operators_that_give_the_same(
    layer_type: Any, on_cpu: Callable[..., list[Any]]
) -> None:
    def host(rank: int, world: World) -> None:
        layer = layer_type(HIDDEN, INNER, group=world, max_tokens=TOKENS, bias=False)
        column = layer_type is ColumnParallelLinear
        shape = (TOKENS // 2, HIDDEN) if column else (TOKENS, HIDDEN // 2)
        x = torch.randn(shape).bfloat16().requires_grad_()

        def step() -> tuple[torch.Tensor, ...]:
            y = layer(x)
            return y, *torch.autograd.grad(y, (x, layer.weight), torch.ones_like(y))

        plain = step()
        recorder = Recorder()
        with recorder:
            seen = step()
        op = "column_linear" if column else "row_linear"
        assert [name for name in recorder.names if name.startswith(op)] == [op, f"{op}_backward"]
        for one, other in zip(plain, seen, strict=True):
            assert torch.equal(one, other)

    on_cpu(2, host)


def test_no_tokens_leave_zeros(on_cpu: Callable[..., list[Any]]) -> None:
    def host(rank: int, world: World) -> None:
        mlp = ParallelMLP(HIDDEN, INNER, group=world, max_tokens=TOKENS)
        out = mlp(torch.zeros(0, HIDDEN).bfloat16())
        out.sum().backward()
        assert out.shape == (0, HIDDEN)
        assert not any(p.grad.any() for p in mlp.parameters())

    on_cpu(2, host)


def test_a_program_without_torch_distributed_is_a_group_of_one() -> None:
    mlp = ParallelMLP(HIDDEN, INNER, group=reference_world(), max_tokens=TOKENS)
    x = torch.randn(5, HIDDEN).bfloat16()
    gate_up, _ = mlp.gate_up.gather_full()
    gate, up = (x @ gate_up.t()).chunk(2, -1)
    hidden = torch.nn.functional.silu(gate) * up
    assert torch.equal(mlp(x), hidden @ mlp.down.weight.t())


@pytest.mark.parametrize("op", ["column_linear", "row_linear"])
def test_operators_pass_the_checks_of_torch(op: str) -> None:
    def host(rank: int) -> None:
        call = LinearCall(TpSpWorkspace(world, TOKENS, INNER))
        x = torch.randn(TOKENS, HIDDEN).bfloat16().requires_grad_()
        w = torch.randn(INNER, HIDDEN).bfloat16().requires_grad_()
        checked = torch.library.opcheck(getattr(torch.ops.kosmos, op), (x, w, call.handle))
        assert set(checked.values()) == {"SUCCESS"}

    with cpu_world(1) as world:
        world.spmd(host)
