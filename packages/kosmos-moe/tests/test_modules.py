"""The layer under autograd: gradients are the reference's; no_grad saves nothing; it learns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
