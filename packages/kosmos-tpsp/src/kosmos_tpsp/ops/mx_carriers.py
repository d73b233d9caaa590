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
from kosmos_tpsp.ops.ag_gemm_pair import AgGemmPairOptions, ag_gemm_pair
from kosmos_tpsp.ops.bulk_ag import BulkAgOptions, bulk_ag
from kosmos_tpsp.workspaces import TpSpWorkspace

LOG = logging.getLogger("kosmos_tpsp")
_LOGGED: set[tuple[str, str]] = set()
UNPADDED = f"rows of no multiple of {GROUP} elements"
STRADDLING = f"a rank's rows or features are no multiple of {GROUP}"


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
    if x.shape[0] % GROUP or dy.shape[1] % GROUP:
        _carried_in_bf16("bulk_ag", STRADDLING, workspace)
        return bulk_ag(x.dequantize(), dy, w, workspace, options=options)
    return bulk_ag(x, dy, w, workspace, options=options)


def gather_pair(
    dy: MXTensor,
    dy_columns: MXTensor,
    w: torch.Tensor,
    x: torch.Tensor,
    workspace: TpSpWorkspace,
    main_grad: torch.Tensor | None,
    options: AgGemmPairOptions,
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """`ag_gemm_pair`: (dx [m, n], dw [k, n], or None where it went into main_grad).

    None where its kernel cannot be: rows or features of no whole groups, or a workspace without
    room for scales. Then the copies have to be gathered one after the other.

    Args:
        dy: [m / world size, k], row-wise.
        dy_columns: the same, column-wise.
        w: [k, n].
        x: [m, n].
        workspace: of the group.
        main_grad: [k, n] float32 to add the weight gradient to, or None.
        options: of the call.
    """
    rows, k = dy.shape
    if rows % GROUP or k % GROUP or workspace.max_features < k + k // GROUP:
        return None
    return ag_gemm_pair(dy, dy_columns, w, x, workspace, main_grad=main_grad, options=options)


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


__all__ = ["gather", "gather_and_multiply", "gather_beside", "gather_pair"]
