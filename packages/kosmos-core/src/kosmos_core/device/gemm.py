"""One output tile of a GEMM, accumulated in FP32."""

import triton
import triton.language as tl

from kosmos_core.device.sentinel import result_bits
from kosmos_core.device.target import AMD, CLAMPED, add_tile, load_tile, store_tile

TN = tl.constexpr(0)  # X [m, k] times W [n, k] transposed
NN = tl.constexpr(1)  # X [m, k] times W [k, n]
NT = tl.constexpr(2)  # Y [k, m] transposed times X [k, n]


@triton.jit
def gemm_step(
    a_view,
    b_view,
    chunk,
    row,
    col,
    k,
    acc,
    LAYOUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_M: tl.constexpr,
    EVEN_N: tl.constexpr,
    TARGET: tl.constexpr,
):
    """Adds BLOCK_K steps of the contraction, from k on, to a tile."""
    if LAYOUT == NT:
        # Both read 0 past k, as Inf times 0 is not.
        a = load_tile(a_view, chunk, k, row, BLOCK_K, BLOCK_M, EVEN_K, EVEN_M, TARGET).T
    else:
        a = load_tile(a_view, chunk, row, k, BLOCK_M, BLOCK_K, CLAMPED, EVEN_K, TARGET)
    if LAYOUT == TN:
        b = load_tile(b_view, 0, col, k, BLOCK_N, BLOCK_K, CLAMPED, EVEN_K, TARGET).T
    else:
        # Rows past k are 0: the columns of A there are, but 0 times Inf is not.
        b = load_tile(b_view, 0, k, col, BLOCK_K, BLOCK_N, EVEN_K, EVEN_N, TARGET)
    return tl.dot(a, b, acc)


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
    EVEN_M: tl.constexpr,
    EVEN_N: tl.constexpr,
    TARGET: tl.constexpr,
):
    """[BLOCK_M, BLOCK_N] fp32 of A times B over k_begin to k_end.

    The tile begins at row `row` of chunk `chunk` of A (NT: at its column `row`) and at column `col`
    of B. No wait may stand inside this loop: the pipeliner hoists its loads above it.
    begin_with: what the sum begins with, 0 but for a tile that is to be NaN.
    EVEN_M: only NT, whose rows of the product are columns of A, asks for it.
    """
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32) + begin_with
    # Pointers with a mask for the rows of a step take registers that a split tile does not have:
    # the ragged last step stands by itself, unless masks for its columns take as many.
    PEELED: tl.constexpr = TARGET == AMD and LAYOUT == NT and not EVEN_K and EVEN_M and EVEN_N
    k_whole = k_end
    if PEELED:
        k_whole = k_begin + (k_end - k_begin) // BLOCK_K * BLOCK_K
    for k in tl.range(k_begin, k_whole, BLOCK_K, num_stages=STAGES):
        acc = gemm_step(
            a_view, b_view, chunk, row, col, k, acc, LAYOUT, BLOCK_M, BLOCK_N, BLOCK_K,
            CLAMPED if PEELED else EVEN_K, EVEN_M, EVEN_N, TARGET,
        )  # fmt: skip
    if PEELED:
        if k_whole < k_end:
            acc = gemm_step(
                a_view, b_view, chunk, row, col, k_whole, acc, LAYOUT, BLOCK_M, BLOCK_N, BLOCK_K,
                False, EVEN_M, EVEN_N, TARGET,
            )  # fmt: skip
    return acc


@triton.jit
def column_parts(tile, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr):
    """A tile in SPLITS parts of equal width, from left to right; SPLITS is 1, 2, 4 or 8."""
    parts = (tile,)
    for level in tl.static_range(0, 3):
        if (1 << level) < SPLITS:
            halves = ()
            for i in tl.static_range(0, 1 << level):
                pair = parts[i].reshape(BLOCK_M, 2, BLOCK_N >> (level + 1)).permute(0, 2, 1)
                left, right = pair.split()
                halves = halves + (left, right)
            parts = halves
    return parts


@triton.jit
def rounded(acc, POLLED: tl.constexpr):
    """An fp32 tile rounded once to bf16; as bits where readers poll it."""
    if POLLED:
        return result_bits(acc)
    else:
        return acc.to(tl.bfloat16)


def store_splits(block_n: int, element_bytes: int = 2) -> int:
    """Column parts in which a tile is stored.

    A tile is written out while the next one is computed, so its staging stands beside the buffers
    of the pipeline. Wider than 256 bytes it does not fit there whole.
    """
    return max(1, block_n * element_bytes // 256)


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

    SPLITS: column parts it is stored in; more of them save shared memory.
    POLLED: the view is of int16, and readers poll it: no element looks as if it were missing.
    """
    WIDTH: tl.constexpr = BLOCK_N // SPLITS
    parts = column_parts(acc, BLOCK_M, BLOCK_N, SPLITS)
    for i in tl.static_range(0, SPLITS):
        part = rounded(parts[i], POLLED)
        store_tile(c_view, chunk, row, col + i * WIDTH, part, BLOCK_M, WIDTH, TARGET)


@triton.jit
def add_accumulator(
    c_view,
    chunk,
    row,
    col,
    acc,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    TARGET: tl.constexpr,
):
    """Adds an fp32 tile to what a matrix of fp32 holds there.

    Each element is read and written once, by whoever holds its complete sum, so that the result
    does not depend on who that is.
    SPLITS: as in `store_accumulator`.
    """
    WIDTH: tl.constexpr = BLOCK_N // SPLITS
    parts = column_parts(acc, BLOCK_M, BLOCK_N, SPLITS)
    for i in tl.static_range(0, SPLITS):
        place = col + i * WIDTH
        add_tile(c_view, chunk, row, place, parts[i], BLOCK_M, WIDTH, TARGET)
