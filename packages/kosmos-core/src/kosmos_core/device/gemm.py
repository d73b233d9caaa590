"""One output tile of a GEMM, accumulated in FP32."""

import triton
import triton.language as tl

from kosmos_core.device.sentinel import result_bits
from kosmos_core.device.target import load_tile, store_tile

TN = tl.constexpr(0)  # X [m, k] times W [n, k] transposed
NN = tl.constexpr(1)  # X [m, k] times W [k, n]


@triton.jit
def gemm_tile(
    a_view,
    b_view,
    chunk,
    row,
    col,
    k_begin,
    k_end,
    begin_with,
    LAYOUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    TARGET: tl.constexpr,
):
    """[BLOCK_M, BLOCK_N] fp32 of A times B over k_begin to k_end.

    The tile begins at row `row` of chunk `chunk` of A and at column `col` of B. No wait may
    stand inside this loop: the pipeliner hoists its loads above it.
    begin_with: what the sum begins with, 0 but for a tile that is to be NaN.
    """
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32) + begin_with
    for k in tl.range(k_begin, k_end, BLOCK_K, num_stages=STAGES):
        a = load_tile(a_view, chunk, row, k, BLOCK_M, BLOCK_K, True, EVEN_K, TARGET)
        if LAYOUT == TN:
            b = load_tile(b_view, 0, col, k, BLOCK_N, BLOCK_K, True, EVEN_K, TARGET).T
        else:
            # Rows past k are 0: the columns of A there are, but 0 times Inf is not.
            b = load_tile(b_view, 0, k, col, BLOCK_K, BLOCK_N, EVEN_K, EVEN_N, TARGET)
        acc = tl.dot(a, b, acc)
    return acc


@triton.jit
def rounded(acc, POLLED: tl.constexpr):
    """An fp32 tile rounded once to bf16; as bits where readers poll it."""
    if POLLED:
        return result_bits(acc)
    else:
        return acc.to(tl.bfloat16)


@triton.jit
def store_accumulator(
    c_view,
    chunk,
    row,
    col,
    acc,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    TARGET: tl.constexpr,
    POLLED: tl.constexpr = False,
):
    """Rounds an fp32 tile once to bf16 and stores it.

    SPLITS: column parts it is stored in, 1 or 2; two save shared memory.
    POLLED: the view is of int16, and readers poll it: no element looks as if it were missing.
    """
    if SPLITS == 1:
        store_tile(c_view, chunk, row, col, rounded(acc, POLLED), BLOCK_M, BLOCK_N, TARGET)
    else:
        HALF: tl.constexpr = BLOCK_N // 2
        parts = acc.reshape(BLOCK_M, 2, HALF).permute(0, 2, 1)
        left, right = parts.split()
        store_tile(c_view, chunk, row, col, rounded(left, POLLED), BLOCK_M, HALF, TARGET)
        store_tile(c_view, chunk, row, col + HALF, rounded(right, POLLED), BLOCK_M, HALF, TARGET)
