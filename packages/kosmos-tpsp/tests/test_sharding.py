"""Parts of full weights: the same numbers at every size of the group, `nn.Linear`'s state dict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kosmos_core.errors import ArgumentError
from kosmos_core.worlds import World
from kosmos_tpsp import ColumnParallelLinear, ParallelMLP, RowParallelLinear, sharding
from torch import nn

IN, OUT = 24, 36
Made = tuple[torch.Tensor, torch.Tensor | None]


def build(world: World, name: str, **arguments: Any) -> ColumnParallelLinear | RowParallelLinear:
    kind = RowParallelLinear if name == "row" else ColumnParallelLinear
    if name == "splits":
        arguments["splits"] = (12, 24)
    return kind(IN, OUT, group=world, max_tokens=8, **arguments)


@pytest.mark.parametrize("name", ["column", "splits", "row"])
def test_the_full_weight_does_not_depend_on_the_number_of_ranks(
    name: str, on_cpu: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharding, "DRAWN_ROWS", 7)  # several blocks, cut anywhere

    def host(rank: int, world: World) -> Made:
        return build(world, name, seed=5).gather_full()

    alone, of_one = on_cpu(1, host)[0]
    for size in (2, 3, 4):
        for weight, bias in on_cpu(size, host):
            assert torch.equal(weight, alone)
            assert torch.equal(bias, of_one)
    bound = IN**-0.5
    assert 0.9 * bound < float(alone.abs().max()) <= bound * 1.01
    assert len(alone.unique()) > alone.numel() // 2


def test_without_a_seed_ranks_agree_and_layers_differ(on_cpu: Callable[..., list[Any]]) -> None:
    def host(rank: int, world: World) -> list[Made]:
        torch.manual_seed(rank)  # as careless programs do
        return [build(world, name).gather_full() for name in ("row", "row", "column")]

    first, second = on_cpu(2, host)
    for (weight, bias), (other, other_bias) in zip(first, second, strict=True):
        assert torch.equal(weight, other)
        assert torch.equal(bias, other_bias)
    assert not torch.equal(first[0][0], first[1][0])


@pytest.mark.parametrize("name", ["column", "splits", "row"])
def test_parts_are_the_slices_of_nn_linear(name: str, on_cpu: Callable[..., list[Any]]) -> None:
    torch.manual_seed(0)
    full = nn.Linear(IN, OUT, dtype=torch.bfloat16)

    def host(rank: int, world: World) -> None:
        layer = build(world, name)
        layer.load_full(full.weight, full.bias)
        w, b = full.weight.detach(), full.bias.detach()
        wanted = {
            "column": (w[18 * rank : 18 * rank + 18], b[18 * rank : 18 * rank + 18]),
            "row": (w[:, 12 * rank : 12 * rank + 12], b),
            "splits": tuple(
                torch.cat([t[6 * rank : 6 * rank + 6], t[12 + 12 * rank : 24 + 12 * rank]])
                for t in (w, b)
            ),
        }[name]
        assert torch.equal(layer.weight, wanted[0])
        assert torch.equal(layer.bias, wanted[1])
        again = layer.gather_full()
        assert torch.equal(again[0], w)
        assert torch.equal(again[1], b)
        # Either loads the other's state dict.
        shard = nn.Linear(layer.weight.shape[1], layer.weight.shape[0], dtype=torch.bfloat16)
        shard.load_state_dict(layer.state_dict())
        assert torch.equal(shard.weight, layer.weight)
        layer.reset_parameters(1)
        layer.load_state_dict(shard.state_dict())
        assert torch.equal(layer.weight, wanted[0])
        assert list(layer.state_dict()) == list(full.state_dict())

    on_cpu(2, host)


def test_an_initialiser_and_a_device_may_be_given(on_cpu: Callable[..., list[Any]]) -> None:
    def host(rank: int, world: World) -> None:
        mlp = ParallelMLP(
            IN, OUT, group=world, max_tokens=8, seed=1,
            init=lambda part, generator: part.normal_(3.0, 0.1, generator=generator),
        )  # fmt: skip
        assert all(abs(float(p.detach().mean()) - 3) < 0.05 for p in mlp.parameters())
        assert not torch.equal(mlp.gate_up.weight[:8, :8], mlp.down.weight[:8, :8])
        empty = build(world, "column", device="meta")
        assert empty.weight.is_meta
        empty.to_empty(device="cpu").reset_parameters(5)
        assert torch.equal(empty.weight, build(world, "column", seed=5).weight)

    on_cpu(2, host)


@pytest.mark.parametrize(
    ("weight", "bias", "told"),
    [
        (torch.zeros(OUT, IN), None, "bias: got none, wanted one"),
        (
            torch.zeros(IN, OUT),
            torch.zeros(OUT),
            r"weight: got shape \(24, 36\), wanted \(36, 24\)",
        ),
        (torch.zeros(OUT, IN), torch.zeros(IN), r"bias: got shape \(24,\), wanted \(36,\)"),
    ],
)
def test_other_weights_are_refused(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    told: str,
    on_cpu: Callable[..., list[Any]],
) -> None:
    def host(rank: int, world: World) -> None:
        layer = build(world, "row", seed=1)
        before = layer.weight.clone()
        with pytest.raises(ArgumentError, match=told):
            layer.load_full(weight, bias)
        assert torch.equal(layer.weight, before)

    on_cpu(2, host)
