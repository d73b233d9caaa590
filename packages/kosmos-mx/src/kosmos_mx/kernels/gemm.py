"""A GEMM of two MXFP8 operands, or of what they were dequantised to, accumulated in FP32."""

from typing import NamedTuple

import triton
import triton.language as tl

from kosmos_mx.device.gemm import load_operand, scaled_tile


class GemmOperands(NamedTuple):
    """Both operands and the output.

    Attributes:
        a_ptr: [m, k], or [k, m] unless A_K_MAJOR; uint8, or bf16 without SCALED.
        b_ptr: [n, k], or [k, n] unless B_K_MAJOR; likewise.
        a_scale_ptr, b_scale_ptr: uint8, the same with k / 32; not read without SCALED.
        out_ptr: [m, n] bf16 or fp32.
    """

    a_ptr: tl.tensor
    b_ptr: tl.tensor
    a_scale_ptr: tl.tensor
    b_scale_ptr: tl.tensor
    out_ptr: tl.tensor


class GemmConfig(NamedTuple):
    """Constants of the kernel.

    Attributes:
        SCALED: 1 for block-scaled MMA on MXFP8, 0 for BF16 operands.
        A_FORMAT, B_FORMAT: E4M3 or E5M2.
        A_K_MAJOR, B_K_MAJOR: whether the contraction is what lies together in memory.
        EVEN_K: k is a multiple of BLOCK_K.
        BLOCK_M, BLOCK_N, BLOCK_K: the tile.
        GROUP_M: tile rows that are walked together.
        STAGES: depth of the pipeline.
    """

    SCALED: tl.constexpr
    A_FORMAT: tl.constexpr
    B_FORMAT: tl.constexpr
    A_K_MAJOR: tl.constexpr
    B_K_MAJOR: tl.constexpr
    EVEN_K: tl.constexpr
    BLOCK_M: tl.constexpr
    BLOCK_N: tl.constexpr
    BLOCK_K: tl.constexpr
    GROUP_M: tl.constexpr
    STAGES: tl.constexpr


@triton.jit
def gemm_kernel(ops, m, n, k, CONFIG):
    """A workgroup a tile of the output; the contraction goes from low to high k."""
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    BLOCK_K: tl.constexpr = CONFIG.BLOCK_K
    num_rows = (m + BLOCK_M - 1) // BLOCK_M
    num_cols = (n + BLOCK_N - 1) // BLOCK_N
    width = CONFIG.GROUP_M * num_cols
    band = tl.program_id(0) // width
    inside_band = tl.program_id(0) - band * width
    height = tl.minimum(num_rows - band * CONFIG.GROUP_M, CONFIG.GROUP_M)
    row = (band * CONFIG.GROUP_M + inside_band % height) * BLOCK_M
    col = (inside_band // height) * BLOCK_N

    if CONFIG.SCALED:
        acc = scaled_tile(
            ops.a_ptr, ops.a_scale_ptr, ops.b_ptr, ops.b_scale_ptr, row, col, m, n, k, 0, k, 0.0,
            CONFIG.A_FORMAT, CONFIG.B_FORMAT, CONFIG.A_K_MAJOR, CONFIG.B_K_MAJOR,
            BLOCK_M, BLOCK_N, BLOCK_K, CONFIG.STAGES, CONFIG.EVEN_K,
        )  # fmt: skip
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for i in tl.range(0, k, BLOCK_K, num_stages=CONFIG.STAGES):
            a = load_operand(
                ops.a_ptr, row, i, m, k, CONFIG.A_K_MAJOR, BLOCK_M, BLOCK_K, CONFIG.EVEN_K
            )
            b = load_operand(
                ops.b_ptr, col, i, n, k, CONFIG.B_K_MAJOR, BLOCK_N, BLOCK_K, CONFIG.EVEN_K
            )
            acc = tl.dot(a, b.T, acc)

    rows = row + tl.arange(0, BLOCK_M)
    cols = col + tl.arange(0, BLOCK_N)
    kept = (rows < m)[:, None] & (cols < n)[None, :]
    pointers = ops.out_ptr + rows.to(tl.int64)[:, None] * n + cols[None, :]
    tl.store(pointers, acc.to(ops.out_ptr.dtype.element_ty), mask=kept)
