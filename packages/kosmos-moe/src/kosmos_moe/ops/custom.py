"""The operator of the dispatcher: what autograd, `torch.compile` and CUDA graphs see.

`torch.ops.kosmos.moe_forward(x, router_weight, w1, w2, bias, padding, ids, weights, shared1,
shared2, call)`; `call` comes from `kosmos_core.handles.call_handle(workspace, (router, options))`.
"""

from __future__ import annotations

import torch
from kosmos_core.errors import WorkspaceError
from kosmos_core.handles import resolve

from kosmos_moe.ops.moe_forward import moe_forward
from kosmos_moe.ops.options import MoeOptions
from kosmos_moe.router import RouterOptions
from kosmos_moe.workspaces import MoEWorkspace


def _resolve(call: int) -> tuple[MoEWorkspace, RouterOptions, MoeOptions]:
    workspace, (router, options) = resolve(call)
    if not isinstance(workspace, MoEWorkspace):
        raise WorkspaceError(
            f"call: got a handle of a {type(workspace).__name__}, wanted one of an MoEWorkspace"
        )
    return workspace, router, options


@torch.library.custom_op("kosmos::moe_forward", mutates_args=())
def moe_forward_op(
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
    call: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`moe_forward`: (y, auxiliary loss, experts chosen, their weights)."""
    workspace, router, options = _resolve(call)
    routing = None if ids is None or weights is None else (ids, weights)
    shared = None if shared1 is None or shared2 is None else (shared1, shared2)
    found = moe_forward(
        x, router_weight, w1, w2, workspace, router, bias=bias, padding=padding, routing=routing,
        shared=shared, options=options,
    )  # fmt: skip
    if routing is None:
        return found.y, found.aux_loss.clone(), found.ids, found.weights
    # An operator returns no tensor that it was given.
    return found.y, found.aux_loss.clone(), found.ids.clone(), found.weights.clone()


@moe_forward_op.register_fake
def _moe_forward_fake(
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
    call: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    _, router, _ = _resolve(call)
    choices = (x.shape[0], router.topk)
    return (
        torch.empty_like(x),
        x.new_empty((), dtype=torch.float32),
        x.new_empty(choices, dtype=torch.int32),
        x.new_empty(choices, dtype=torch.float32),
    )


__all__ = ["moe_forward_op"]
