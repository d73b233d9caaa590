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

A queue of the shared expert comes first. The other one: dgrad2 of an expert, then wgrad2 of the one
before it; dgrad1 of an expert, then wgrad1 of the one before it. Wgrads contract over the row
blocks of an expert, whose pad rows are zero on both sides.
"""

import triton
import triton.language as tl
from kosmos_core.device.barrier import call_again, elect_last
from kosmos_core.device.flags import flag_arrive
from kosmos_core.device.layout import PHASE_BUILD, Standing
from kosmos_core.device.peers import peer_ptr
from kosmos_core.device.queue import queue_claim
from kosmos_core.device.target import fence_async_proxy
from kosmos_core.device.trace import BUILD, trace_begin, trace_end

from kosmos_moe.device.expert_gemm import await_block, await_rows
from kosmos_moe.device.gradient_tiles import (
    dgrad1_tile,
    dgrad2_tile,
    gradient_views,
    wgrad_tile,
)
from kosmos_moe.device.layout import (
    ARENA,
    INPUTS,
    PAD_QUEUE,
    PADDED,
    SCALARS,
    SHARED_DONE,
    SHARED_HALF,
    SHARED_QUEUE,
    built_at,
    finished_at,
    shared_built_at,
    weighed_at,
)
from kosmos_moe.device.plan import await_word

# Kinds of tiles.
DGRAD2 = tl.constexpr(0)
DGRAD1 = tl.constexpr(1)
WGRAD2 = tl.constexpr(2)
WGRAD1 = tl.constexpr(3)
NONE = tl.constexpr(4)


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
def await_half(ctx, call, standing, size, CONFIG):
    """Waits for all dgrad2 tiles of the shared expert."""
    columns = tl.cdiv(size.shared_inter, CONFIG.BLOCK_N // 2)
    tiles = tl.cdiv(size.tokens, CONFIG.BLOCK_M) * columns
    return await_word(ctx, call, standing, SHARED_HALF, tiles, PHASE_BUILD)


@triton.jit
def build_dgrad2(
    ops, ctx, call, standing, size, tables, views, local, place, inter, IS_SHARED: tl.constexpr,
    CONFIG,
):  # fmt: skip
    """A dgrad2 tile; the last of a routed expert's row block sends dw."""
    M: tl.constexpr = CONFIG.BLOCK_M
    HALF: tl.constexpr = CONFIG.BLOCK_N // 2
    columns = tl.cdiv(inter, HALF)
    first = place // columns * M
    column = place % columns
    if IS_SHARED:
        row = first
        valid = size.tokens - first
    else:
        row = first + tl.load(tables.blocks + local) * M
        valid = rows_of(ctx, call, tables, local, CONFIG) - first
        standing = await_rows(ctx, call, standing, tables, local, first, M, 0, CONFIG)
        standing = await_word(ctx, call, standing, PADDED, CONFIG.LOCAL_EXPERTS, PHASE_BUILD)
    fence_async_proxy(ctx.TARGET)
    if standing.ok != 0:
        rows = row + tl.arange(0, M)
        if IS_SHARED:
            weight = tl.full((M,), 1.0, tl.float32)
        else:
            scalars_ptr = peer_ptr(ctx, SCALARS, call.rank, tl.float32)
            weight = tl.load(scalars_ptr + rows, mask=tl.arange(0, M) < valid, other=0.0)
        part = dgrad2_tile(
            views, weight, local, row, column * HALF, size.hidden, inter, valid, CONFIG, ctx.TARGET
        )
        if IS_SHARED:
            flag_arrive(call.set_ptr + SHARED_HALF, "gpu", ctx.TARGET)
        else:
            arena_rows = size.arena_blocks * M
            tl.store(ops.partials_ptr + column.to(tl.int64) * arena_rows + rows, part)
            block = row // M
            if elect_last(built_at(call, size) + block, columns, ctx.TARGET):
                send_dw(ops, ctx, call, size, tables, local, block, first, columns, CONFIG)
            flag_arrive(shared_built_at(call, size) + local, "gpu", ctx.TARGET)
    return standing


@triton.jit
def build_dgrad1(
    ctx, call, standing, size, tables, views, local, place, inter, IS_SHARED: tl.constexpr, CONFIG
):
    """A dgrad1 tile."""
    M: tl.constexpr = CONFIG.BLOCK_M
    columns = tl.cdiv(size.hidden, CONFIG.BLOCK_N)
    block = place // columns
    if IS_SHARED:
        standing = await_half(ctx, call, standing, size, CONFIG)
    else:
        block += tl.load(tables.blocks + local)
        tiles = tl.cdiv(inter, CONFIG.BLOCK_N // 2)
        standing = await_block(ctx, call, standing, built_at(call, size) + block, block, tiles)
    fence_async_proxy(ctx.TARGET)
    if standing.ok != 0:
        col = place % columns * CONFIG.BLOCK_N
        dgrad1_tile(views, 2 * local, block * M, col, inter, CONFIG, ctx.TARGET)
        if IS_SHARED:
            flag_arrive(call.set_ptr + SHARED_DONE, "gpu", ctx.TARGET)
        else:
            flag_arrive(finished_at(call, size) + block, "gpu", ctx.TARGET)
    return standing


@triton.jit
def build_wgrad(
    ctx, call, standing, size, tables, views, local, place, inter, second, IS_SHARED: tl.constexpr,
    CONFIG,
):  # fmt: skip
    """A wgrad tile; an expert without rows gets zeros, or keeps what it has.

    second: whether it is of W2, else of W1.
    """
    M: tl.constexpr = CONFIG.BLOCK_M
    N: tl.constexpr = CONFIG.BLOCK_N
    if IS_SHARED:
        standing = await_half(ctx, call, standing, size, CONFIG)
        begin = place * 0
        end = begin + size.tokens
    else:
        standing = await_expert(ctx, call, standing, size, tables, local, tl.cdiv(inter, N // 2))
        # Rows that peers have written are acquired from them, by whoever reads them: those that
        # dgrad2 has waited for, too.
        word = tl.where(second, 0, CONFIG.LOCAL_EXPERTS)
        rows = rows_of(ctx, call, tables, local, CONFIG)
        standing = await_rows(ctx, call, standing, tables, local, 0, rows, word, CONFIG)
        begin = tl.load(tables.blocks + local) * M
        end = tl.load(tables.blocks + local + 1) * M
    fence_async_proxy(ctx.TARGET)
    if standing.ok != 0:
        # [hidden, inter] of W2; gate's and up's [inter, hidden] of W1.
        height = tl.where(second, size.hidden, inter)
        columns = tl.cdiv(tl.where(second, inter, size.hidden), N)
        tiles = tl.cdiv(height, M) * columns
        half = place // tiles
        place = place % tiles
        chunk = tl.where(second, local, 2 * local + half)
        wgrad_tile(
            views, second, half, chunk, place // columns * M, place % columns * N, begin, end,
            CONFIG, ctx.TARGET,
        )  # fmt: skip
    return standing


@triton.jit
def num_wgrads(hidden, inter, CONFIG):
    """(tiles of the gradient of an expert's W2, of its W1)."""
    M: tl.constexpr = CONFIG.BLOCK_M
    N: tl.constexpr = CONFIG.BLOCK_N
    second = tl.cdiv(hidden, M) * tl.cdiv(inter, N)
    return second, 2 * tl.cdiv(inter, M) * tl.cdiv(hidden, N)


@triton.jit
def build_kind(
    ops, ctx, call, standing, size, tables, views, kind, local, place, inter,
    IS_SHARED: tl.constexpr, CONFIG,
):  # fmt: skip
    """A tile of some kind, or none."""
    if kind == DGRAD2:
        standing = build_dgrad2(
            ops, ctx, call, standing, size, tables, views, local, place, inter, IS_SHARED, CONFIG
        )
    elif kind == DGRAD1:
        standing = build_dgrad1(
            ctx, call, standing, size, tables, views, local, place, inter, IS_SHARED, CONFIG
        )
    elif kind != NONE:
        standing = build_wgrad(
            ctx, call, standing, size, tables, views, local, place, inter, kind == WGRAD2,
            IS_SHARED, CONFIG,
        )  # fmt: skip
    return standing


@triton.jit
def build_gradient(ops, ctx, call, standing, size, tables, row_blocks, views, index, CONFIG):
    """Tile `index` of the routed experts' queue.

    Returns (standing, whether there is such a tile).
    """
    begin = trace_begin(ctx)
    columns2 = tl.cdiv(size.inter, CONFIG.BLOCK_N // 2)
    columns1 = tl.cdiv(size.hidden, CONFIG.BLOCK_N)
    wgrads2, wgrads1 = num_wgrads(size.hidden, size.inter, CONFIG)
    first = row_blocks * columns2 + CONFIG.LOCAL_EXPERTS * wgrads2
    total = first + row_blocks * columns1 + CONFIG.LOCAL_EXPERTS * wgrads1
    kind = index * 0 + NONE
    local = index * 0
    place = local
    if index < total:
        is_second = index < first
        tiles = tl.where(is_second, columns2, columns1)
        wgrads = tl.where(is_second, wgrads2, wgrads1)
        at = tl.where(is_second, index, index - first)
        local, place, is_wgrad = interleaved(at, tables, tiles, wgrads, CONFIG)
        kind = tl.where(
            is_wgrad, tl.where(is_second, WGRAD2, WGRAD1), tl.where(is_second, DGRAD2, DGRAD1)
        )
    standing = build_kind(
        ops, ctx, call, standing, size, tables, views, kind, local, place, size.inter, False, CONFIG
    )
    trace_end(ctx, BUILD, index, begin)
    return standing, index < total


@triton.jit
def build_shared(ops, ctx, call, standing, size, tables, call_hash, CONFIG):
    """All workgroups build the shared expert's gradients: they wait for no other rank.

    Returns (call, standing).
    """
    views = gradient_views(ops, ctx, call, size, True, CONFIG)
    # What was acquired up to here is older than what tiles load.
    fence_async_proxy(ctx.TARGET)
    ticket = call.ticket
    held = standing.held
    ok = standing.ok
    left = ticket * 0 + 1
    # As in `build_and_combine`: nothing is kept over a tile's sums that can be made anew.
    while tl.condition(left > 0, disable_licm=True):
        own = call_again(ctx, ticket, call_hash)
        begin = trace_begin(ctx)
        blocks = tl.cdiv(size.tokens, CONFIG.BLOCK_M)
        wgrads2, wgrads1 = num_wgrads(size.hidden, size.shared_inter, CONFIG)
        dgrad1 = blocks * tl.cdiv(size.shared_inter, CONFIG.BLOCK_N // 2)
        wgrad2 = dgrad1 + blocks * tl.cdiv(size.hidden, CONFIG.BLOCK_N)
        wgrad1 = wgrad2 + wgrads2
        index = queue_claim(own.set_ptr + SHARED_QUEUE)
        place = index
        kind = index * 0 + DGRAD2
        if index >= dgrad1:
            kind = index * 0 + DGRAD1
            place = index - dgrad1
        if index >= wgrad2:
            kind = index * 0 + WGRAD2
            place = index - wgrad2
        if index >= wgrad1:
            kind = index * 0 + WGRAD1
            place = index - wgrad1
        # Of the value before: a loop that does not read what it carries is made anew, see there.
        left = tl.where(index < wgrad1 + wgrads1, left, 0)
        if left > 0:
            now = build_kind(
                ops, ctx, own, Standing(held, ok), size, tables, views, kind, index * 0, place,
                size.shared_inter, True, CONFIG,
            )  # fmt: skip
            ok = now.ok
        trace_end(ctx, BUILD, index, begin)
    return call_again(ctx, ticket, call_hash), Standing(held, ok)
