"""What carries the operands of MXFP8 products between ranks: the one place that chooses.

Each function takes the travelling operand as an `MXTensor` and the others as BF16 matrices that
hold dequantised values. None of today's fused kernels carries MXFP8: the gathers carry the
dequantised values in BF16, which gives the same products with about twice the bytes, and say so
once.
"""

from __future__ import annotations

import logging

import torch
from kosmos_mx import MXTensor

from kosmos_tpsp.ops.ag_gemm import AgGemmOptions, ag_gemm
from kosmos_tpsp.ops.bulk_ag import BulkAgOptions, bulk_ag
from kosmos_tpsp.workspaces import TpSpWorkspace

LOG = logging.getLogger("kosmos_tpsp")
_LOGGED: set[str] = set()


def gather_and_multiply(
    x: MXTensor, w: torch.Tensor, workspace: TpSpWorkspace, options: AgGemmOptions
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`ag_gemm` of a quantised activation: (out, the gathered values where options keep them).

    Args:
        x: [chunk rows, k], row-wise.
        w: [n, k] or [k, n], by the layout.
        workspace: of the group.
        options: of the call.
    """
    _carried_in_bf16("ag_gemm", workspace)
    made = ag_gemm(x.dequantize(), w, workspace, options=options)
    return made if isinstance(made, tuple) else (made, None)


def gather_beside(
    x: MXTensor,
    dy: torch.Tensor,
    w: torch.Tensor,
    workspace: TpSpWorkspace,
    options: BulkAgOptions,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`bulk_ag` of a quantised input: (gathered values [m, n], dx [m, n]).

    Args:
        x: [m / world size, n], column-wise.
        dy: [m, k].
        w: [k, n].
        workspace: of the group.
        options: of the call.
    """
    _carried_in_bf16("bulk_ag", workspace)
    return bulk_ag(x.dequantize(), dy, w, workspace, options=options)


def gather(x: MXTensor, workspace: TpSpWorkspace) -> torch.Tensor:
    """All ranks' values [rows * world size, features], where no GEMM of this call would hide it.

    The bytes of elements and scales travel.

    Args:
        x: [rows, features], either way, one segment.
        workspace: of the group.
    """
    workspace.check()
    world = workspace.world
    data, scales = (
        world.all_gather_tensor(part.view(torch.uint8)).view(part.dtype)
        for part in (x.data, x.scales)
    )
    rows, features = x.shape
    # Every rank's groups of rows are its own.
    segments = x.segments if x.axis == "row" else x.segments * world.size
    whole = MXTensor(data, scales, x.axis, (rows * world.size, features), segments)
    return whole.dequantize()


def _carried_in_bf16(op: str, workspace: TpSpWorkspace) -> None:
    if workspace.world.size > 1 and workspace.world.fused and op not in _LOGGED:
        _LOGGED.add(op)
        LOG.warning("%s of MXFP8 operands carries their values in BF16: not fused yet", op)


__all__ = ["gather", "gather_and_multiply", "gather_beside"]
