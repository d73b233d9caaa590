"""The MoE layer under autograd: one launch forward, one backward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from kosmos_core.handles import call_handle
from kosmos_core.main_grad import is_executed

from kosmos_moe.ops.custom import Operands, moe_backward_op, moe_forward_op, moe_forward_saved_op
from kosmos_moe.ops.moe_forward import MoeResult
from kosmos_moe.ops.options import MoeOptions
from kosmos_moe.router import RouterOptions
from kosmos_moe.workspaces import MoEWorkspace

# Operands of an operator, in order, that a gradient may be asked of.
DIFFERENTIABLE = ("x", "router", "w1", "w2", "weights", "shared1", "shared2")
OWNERS = ("w1", "w2", "shared1", "shared2")


class MoeCall:
    """The choices of a layer's calls on a workspace, as operators take them.

    Args:
        workspace: of the group; made with `training=True` where gradients are asked for.
        router: how tokens choose.
        options: choices of the calls.
    """

    def __init__(
        self, workspace: MoEWorkspace, router: RouterOptions, options: MoeOptions | None = None
    ) -> None:
        options = options or MoeOptions()
        self.plain = call_handle(workspace, (router, replace(options, save=False)))
        self.saved = call_handle(workspace, (router, replace(options, save=True)))

    def __call__(self, *operands: torch.Tensor | None) -> MoeResult:
        """The layer of the fields of `Operands`; saves nothing where no gradient is asked for."""
        wanted = any(t is not None and t.requires_grad for t in operands)
        if not (wanted and torch.is_grad_enabled()):
            return MoeResult(*moe_forward_op(*operands, self.plain))
        y, loss, ids, weights = moe_forward_saved_op(*operands, self.saved)[:4]
        return MoeResult(y, loss, ids, weights.detach())


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    given = Operands(*inputs[:-1])
    ctx.call = inputs[-1]
    # What is kept has no gradient, which would otherwise be made of zeros.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*given, *output[2:])
    owners = [w for w in (getattr(given, name) for name in OWNERS) if w is not None]
    # Checkpointing hands back other tensors with the same values, which have no main_grad.
    adds = all(_takes(w) for w in owners)
    ctx.owners = {n: getattr(given, n) for n in OWNERS} if adds else None


def _takes(w: torch.Tensor) -> bool:
    """Whether a weight has a `main_grad` that the kernel can add to."""
    found = getattr(w, "main_grad", None)
    return w.requires_grad and found is not None and found.dtype == torch.float32


def _backward(ctx: Any, grads: list[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    tensors = ctx.saved_tensors
    given, saved = Operands(*tensors[:10]), list(tensors[10:])
    adds = False
    if ctx.owners is not None:
        given = given._replace(**ctx.owners)
        # Of `torch.autograd.grad(y, x)` nothing may be left in a main_grad.
        places = [Operands._fields.index(n) for n in OWNERS if ctx.owners[n] is not None]
        adds = all(is_executed(ctx.next_functions[_edge(given, i)][0]) for i in places)
    dy, dloss = grads[:2]
    if dy is None:
        dy = torch.zeros_like(given.x)
    found = moe_backward_op(dy, dloss, *given, saved, ctx.call, adds)
    made = dict(zip(DIFFERENTIABLE, found, strict=True))
    wanted = dict(zip(Operands._fields, ctx.needs_input_grad, strict=False))
    return (*(made.get(n) if wanted[n] else None for n in Operands._fields), None)


def _edge(given: Operands, place: int) -> int:
    """Which of a node's edges leads to an operand: those that are no tensors have none."""
    return sum(t is not None for t in given[:place])


moe_forward_saved_op.register_autograd(_backward, setup_context=_save)


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
    of the result carry no gradient; those of a routing that is given get theirs. Where w1, w2 and
    the shared expert's weights all have a float32 `main_grad`, their gradients are added to it,
    `grad_added_to_main_grad` is set, and autograd gets zeros, so that hooks fire.

    Args, Returns, Raises: as `moe_forward`; the workspace is made with `training=True`.
    """
    call = MoeCall(workspace, router, options)
    ids, weights = routing or (None, None)
    return call(x, router_weight, w1, w2, bias, padding, ids, weights, *(shared or (None, None)))


__all__ = ["MoeCall", "MoeOptions", "moe"]
