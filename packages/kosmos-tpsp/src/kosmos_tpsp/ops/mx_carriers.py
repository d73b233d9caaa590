"""What carries the operands of MXFP8 products between ranks: the one place that chooses.

Each function takes the travelling operand as an `MXTensor` and the others as BF16 matrices that
hold dequantised values. Where no kernel carries MXFP8, the values travel in BF16, which gives the
same products with about twice the bytes; the log says so once, and why.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import lru_cache

import torch
from kosmos_mx import MXTensor
from kosmos_mx.formats import GROUP

from kosmos_tpsp.ops import linear
from kosmos_tpsp.ops.ag_gemm import AgGemmOptions, ag_gemm
from kosmos_tpsp.ops.bulk_ag import BulkAgOptions, bulk_ag
from kosmos_tpsp.workspaces import TpSpWorkspace

LOG = logging.getLogger("kosmos_tpsp")
_LOGGED: set[tuple[str, str]] = set()
UNPADDED = f"its rows are no multiple of {GROUP} elements"
NOT_FUSED = "its kernel does not take MXFP8"


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
    if x.shape[1] % GROUP:
        _carried_in_bf16("ag_gemm", UNPADDED, workspace)
        made = ag_gemm(x.dequantize(), w, workspace, options=options)
    else:
        made = ag_gemm(x, w, workspace, options=_of_values(options))
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
    _carried_in_bf16("bulk_ag", NOT_FUSED, workspace)
    return bulk_ag(x.dequantize(), dy, w, workspace, options=options)


def gather(x: MXTensor, workspace: TpSpWorkspace) -> torch.Tensor:
    """All ranks' values [rows * world size, features], where no GEMM of this call would hide it.

    The bytes of elements and scales travel, once all ranks have agreed, for which the host waits.

    Args:
        x: [rows, features], either way, one segment.
        workspace: of the group.
    """
    values: torch.Tensor = linear.gather(x, workspace).dequantize()
    return values


@lru_cache(maxsize=64)
def _of_values(options: AgGemmOptions) -> AgGemmOptions:
    """The choices of a call whose weight is given as values in BF16."""
    return replace(options, block_scaled=False)


def _carried_in_bf16(op: str, why: str, workspace: TpSpWorkspace) -> None:
    if workspace.world.size > 1 and workspace.world.fused and (op, why) not in _LOGGED:
        _LOGGED.add((op, why))
        LOG.warning("%s carries values of MXFP8 operands in BF16: %s", op, why)


__all__ = ["gather", "gather_and_multiply", "gather_beside"]
