"""Operand tiles of a GEMM: MXFP8 with scales for block-scaled MMA, or BF16."""

import triton
import triton.language as tl

from kosmos_mx.device.encode import GROUP


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
