"""Differentiable parallel linears: autograd over what `ops/linear_custom.py` computes.

Compilers, tracers and other modes see its operators. Where nobody but autograd looks, the functions
behind them are called directly: the dispatcher would cost half of a call's host time again.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from kosmos_core.errors import ArgumentError
from kosmos_core.main_grad import is_executed
from kosmos_core.worlds import World

from kosmos_tpsp.ops import linear_custom as custom
from kosmos_tpsp.ops.linear import LinearOptions, refuse
from kosmos_tpsp.ops.registry import AnyWorkspace, call_handle, resolve
from kosmos_tpsp.precision import MXFP8, precision_of
from kosmos_tpsp.sharing import world_of


class LinearCall:
    """Where calls of a parallel linear run, and how: a workspace and choices.

    Args:
        workspace: a `TpSpWorkspace`, or what layers share.
        cap: most workgroups that a call uses; None for all.
        main_grad: add weight gradients into `weight.main_grad` where the weight has one in FP32.
        force: run fused although a plan would decline for speed.
        traced: record what workgroups do into the workspace's trace buffer.
        precision: of the GEMMs: "bf16", "mxfp8", or an `MXFP8`.

    Raises:
        ArgumentError: a choice is not of its type or range.

    Attributes:
        workspace: kept alive by this.
        size: ranks.
        handle: stands for both in operators.
        mx: the functions of MXFP8, or None.
    """

    def __init__(
        self,
        workspace: AnyWorkspace,
        *,
        cap: int | None = None,
        main_grad: bool = True,
        force: bool = False,
        traced: bool = False,
        precision: str | MXFP8 = "bf16",
    ) -> None:
        if cap is not None and (not isinstance(cap, int) or isinstance(cap, bool) or cap < 2):
            raise ArgumentError(
                f"cap: got {cap!r}, wanted at least 2 workgroups (a mover beside a builder) or None"
            )
        for name, value in (
            ("main_grad", main_grad),
            ("force", force),
            ("traced", traced),
        ):
            if not isinstance(value, bool):
                raise ArgumentError(f"{name}: got {value!r}, wanted True or False")
        self.workspace = workspace
        self.options = LinearOptions(
            cap=cap, main_grad=main_grad, force=force, traced=traced, mx=precision_of(precision)
        )
        # kosmos-mx need not be installed where nothing asks for it.
        mx = self.options.mx is not None
        self.mx: Any = importlib.import_module("kosmos_tpsp.mx_functions") if mx else None
        self.size = workspace.world.size
        self.handle = call_handle(workspace, self.options)

    def __deepcopy__(self, memo: dict[int, Any]) -> LinearCall:
        return self  # copies of a layer use the same memory


def column_parallel_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: LinearCall
) -> torch.Tensor:
    """Gathers the sequence and multiplies by this rank's rows of the weight.

    Args:
        x: [tokens / ranks, ..., in] bfloat16; dimension 0 is sharded in rank order.
        weight: [out / ranks, in] bfloat16.
        bias: [out / ranks], or None.
        call: where and how.

    Returns:
        [tokens, ..., out / ranks].

    Raises:
        ArgumentError, WorkspaceError, PeerError: as `ag_gemm`, in the backward as the ops there.

    Communication: forward gathers x; backward gathers x again and reduces its gradient.
    Synchronizes: as the ops: no host synchronisation where they run fused.

    Source: paper, Figure 5.
    """
    linear = _column_linear if call.mx is None else call.mx.column_linear
    out: torch.Tensor = linear(_rows(x), weight, call.handle)
    if bias is not None:
        out.add_(bias)
    if x.dim() <= 2:
        return out
    return out.view(x.shape[0] * call.size, *x.shape[1:-1], out.shape[-1])


def row_parallel_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: LinearCall
) -> torch.Tensor:
    """Multiplies by this rank's columns of the weight and leaves each rank the sum of its rows.

    Args:
        x: [tokens, ..., in / ranks] bfloat16; the ranks divide dimension 0.
        weight: [out, in / ranks] bfloat16.
        bias: [out], equal on all ranks and added once, or None. Its gradient is of the own rows:
            `reduce_replicated_grads`.
        call: where and how.

    Returns:
        [tokens / ranks, ..., out]; dimension 0 is sharded in rank order.

    Raises:
        ArgumentError, WorkspaceError, PeerError: as `gemm_rs`, in the backward as `ag_gemm`.

    Communication: forward reduces the output; backward gathers its gradient.
    Synchronizes: as the ops: no host synchronisation where they run fused.

    Source: paper, Figure 5.
    """
    if x.dim() > 2 and x.shape[0] % call.size:
        refuse(
            resolve(call.handle)[0], "row_parallel_linear", x, weight,
            f"x: got {x.shape[0]} in dimension 0, wanted a multiple of the {call.size} ranks; pad "
            "the sequence",
        )  # fmt: skip
    linear = _row_linear if call.mx is None else call.mx.row_linear
    out: torch.Tensor = linear(_rows(x), weight, call.handle)
    if bias is not None:
        out.add_(bias)
    if x.dim() <= 2:
        return out
    return out.view(x.shape[0] // call.size, *x.shape[1:-1], out.shape[-1])


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[rows, features]; what has fewer dimensions the op refuses."""
    return x.reshape(-1, x.shape[-1]) if x.dim() > 2 else x


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, w, call = inputs
    # With a frozen weight the input is not needed, and not kept alive.
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, w)
    # Checkpointing hands back another tensor with the same values, which has no main_grad.
    ctx.owner = w if getattr(w, "main_grad", None) is not None else None
    ctx.call = call


def _column_backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return *backward_by(custom.column_linear_backward_op, ctx, dy), None


def _row_backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return *backward_by(custom.row_linear_backward_op, ctx, dy), None


class _ColumnLinear(torch.autograd.Function):
    """`column_linear` and its gradients, past the dispatcher."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, call: int) -> torch.Tensor:
        out = custom.column_linear(x, w, call)
        _save(ctx, (x, w, call), out)
        return out

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if _is_observed(dy) or torch.is_grad_enabled():
            return _column_backward(ctx, dy)
        return *backward_by(custom.column_linear_backward, ctx, dy), None


class _RowLinear(torch.autograd.Function):
    """`row_linear` and its gradients, past the dispatcher."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, call: int) -> torch.Tensor:
        out = custom.row_linear(x, w, call)
        _save(ctx, (x, w, call), out)
        return out

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if _is_observed(dy) or torch.is_grad_enabled():
            return _row_backward(ctx, dy)
        return *backward_by(custom.row_linear_backward, ctx, dy), None


def _is_observed(*operands: Any) -> bool:
    """Whether a compiler, tracer, transform, mode or tensor subclass is to see an operator.

    In a backward so is a graph of gradients, for which the operators have no formula and say so.
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or not all(type(t) in (torch.Tensor, torch.nn.Parameter) for t in operands)
    )


def _column_linear(x: torch.Tensor, w: torch.Tensor, call: int) -> torch.Tensor:
    if _is_observed(x, w):
        out: torch.Tensor = custom.column_linear_op(x, w, call)
        return out
    if torch.is_grad_enabled():
        out = _ColumnLinear.apply(x, w, call)  # type: ignore[no-untyped-call]
        return out
    return custom.column_linear(x, w, call)


def _row_linear(x: torch.Tensor, w: torch.Tensor, call: int) -> torch.Tensor:
    if _is_observed(x, w):
        out: torch.Tensor = custom.row_linear_op(x, w, call)
        return out
    if torch.is_grad_enabled():
        out = _RowLinear.apply(x, w, call)  # type: ignore[no-untyped-call]
        return out
    return custom.row_linear(x, w, call)


def backward_by(
    op: Any, ctx: Any, dy: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(dx, dw) by an operator, None for what is not wanted.

    Args:
        op: takes what was saved of the input, dy, w, the call, and which of the two are wanted.
        ctx: of autograd, with saved tensors, of which w is the last, `owner` and `call`.
        dy: gradient of the output.
    """
    *kept, w = ctx.saved_tensors
    needs_dx, needs_dw = ctx.needs_input_grad[:2]
    if kept[0] is None:
        kept = [dy.new_empty(0, w.shape[1])]
    if ctx.owner is not None:
        w = ctx.owner
        if getattr(w, "main_grad", None) is not None:
            # Of `torch.autograd.grad(y, x)` nothing may be left in it.
            needs_dw = needs_dw and is_executed(ctx.next_functions[1][0])
    dx, dw = op(*kept, dy, w, ctx.call, needs_dx, needs_dw)
    return dx if needs_dx else None, dw if needs_dw else None


custom.column_linear_op.register_autograd(_column_backward, setup_context=_save)
custom.row_linear_op.register_autograd(_row_backward, setup_context=_save)


def reduce_replicated_grads(
    parameters: Iterable[torch.nn.Parameter], group: dist.ProcessGroup | World | None = None
) -> None:
    """Sums over the group the gradients of parameters that every rank holds whole.

    Under sequence parallelism each rank's gradient of a norm's weight, or of a row-parallel bias,
    is of its own rows. After the backward and before the optimizer.

    Args:
        parameters: those with an attribute `sequence_parallel` that is true are summed, others are
            passed over. Summed is `.grad`, or `main_grad` where a hook has moved it there.
        group: of the layers.

    Communication: one gather of all of them, summed in FP32, rank 0 first: equal on all ranks.
    """
    world = world_of(group)
    grads = []
    for parameter in parameters:
        if getattr(parameter, "sequence_parallel", False):
            grad = parameter.grad
            grad = getattr(parameter, "main_grad", None) if grad is None else grad
            if grad is not None:
                grads.append(grad)
    if world.size == 1 or not grads:
        return
    with torch.no_grad():
        own = torch.cat([grad.flatten().float() for grad in grads])
        parts = world.all_gather_tensor(own).view(world.size, -1)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        sums = torch.split(total, [grad.numel() for grad in grads])
        for grad, summed in zip(grads, sums, strict=True):
            grad.copy_(summed.view_as(grad))


__all__ = [
    "MXFP8",
    "LinearCall",
    "backward_by",
    "column_parallel_linear",
    "reduce_replicated_grads",
    "row_parallel_linear",
]
