"""Operators of the dispatcher: what autograd, `torch.compile` and CUDA graphs see.

`torch.ops.kosmos.moe_forward(x, router_weight, w1, w2, bias, padding, ids, weights, shared1,
shared2, call)`; `call` comes from `kosmos_core.handles.call_handle(workspace, (router, options))`.
`moe_forward_saved` also returns what a backward needs, and is differentiable through
`kosmos_moe.functions`; `moe_backward` is its backward, which adds to the weights' `main_grad`
behind the dispatcher's back: safe while nothing in the same graph reads it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from kosmos_core.errors import WorkspaceError
from kosmos_core.handles import resolve
from kosmos_core.main_grad import stand_in

from kosmos_moe.ops.call import prepare
from kosmos_moe.ops.moe_backward import moe_backward
from kosmos_moe.ops.moe_forward import Inputs, MoeSaved, kept_tensors, layer_of, run_forward
from kosmos_moe.ops.options import MoeOptions
from kosmos_moe.router import RouterOptions
from kosmos_moe.workspaces import MoEWorkspace

# What a forward leaves for its backward, besides ids and weights, in the order of the operators.
KEPT = ("places_ptr", "act_ptr", "shared_act_ptr", "logits_ptr", "list_ptr", "tables_ptr")


class Operands(NamedTuple):
    """What an operator is given: the fields of `Inputs`, pairs one by one."""

    x: torch.Tensor
    router: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor
    bias: torch.Tensor | None
    padding: torch.Tensor | None
    ids: torch.Tensor | None
    weights: torch.Tensor | None
    shared1: torch.Tensor | None
    shared2: torch.Tensor | None

    def inputs(self) -> Inputs:
        """The operands of a call."""
        routing = None if self.ids is None or self.weights is None else (self.ids, self.weights)
        shared = (
            None if self.shared1 is None or self.shared2 is None else (self.shared1, self.shared2)
        )
        return Inputs(*self[:6], routing, shared)


def _resolve(call: int) -> tuple[MoEWorkspace, RouterOptions, MoeOptions]:
    workspace, (router, options) = resolve(call)
    if not isinstance(workspace, MoEWorkspace):
        raise WorkspaceError(
            f"call: got a handle of a {type(workspace).__name__}, wanted one of an MoEWorkspace"
        )
    return workspace, router, options


def _recording() -> Any:
    """Lets autograd record inside an operator, as the reference path of a backward needs."""
    keys = torch._C._dispatch_tls_local_exclude_set()
    autograd = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradFunctionality)
    return torch._C._ForceDispatchKeyGuard(
        torch._C._dispatch_tls_local_include_set(), keys - autograd
    )


def _run(given: Inputs, call: int) -> tuple[list[torch.Tensor], MoeSaved]:
    """([y, auxiliary loss, ids, weights], what is kept); nothing of it is an operand."""
    workspace, router, options = _resolve(call)
    found, saved = run_forward(given, workspace, router, options, {})
    ids, weights = found.ids, found.weights
    if given.routing is not None:
        # An operator returns no tensor that it was given.
        ids, weights = ids.clone(), weights.clone()
    return [found.y, found.aux_loss, ids, weights], saved


def _results(x: torch.Tensor, call: int) -> list[torch.Tensor]:
    _, router, _ = _resolve(call)
    choices = (x.shape[0], router.topk)
    return [
        torch.empty_like(x),
        x.new_empty((), dtype=torch.float32),
        x.new_empty(choices, dtype=torch.int32),
        x.new_empty(choices, dtype=torch.float32),
    ]


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
    operands = Operands(x, router_weight, w1, w2, bias, padding, ids, weights, shared1, shared2)
    y, loss, chosen, weighed = _run(operands.inputs(), call)[0]
    return y, loss, chosen, weighed


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
    y, loss, chosen, weighed = _results(x, call)
    return y, loss, chosen, weighed


@torch.library.custom_op("kosmos::moe_forward_saved", mutates_args=())
def moe_forward_saved_op(
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
) -> list[torch.Tensor]:
    """`moe_forward_op`'s results, then what a backward needs: `KEPT`, and whether it ran fused."""
    operands = Operands(x, router_weight, w1, w2, bias, padding, ids, weights, shared1, shared2)
    results, saved = _run(operands.inputs(), call)
    kept = [saved.tensors[name] if saved.tensors else x.new_empty(0) for name in KEPT]
    return [*results, *kept, torch.tensor(saved.fused)]


@moe_forward_saved_op.register_fake
def _moe_forward_saved_fake(
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
) -> list[torch.Tensor]:
    workspace, router, options = _resolve(call)
    given = Operands(
        x, router_weight, w1, w2, bias, padding, ids, weights, shared1, shared2
    ).inputs()
    prepared = prepare(layer_of(given, router), workspace, options)
    if prepared.decline is None:
        act, shared_act, logits, order, tables = kept_tensors(prepared, workspace, x)
        kept = [torch.empty_like(order), act, shared_act, logits, order, tables]
    else:
        kept = [x.new_empty(0) for _ in KEPT]
    return [*_results(x, call), *kept, torch.empty((), dtype=torch.bool)]


@torch.library.custom_op("kosmos::moe_backward", mutates_args=())
def moe_backward_op(
    dy: torch.Tensor,
    dloss: torch.Tensor | None,
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
    saved: list[torch.Tensor],
    call: int,
    adds: bool,
) -> list[torch.Tensor]:
    """Gradients of x, router, w1, w2, weights, shared1, shared2; without elements for none.

    saved: what `moe_forward_saved` returned from its third result on.
    adds: whether weight gradients go into `main_grad`; zeros stand for them then.
    """
    workspace, router, options = _resolve(call)
    given = Operands(
        x, router_weight, w1, w2, bias, padding, ids, weights, shared1, shared2
    ).inputs()
    chosen, weighed, *kept, fused = saved
    tensors = dict(zip(KEPT, kept, strict=True), ids_ptr=chosen, weights_ptr=weighed)
    state = MoeSaved(given, layer_of(given, router), router, bool(fused), tensors)
    owners = [w for w in (w1, w2, shared1, shared2) if w is not None]
    main_grads = [w.main_grad for w in owners] if adds else None  # type: ignore[attr-defined]
    with _recording():
        found = moe_backward(
            dy, state, workspace, dloss=dloss, main_grads=main_grads, options=options
        )
    none = x.new_empty(0)
    made = [found.w1, found.w2, *(found.shared or (None, None))]
    if adds:
        made = [None if w is None else stand_in(w) for w in (w1, w2, shared1, shared2)]
    router_grad = none if found.router is None else found.router.to(router_weight.dtype)
    weight_grad = none if found.weights is None else found.weights
    dw1, dw2, dshared1, dshared2 = (none.clone() if g is None else g for g in made)
    return [found.x, router_grad, dw1, dw2, weight_grad.clone(), dshared1, dshared2]


@moe_backward_op.register_fake
def _moe_backward_fake(
    dy: torch.Tensor,
    dloss: torch.Tensor | None,
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
    saved: list[torch.Tensor],
    call: int,
    adds: bool,
) -> list[torch.Tensor]:
    def like(t: torch.Tensor | None) -> torch.Tensor:
        return x.new_empty(0) if t is None else torch.empty_like(t)

    router_grad = like(router_weight if ids is None else None)
    return [like(x), router_grad, like(w1), like(w2), like(weights), like(shared1), like(shared2)]


__all__ = ["KEPT", "Operands", "moe_backward_op", "moe_forward_op", "moe_forward_saved_op"]
