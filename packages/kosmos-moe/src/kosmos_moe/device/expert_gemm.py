"""The experts' GEMMs: GEMM1 with SwiGLU in its epilogue, GEMM2, and those of the shared expert.

=============== =================== ==================== ====== ============= ======================
word            writer              reader               scope  order         guards
=============== =================== ==================== ====== ============= ======================
built [row      who has built a     GEMM2 tiles of the   gpu    barrier +     h of the row block
block]          GEMM1 tile, +1      row block, == its           release;
                                    GEMM1 tiles                 acquire
finished [row   who has built a     combiners, == its    gpu    barrier +     y2 of the row block
block]          GEMM2 tile, +1      GEMM2 tiles                 release;
                                                                acquire
shared built    who has built a     second tiles of the  gpu    barrier +     shared h of the row
[row block]     first tile, +1      row block                   release;      block
                                                                acquire
shared done     who has built a     fold, == all of      gpu    barrier +     shared y
                second tile, +1     them                        release;
                                                                acquire
=============== =================== ==================== ====== ============= ======================

One queue: first tiles of the shared expert, which wait for nothing; GEMM1 and GEMM2 of the routed
experts, row block by row block; second tiles of the shared expert. There is no table of tiles:
experts are padded to whole row blocks, so that a tile is found by division and its expert by a
search in a prefix of the local experts.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from kosmos_core.device.flags import flag_arrive, flag_wait
from kosmos_core.device.gemm import TN, column_parts, gemm_tile, store_accumulator
from kosmos_core.device.layout import FLAG_ARRIVAL, PHASE_BUILD, Standing
from kosmos_core.device.peers import peer_ptr
from kosmos_core.device.target import CLAMPED, fence_async_proxy, load_tile, matrix_view, store_tile
from kosmos_core.device.trace import BUILD, WAIT, trace_begin, trace_end

from kosmos_moe.device.dispatch import find_local
from kosmos_moe.device.layout import (
    ARENA,
    SHARED_DONE,
    arrivals_at,
    built_at,
    finished_at,
    shared_built_at,
)


class Queue(NamedTuple):
    """Where each kind of tile begins in the queue.

    Attributes:
        columns1, columns2: columns of tiles of GEMM1 and of GEMM2.
        shared_columns: those of the shared expert's first GEMM.
        gemm1, gemm2, shared2, total: first index of each kind, and the end.
    """

    columns1: tl.tensor
    columns2: tl.tensor
    shared_columns: tl.tensor
    gemm1: tl.tensor
    gemm2: tl.tensor
    shared2: tl.tensor
    total: tl.tensor


class Views(NamedTuple):
    """One GEMM's matrices as it loads and stores them.

    Attributes:
        a: rows.
        w: weights, chunk by chunk.
        out: what is stored, rounded.
        act: what GEMM1 keeps besides: gate in the first half, up in the second.
    """

    a: tl.tensor
    w: tl.tensor
    out: tl.tensor
    act: tl.tensor


@triton.jit
def tile_queue(size, row_blocks, CONFIG):
    """The queue of a call."""
    HALF: tl.constexpr = CONFIG.BLOCK_N // 2
    columns1 = tl.cdiv(size.inter, HALF)
    columns2 = tl.cdiv(size.hidden, CONFIG.BLOCK_N)
    shared_columns = columns1 * 0
    shared_blocks = columns1 * 0
    if CONFIG.SHARED:
        shared_columns = tl.cdiv(size.shared_inter, HALF)
        shared_blocks = tl.cdiv(size.tokens, CONFIG.BLOCK_M)
    gemm1 = shared_blocks * shared_columns
    gemm2 = gemm1 + row_blocks * columns1
    shared2 = gemm2 + row_blocks * columns2
    total = shared2 + shared_blocks * columns2
    return Queue(columns1, columns2, shared_columns, gemm1, gemm2, shared2, total)


@triton.jit
def up_views(a_ptr, w_ptr, h_ptr, act_ptr, experts, rows, inter, hidden, CONFIG, T: tl.constexpr):
    """Matrices of GEMM1 of some experts."""
    M: tl.constexpr = CONFIG.BLOCK_M
    K: tl.constexpr = CONFIG.BLOCK_K
    HALF: tl.constexpr = CONFIG.BLOCK_N // 2
    WIDTH: tl.constexpr = HALF // CONFIG.PARTS
    return Views(
        matrix_view(a_ptr, 1, rows, hidden, M, K, T),
        matrix_view(w_ptr, 2 * experts, inter, hidden, HALF, K, T),
        matrix_view(h_ptr, 1, rows, inter, M, WIDTH, T),
        matrix_view(act_ptr, 2, rows, inter, M, WIDTH, T),
    )


@triton.jit
def down_views(h_ptr, w_ptr, y_ptr, experts, rows, inter, hidden, CONFIG, T: tl.constexpr):
    """Matrices of GEMM2 of some experts; it keeps nothing."""
    M: tl.constexpr = CONFIG.BLOCK_M
    N: tl.constexpr = CONFIG.BLOCK_N
    K: tl.constexpr = CONFIG.BLOCK_K
    out = matrix_view(y_ptr, 1, rows, hidden, M, N, T)
    return Views(
        matrix_view(h_ptr, 1, rows, inter, M, K, T),
        matrix_view(w_ptr, 1, experts * hidden, inter, N, K, T),
        out,
        out,
    )


@triton.jit
def all_views(ops, ctx, call, size, CONFIG):
    """(GEMM1, GEMM2, shared first, shared second) matrices; built once, before the tile loop."""
    T: tl.constexpr = ctx.TARGET
    rows = size.arena_blocks * CONFIG.BLOCK_M
    arena_ptr = peer_ptr(ctx, ARENA, call.rank, tl.bfloat16)
    up = up_views(
        arena_ptr, ops.w1_ptr, ops.h_ptr, ops.act_ptr, CONFIG.LOCAL_EXPERTS, rows, size.inter,
        size.hidden, CONFIG, T,
    )  # fmt: skip
    down = down_views(
        ops.h_ptr, ops.w2_ptr, ops.y2_ptr, CONFIG.LOCAL_EXPERTS, rows, size.inter, size.hidden,
        CONFIG, T,
    )  # fmt: skip
    shared_up = up
    shared_down = down
    if CONFIG.SHARED:
        shared_up = up_views(
            ops.x_ptr, ops.shared1_ptr, ops.shared_h_ptr, ops.shared_act_ptr, 1, size.tokens,
            size.shared_inter, size.hidden, CONFIG, T,
        )  # fmt: skip
        shared_down = down_views(
            ops.shared_h_ptr, ops.shared2_ptr, ops.shared_y_ptr, 1, size.tokens, size.shared_inter,
            size.hidden, CONFIG, T,
        )  # fmt: skip
    return up, down, shared_up, shared_down


@triton.jit
def await_rows(ctx, call, standing, tables, local, first, rows, word, CONFIG):
    """Waits for the sources of some rows of a local expert, and for no other.

    first, rows: which of the expert's rows.
    word: first of the words that count them.
    """
    expert = call.rank * CONFIG.LOCAL_EXPERTS + local
    sources = tl.arange(0, CONFIG.WORLD_P2)
    inside = sources < ctx.WORLD
    at = sources * CONFIG.EXPERTS + expert
    begins = tl.load(tables.before + at, mask=inside, other=2147483647)
    ends = begins + tl.load(tables.counts + at, mask=inside, other=0)
    # Sources lie one behind the other: those before the block have ended, those after not begun.
    source = tl.sum((inside & (ends <= first)).to(tl.int32), axis=0)
    past = tl.sum((begins < first + rows).to(tl.int32), axis=0)
    words_ptr = arrivals_at(ctx, call, call.rank) + word + local
    ok = standing.ok
    while (source < past) & (ok != 0):
        wanted = tl.load(tables.counts + source * CONFIG.EXPERTS + expert)
        ok = flag_wait(
            ctx, call, words_ptr + source * ctx.MAX_ROWS, wanted, source, local, PHASE_BUILD,
            FLAG_ARRIVAL, "sys",
        )  # fmt: skip
        source += 1
    return Standing(standing.held, ok)


@triton.jit
def await_block(ctx, call, standing, word_ptr, block, tiles):
    """Waits for all tiles of a row block of the GEMM before."""
    ok = standing.ok
    if ok != 0:
        ok = flag_wait(
            ctx, call, word_ptr, tiles, call.rank, block, PHASE_BUILD, FLAG_ARRIVAL, "gpu"
        )
    return Standing(standing.held, ok)


@triton.jit
def swiglu_tile(views, chunk, row, col, hidden, inter, CONFIG, T: tl.constexpr):
    """A GEMM1 tile: gate and up in fp32, both rounded and kept, SwiGLU of them rounded once."""
    M: tl.constexpr = CONFIG.BLOCK_M
    HALF: tl.constexpr = CONFIG.BLOCK_N // 2
    WIDTH: tl.constexpr = HALF // CONFIG.PARTS
    K: tl.constexpr = CONFIG.BLOCK_K
    gate = tl.zeros((M, HALF), tl.float32)
    up = tl.zeros((M, HALF), tl.float32)
    for k in tl.range(0, hidden, K, num_stages=CONFIG.STAGES):
        a = load_tile(views.a, 0, row, k, M, K, CLAMPED, CONFIG.EVEN_H, T)
        w = load_tile(views.w, chunk, col, k, HALF, K, CLAMPED, CONFIG.EVEN_H, T)
        gate = tl.dot(a, w.T, gate)
        w = load_tile(views.w, chunk + 1, col, k, HALF, K, CLAMPED, CONFIG.EVEN_H, T)
        up = tl.dot(a, w.T, up)
    gates = column_parts(gate, M, HALF, CONFIG.PARTS)
    ups = column_parts(up, M, HALF, CONFIG.PARTS)
    for i in tl.static_range(0, CONFIG.PARTS):
        place = col + i * WIDTH
        if place < inter:
            if CONFIG.SAVE:
                store_tile(views.act, 0, row, place, gates[i].to(tl.bfloat16), M, WIDTH, T)
                store_tile(views.act, 1, row, place, ups[i].to(tl.bfloat16), M, WIDTH, T)
            h = gates[i] / (1.0 + tl.exp(-gates[i])) * ups[i]
            store_tile(views.out, 0, row, place, h.to(tl.bfloat16), M, WIDTH, T)


@triton.jit
def down_tile(views, expert, row, col, hidden, inter, CONFIG, T: tl.constexpr):
    """A GEMM2 tile, rounded once.

    Columns past `hidden` meet the next expert's weights, and are not stored.
    """
    M: tl.constexpr = CONFIG.BLOCK_M
    N: tl.constexpr = CONFIG.BLOCK_N
    acc = gemm_tile(
        views.a, views.w, 0, row, expert * hidden + col, 0, inter, 0.0, TN, M, N, CONFIG.BLOCK_K,
        CONFIG.STAGES, CONFIG.EVEN_I, True, True, T,
    )  # fmt: skip
    store_accumulator(views.out, 0, row, col, acc, M, N, 1, T)


@triton.jit
def build_up(ctx, call, standing, size, tables, queue, views, shared_views, index, CONFIG):
    """A tile of the first GEMM, of a routed expert or of the shared one."""
    HALF: tl.constexpr = CONFIG.BLOCK_N // 2
    begin = trace_begin(ctx)
    place = index - queue.gemm1
    block = place // queue.columns1
    col = place % queue.columns1 * HALF
    chunk = index * 0
    done_ptr = built_at(call, size) + block
    chosen = views
    inter = size.inter
    if CONFIG.SHARED:
        if index < queue.gemm1:
            block = index // queue.shared_columns
            col = index % queue.shared_columns * HALF
            done_ptr = shared_built_at(call, size) + block
            chosen = shared_views
            inter = size.shared_inter
    if index >= queue.gemm1:
        local = find_local(tables.blocks, block, CONFIG)
        chunk = 2 * local
        first = (block - tl.load(tables.blocks + local)) * CONFIG.BLOCK_M
        standing = await_rows(ctx, call, standing, tables, local, first, CONFIG.BLOCK_M, 0, CONFIG)
    fence_async_proxy(ctx.TARGET)
    trace_end(ctx, WAIT, index, begin)
    begin = trace_begin(ctx)
    if standing.ok != 0:
        swiglu_tile(
            chosen, chunk, block * CONFIG.BLOCK_M, col, size.hidden, inter, CONFIG, ctx.TARGET
        )
        flag_arrive(done_ptr, "gpu", ctx.TARGET)
    trace_end(ctx, BUILD, index, begin)
    return standing


@triton.jit
def build_down(ctx, call, standing, size, tables, queue, views, shared_views, index, CONFIG):
    """A tile of the second GEMM, of a routed expert or of the shared one."""
    begin = trace_begin(ctx)
    place = index - queue.gemm2
    chosen = views
    inter = size.inter
    if CONFIG.SHARED:
        if index >= queue.shared2:
            place = index - queue.shared2
            chosen = shared_views
            inter = size.shared_inter
    block = place // queue.columns2
    col = place % queue.columns2 * CONFIG.BLOCK_N
    wait_ptr = built_at(call, size) + block
    done_ptr = finished_at(call, size) + block
    tiles = queue.columns1
    chunk = index * 0
    if CONFIG.SHARED:
        if index >= queue.shared2:
            wait_ptr = shared_built_at(call, size) + block
            done_ptr = call.set_ptr + SHARED_DONE
            tiles = queue.shared_columns
    if index < queue.shared2:
        chunk = find_local(tables.blocks, block, CONFIG)
    standing = await_block(ctx, call, standing, wait_ptr, block, tiles)
    fence_async_proxy(ctx.TARGET)
    trace_end(ctx, WAIT, index, begin)
    begin = trace_begin(ctx)
    if standing.ok != 0:
        down_tile(
            chosen, chunk, block * CONFIG.BLOCK_M, col, size.hidden, inter, CONFIG, ctx.TARGET
        )
        flag_arrive(done_ptr, "gpu", ctx.TARGET)
    trace_end(ctx, BUILD, index, begin)
    return standing


@triton.jit
def build_forward(ctx, call, standing, size, tables, row_blocks, views, index, CONFIG):
    """Tile `index` of the queue.

    Returns (standing, whether there is such a tile).
    """
    up, down, shared_up, shared_down = views
    queue = tile_queue(size, row_blocks, CONFIG)
    if index < queue.gemm2:
        standing = build_up(ctx, call, standing, size, tables, queue, up, shared_up, index, CONFIG)
    elif index < queue.total:
        standing = build_down(
            ctx, call, standing, size, tables, queue, down, shared_down, index, CONFIG
        )
    return standing, index < queue.total
