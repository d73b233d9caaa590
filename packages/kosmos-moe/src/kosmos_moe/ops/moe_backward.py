"""`moe_backward`: all gradients of an MoE layer in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from kosmos_core.arguments import (
    ARGUMENT,
    DEVICE,
    DTYPE,
    SHAPE,
    WORKSPACE,
    Rejected,
    TellingPeers,
    check_tensor,
    chosen_options,
    dense,
    reject,
)
from kosmos_core.errors import ArgumentError, WorkspaceError
from kosmos_core.worlds import World

from kosmos_moe import reference
from kosmos_moe.device.config import BackwardOperands
from kosmos_moe.kernels.backward import moe_backward_kernel
from kosmos_moe.ops.call import Prepared, prepare
from kosmos_moe.ops.launching import launch
from kosmos_moe.ops.moe_forward import MoeSaved
from kosmos_moe.ops.options import MoeOptions
from kosmos_moe.workspaces import MoEWorkspace


class MoeGradients(NamedTuple):
    """Gradients of what went into a forward.

    Attributes:
        x: [tokens, hidden] bf16.
        router: [experts, hidden] fp32, of this rank's tokens; None where the routing was given.
        w1: [local experts, 2 * inter, hidden] bf16, of all ranks' tokens; None where it was added.
        w2: [local experts, hidden, inter] bf16, likewise.
        weights: [tokens, k] fp32 of a routing that was given, else None.
        shared: of the shared expert's weights, of this rank's tokens, or None.
    """

    x: torch.Tensor
    router: torch.Tensor | None
    w1: torch.Tensor | None
    w2: torch.Tensor | None
    weights: torch.Tensor | None
    shared: tuple[torch.Tensor, torch.Tensor] | None


def moe_backward(
    dy: torch.Tensor,
    saved: MoeSaved,
    workspace: MoEWorkspace,
    *,
    dloss: torch.Tensor | None = None,
    main_grads: Sequence[torch.Tensor] | None = None,
    options: MoeOptions | None = None,
    **choices: Any,
) -> MoeGradients:
    """Gradients of a layer from those of its results.

    Args:
        dy: [tokens, hidden] bfloat16.
        saved: of the forward, which was made with `save`.
        workspace: of the group, made with `training`; every rank makes the same calls on it.
        dloss: gradient of the auxiliary loss, a float32 scalar; None means 0.
        main_grads: float32 tensors in the shapes of w1, w2 and, with a shared expert, of its two
            weights; their gradients are added to them, unrounded, instead of being returned.
        options: a prepared set of choices, instead of `choices`.
        **choices: fields of `MoeOptions`, when `options` is not given.

    Returns:
        The gradients. Those of the router and of the shared expert are of this rank's tokens: data
        parallelism sums them over ranks.

    Raises:
        ArgumentError: an operand or a choice is wrong; the peers are told.
        WorkspaceError: the workspace is destroyed or not made for training.
        PeerError: an earlier call on the workspace was given up.

    Communication: tokens * k rows of hidden * 2 bytes twice there and once back, two scalars each.
    Synchronizes: no host synchronisation.

    Source: paper, section 3.3.2.
    """
    if not isinstance(workspace, MoEWorkspace):
        raise ArgumentError(
            f"workspace: got {type(workspace).__name__}, wanted the MoEWorkspace of the group"
        )
    with TellingPeers(workspace, lambda: "moe_backward"):
        options = chosen_options(MoeOptions, options, choices)
        _check(dy, saved, workspace)
        adds = main_grads is not None
        if main_grads is not None:
            _check_main_grads(main_grads, saved)
        call = prepare(
            saved.layer, workspace, options, backward=True, adds=adds, with_loss=dloss is not None
        )
        dy = dense(dy)
    if not saved.fused:
        workspace.agree(call.label, call.call_hash)
        found = reference_backward(dy, dloss, saved, workspace.world)
        return found if main_grads is None else _added(found, main_grads)
    return _launch(dy, dloss, saved, workspace, call, options, main_grads)


def _weights(saved: MoeSaved) -> tuple[torch.Tensor, ...]:
    """The weights whose gradients may be added to what is there."""
    return saved.inputs.w1, saved.inputs.w2, *(saved.inputs.shared or ())


def _check_main_grads(main_grads: Sequence[torch.Tensor], saved: MoeSaved) -> None:
    weights = _weights(saved)
    if len(main_grads) != len(weights):
        raise reject(
            ARGUMENT,
            f"main_grads: got {len(main_grads)} tensors, wanted {len(weights)}, one a weight",
        )
    for i, (t, w) in enumerate(zip(main_grads, weights, strict=True)):
        check_tensor(f"main_grads[{i}]", t)
        fits = t.shape == w.shape and t.device == w.device and t.dtype == torch.float32
        if not fits or not t.is_contiguous() or t.data_ptr() % 16:
            raise reject(
                SHAPE,
                f"main_grads[{i}]: got {tuple(t.shape)} {t.dtype} on {t.device}, strides "
                f"{t.stride()}, wanted a contiguous {tuple(w.shape)} torch.float32 on {w.device}, "
                "aligned to 16 bytes",
            )


def _added(found: MoeGradients, main_grads: Sequence[torch.Tensor]) -> MoeGradients:
    """The gradients of a reference path, those of weights added."""
    for t, grad in zip(main_grads, (found.w1, found.w2, *(found.shared or ())), strict=True):
        assert grad is not None
        t += grad
    return found._replace(w1=None, w2=None, shared=None)


def _check(dy: torch.Tensor, saved: MoeSaved, workspace: MoEWorkspace) -> None:
    check_tensor("dy", dy)
    x = saved.inputs.x
    if dy.dtype != torch.bfloat16:
        raise reject(DTYPE, f"dy: got dtype {dy.dtype}, wanted torch.bfloat16; cast it first")
    if dy.device != x.device:
        raise reject(DEVICE, f"dy: got device {dy.device}, wanted {x.device}; move it there")
    if dy.shape != x.shape:
        raise reject(SHAPE, f"dy: got shape {tuple(dy.shape)}, wanted {tuple(x.shape)}")
    if saved.fused and not saved.tensors:
        raise reject(
            ARGUMENT, "saved: got a forward that kept nothing, wanted one made with save=True"
        )
    try:
        workspace.ensure_usable()
        if workspace.world.fused and not workspace.limits.training:
            raise WorkspaceError(
                "workspace: it has no room for backwards; create it with training=True"
            )
    except WorkspaceError as error:
        raise Rejected(WORKSPACE, error) from error


def reference_backward(
    dy: torch.Tensor, dloss: torch.Tensor | None, saved: MoeSaved, world: World
) -> MoeGradients:
    """Through plain PyTorch, the forward included."""
    given = saved.inputs

    def leaf(t: torch.Tensor) -> torch.Tensor:
        return t.detach().requires_grad_()

    with torch.enable_grad():
        x, router, w1, w2 = (leaf(t) for t in (given.x, given.router, given.w1, given.w2))
        shared = None if given.shared is None else reference.Experts(*map(leaf, given.shared))
        routing = given.routing
        if routing is not None:
            routing = routing[0], leaf(routing[1])
        out = reference.moe_layer(
            x, router, reference.Experts(w1, w2), world, saved.router, bias=given.bias,
            padding=given.padding, routing=routing, shared=shared,
        )  # fmt: skip
        loss = out.aux_loss * (0.0 if dloss is None else dloss.reshape(()))
        # Sums as wide as the operands ask for.
        kind = reference.wide(dy.dtype)
        leaves = [x, router, w1, w2, *(shared or ()), *(() if routing is None else routing[1:])]
        grads = torch.autograd.grad(
            (out.y.to(kind) * dy.to(kind)).sum() + loss, leaves, allow_unused=True
        )
    found = [torch.zeros_like(t) if g is None else g for t, g in zip(leaves, grads, strict=True)]
    return MoeGradients(
        found[0],
        found[1].to(kind) if routing is None else None,
        found[2],
        found[3],
        None if routing is None else found[-1],
        None if shared is None else (found[4], found[5]),
    )


def _launch(
    dy: torch.Tensor,
    dloss: torch.Tensor | None,
    saved: MoeSaved,
    workspace: MoEWorkspace,
    call: Prepared,
    options: MoeOptions,
    main_grads: Sequence[torch.Tensor] | None,
) -> MoeGradients:
    """One launch of the kernel."""
    given, layer = saved.inputs, saved.layer
    tokens, device = len(dy), dy.device
    dx = torch.empty_like(dy)
    drouter = torch.empty((layer.experts, layer.hidden), dtype=torch.float32, device=device)
    grads = main_grads or [torch.empty_like(w) for w in _weights(saved)]
    dw1, dw2 = grads[:2]
    dweights = torch.empty((tokens, layer.router.topk), dtype=torch.float32, device=device)
    dshared = None if given.shared is None else (grads[2], grads[3])
    scratch = workspace.scratch
    shared1, shared2 = given.shared or (given.w1, given.w2)
    dshared1, dshared2 = dshared or (dw1, dw2)
    ops = BackwardOperands(
        dy_ptr=dy,
        dloss_ptr=drouter if dloss is None else dloss.reshape(1),
        x_ptr=given.x,
        router_ptr=given.router,
        bias_ptr=drouter if given.bias is None else given.bias,
        padding_ptr=dx if given.padding is None else given.padding.view(torch.uint8),
        w1_ptr=given.w1,
        w2_ptr=given.w2,
        shared1_ptr=shared1,
        shared2_ptr=shared2,
        y_ptr=dx,
        drouter_ptr=drouter,
        dweights_ptr=dweights,
        dw1_ptr=dw1,
        dw2_ptr=dw2,
        dshared1_ptr=dshared1,
        dshared2_ptr=dshared2,
        h_ptr=scratch("h"),
        dgu_ptr=scratch("dgu"),
        y2_ptr=scratch("y2"),
        partials_ptr=scratch("partials"),
        shared_h_ptr=scratch("shared_h"),
        shared_dgu_ptr=scratch("shared_dgu"),
        shared_y_ptr=scratch("shared_y"),
        dlogits_ptr=scratch("dlogits"),
        router_dx_ptr=scratch("router_dx"),
        **saved.tensors,
    )
    launch(moe_backward_kernel, ops, call, workspace, options, tokens)
    is_given = given.routing is not None
    found = MoeGradients(
        dx, None if is_given else drouter, dw1, dw2, dweights if is_given else None, dshared
    )
    return found if main_grads is None else found._replace(w1=None, w2=None, shared=None)


__all__ = ["MoeGradients", "moe_backward", "reference_backward"]
