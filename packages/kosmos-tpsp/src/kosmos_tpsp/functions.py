"""Differentiable parallel linears: autograd over what `ops/linear_custom.py` computes."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from kosmos_core.errors import ArgumentError
from kosmos_core.worlds import World

from kosmos_tpsp.linear_autograd import Kernel, differentiable
from kosmos_tpsp.ops import linear_custom as custom
from kosmos_tpsp.ops.linear import LinearOptions, refuse
from kosmos_tpsp.ops.registry import AnyWorkspace, call_handle, resolve
from kosmos_tpsp.precision import MXFP8, precision_of, with_scales
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


_column_linear = differentiable(
    Kernel(custom.column_linear, custom.column_linear_op),
    Kernel(custom.column_linear_backward, custom.column_linear_backward_op),
    _save,
    constants=1,
)
_row_linear = differentiable(
    Kernel(custom.row_linear, custom.row_linear_op),
    Kernel(custom.row_linear_backward, custom.row_linear_backward_op),
    _save,
    constants=1,
)


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
    "column_parallel_linear",
    "reduce_replicated_grads",
    "row_parallel_linear",
    "with_scales",
]
