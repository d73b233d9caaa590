"""An MXFP8 copy back to BF16 or FP32."""

from typing import NamedTuple

import triton
import triton.language as tl

from kosmos_mx.device.decode import to_bf16
from kosmos_mx.device.encode import GROUP
from kosmos_mx.device.tiles import dequantize_columns, dequantize_rows


class DequantizeConfig(NamedTuple):
    """Constants of the kernel.

    Attributes:
        COLUMNS: 1 if groups lie along columns.
        FORMAT: E4M3 or E5M2.
        BLOCK_COLS: columns of a tile, which has 32 rows.
        TARGET: NVIDIA or AMD.
    """

    COLUMNS: tl.constexpr
    FORMAT: tl.constexpr
    BLOCK_COLS: tl.constexpr
    TARGET: tl.constexpr


@triton.jit
def dequantize_kernel(element_ptr, scale_ptr, out_ptr, rows, cols, CONFIG):
    """A workgroup a tile of 32 rows.

    element_ptr: uint8 [rows, cols], padded to 32 along the groups.
    scale_ptr: uint8 [rows, cols / 32], or [rows / 32, cols] with COLUMNS.
    out_ptr: [rows, cols], fp32 (exact), or bf16 (nearest even).
    """
    BLOCK_COLS: tl.constexpr = CONFIG.BLOCK_COLS
    BLOCK_GROUPS: tl.constexpr = BLOCK_COLS // GROUP
    num_blocks = (cols + BLOCK_COLS - 1) // BLOCK_COLS
    band = tl.program_id(0) // num_blocks
    col = (tl.program_id(0) - band * num_blocks) * BLOCK_COLS
    row_ids = band * GROUP + tl.arange(0, GROUP)
    cols_ids = col + tl.arange(0, BLOCK_COLS)
    inside = (row_ids < rows)[:, None] & (cols_ids < cols)[None, :]
    offsets = row_ids.to(tl.int64)[:, None] * cols + cols_ids[None, :]
    elements = tl.load(element_ptr + offsets, mask=inside, other=0)
    if CONFIG.COLUMNS:
        base = scale_ptr + band.to(tl.int64) * cols
        codes = tl.load(base + cols_ids, mask=cols_ids < cols, other=0)
        value = dequantize_columns(
            elements, codes.reshape(1, BLOCK_COLS), CONFIG.FORMAT, CONFIG.TARGET
        )
    else:
        groups = cols // GROUP
        group_ids = col // GROUP + tl.arange(0, BLOCK_GROUPS)
        known = (row_ids < rows)[:, None] & (group_ids < groups)[None, :]
        pointers = scale_ptr + row_ids.to(tl.int64)[:, None] * groups + group_ids[None, :]
        codes = tl.load(pointers, mask=known, other=0)
        value = dequantize_rows(elements, codes, CONFIG.FORMAT, CONFIG.TARGET)
    if out_ptr.dtype.element_ty == tl.bfloat16:
        tl.store(out_ptr + offsets, to_bf16(value, CONFIG.TARGET), mask=inside)
    else:
        tl.store(out_ptr + offsets, value, mask=inside)
