"""Quantised weights of layers: how often they are made, what makes them anew, how they go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("kosmos_mx")

from kosmos_core.worlds import reference_world
from kosmos_tpsp import (
    ColumnParallelLinear,
    ParallelMLP,
    RowParallelLinear,
    column_parallel_linear,
)
from kosmos_tpsp.ops import mx_weights
from torch.utils.checkpoint import checkpoint


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, ...]]]:
    """(axis, shape) of every weight that is quantised."""
    seen: list[tuple[str, tuple[int, ...]]] = []
    quantize = mx_weights.quantize

    def counting(w: torch.Tensor, axis: str, rounding: str, **choices: Any) -> Any:
        seen.append((axis, tuple(w.shape)))
        return quantize(w, axis, rounding, **choices)

    monkeypatch.setattr(mx_weights, "quantize", counting)
    return seen


UP, DOWN = ("both", (192, 64)), ("both", (64, 96))


def step(mlp: Callable[[torch.Tensor], torch.Tensor], calls: int = 1) -> torch.Tensor:
    y = sum(mlp(torch.randn(32, 64).bfloat16()) for _ in range(calls))
    assert isinstance(y, torch.Tensor)
    y.sum().backward()
    return y


def test_weights_are_quantised_once_a_step(counted: list[Any]) -> None:
    mlp = ParallelMLP(64, 96, group=reference_world(), max_tokens=32, precision="mxfp8")
    optimizer = torch.optim.SGD(mlp.parameters(), lr=0.1)
    for _ in range(3):
        step(mlp, calls=2)
        step(mlp)  # a second micro-batch
        assert counted == [UP, DOWN]
        counted.clear()
        optimizer.step()


def test_compiled_and_checkpointed_steps_quantise_as_often(counted: list[Any]) -> None:
    torch._dynamo.reset()
    mlp = ParallelMLP(64, 96, group=reference_world(), max_tokens=32, precision="mxfp8")
    compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        step(compiled)
        assert counted == [UP, DOWN]
        step(lambda x: checkpoint(mlp, x, use_reentrant=False))
        assert counted == [UP, DOWN]
        counted.clear()
        mx_weights.weights_changed()
    # A recomputed forward is told by autograd only then that there will be a backward.
    step(lambda x: checkpoint(mlp, x.requires_grad_(), use_reentrant=True))
    axes = [axis for axis, _ in counted]
    assert axes == ["row", "row", "col", "col"]


def test_one_compiled_graph_takes_any_number_of_tokens() -> None:
    torch._dynamo.reset()
    mlp = ParallelMLP(64, 96, group=reference_world(), max_tokens=64, precision="mxfp8")
    seen: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        seen.append(len(inputs))
        return graph.forward

    compiled = torch.compile(mlp, fullgraph=True, dynamic=True, backend=backend)
    for rows in (32, 64, 20):
        x = torch.randn(rows, 64).bfloat16()
        assert torch.equal(compiled(x), mlp(x))
    assert len(seen) == 1


def change(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight.add_(1)


def behind_autograd(weight: torch.Tensor) -> None:
    """As optimizers that keep masters elsewhere do it: a step, then a copy that no counter sees."""
    master = torch.nn.Parameter(torch.ones(2))
    master.grad = torch.ones(2)
    torch.optim.SGD([master], lr=0.1).step()
    weight.data.copy_(weight.data + 1)


def by_hand(weight: torch.Tensor) -> None:
    weight.data.copy_(weight.data + 1)
    mx_weights.weights_changed()


def elsewhere(weight: torch.Tensor) -> None:
    weight.data = weight.data + 1


@pytest.mark.parametrize("how", [change, behind_autograd, by_hand, elsewhere])
def test_a_change_of_the_weight_is_seen(how: Callable[[torch.Tensor], None]) -> None:
    world = reference_world()
    layer = ColumnParallelLinear(64, 96, bias=False, group=world, max_tokens=32, precision="mxfp8")
    x = torch.randn(32, 64).bfloat16()
    before = layer(x)
    version = layer.weight._version
    how(layer.weight)
    assert (how is change) == (layer.weight._version != version)
    after = layer(x)
    fresh = column_parallel_linear(x, layer.weight.detach().clone(), None, layer.call)
    assert not torch.equal(before, after)
    assert torch.equal(after, fresh)


def test_inference_makes_the_row_wise_copy_alone(counted: list[Any]) -> None:
    world = reference_world()
    mlp = ParallelMLP(64, 96, group=world, max_tokens=32, precision="mxfp8")
    with torch.no_grad():
        out = mlp(x := torch.randn(32, 64).bfloat16())
    with torch.inference_mode():
        assert torch.equal(mlp(x), out)
    assert counted == [("row", UP[1]), ("row", DOWN[1])]
    step(mlp)
    assert counted[2:] == [("col", UP[1]), ("col", DOWN[1])]
    with torch.inference_mode():
        layer = RowParallelLinear(64, 96, group=world, max_tokens=32, precision="mxfp8")
        assert layer.weight.is_inference()
        assert torch.equal(layer(x), layer(x))


def test_a_captured_call_quantises_in_its_graph(
    counted: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = reference_world()
    mlp = ParallelMLP(64, 96, group=world, max_tokens=32, precision="mxfp8")
    step(mlp)
    counted.clear()
    with monkeypatch.context() as capture:
        capture.setattr(mlp.down.call.workspace.world, "is_capturing", lambda: True)
        step(mlp)
    assert counted == [("row", UP[1]), ("row", DOWN[1]), ("col", DOWN[1])]
    counted.clear()
    step(mlp)
    assert counted == []


def test_copies_go_with_their_weight() -> None:
    world = reference_world()
    before = len(mx_weights._KEPT)
    layer = ColumnParallelLinear(64, 96, group=world, max_tokens=32, precision="mxfp8")
    step(layer)
    assert len(mx_weights._KEPT) == before + 1
    del layer
    assert len(mx_weights._KEPT) == before
