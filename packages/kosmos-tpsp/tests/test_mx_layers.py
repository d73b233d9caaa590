"""Layers in MXFP8: every product against FP64 of the promised operands, and how they are used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("kosmos_mx")

from kosmos_core.errors import ArgumentError, PeerError
from kosmos_core.executor import Random
from kosmos_core.worlds import World, cpu_world, reference_world
from kosmos_mx import MXTensor
from kosmos_tpsp import (
    MXFP8,
    ColumnParallelLinear,
    LinearCall,
    ParallelMLP,
    RowParallelLinear,
    TpSpWorkspace,
    destroy_workspaces,
)
from kosmos_tpsp.cli.layer_check import LAYER_TOLERANCE, LayerCase, layer_errors
from kosmos_tpsp.cli.mx_layer_check import MxCase, mx_layer_problems
from kosmos_tpsp.ops import mx_carriers, mx_linear, mx_weights
from kosmos_tpsp.precision import with_scales

DERIVE = MXFP8(column_dy="derive")
ON = (("precision", "mxfp8"),)
CASES = [
    *(MxCase(kind) for kind in ("column", "row")),
    *(MxCase(kind, recipe=MXFP8("floor")) for kind in ("column", "row")),
    *(MxCase(kind, main_grad=True) for kind in ("column", "row")),
    *(MxCase(kind, frozen=frozen) for kind in ("column", "row") for frozen in "xw"),
    MxCase("row", recipe=DERIVE),
    MxCase("row", recipe=DERIVE, frozen="x", main_grad=True),
    # Chunks, shards and features that are not a multiple of 32.
    MxCase("column", tokens=24, inputs=40, outputs=72),
    MxCase("row", tokens=120, inputs=72, outputs=40),
]


def problems(world: World, case: MxCase, steps: int = 1) -> dict[str, str]:
    """What any rank has found wrong."""

    def host(rank: int) -> dict[str, str]:
        found = mx_layer_problems(case, world, steps)
        destroy_workspaces(world)
        return found

    return {name: told for rank in world.spmd(host) for name, told in rank.items()}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_products_are_of_the_promised_operands(case: MxCase) -> None:
    with cpu_world(2, race="raise", strict=True) as world:
        assert problems(world, case) == {}


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("kind", ["column", "row"])
def test_any_number_of_ranks(size: int, kind: str) -> None:
    case = MxCase(kind, tokens=32 * size, inputs=16 * size, outputs=32 * size)
    with cpu_world(size, race="raise", strict=True, policy=Random(size)) as world:
        assert problems(world, case) == {}


@pytest.mark.parametrize("case", [MxCase("column"), MxCase("row"), CASES[-2], CASES[-1]], ids=str)
def test_changed_weights_are_quantised_anew(case: MxCase) -> None:
    with cpu_world(2) as world:
        assert problems(world, case, steps=2) == {}


def given(rows: MXTensor, columns: MXTensor, axis: str, values: str | None) -> Any:
    """Copies as `quantize` returns them."""
    made = [
        copy.dequantize() if values in (copy.axis, "both") else copy
        for copy in (rows, columns)
        if axis in (copy.axis, "both")
    ]
    return tuple(made) if axis == "both" else made[0]


def requantised(
    x: torch.Tensor, axis: str, rounding: str, *, segments: int, values: str | None
) -> Any:
    """The column-wise copy from the row-wise one."""
    rows = mx_linear_quantize(x, "row", rounding)
    columns = mx_linear_quantize(rows.dequantize(), "col", rounding, segments=segments)
    return given(rows, columns, axis, values)


def straddling(
    x: torch.Tensor, axis: str, rounding: str, *, segments: int, values: str | None
) -> Any:
    """Groups that take no notice of whose rows they hold."""
    rows, whole = mx_linear_quantize(x, "both", rounding)
    columns = mx_linear_quantize(whole.dequantize(), "col", rounding, segments=segments)
    return given(rows, columns, axis, values)


def stale(w: torch.Tensor, *rest: Any, **choices: Any) -> Any:
    """Copies that are never made anew."""
    known = mx_weights._KEPT.get(w)
    if known is not None:
        now = (w.data_ptr(), w._version, mx_weights._epoch, *known.state[-2:])
        mx_weights._KEPT[w] = replace(known, state=now)
    return weight_copies(w, *rest, **choices)


mx_linear_quantize = mx_linear.quantize
weight_copies = mx_weights.weight_copies
swapped = {"row": "col", "col": "row"}


def turned(w: torch.Tensor, axes: Any, *rest: Any, **choices: Any) -> Any:
    """The copy along the other axis."""
    return weight_copies(w, tuple(swapped[axis] for axis in axes), *rest, **choices)


PLANTS: list[tuple[str, Any, MxCase, str]] = [
    ("quantize", requantised, MxCase("column"), "step 0 dw"),
    ("quantize", requantised, MxCase("row"), "step 0 dw"),
    ("quantize", straddling, MxCase("column", tokens=24), "step 0 dw"),
    ("weight_copies", stale, MxCase("column"), "step 1 y"),
    ("weight_copies", stale, MxCase("row"), "step 1 dx"),
    ("weight_copies", turned, MxCase("column"), "step 0 y"),
    ("weight_copies", turned, MxCase("row"), "step 0 dx"),
]


@pytest.mark.parametrize(("name", "instead", "case", "caught"), PLANTS)
def test_the_comparison_catches(
    name: str, instead: Any, case: MxCase, caught: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mx_linear, name, instead)
    with cpu_world(2) as world:
        assert caught in problems(world, case, steps=2)


IN_BF16, IN_MXFP8 = torch.Tensor, MXTensor
CARRIED: list[tuple[MxCase, dict[str, type]]] = [
    (MxCase("column"), {"ag_gemm": IN_MXFP8, "bulk_ag": IN_MXFP8}),
    (MxCase("column", inputs=72), {"ag_gemm": IN_BF16, "bulk_ag": IN_MXFP8}),
    (MxCase("column", tokens=80), {"ag_gemm": IN_MXFP8, "bulk_ag": IN_BF16}),
    (MxCase("row"), {"ag_gemm_pair": IN_MXFP8}),
    (MxCase("row", main_grad=True), {"ag_gemm_pair": IN_MXFP8}),
    (MxCase("row", recipe=DERIVE), {"ag_gemm": IN_MXFP8}),
    (MxCase("column", outputs=96), {"ag_gemm": IN_MXFP8, "bulk_ag": IN_BF16}),
    (MxCase("row", tokens=80), {"ag_gemm": IN_MXFP8}),
    (MxCase("row", outputs=72), {"ag_gemm": IN_BF16}),
]


@pytest.mark.parametrize(("case", "carried"), CARRIED, ids=str)
def test_what_the_operations_carry(
    case: MxCase,
    carried: dict[str, type],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[tuple[str, type]] = []

    def watched(name: str) -> Callable[..., Any]:
        op = getattr(mx_carriers, name)

        def call(x: Any, *rest: Any, **choices: Any) -> Any:
            seen.append((name, type(x)))
            return op(x, *rest, **choices)

        return call

    for name in ("ag_gemm", "bulk_ag", "ag_gemm_pair"):
        monkeypatch.setattr(mx_carriers, name, watched(name))
    monkeypatch.setattr(mx_carriers, "_LOGGED", set())
    with cpu_world(2) as world, caplog.at_level("WARNING", logger="kosmos_tpsp"):
        for _ in range(2):
            assert problems(world, case) == {}
    assert Counter(seen) == dict.fromkeys(carried.items(), 4)
    told = [r.message.split()[0] for r in caplog.records if "carries values" in r.message]
    assert told == [name for name, kind in carried.items() if kind is IN_BF16]


def test_a_workspace_without_room_for_scales_serves_all_the_same(
    on_cpu: Callable[..., list[Any]],
) -> None:
    def host(rank: int, world: World) -> dict[str, str]:
        found: dict[str, str] = {}
        for features in (128, with_scales(128)):
            workspace = TpSpWorkspace(world, 128, features)
            options = (("workspace", workspace), ("group", None), ("max_tokens", None))
            found |= mx_layer_problems(MxCase("row", options=options), world)
            pairs = workspace.launches["ag_gemm_pair"]
            assert pairs == (features > 128)
            workspace.destroy()
        return found

    assert on_cpu(2, host) == [{}, {}]


@pytest.mark.parametrize("column_dy", ["gather", "derive"])
def test_a_fused_op_is_one_launch(column_dy: str, on_cpu: Callable[..., list[Any]]) -> None:
    def host(rank: int, world: World) -> dict[str, int]:
        recipe = MXFP8(column_dy=column_dy)
        mlp = ParallelMLP(64, 64, group=world, max_tokens=64, precision=recipe, seed=1)
        y = mlp(torch.randn(32, 64).bfloat16().requires_grad_())
        forward = dict(mlp.down.call.workspace.get().launches)
        assert forward == {"ag_gemm": 1, "gemm_rs": 1}
        y.backward(torch.randn_like(y))
        return dict(mlp.down.call.workspace.get().launches)

    row = {"ag_gemm": 1, "ag_gemm_pair": 1} if column_dy == "gather" else {"ag_gemm": 2}
    step = {**row, "gemm_rs": 1, "bulk_ag": 1, "bulk_rs": 1}
    assert on_cpu(2, host) == [step, step]


def test_the_two_copies_of_dy_are_not_the_same() -> None:
    """Either way is told from the other by the comparison, which holds each to its own promise."""
    case = MxCase("row")
    with cpu_world(2) as world:
        other = partial(mx_layer_problems, replace(case, options=(("precision", DERIVE),)))
        found = world.spmd(lambda rank: other(world))
    assert all(set(rank) == {"step 0 dw"} for rank in found)


PAIRS = [
    LayerCase("column", bias=True, options=ON),
    LayerCase("row", bias=True, options=ON),
    LayerCase(main_grad=True, steps=2, uses=2, options=ON),
    LayerCase("attention", options=ON),
    LayerCase(checkpointed=True, main_grad=True, steps=2, options=ON),
    LayerCase("attention", checkpointed=True, reentrant=True, options=ON),
    LayerCase(compiler="aot_eager", main_grad=True, steps=2, uses=2, options=ON),
    LayerCase("attention", compiler="aot_eager", bias=True, options=ON),
    LayerCase(checkpointed=True, compiler="aot_eager", options=ON),
    LayerCase(frozen="x", compiler="aot_eager", options=ON),
    LayerCase(frozen="w", options=ON),
    LayerCase(frozen="xw", options=ON),
    LayerCase(tokens=24, hidden=40, inner=72, options=ON),
]


@pytest.mark.parametrize("case", PAIRS, ids=str)
def test_against_unquantised_layers(case: LayerCase) -> None:
    """Within what two roundings of normal operands to E4M3 explain, and not nearer than that."""
    torch._dynamo.reset()
    errors = layer_errors(case, reference_world())
    destroy_workspaces(reference_world())
    assert max(errors.values()) <= case.tolerance, errors
    assert errors["step 0 use 0 y"] > 2 * LAYER_TOLERANCE


def test_checkpointing_changes_no_bit() -> None:
    world = reference_world()
    found = [
        layer_errors(LayerCase(checkpointed=again, options=ON), world) for again in (False, True)
    ]
    assert found[0] == found[1]
    destroy_workspaces(world)


def test_what_a_forward_keeps_is_in_8_bits() -> None:
    world = reference_world()
    layer = RowParallelLinear(64, 96, bias=False, group=world, max_tokens=64, precision="mxfp8")
    saved: list[torch.Tensor] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        layer(torch.randn(64, 64).bfloat16().requires_grad_())
    activations = [t for t in saved if t is not layer.weight and t.shape != layer.weight.shape]
    assert sorted(t.nbytes for t in activations) == [64 * 64 // 32, 64 * 64]


@pytest.mark.parametrize("tokens", [64, 40])
@pytest.mark.parametrize("op", ["mx_column_linear", "mx_row_linear"])
def test_operators_pass_the_checks_of_torch(op: str, tokens: int) -> None:
    call = LinearCall(TpSpWorkspace(reference_world(), 64, 96), precision="mxfp8")
    x = torch.randn(tokens, 64).bfloat16().requires_grad_()
    w = torch.randn(96, 64).bfloat16().requires_grad_()
    arguments = (x, w, call.handle, True)
    checked = torch.library.opcheck(getattr(torch.ops.kosmos, op), arguments)
    assert set(checked.values()) == {"SUCCESS"}
    with pytest.raises(ArgumentError, match="keep: got False"):
        getattr(torch.ops.kosmos, op)(x, w, call.handle, False)


def test_no_tokens() -> None:
    mlp = ParallelMLP(64, 96, group=reference_world(), max_tokens=32, precision="mxfp8")
    x = torch.zeros(0, 64).bfloat16().requires_grad_()
    y = mlp(x)
    y.sum().backward()
    assert y.shape == x.grad.shape == (0, 64)
    assert not any(p.grad.any() for p in mlp.parameters())


@pytest.mark.parametrize(
    ("precision", "told"),
    [
        ("fp8", "precision: got 'fp8', wanted 'bf16', 'mxfp8' or an MXFP8"),
        (8, "precision: got 8"),
    ],
)
def test_an_unknown_precision_is_refused(precision: Any, told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        ColumnParallelLinear(64, 96, group=reference_world(), max_tokens=32, precision=precision)


def test_unknown_choices_are_refused() -> None:
    with pytest.raises(ArgumentError, match="scale_rounding: got 'up', wanted rceil or floor"):
        MXFP8(scale_rounding="up")
    with pytest.raises(ArgumentError, match="column_dy: got 'both', wanted gather or derive"):
        MXFP8(column_dy="both")


def test_without_kosmos_mx_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from kosmos_tpsp import precision

    monkeypatch.setattr(precision, "find_spec", lambda name: None)
    with pytest.raises(ArgumentError, match=r"install kosmos-tpsp\[mx\]"):
        precision.precision_of("mxfp8")
    assert precision.precision_of("bf16") is None


BAD = [
    (lambda x, w: (x.float(), w), "x: got dtype torch.float32, wanted torch.bfloat16"),
    (lambda x, w: (x, w.float()), "w: got dtype torch.float32, wanted torch.bfloat16"),
    (lambda x, w: (x[:, :32], w), "wanted a contraction of"),
    (lambda x, w: (x[:, 0], w), "x: got shape"),
]


@pytest.mark.parametrize(("spoil", "told"), BAD)
def test_one_rank_with_bad_operands_leaves_nobody_waiting(
    spoil: Any, told: str, on_cpu: Callable[..., list[Any]]
) -> None:
    def host(rank: int, world: World) -> str:
        layer = RowParallelLinear(128, 96, bias=False, group=world, max_tokens=64, seed=1,
                                  precision="mxfp8")  # fmt: skip
        x, w = torch.randn(64, 64).bfloat16(), layer.weight.detach()
        x, w = spoil(x, w) if rank == 0 else (x, w)
        call = layer.call.mx.row_linear
        try:
            call(x, w, layer.call.handle)
            world.synchronize()
            layer.call.workspace.get().check()
        except (ArgumentError, PeerError) as error:
            return str(error)
        return ""

    first, second = on_cpu(2, host)
    assert told in first
    assert "rank 0" in second
