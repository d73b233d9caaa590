"""The layer under autograd: gradients are the reference's; no_grad saves nothing; it learns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kosmos_core.worlds import World
from kosmos_moe import MoELayer, MoEWorkspace, RouterOptions
from kosmos_moe.reference import Experts, moe_layer

ROUTER = RouterOptions(2, normalize=True, aux_coefficient=0.1)


def layer_of(world: World, rank: int) -> MoELayer:
    workspace = MoEWorkspace(world, 12, 40, 24, 6, 2, shared_inter=24, training=True)
    torch.manual_seed(0)
    layer = MoELayer(40, 24, 6, ROUTER, workspace, shared=1)
    with torch.no_grad():
        for weight in (layer.w1, layer.w2):
            weight += 0.01 * rank
    return layer


def host(rank: int, world: World) -> None:
    layer = layer_of(world, rank)
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(12 - 5 * rank, 40, generator=generator).bfloat16().requires_grad_()
    dy = torch.randn(x.shape, generator=generator).bfloat16()
    y = layer(x)
    assert layer.aux_loss is not None
    ((y * dy).sum() + layer.aux_loss).backward()
    found = [t.grad.double() for t in (x, *layer.parameters()) if t.grad is not None]
    names = ["x", *(name for name, _ in layer.named_parameters())]
    assert len(found) == len(names) == 6
    leaves = [t.detach().double().requires_grad_() for t in (x, *layer.parameters())]
    own = dict(zip(names, leaves, strict=True))
    out = moe_layer(
        own["x"], own["router"], Experts(own["w1"], own["w2"]), world, ROUTER,
        shared=Experts(own["shared1"], own["shared2"]),
    )  # fmt: skip
    ((out.y * dy.double()).sum() + out.aux_loss).backward()
    for name, gradient in zip(names, found, strict=True):
        wanted = own[name].grad
        assert wanted is not None
        assert (gradient - wanted).norm() <= 1e-2 * wanted.norm(), name
    with torch.no_grad():
        assert torch.equal(layer(x), y)
    layer.workspace.destroy()


def test_gradients_are_the_references(on_cpu: Callable[..., Any]) -> None:
    on_cpu(2, host)


def main_grad_host(rank: int, world: World) -> None:
    layer = layer_of(world, rank)
    x = torch.randn(12 - 5 * rank, 40, generator=torch.Generator().manual_seed(rank)).bfloat16()
    layer(x).float().square().sum().backward()
    weights = {n: w for n, w in layer.named_parameters() if n != "router"}
    plain = {n: w.grad.float() for n, w in weights.items() if w.grad is not None}
    for w in layer.parameters():
        w.grad = None
    for w in weights.values():
        w.main_grad = torch.ones(w.shape)  # type: ignore[attr-defined]
    for _ in range(2):
        layer(x).float().square().sum().backward()
    for name, w in weights.items():
        assert w.grad is not None
        assert not w.grad.any(), name
        assert w.grad_added_to_main_grad  # type: ignore[attr-defined]
        added = w.main_grad - 1.0  # type: ignore[attr-defined]
        # Rounded to bf16 the plain one was; twice the same was added.
        assert (added - 2 * plain[name]).norm() <= 4e-3 * added.norm(), name
    before = layer.w1.main_grad.clone()  # type: ignore[attr-defined]
    x.requires_grad_()
    # What is not asked for is not added.
    torch.autograd.grad(layer(x).float().sum(), x)
    assert torch.equal(before, layer.w1.main_grad)  # type: ignore[attr-defined]
    layer.workspace.destroy()


def test_weight_gradients_go_into_main_grad(on_cpu: Callable[..., Any]) -> None:
    on_cpu(2, main_grad_host)


@pytest.mark.parametrize("inter", [24, 12])
def test_compiled_and_checkpointed_layers_do_the_same(
    inter: int, on_cpu: Callable[..., Any]
) -> None:
    """With rows that are not aligned, 12, by the reference path."""

    def host(rank: int, world: World) -> None:
        workspace = MoEWorkspace(world, 12, 40, inter, 6, 2, training=True)
        torch.manual_seed(0)
        layer = MoELayer(40, inter, 6, ROUTER, workspace)
        x = torch.randn(9, 40).bfloat16().requires_grad_()
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")

        def checkpointed(x: torch.Tensor) -> Any:
            return torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)

        found = []
        for run in (layer, compiled, checkpointed):
            y = run(x)
            assert layer.aux_loss is not None
            (y.float().square().sum() + layer.aux_loss).backward()
            grads = [t.grad for t in (x, *layer.parameters())]
            found.append([y.detach(), *(g.clone() for g in grads if g is not None)])
            for t in (x, *layer.parameters()):
                t.grad = None
        assert len(found[0]) == 5
        for other in found[1:]:
            assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
        workspace.destroy()

    torch._dynamo.reset()
    on_cpu(1, host)


def test_saved_bytes_are_shown(on_cpu: Callable[..., Any]) -> None:
    def host(rank: int, world: World) -> None:
        layer = layer_of(world, rank)
        call = layer.call
        assert f"saved_bytes={layer.saved_bytes(12)}" in repr(layer)
        x = torch.zeros(12, 40).bfloat16()
        out = torch.ops.kosmos.moe_forward_saved(
            x, layer.router, layer.w1, layer.w2, None, None, None, None, layer.shared1,
            layer.shared2, call.saved,
        )  # fmt: skip
        assert sum(t.numel() * t.element_size() for t in out[2:-1]) == layer.saved_bytes(12)
        layer.workspace.destroy()

    on_cpu(1, host)
