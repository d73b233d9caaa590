"""Row-wise and column-wise MXFP8 copies of a matrix, or their values, in one pass over it."""

from typing import NamedTuple

import triton
import triton.language as tl

from kosmos_mx.device.decode import to_bf16
from kosmos_mx.device.encode import GROUP
from kosmos_mx.device.tiles import (
    dequantize_columns,
    dequantize_rows,
    quantize_columns,
    quantize_rows,
    quantize_transposed,
    swiglu,
)

# Where the column-wise copy goes.
NO_COLUMNS = tl.constexpr(0)
AS_SOURCE = tl.constexpr(1)  # [padded rows, cols], scales [groups, cols]
TRANSPOSED = tl.constexpr(2)  # [cols, padded rows], scales [cols, groups]


class Source(NamedTuple):
    """A matrix [rows, cols] whose rows fall into segments (shards, experts).

    Attributes:
        ptr: first element, bf16 or fp32; with SwiGLU that of the gates.
        up_ptr: first of the values that the gates multiply; with the same stride.
        rows, cols: extent; a row is contiguous.
        stride: elements between rows.
        segment_rows: rows of every segment, the last one perhaps less; without a table.
        segment_groups: groups of 32 rows that a segment has; without a table.
        table_ptr: int32 [2 * segments + 3]: how many segments; first row of each, then their end;
            first group of each, then their end.
    """

    ptr: tl.tensor
    up_ptr: tl.tensor
    rows: tl.tensor
    cols: tl.tensor
    stride: tl.tensor
    segment_rows: tl.tensor
    segment_groups: tl.tensor
    table_ptr: tl.tensor


class Copies(NamedTuple):
    """Where elements and scales go, uint8; those of a copy that is not made are not touched.

    Where `row_ptr` or `column_ptr` is bf16, the copy's values go there, [rows, cols], and no scales
    anywhere.

    Attributes:
        row_ptr: [rows, row_cols], columns padded with zeros to groups of 32.
        row_scale_ptr: [rows, row_cols / 32].
        column_ptr: [groups * 32, cols], or [cols, groups * 32] transposed.
        column_scale_ptr: [groups, cols], or [cols, groups] transposed.
        groups: groups of 32 rows, over all segments.
    """

    row_ptr: tl.tensor
    row_scale_ptr: tl.tensor
    column_ptr: tl.tensor
    column_scale_ptr: tl.tensor
    groups: tl.tensor


class QuantizeConfig(NamedTuple):
    """Constants of the kernel.

    Attributes:
        ROWS: 1 to make the row-wise copy.
        COLUMNS: NO_COLUMNS, AS_SOURCE or TRANSPOSED.
        FORMAT: E4M3 or E5M2.
        SCALING: RCEIL or FLOOR.
        SWIGLU: 1 to quantise silu(gate) * up.
        SEGMENTS: 0 without a table, else a power of two above the number of segments.
        BLOCK_COLS: columns of a tile, which has 32 rows.
        STEPS: tiles of a workgroup, one beside another; each is loaded while the one before it is
            quantised.
        WIDTH: neighbouring elements that a thread stores at once, and mostly loads.
        TARGET: NVIDIA or AMD.
    """

    ROWS: tl.constexpr
    COLUMNS: tl.constexpr
    FORMAT: tl.constexpr
    SCALING: tl.constexpr
    SWIGLU: tl.constexpr
    SEGMENTS: tl.constexpr
    BLOCK_COLS: tl.constexpr
    STEPS: tl.constexpr
    WIDTH: tl.constexpr
    TARGET: tl.constexpr


@triton.jit
def group_rows(source, group, CONFIG):
    """First row of a group of rows, and the end of its segment: groups never straddle segments."""
    if CONFIG.SEGMENTS == 0:
        segment = group // source.segment_groups
        begin = segment * source.segment_rows
        first = begin + (group - segment * source.segment_groups) * GROUP
        return first, tl.minimum(begin + source.segment_rows, source.rows)
    else:
        index = tl.arange(0, CONFIG.SEGMENTS)
        # Row and group where each segment ends; what the table does not have ends last.
        count = tl.load(source.table_ptr)
        inside = index < count
        group_ends = tl.load(source.table_ptr + 2 + count + index + 1, mask=inside, other=1 << 30)
        segment = tl.sum((group_ends <= group).to(tl.int32), 0)
        begin = tl.load(source.table_ptr + 1 + segment)
        end = tl.load(source.table_ptr + 2 + segment)
        first = begin + (group - tl.load(source.table_ptr + 2 + count + segment)) * GROUP
        return first, end


@triton.jit
def load_tile(source, first, end, col, CONFIG):
    """32 rows from `first` and BLOCK_COLS columns from `col`, zeros from `end` on; and SwiGLU's."""
    lane = tl.arange(0, GROUP)
    cols = col + tl.arange(0, CONFIG.BLOCK_COLS)
    own = (lane < end - first)[:, None] & (cols < source.cols)[None, :]
    tile = lane[:, None] * source.stride + cols[None, :]
    start = first.to(tl.int64) * source.stride
    x = tl.load(source.ptr + start + tile, mask=own, other=0.0)
    up = x
    if CONFIG.SWIGLU:
        up = tl.load(source.up_ptr + start + tile, mask=own, other=0.0)
    return x, up


@triton.jit
def store_rows(x, source, copies, first, end, col, CONFIG):
    """The row-wise copy of a tile, or its values."""
    BLOCK_GROUPS: tl.constexpr = CONFIG.BLOCK_COLS // GROUP
    lane = tl.arange(0, GROUP)
    own_rows = (lane < end - first)[:, None]
    cols = tl.max_contiguous(col + tl.arange(0, CONFIG.BLOCK_COLS), CONFIG.WIDTH)
    elements, codes = quantize_rows(x, CONFIG.FORMAT, CONFIG.SCALING, CONFIG.TARGET)
    if copies.row_ptr.dtype.element_ty == tl.bfloat16:
        values = dequantize_rows(elements, codes, CONFIG.FORMAT, CONFIG.TARGET)
        pointers = copies.row_ptr + first.to(tl.int64) * source.cols
        pointers += lane[:, None] * source.cols + cols[None, :]
        own = own_rows & (cols < source.cols)[None, :]
        tl.store(pointers, to_bf16(values, CONFIG.TARGET), mask=own)
    else:
        row_cols = (source.cols + GROUP - 1) // GROUP * GROUP
        kept = own_rows & (cols < row_cols)[None, :]
        base = copies.row_ptr + first.to(tl.int64) * row_cols
        tl.store(base + lane[:, None] * row_cols + cols[None, :], elements, mask=kept)
        row_groups = row_cols // GROUP
        group_cols = col // GROUP + tl.arange(0, BLOCK_GROUPS)
        kept = own_rows & (group_cols < row_groups)[None, :]
        base = copies.row_scale_ptr + first.to(tl.int64) * row_groups
        tl.store(base + lane[:, None] * row_groups + group_cols[None, :], codes, mask=kept)


@triton.jit
def store_columns(x, source, copies, first, end, group, col, CONFIG):
    """The column-wise copy of a tile, or its values."""
    lane = tl.arange(0, GROUP)
    cols = tl.max_contiguous(col + tl.arange(0, CONFIG.BLOCK_COLS), CONFIG.WIDTH)
    inside = cols < source.cols
    here = lane[:, None] * source.cols + cols[None, :]
    if CONFIG.COLUMNS == AS_SOURCE:
        elements, codes = quantize_columns(x, CONFIG.FORMAT, CONFIG.SCALING, CONFIG.TARGET)
        if copies.column_ptr.dtype.element_ty == tl.bfloat16:
            values = dequantize_columns(elements, codes, CONFIG.FORMAT, CONFIG.TARGET)
            pointers = copies.column_ptr + first.to(tl.int64) * source.cols + here
            own = (lane < end - first)[:, None] & inside[None, :]
            tl.store(pointers, to_bf16(values, CONFIG.TARGET), mask=own)
        else:
            base = copies.column_ptr + group.to(tl.int64) * GROUP * source.cols
            tl.store(base + here, elements, mask=inside[None, :])
            base = copies.column_scale_ptr + group.to(tl.int64) * source.cols
            tl.store(base + cols, codes.reshape(CONFIG.BLOCK_COLS), mask=inside)
    if CONFIG.COLUMNS == TRANSPOSED:
        elements, codes = quantize_transposed(x, CONFIG.FORMAT, CONFIG.SCALING, CONFIG.TARGET)
        wide = cols.to(tl.int64) * copies.groups + group
        pointers = copies.column_ptr + (wide * GROUP)[:, None] + lane[None, :]
        tl.store(pointers, elements, mask=inside[:, None])
        tl.store(copies.column_scale_ptr + wide, codes.reshape(CONFIG.BLOCK_COLS), mask=inside)


@triton.jit
def quantize_kernel(source, copies, CONFIG):
    """A workgroup STEPS tiles of 32 rows; the tiles of a row of groups are neighbours."""
    SPAN: tl.constexpr = CONFIG.BLOCK_COLS * CONFIG.STEPS
    row_cols = (source.cols + GROUP - 1) // GROUP * GROUP
    num_spans = (row_cols + SPAN - 1) // SPAN
    group = tl.program_id(0) // num_spans
    col = (tl.program_id(0) - group * num_spans) * SPAN
    first, end = group_rows(source, group, CONFIG)
    x, up = load_tile(source, first, end, col, CONFIG)
    for step in range(CONFIG.STEPS):
        next_x, next_up = x, up
        if CONFIG.STEPS > 1:
            # After the last tile nothing is loaded.
            stop = tl.where(step + 1 < CONFIG.STEPS, end, first)
            next_x, next_up = load_tile(source, first, stop, col + CONFIG.BLOCK_COLS, CONFIG)
        wide = x.to(tl.float32)
        if CONFIG.SWIGLU:
            wide = swiglu(wide, up.to(tl.float32))
        if CONFIG.ROWS:
            store_rows(wide, source, copies, first, end, col, CONFIG)
        store_columns(wide, source, copies, first, end, group, col, CONFIG)
        x, up = next_x, next_up
        col += CONFIG.BLOCK_COLS
