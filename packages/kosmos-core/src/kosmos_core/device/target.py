"""What differs between vendors: clock, store drain, proxy fence, loads and stores of tiles.

NVIDIA tiles go through tensor descriptors (pointer loads are 8 % slower there); AMD tiles through
pointers (descriptors spill there). The CPU executor runs either path.
"""

from typing import NamedTuple

import triton
import triton.language as tl

NVIDIA = tl.constexpr(0)
AMD = tl.constexpr(1)
CLAMPED = tl.constexpr(2)
CLOCK_LANES = tl.constexpr(256)  # one a thread of eight warps


class PointerView(NamedTuple):
    """A stack of row-major matrices, reached by pointers.

    Attributes:
        ptr: first element.
        rows: rows of each matrix.
        cols: columns, also the row stride in elements.
    """

    ptr: tl.tensor
    rows: tl.tensor
    cols: tl.tensor


@triton.jit
def clock_ns(TARGET: tl.constexpr):
    """Device time in nanoseconds, int64 (AMD counts at 100 MHz).

    Every warp reads a clock of its own. Nothing may branch on it: see `is_over`.
    """
    if TARGET == AMD:
        ticks = tl.inline_asm_elementwise(
            "s_memrealtime $0\ns_waitcnt lgkmcnt(0)",
            "=s",
            [],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )
        return ticks * 10
    else:
        return tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
        )


@triton.jit
def is_over(begin, bound_ns, TARGET: tl.constexpr):
    """Whether more than `bound_ns` have gone by since `begin`, with one answer for all warps.

    Were a bound over for one warp and not for the next, the two would leave a wait apart, and
    every barrier after it would count the wrong warps.
    """
    late = (clock_ns(TARGET) - begin > bound_ns).to(tl.int32)
    if TARGET == NVIDIA:
        # One instruction; a reduction costs registers that the split tiles do not have.
        any_late = tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $1, 0; bar.red.or.pred p, 0, p; "
            "selp.s32 $0, 1, 0, p; }",
            "=r,r",
            [late],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        any_late = tl.max(tl.zeros([CLOCK_LANES], tl.int32) + late, 0)
    return any_late != 0


@triton.jit
def drain_stores(SCOPE: tl.constexpr, TARGET: tl.constexpr):
    """Once a barrier has followed this, a release at SCOPE may announce the workgroup's stores.

    NVIDIA: descriptor stores have reached memory (triton 3.6 waits only until their source may be
    reused); plain stores need nothing, a release is cumulative over the barrier.
    AMD: every wave's stores are written back, with a wait of our own: triton 3.6 omits the one
    after its write-back when it believes that nothing is outstanding, and the flag may then
    overtake the data.
    """
    if TARGET == NVIDIA:
        tl.inline_asm_elementwise(
            "cp.async.bulk.wait_group 0; mov.u32 $0, 0;",
            "=r",
            [],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    if TARGET == AMD:
        if SCOPE == "sys":
            tl.inline_asm_elementwise(
                "s_waitcnt vmcnt(0)\nbuffer_wbl2 sc0 sc1\ns_waitcnt vmcnt(0)\nv_mov_b32 $0, 0",
                "=v",
                [],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
        else:
            tl.inline_asm_elementwise(
                "s_waitcnt vmcnt(0)\nbuffer_wbl2 sc1\ns_waitcnt vmcnt(0)\nv_mov_b32 $0, 0",
                "=v",
                [],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )


@triton.jit
def fence_async_proxy(TARGET: tl.constexpr):
    """Orders acquired data before descriptor loads of it, which use the async proxy on NVIDIA."""
    if TARGET == NVIDIA:
        tl.inline_asm_elementwise(
            "fence.proxy.async.global; mov.u32 $0, 0;",
            "=r,r",
            [tl.arange(0, 256)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def matrix_view(
    ptr,
    chunks,
    rows,
    cols,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    TARGET: tl.constexpr,
):
    """A view of [chunks, rows, cols] that loads and stores [BLOCK_ROWS, BLOCK_COLS] tiles.

    The chunk is a dimension of its own, so that a tile ends with its chunk and never touches the
    next one.
    """
    if TARGET == NVIDIA:
        return tl.make_tensor_descriptor(
            ptr,
            [chunks, rows, cols],
            [rows.to(tl.int64) * cols, cols.to(tl.int64), 1],
            [1, BLOCK_ROWS, BLOCK_COLS],
        )
    else:
        return PointerView(ptr, rows, cols)


@triton.jit
def load_tile(
    view,
    chunk,
    row,
    col,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    EVEN_ROWS: tl.constexpr,
    EVEN_COLS: tl.constexpr,
    TARGET: tl.constexpr,
):
    """[BLOCK_ROWS, BLOCK_COLS] from (chunk, row, col).

    Columns past the end read 0, and so do rows past it unless EVEN_ROWS.
    EVEN_ROWS: the rows are a multiple of BLOCK_ROWS, or what comes of those past the end is never
        stored, so that pointers need no mask.
    EVEN_COLS: the columns are a multiple of BLOCK_COLS, so that pointers need no mask.
    """
    if TARGET == NVIDIA:
        return view.load([chunk, row, col]).reshape(BLOCK_ROWS, BLOCK_COLS)
    else:
        row_ids = row + tl.arange(0, BLOCK_ROWS)
        rows = row_ids.to(tl.int64)
        if EVEN_ROWS == CLAMPED:
            # Rows past the end read the last row: they are not masked, and stay inside.
            rows = tl.minimum(row_ids, view.rows - 1).to(tl.int64)
        cols = col + tl.arange(0, BLOCK_COLS)
        base = view.ptr + view.rows.to(tl.int64) * view.cols * chunk
        pointers = base + rows[:, None] * view.cols + cols[None, :]
        inside_cols = (cols < view.cols)[None, :]
        inside_rows = (row_ids < view.rows)[:, None]
        if EVEN_ROWS and EVEN_COLS:
            return tl.load(pointers)
        elif EVEN_ROWS:
            return tl.load(pointers, mask=inside_cols, other=0.0)
        elif EVEN_COLS:
            return tl.load(pointers, mask=inside_rows, other=0.0)
        else:
            return tl.load(pointers, mask=inside_rows & inside_cols, other=0.0)


@triton.jit
def store_tile(
    view,
    chunk,
    row,
    col,
    value,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    TARGET: tl.constexpr,
):
    """Writes the part of a [BLOCK_ROWS, BLOCK_COLS] tile that lies inside its chunk."""
    if TARGET == NVIDIA:
        view.store([chunk, row, col], value.reshape(1, BLOCK_ROWS, BLOCK_COLS))
    else:
        rows = row + tl.arange(0, BLOCK_ROWS)
        cols = col + tl.arange(0, BLOCK_COLS)
        base = view.ptr + view.rows.to(tl.int64) * view.cols * chunk
        inside = (rows < view.rows)[:, None] & (cols < view.cols)[None, :]
        offsets = rows.to(tl.int64)[:, None] * view.cols + cols[None, :]
        tl.store(base + offsets, value, mask=inside)


@triton.jit
def add_tile(
    view,
    chunk,
    row,
    col,
    value,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    TARGET: tl.constexpr,
):
    """Adds the part of a tile that lies inside its chunk to what is there."""
    if TARGET == NVIDIA:
        held = view.load([chunk, row, col])
        view.store([chunk, row, col], held + value.reshape(1, BLOCK_ROWS, BLOCK_COLS))
    else:
        # One set of pointers for both: two do not fit beside a split tile.
        rows = row + tl.arange(0, BLOCK_ROWS)
        cols = col + tl.arange(0, BLOCK_COLS)
        base = view.ptr + view.rows.to(tl.int64) * view.cols * chunk
        inside = (rows < view.rows)[:, None] & (cols < view.cols)[None, :]
        pointers = base + rows.to(tl.int64)[:, None] * view.cols + cols[None, :]
        tl.store(pointers, tl.load(pointers, mask=inside, other=0.0) + value, mask=inside)
