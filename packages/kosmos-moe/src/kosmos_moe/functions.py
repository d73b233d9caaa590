"""The MoE layer under autograd: one launch forward, one backward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from kosmos_moe.ops.moe_backward import moe_backward
from kosmos_moe.ops.moe_forward import Inputs, MoeResult, moe_forward, run_forward
from kosmos_moe.ops.options import MoeOptions
from kosmos_moe.router import RouterOptions
from kosmos_moe.workspaces import MoEWorkspace


class _Moe(torch.autograd.Function):
    """`moe_forward` and `moe_backward`.

    Args of `apply`: workspace, router, options, then the fields of `Inputs`, pairs one by one.
    """

    @staticmethod
    def forward(
        ctx: Any,
        workspace: MoEWorkspace,
        router: RouterOptions,
        options: MoeOptions,
        x: torch.Tensor,
        router_weight: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        bias: torch.Tensor | None,
        padding: torch.Tensor | None,
        ids: torch.Tensor | None,
        weights: torch.Tensor | None,
        shared1: torch.Tensor | None,
        shared2: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        routing = None if ids is None or weights is None else (ids, weights)
        shared = None if shared1 is None or shared2 is None else (shared1, shared2)
        given = Inputs(x, router_weight, w1, w2, bias, padding, routing, shared)
        found, saved = run_forward(given, workspace, router, options, {})
        ctx.saved, ctx.workspace, ctx.options = saved, workspace, options
        # A routing that was given is no result of this function.
        own = (
            found
            if routing is None
            else found._replace(ids=found.ids.clone(), weights=found.weights.clone())
        )
        ctx.mark_non_differentiable(own.ids, own.weights)
        return tuple(own)

    @staticmethod
    def backward(
        ctx: Any, dy: torch.Tensor, dloss: torch.Tensor, *rest: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        given = ctx.saved.inputs
        found = moe_backward(dy, ctx.saved, ctx.workspace, dloss=dloss, options=ctx.options)
        router = None if found.router is None else found.router.to(given.router.dtype)
        shared = found.shared or (None, None)
        return (
            None, None, None, found.x, router, found.w1, found.w2, None, None, None, found.weights,
            *shared,
        )  # fmt: skip


def moe(
    x: torch.Tensor,
    router_weight: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    workspace: MoEWorkspace,
    router: RouterOptions,
    *,
    bias: torch.Tensor | None = None,
    padding: torch.Tensor | None = None,
    routing: tuple[torch.Tensor, torch.Tensor] | None = None,
    shared: tuple[torch.Tensor, torch.Tensor] | None = None,
    options: MoeOptions | None = None,
) -> MoeResult:
    """`moe_forward` with gradients; where none are asked for, nothing is saved.

    Every rank of the group has to ask for gradients, or none: a backward is collective. The weights
    of the result carry no gradient; those of a routing that is given get theirs.

    Args, Returns, Raises: as `moe_forward`; the workspace is made with `training=True`.
    """
    options = options or MoeOptions()
    operands = (
        x, router_weight, w1, w2, bias, padding, *(routing or (None, None)),
        *(shared or (None, None)),
    )  # fmt: skip
    wanted = any(t is not None and t.requires_grad for t in operands)
    if not (wanted and torch.is_grad_enabled()):
        return moe_forward(
            x, router_weight, w1, w2, workspace, router, bias=bias, padding=padding,
            routing=routing, shared=shared, options=replace(options, save=False),
        )  # fmt: skip
    found = _Moe.apply(  # type: ignore[no-untyped-call]
        workspace, router, replace(options, save=True), *operands
    )
    return MoeResult(*found)
