"""Rows as they lie in memory and cross the link: BF16, or MXFP8 elements with their scales.

In MXFP8 a region holds the elements of all its rows, then their scales. What a unit moves are both,
and one arrival announces them. Groups along columns need no other copy: whole groups of rows, too,
have one scale for 32 elements, in the order of the rows.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from kosmos_core.device.mover import copy_run, fill_nan
from kosmos_core.device.peers import peer_ptr

from kosmos_tpsp.device.config import BF16, COLUMNS, UNPACKED
from kosmos_tpsp.device.mx import GROUP, move_groups, unpack_columns


class Rows(NamedTuple):
    """Where rows begin.

    Attributes:
        ptr: elements, bf16 or uint8.
        scale_ptr: scales of their groups, uint8; in BF16 the same as ptr, and not used.
    """

    ptr: tl.tensor
    scale_ptr: tl.tensor


@triton.jit
def own_rows(ops, CONFIG):
    """The rows that this rank was given."""
    if CONFIG.FORMAT == BF16:
        return Rows(ops.x_ptr, ops.x_ptr)
    else:
        return Rows(ops.x_ptr, ops.x_scale_ptr)


@triton.jit
def region_rows(ctx, region, rank, elements, CONFIG):
    """The rows in a region of a rank, which has room for so many elements of this call."""
    if CONFIG.FORMAT == BF16:
        ptr = peer_ptr(ctx, region, rank, tl.bfloat16)
        return Rows(ptr, ptr)
    else:
        ptr = peer_ptr(ctx, region, rank, tl.uint8)
        return Rows(ptr, ptr + elements)


@triton.jit
def own_columns(ops):
    """The copy with groups along columns that this rank was given besides."""
    return Rows(ops.column_ptr, ops.column_scale_ptr)


@triton.jit
def columns_after(rows, elements):
    """The copy with groups along columns that a region holds behind the other one."""
    ptr = rows.ptr + elements + elements // GROUP
    return Rows(ptr, ptr + elements)


@triton.jit
def rows_at(rows, offset, CONFIG):
    """The rows that begin `offset` elements further on, whole groups in MXFP8."""
    if CONFIG.FORMAT == BF16:
        return Rows(rows.ptr + offset, rows.ptr)
    else:
        return Rows(rows.ptr + offset, rows.scale_ptr + offset // GROUP)


@triton.jit
def copy_elements(src, dst, count, CONFIG, TARGET: tl.constexpr):
    """Copies `count` elements of rows as they are."""
    if CONFIG.FORMAT == BF16:
        copy_run(src.ptr, dst.ptr, count, CONFIG.COPY_ELEMENTS, CONFIG.COPY_DEPTH)
    else:
        move_groups(
            src.ptr, src.scale_ptr, dst.ptr, dst.scale_ptr, count // GROUP,
            CONFIG.COPY_ELEMENTS // GROUP, CONFIG.COPY_DEPTH, False, TARGET,
        )  # fmt: skip


@triton.jit
def unpack_elements(
    src, dst_ptr, rows, k, CONFIG, TARGET: tl.constexpr, ALONG_COLUMNS: tl.constexpr
):
    """Dequantises MXFP8 rows of k elements to bf16; ALONG_COLUMNS: whole groups of rows."""
    if ALONG_COLUMNS:
        unpack_columns(
            src.ptr, src.scale_ptr, dst_ptr, rows // GROUP, k, CONFIG.COPY_ELEMENTS // GROUP,
            CONFIG.COPY_DEPTH, TARGET,
        )  # fmt: skip
    else:
        move_groups(
            src.ptr, src.scale_ptr, dst_ptr, dst_ptr, rows * k // GROUP,
            CONFIG.COPY_ELEMENTS // GROUP, CONFIG.COPY_DEPTH, True, TARGET,
        )  # fmt: skip


@triton.jit
def receive_elements(src, dst, rows, k, CONFIG, TARGET: tl.constexpr):
    """Brings rows of k elements to where builders read them, in what they multiply."""
    if CONFIG.FORMAT == UNPACKED:
        unpack_elements(src, dst.ptr, rows, k, CONFIG, TARGET, CONFIG.COPIES == COLUMNS)
    else:
        copy_elements(src, dst, rows * k, CONFIG, TARGET)


@triton.jit
def spoil_elements(dst, count, CONFIG):
    """Marks rows that builders read, or the caller, as never written."""
    if CONFIG.FORMAT == BF16 or CONFIG.FORMAT == UNPACKED:
        fill_nan(dst.ptr, count, CONFIG.COPY_ELEMENTS)
