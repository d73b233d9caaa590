"""Tiles of a GEMM: operands in MXFP8 with scales, or BF16; sums by block-scaled MMA."""

import triton
import triton.language as tl

from kosmos_mx.device.encode import E4M3, GROUP


@triton.jit
def load_operand(
    ptr,
    first,
    k,
    extent,
    depth,
    K_MAJOR: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """[BLOCK, BLOCK_K] of an operand stored [extent, depth] (K_MAJOR) or [depth, extent].

    Rows past `extent` repeat its last one: what comes of them is never stored. Past `depth` it
    reads 0, unless EVEN_K says that there is nothing.
    """
    # A tile spans less than 2^31 elements, a matrix may not: only its start is 64 bits wide.
    rows = tl.minimum(tl.arange(0, BLOCK), extent - 1 - first)
    ks = tl.arange(0, BLOCK_K)
    if K_MAJOR:
        base = ptr + first.to(tl.int64) * depth + k
        pointers = base + rows[:, None] * depth + ks[None, :]
        if EVEN_K:
            return tl.load(pointers)
        else:
            return tl.load(pointers, mask=(ks < depth - k)[None, :], other=0)
    else:
        base = ptr + k.to(tl.int64) * extent + first
        pointers = base + ks[:, None] * extent + rows[None, :]
        if EVEN_K:
            return tl.load(pointers).T
        else:
            return tl.load(pointers, mask=(ks < depth - k)[:, None], other=0).T


@triton.jit
def load_scales(
    ptr,
    first,
    k,
    extent,
    depth,
    K_MAJOR: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """[BLOCK, BLOCK_K / 32] E8M0 codes, uint8, that go with `load_operand`."""
    return load_operand(
        ptr,
        first,
        k // GROUP,
        extent,
        depth // GROUP,
        K_MAJOR,
        BLOCK,
        BLOCK_K // GROUP,
        EVEN_K,
    )


@triton.jit
def scaled_tile(
    a_ptr,
    a_scale_ptr,
    b_ptr,
    b_scale_ptr,
    row,
    col,
    m,
    n,
    k,
    k_begin,
    k_end,
    begin_with,
    A_FORMAT: tl.constexpr,
    B_FORMAT: tl.constexpr,
    A_K_MAJOR: tl.constexpr,
    B_K_MAJOR: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """[BLOCK_M, BLOCK_N] fp32 of A times B over k_begin to k_end by block-scaled MMA.

    The tile begins at row `row` of A, [m, k], and at row `col` of B, [n, k].
    begin_with: what the sum begins with, 0 but for a tile that is to be NaN.
    """
    A_NAME: tl.constexpr = "e4m3" if A_FORMAT == E4M3 else "e5m2"
    B_NAME: tl.constexpr = "e4m3" if B_FORMAT == E4M3 else "e5m2"
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32) + begin_with
    for i in tl.range(k_begin, k_end, BLOCK_K, num_stages=STAGES):
        a = load_operand(a_ptr, row, i, m, k, A_K_MAJOR, BLOCK_M, BLOCK_K, EVEN_K)
        b = load_operand(b_ptr, col, i, n, k, B_K_MAJOR, BLOCK_N, BLOCK_K, EVEN_K)
        a_scales = load_scales(a_scale_ptr, row, i, m, k, A_K_MAJOR, BLOCK_M, BLOCK_K, EVEN_K)
        b_scales = load_scales(b_scale_ptr, col, i, n, k, B_K_MAJOR, BLOCK_N, BLOCK_K, EVEN_K)
        acc = tl.dot_scaled(a, a_scales, A_NAME, b.T, b_scales, B_NAME, acc)
    return acc
