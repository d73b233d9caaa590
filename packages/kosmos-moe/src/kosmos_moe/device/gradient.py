"""The experts' gradients: dgrad2 with the SwiGLU backward, wgrad2, dgrad1, wgrad1.

=============== =================== ==================== ====== ============= ======================
word            writer              reader               scope  order         guards
=============== =================== ==================== ====== ============= ======================
padded          who has cleared an  dgrad2 tiles, ==     gpu    barrier +     pad rows of arena and
                expert's pad rows,  local experts               release;      inputs
                +1                                              acquire
dgrad2 [row     who has built a     dgrad1 tiles; the    gpu    barrier +     dgu of the row block;
block]          tile, +1            last of them, who           acq_rel;      parts of dw
                (`elect_last`)      sends dw                    acquire
dgrad2 [local   who has built a     wgrad tiles of the   gpu    barrier +     w h and dgu of the
expert]         tile, +1            expert, == its              release;      expert
                                    dgrad2 tiles                acquire
weighed at the  last dgrad2 tile of router's blocks, ==  sys    barrier +     dw in list order
token's rank    a row block, +rows  rows owed                   release;
                                                                acquire
dgrad1 [row     who has built a     combiners            gpu    barrier +     gradients of the row
block]          tile, +1                                        release;      block's tokens
                                                                acquire
shared half,    who has built a     shared wgrad and     gpu    barrier +     shared w h and dgu; dx
shared done     tile of the shared  dgrad1 tiles; fold          release;      of the shared expert
                expert, +1                                      acquire
=============== =================== ==================== ====== ============= ======================

One queue: the shared expert; dgrad2 of an expert, then wgrad2 of the one before it; dgrad1 of an
expert, then wgrad1 of the one before it. Contractions of wgrads run over row blocks of an expert,
whose pad rows are zero on both sides.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from kosmos_core.device.barrier import elect_last
from kosmos_core.device.flags import flag_arrive, flag_wait
from kosmos_core.device.gemm import column_parts
from kosmos_core.device.layout import FLAG_ARRIVAL, PHASE_BUILD, Standing
from kosmos_core.device.peers import peer_ptr
from kosmos_core.device.queue import queue_claim
from kosmos_core.device.target import CLAMPED, fence_async_proxy, load_tile, matrix_view, store_tile
from kosmos_core.device.trace import BUILD, trace_begin, trace_end

from kosmos_moe.device.expert_gemm import await_block, await_rows
from kosmos_moe.device.layout import (
    ARENA,
    INPUTS,
    PAD_QUEUE,
    PADDED,
    SCALARS,
    SHARED_DONE,
    SHARED_HALF,
    built_at,
    finished_at,
    shared_built_at,
    weighed_at,
)
from kosmos_moe.device.plan import await_word


class GradientViews(NamedTuple):
    """Matrices of one set of experts as its tiles load and store them.

    Attributes:
        dy_rows, dy_columns: gradients of results, for dgrad2 and for wgrad2.
        w2: weights for dgrad2.
        act: gate and up.
        h, dgu: what dgrad2 stores.
        dgu_rows, dgu_columns: gradients of gate and up, for dgrad1 and for wgrad1.
        w1: weights for dgrad1.
        dx: what dgrad1 stores.
        h_columns, x_columns: right operands of wgrad2 and of wgrad1.
        dw2, dw1: what they store.
    """

    dy_rows: tl.tensor
    dy_columns: tl.tensor
    w2: tl.tensor
    act: tl.tensor
    h: tl.tensor
    dgu: tl.tensor
    dgu_rows: tl.tensor
    dgu_columns: tl.tensor
    w1: tl.tensor
    dx: tl.tensor
    h_columns: tl.tensor
    x_columns: tl.tensor
    dw2: tl.tensor
    dw1: tl.tensor


@triton.jit
def views_of(
    dy_ptr, x_ptr, w1_ptr, w2_ptr, act_ptr, h_ptr, dgu_ptr, dx_ptr, dw1_ptr, dw2_ptr, experts, rows,
    inter, hidden, CONFIG, T: tl.constexpr,
):  # fmt: skip
    """The matrices of some experts."""
    M: tl.constexpr = CONFIG.BLOCK_M
    N: tl.constexpr = CONFIG.BLOCK_N
    HALF: tl.constexpr = CONFIG.BLOCK_N // 2
    WIDTH: tl.constexpr = HALF // CONFIG.PARTS
    K: tl.constexpr = CONFIG.BLOCK_K
    R: tl.constexpr = CONFIG.WGRAD_K
    return GradientViews(
        matrix_view(dy_ptr, 1, rows, hidden, M, K, T),
        matrix_view(dy_ptr, 1, rows, hidden, R, M, T),
        matrix_view(w2_ptr, experts, hidden, inter, K, HALF, T),
        matrix_view(act_ptr, 2, rows, inter, M, WIDTH, T),
        matrix_view(h_ptr, 1, rows, inter, M, WIDTH, T),
        matrix_view(dgu_ptr, 2, rows, inter, M, WIDTH, T),
        matrix_view(dgu_ptr, 2, rows, inter, M, K, T),
        matrix_view(dgu_ptr, 2, rows, inter, R, M, T),
        matrix_view(w1_ptr, 2 * experts, inter, hidden, K, N, T),
        matrix_view(dx_ptr, 1, rows, hidden, M, N, T),
        matrix_view(h_ptr, 1, rows, inter, R, N, T),
        matrix_view(x_ptr, 1, rows, hidden, R, N, T),
        matrix_view(dw2_ptr, experts, hidden, inter, M, N, T),
        matrix_view(dw1_ptr, 2 * experts, inter, hidden, M, N, T),
    )


@triton.jit
def gradient_views(ops, ctx, call, size, CONFIG):
    """(routed, shared) matrices; built once, before the tile loop."""
    T: tl.constexpr = ctx.TARGET
    rows = size.arena_blocks * CONFIG.BLOCK_M
    arena_ptr = peer_ptr(ctx, ARENA, call.rank, tl.bfloat16)
    inputs_ptr = peer_ptr(ctx, INPUTS, call.rank, tl.bfloat16)
    routed = views_of(
        arena_ptr, inputs_ptr, ops.w1_ptr, ops.w2_ptr, ops.act_ptr, ops.h_ptr, ops.dgu_ptr,
        ops.y2_ptr, ops.dw1_ptr, ops.dw2_ptr, CONFIG.LOCAL_EXPERTS, rows, size.inter, size.hidden,
        CONFIG, T,
    )  # fmt: skip
    shared = routed
    if CONFIG.SHARED:
        shared = views_of(
            ops.dy_ptr, ops.x_ptr, ops.shared1_ptr, ops.shared2_ptr, ops.shared_act_ptr,
            ops.shared_h_ptr, ops.shared_dgu_ptr, ops.shared_y_ptr, ops.dshared1_ptr,
            ops.dshared2_ptr, 1, size.tokens, size.shared_inter, size.hidden, CONFIG, T,
        )  # fmt: skip
    return routed, shared


@triton.jit
def rows_of(ctx, call, tables, local, CONFIG):
    """Rows that a local expert has been sent by all ranks."""
    last = (ctx.WORLD - 1) * CONFIG.EXPERTS + call.rank * CONFIG.LOCAL_EXPERTS + local
    return tl.load(tables.before + last) + tl.load(tables.counts + last)


@triton.jit
def clear_pads(ctx, call, standing, size, tables, CONFIG):
    """All workgroups clear the pad rows of the experts' last row blocks.

    Nobody writes them, and what stood there may be NaN: 0 times NaN is no 0.
    """
    arena_ptr = peer_ptr(ctx, ARENA, call.rank, tl.bfloat16)
    inputs_ptr = peer_ptr(ctx, INPUTS, call.rank, tl.bfloat16)
    local = call.ticket * 0
    while (local < CONFIG.LOCAL_EXPERTS) & (standing.ok != 0):
        local = queue_claim(call.set_ptr + PAD_QUEUE)
        if local < CONFIG.LOCAL_EXPERTS:
            rows = rows_of(ctx, call, tables, local, CONFIG)
            begin = tl.load(tables.blocks + local) * CONFIG.BLOCK_M
            end = tl.load(tables.blocks + local + 1) * CONFIG.BLOCK_M
            at = (begin + rows).to(tl.int64) * size.hidden
            elements = (end - begin - rows) * size.hidden
            for i in range(0, elements, CONFIG.COPY_ELEMENTS):
                offsets = i + tl.arange(0, CONFIG.COPY_ELEMENTS)
                zeros = tl.zeros([CONFIG.COPY_ELEMENTS], tl.bfloat16)
                tl.store(arena_ptr + at + offsets, zeros, mask=offsets < elements)
                tl.store(inputs_ptr + at + offsets, zeros, mask=offsets < elements)
            flag_arrive(call.set_ptr + PADDED, "gpu", ctx.TARGET)
    return standing


@triton.jit
def send_dw(ops, ctx, call, size, tables, local, block, first, columns, CONFIG):
    """Adds the parts of dw of a row block, column by column, and sends each to its token's rank."""
    rows = tl.arange(0, CONFIG.BLOCK_M)
    arena_rows = size.arena_blocks * CONFIG.BLOCK_M
    partials_ptr = ops.partials_ptr + block * CONFIG.BLOCK_M + rows
    total = tl.zeros((CONFIG.BLOCK_M,), tl.float32)
    for column in range(columns):
        total += tl.load(partials_ptr + column.to(tl.int64) * arena_rows)
    expert = call.rank * CONFIG.LOCAL_EXPERTS + local
    for source in range(ctx.WORLD):
        at = source * CONFIG.EXPERTS + expert
        within = first + rows - tl.load(tables.before + at)
        own = (within >= 0) & (within < tl.load(tables.counts + at))
        count = tl.sum(own.to(tl.int32), axis=0)
        if count > 0:
            to_ptr = peer_ptr(ctx, SCALARS, source, tl.float32) + arena_rows
            tl.store(to_ptr + tl.load(tables.starts + at) + within, total, mask=own)
            flag_arrive(weighed_at(ctx, call, source), "sys", ctx.TARGET, count)


@triton.jit
def dgrad2_tile(views, weight, chunk, row, col, hidden, valid, CONFIG, T: tl.constexpr):
    """A dgrad2 tile with the SwiGLU backward in its epilogue.

    weight: [BLOCK_M] routing weights of the rows.
    valid: rows that are no padding.
    Returns [BLOCK_M] fp32 parts of dw: the products of h and the gradient before it is weighted.
    """
    M: tl.constexpr = CONFIG.BLOCK_M
    HALF: tl.constexpr = CONFIG.BLOCK_N // 2
    WIDTH: tl.constexpr = HALF // CONFIG.PARTS
    K: tl.constexpr = CONFIG.BLOCK_K
    acc = tl.zeros((M, HALF), tl.float32)
    for k in tl.range(0, hidden, K, num_stages=CONFIG.STAGES):
        a = load_tile(views.dy_rows, 0, row, k, M, K, CLAMPED, CONFIG.EVEN_H, T)
        b = load_tile(views.w2, chunk, k, col, K, HALF, CONFIG.EVEN_H, False, T)
        acc = tl.dot(a, b, acc)
    inside = (tl.arange(0, M) < valid)[:, None]
    part = tl.zeros((M,), tl.float32)
    # Part by part: beside the sums there are not registers enough for all of gate and up.
    parts = column_parts(acc, M, HALF, CONFIG.PARTS)
    for i in tl.static_range(0, CONFIG.PARTS):
        place = col + i * WIDTH
        gate = load_tile(views.act, 0, row, place, M, WIDTH, False, False, T).to(tl.float32)
        up = load_tile(views.act, 1, row, place, M, WIDTH, False, False, T).to(tl.float32)
        gradient = tl.where(inside, parts[i], 0.0)
        sigmoid = 1.0 / (1.0 + tl.exp(-gate))
        silu = gate * sigmoid
        h = tl.where(inside, silu * up, 0.0)
        part += tl.sum(gradient * h, axis=1)
        store_tile(views.h, 0, row, place, (h * weight[:, None]).to(tl.bfloat16), M, WIDTH, T)
        gradient = gradient * weight[:, None]
        slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
        dgate = tl.where(inside, gradient * up * slope, 0.0)
        store_tile(views.dgu, 0, row, place, dgate.to(tl.bfloat16), M, WIDTH, T)
        dup = tl.where(inside, gradient * silu, 0.0)
        store_tile(views.dgu, 1, row, place, dup.to(tl.bfloat16), M, WIDTH, T)
    return part


@triton.jit
def dgrad1_tile(views, chunk, row, col, inter, CONFIG, T: tl.constexpr):
    """A dgrad1 tile: gradients of gate times W1's gate half, plus those of up times the other."""
    M: tl.constexpr = CONFIG.BLOCK_M
    N: tl.constexpr = CONFIG.BLOCK_N
    K: tl.constexpr = CONFIG.BLOCK_K
    acc = tl.zeros((M, N), tl.float32)
    for half in range(2):
        for k in tl.range(0, inter, K, num_stages=CONFIG.STAGES):
            a = load_tile(views.dgu_rows, half, row, k, M, K, CLAMPED, CONFIG.EVEN_I, T)
            b = load_tile(views.w1, chunk + half, k, col, K, N, CONFIG.EVEN_I, False, T)
            acc = tl.dot(a, b, acc)
    store_tile(views.dx, 0, row, col, acc.to(tl.bfloat16), M, N, T)


@triton.jit
def wgrad_tile(
    a_view, a_chunk, b_view, out_view, out_chunk, row, col, begin, end, CONFIG, T: tl.constexpr
):
    """A wgrad tile: A transposed times B over the rows [begin, end), rounded once."""
    M: tl.constexpr = CONFIG.BLOCK_M
    N: tl.constexpr = CONFIG.BLOCK_N
    R: tl.constexpr = CONFIG.WGRAD_K
    acc = tl.zeros((M, N), tl.float32)
    for k in tl.range(begin, end, R, num_stages=CONFIG.STAGES):
        a = load_tile(a_view, a_chunk, k, row, R, M, False, False, T)
        b = load_tile(b_view, 0, k, col, R, N, False, False, T)
        acc = tl.dot(a.T, b, acc)
    store_tile(out_view, out_chunk, row, col, acc.to(tl.bfloat16), M, N, T)


@triton.jit
def interleaved(index, tables, tiles, wgrads, CONFIG):
    """Place in a queue of `tiles` a row block, expert by expert, wgrads one expert behind.

    Returns (local expert, place among its tiles or among its wgrads, whether it is a wgrad).
    """
    places = tl.arange(0, CONFIG.LOCAL_P2)
    inside = places < CONFIG.LOCAL_EXPERTS
    ends = tl.load(tables.blocks + 1 + places, mask=inside, other=0) * tiles + places * wgrads
    # Groups: the tiles of expert g, then the wgrads of expert g - 1; the last one has wgrads only.
    group = tl.sum((inside & (ends <= index)).to(tl.int32), axis=0)
    begin = tl.load(tables.blocks + group) * tiles + tl.maximum(group - 1, 0) * wgrads
    own = index * 0
    if group < CONFIG.LOCAL_EXPERTS:
        own = (tl.load(tables.blocks + group + 1) - tl.load(tables.blocks + group)) * tiles
    place = index - begin
    is_wgrad = place >= own
    return tl.where(is_wgrad, group - 1, group), tl.where(is_wgrad, place - own, place), is_wgrad


@triton.jit
def await_expert(ctx, call, standing, size, tables, local, columns):
    """Waits for all dgrad2 tiles of a local expert."""
    blocks = tl.load(tables.blocks + local + 1) - tl.load(tables.blocks + local)
    word_ptr = shared_built_at(call, size) + local
    return await_block(ctx, call, standing, word_ptr, local, blocks * columns)


@triton.jit
def build_dgrad2(ops, ctx, call, standing, size, tables, views, local, place, CONFIG):
    """A dgrad2 tile of a routed expert; the last of a row block sends dw."""
    HALF: tl.constexpr = CONFIG.BLOCK_N // 2
    columns = tl.cdiv(size.inter, HALF)
    begin = tl.load(tables.blocks + local)
    block = begin + place // columns
    column = place % columns
    first = place // columns * CONFIG.BLOCK_M
    standing = await_rows(ctx, call, standing, tables, local, first, CONFIG.BLOCK_M, 0, CONFIG)
    standing = await_word(ctx, call, standing, PADDED, CONFIG.LOCAL_EXPERTS, PHASE_BUILD)
    fence_async_proxy(ctx.TARGET)
    if standing.ok != 0:
        rows = block * CONFIG.BLOCK_M + tl.arange(0, CONFIG.BLOCK_M)
        valid = rows_of(ctx, call, tables, local, CONFIG) - first
        inside = tl.arange(0, CONFIG.BLOCK_M) < valid
        scalars_ptr = peer_ptr(ctx, SCALARS, call.rank, tl.float32)
        weight = tl.load(scalars_ptr + rows, mask=inside, other=0.0)
        part = dgrad2_tile(
            views, weight, local, block * CONFIG.BLOCK_M, column * HALF, size.hidden, valid, CONFIG,
            ctx.TARGET,
        )  # fmt: skip
        arena_rows = size.arena_blocks * CONFIG.BLOCK_M
        tl.store(ops.partials_ptr + column.to(tl.int64) * arena_rows + rows, part)
        if elect_last(built_at(call, size) + block, columns, ctx.TARGET):
            send_dw(ops, ctx, call, size, tables, local, block, first, columns, CONFIG)
        flag_arrive(shared_built_at(call, size) + local, "gpu", ctx.TARGET)
    return standing


@triton.jit
def build_wgrad(
    ctx, call, standing, size, tables, views, local, place, SECOND: tl.constexpr, CONFIG
):
    """A wgrad tile of a routed expert; an expert without rows gets zeros.

    SECOND: of W2, else of W1.
    """
    HALF: tl.constexpr = CONFIG.BLOCK_N // 2
    standing = await_expert(ctx, call, standing, size, tables, local, tl.cdiv(size.inter, HALF))
    # Rows that peers have written are acquired from them, by whoever reads them: those that dgrad2
    # has waited for, too.
    word = 0 if SECOND else CONFIG.LOCAL_EXPERTS
    rows = rows_of(ctx, call, tables, local, CONFIG)
    standing = await_rows(ctx, call, standing, tables, local, 0, rows, word, CONFIG)
    fence_async_proxy(ctx.TARGET)
    if standing.ok != 0:
        begin = tl.load(tables.blocks + local) * CONFIG.BLOCK_M
        end = tl.load(tables.blocks + local + 1) * CONFIG.BLOCK_M
        wgrad_place(
            views, local, place, begin, end, size.inter, size.hidden, SECOND, CONFIG, ctx.TARGET
        )
    return standing


@triton.jit
def wgrad_place(
    views, chunk, place, begin, end, inter, hidden, SECOND: tl.constexpr, CONFIG, T: tl.constexpr
):
    """Tile `place` of the gradient of an expert's W2, or of its W1."""
    M: tl.constexpr = CONFIG.BLOCK_M
    N: tl.constexpr = CONFIG.BLOCK_N
    if SECOND:
        columns = tl.cdiv(inter, N)
        row = place // columns * M
        col = place % columns * N
        wgrad_tile(
            views.dy_columns, 0, views.h_columns, views.dw2, chunk, row, col, begin, end, CONFIG, T
        )
    else:
        columns = tl.cdiv(hidden, N)
        bands = tl.cdiv(inter, M)
        half = place // (bands * columns)
        row = place // columns % bands * M
        col = place % columns * N
        wgrad_tile(
            views.dgu_columns, half, views.x_columns, views.dw1, 2 * chunk + half, row, col, begin,
            end, CONFIG, T,
        )  # fmt: skip


@triton.jit
def build_shared(ctx, call, standing, size, views, index, blocks, columns, wgrads2, CONFIG):
    """A tile of the shared expert: dgrad2, dgrad1, wgrad2 and wgrad1, one after the other."""
    M: tl.constexpr = CONFIG.BLOCK_M
    N: tl.constexpr = CONFIG.BLOCK_N
    HALF: tl.constexpr = CONFIG.BLOCK_N // 2
    T: tl.constexpr = ctx.TARGET
    inter = size.shared_inter
    dx_columns = tl.cdiv(size.hidden, N)
    dgrad1 = blocks * columns
    wgrad2 = dgrad1 + blocks * dx_columns
    if index < dgrad1:
        row = index // columns * M
        if standing.ok != 0:
            dgrad2_tile(
                views, tl.full((M,), 1.0, tl.float32), 0, row, index % columns * HALF, size.hidden,
                size.tokens - row, CONFIG, T,
            )  # fmt: skip
            flag_arrive(call.set_ptr + SHARED_HALF, "gpu", T)
    else:
        ok = standing.ok
        if ok != 0:
            ok = flag_wait(
                ctx, call, call.set_ptr + SHARED_HALF, dgrad1, call.rank, 0, PHASE_BUILD,
                FLAG_ARRIVAL, "gpu",
            )  # fmt: skip
        standing = Standing(standing.held, ok)
        fence_async_proxy(T)
        if ok != 0:
            if index < wgrad2:
                place = index - dgrad1
                dgrad1_tile(
                    views, 0, place // dx_columns * M, place % dx_columns * N, inter, CONFIG, T
                )
                flag_arrive(call.set_ptr + SHARED_DONE, "gpu", T)
            elif index < wgrad2 + wgrads2:
                wgrad_place(
                    views, 0, index - wgrad2, 0, size.tokens, inter, size.hidden, True, CONFIG, T
                )
            else:
                wgrad_place(
                    views, 0, index - wgrad2 - wgrads2, 0, size.tokens, inter, size.hidden, False,
                    CONFIG, T,
                )  # fmt: skip
    return standing


@triton.jit
def build_gradient(ops, ctx, call, standing, size, tables, row_blocks, views, index, CONFIG):
    """Tile `index` of the queue.

    Returns (standing, whether there is such a tile).
    """
    M: tl.constexpr = CONFIG.BLOCK_M
    N: tl.constexpr = CONFIG.BLOCK_N
    HALF: tl.constexpr = CONFIG.BLOCK_N // 2
    routed, shared = views
    begin = trace_begin(ctx)
    columns2 = tl.cdiv(size.inter, HALF)
    columns1 = tl.cdiv(size.hidden, N)
    wgrads2 = tl.cdiv(size.hidden, M) * tl.cdiv(size.inter, N)
    wgrads1 = 2 * tl.cdiv(size.inter, M) * columns1
    before = index * 0
    if CONFIG.SHARED:
        blocks = tl.cdiv(size.tokens, M)
        columns = tl.cdiv(size.shared_inter, HALF)
        shared2 = tl.cdiv(size.hidden, M) * tl.cdiv(size.shared_inter, N)
        shared1 = 2 * tl.cdiv(size.shared_inter, M) * columns1
        before = blocks * (columns + columns1) + shared2 + shared1
        if index < before:
            standing = build_shared(
                ctx, call, standing, size, shared, index, blocks, columns, shared2, CONFIG
            )
    first = before + row_blocks * columns2 + CONFIG.LOCAL_EXPERTS * wgrads2
    total = first + row_blocks * columns1 + CONFIG.LOCAL_EXPERTS * wgrads1
    if (index >= before) & (index < first):
        local, place, is_wgrad = interleaved(index - before, tables, columns2, wgrads2, CONFIG)
        if is_wgrad:
            standing = build_wgrad(
                ctx, call, standing, size, tables, routed, local, place, True, CONFIG
            )
        else:
            standing = build_dgrad2(
                ops, ctx, call, standing, size, tables, routed, local, place, CONFIG
            )
    elif (index >= first) & (index < total):
        local, place, is_wgrad = interleaved(index - first, tables, columns1, wgrads1, CONFIG)
        if is_wgrad:
            standing = build_wgrad(
                ctx, call, standing, size, tables, routed, local, place, False, CONFIG
            )
        else:
            block = tl.load(tables.blocks + local) + place // columns1
            standing = await_block(
                ctx, call, standing, built_at(call, size) + block, block, columns2
            )
            fence_async_proxy(ctx.TARGET)
            if standing.ok != 0:
                dgrad1_tile(
                    routed, 2 * local, block * M, place % columns1 * N, size.inter, CONFIG,
                    ctx.TARGET,
                )  # fmt: skip
                flag_arrive(finished_at(call, size) + block, "gpu", ctx.TARGET)
    trace_end(ctx, BUILD, index, begin)
    return standing, index < total
