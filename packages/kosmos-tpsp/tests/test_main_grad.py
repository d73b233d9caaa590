"""`main_grad`: what layers add to it and when, and the zeros that autograd gets instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kosmos_core.errors import ArgumentError, PeerFaultError
from kosmos_core.worlds import World
from kosmos_tpsp import ColumnParallelLinear, ParallelMLP, RowParallelLinear

TOKENS, HIDDEN, INNER = 32, 64, 96


def test_hooks_fire_with_a_stand_in_and_accumulation_is_in_fp32(
    on_cpu: Callable[..., list[Any]],
) -> None:
    def host(rank: int, world: World) -> None:
        mlp = ParallelMLP(HIDDEN, INNER, group=world, max_tokens=TOKENS)
        x = torch.randn(TOKENS // 2, HIDDEN).bfloat16()
        mlp(x).float().square().sum().backward()
        plain = [p.grad.clone() for p in mlp.parameters()]
        fired = []
        for p in mlp.parameters():
            p.grad = None
            p.main_grad = torch.full(p.shape, 1000.0)
            p.register_post_accumulate_grad_hook(lambda p: fired.append(p.grad.shape))
        mlp(x).float().square().sum().backward()
        assert sorted(fired) == sorted(p.shape for p in mlp.parameters())
        for p, grad in zip(mlp.parameters(), plain, strict=True):
            assert not p.grad.any()
            added = p.main_grad - 1000.0
            # Far below what BF16 resolves near 1000.
            torch.testing.assert_close(added, grad.float(), rtol=1e-2, atol=2e-2)
            p.main_grad, p.grad = p.main_grad.bfloat16(), None
        mlp(x).float().square().sum().backward()
        for p, grad in zip(mlp.parameters(), plain, strict=True):
            assert torch.equal(p.grad, grad)  # no FP32 buffer: an ordinary gradient

    on_cpu(2, host)


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_a_weight_gradient_that_is_not_asked_for_is_not_added(
    kind: Any, on_cpu: Callable[..., list[Any]]
) -> None:
    def host(rank: int, world: World) -> None:
        layer = kind(HIDDEN, INNER, bias=False, group=world, max_tokens=TOKENS)
        layer.weight.main_grad = torch.zeros(layer.weight.shape)
        x = torch.randn(TOKENS, layer.weight.shape[1]).bfloat16().requires_grad_()
        if kind is ColumnParallelLinear:
            x = x[: TOKENS // 2]
        y = layer(x)
        (dx,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        assert not layer.weight.main_grad.any()
        assert not hasattr(layer.weight, "grad_added_to_main_grad")
        again, _ = torch.autograd.grad(y.sum(), (x, layer.weight), retain_graph=True)
        once = layer.weight.main_grad.clone()
        assert once.any()
        torch.testing.assert_close(dx, again)
        y.sum().backward(inputs=[layer.weight])
        torch.testing.assert_close(layer.weight.main_grad, 2 * once)

    on_cpu(2, host)


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_nobody_gathers_for_a_peer_that_refuses_its_main_grad(
    kind: Any, on_cpu: Callable[..., list[Any]]
) -> None:
    def host(rank: int, world: World) -> None:
        layer = kind(HIDDEN, INNER, bias=False, group=world, max_tokens=TOKENS)
        # With a frozen input the gather is a plain collective, which would wait for ever.
        rows = TOKENS // 4 if kind is ColumnParallelLinear else TOKENS
        y = layer(torch.randn(rows, layer.weight.shape[1]).bfloat16())
        workspace = layer.call.workspace.get()
        if rank == 1:
            layer.weight.main_grad = torch.zeros(8)
            with pytest.raises(ArgumentError, match=r"weight.main_grad: got \(8,\)"):
                y.sum().backward()
        else:
            with pytest.raises(PeerFaultError, match="rank 1 refused its call before launch"):
                y.sum().backward()
        workspace.reset()

    on_cpu(4, host, jump_clock=False)


def test_a_stand_in_that_autograd_has_added_to_is_not_used_again(
    on_cpu: Callable[..., list[Any]],
) -> None:
    def host(rank: int, world: World) -> None:
        layer = ColumnParallelLinear(HIDDEN, INNER, bias=False, group=world, max_tokens=TOKENS)
        layer.weight.main_grad = torch.zeros(layer.weight.shape)
        x = torch.randn(TOKENS // 2, HIDDEN).bfloat16()
        layer(x).sum().backward()
        # Of another graph, and hence added in place.
        layer.weight.float().square().sum().backward()
        assert layer.weight.grad.any()
        layer.weight.grad = None
        layer(x).sum().backward()
        assert not layer.weight.grad.any()

    on_cpu(1, host)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_compiled_graph_gets_zeros_of_its_own(
    compiled: bool, on_cpu: Callable[..., list[Any]]
) -> None:
    """It takes what an operator returns for memory that it may use again."""

    def host(rank: int, world: World) -> None:
        layer = ColumnParallelLinear(HIDDEN, INNER, bias=False, group=world, max_tokens=TOKENS)
        layer.weight.main_grad = torch.zeros(layer.weight.shape)
        run = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
        x = torch.randn(TOKENS // world.size, HIDDEN).bfloat16()
        found = []
        for _ in range(2):
            run(x).sum().backward()
            found.append(layer.weight.grad)
            layer.weight.grad = None
        assert not any(grad.any() for grad in found)
        assert len({grad.data_ptr() for grad in found}) == (2 if compiled else 1)

    torch._dynamo.reset()
    on_cpu(1, host)
