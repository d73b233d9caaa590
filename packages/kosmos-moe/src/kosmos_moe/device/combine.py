"""Combine: results are pushed back to the ranks whose tokens they are, between tiles.

=============== =================== ==================== ====== ============= ======================
word            writer              reader               scope  order         guards
=============== =================== ==================== ====== ============= ======================
returned at the combiners of all    fold, == rows that   sys    barrier +     rows of the return
token's rank    ranks, +rows        the rank is owed            release;      region
                                                                acquire
=============== =================== ==================== ====== ============= ======================

A unit is (local expert, slice, owner of the tokens). A dual-role mover reserves the next one in
queue order, looks up once which row blocks it reads, polls their counters before it claims a tile,
and pushes once they are finished; it waits for its unit only when no tile is left. Every workgroup
joins then.
"""

import triton
import triton.language as tl
from kosmos_core.device.barrier import call_again
from kosmos_core.device.flags import flag_arrive, flag_read, flag_wait
from kosmos_core.device.layout import FLAG_ARRIVAL, PHASE_COMBINE, Standing
from kosmos_core.device.mover import copy_run
from kosmos_core.device.peers import peer_ptr
from kosmos_core.device.queue import queue_claim
from kosmos_core.device.target import fence_async_proxy
from kosmos_core.device.trace import COMBINE, trace_begin, trace_end

from kosmos_moe.device.config import FIXED, PLANNED, TWO_WAY
from kosmos_moe.device.dispatch import unit_of
from kosmos_moe.device.expert_gemm import all_views, build_forward
from kosmos_moe.device.gradient import build_gradient, num_wgrads
from kosmos_moe.device.gradient_tiles import gradient_views
from kosmos_moe.device.layout import (
    COMBINE_QUEUE,
    COMBINE_UNITS,
    RETURN,
    ROW_BLOCKS,
    TILE_QUEUE,
    finished_at,
    returned_at,
)


@triton.jit
def unit_rows(ctx, call, tables, unit, CONFIG):
    """(expert, owner, first row within (owner, expert), rows, arena row) of a combine unit."""
    local, part, owner = unit_of(tables.combines, unit, unit, call.rank, ctx.WORLD, False, CONFIG)
    expert = call.rank * CONFIG.LOCAL_EXPERTS + local
    at = owner * CONFIG.EXPERTS + expert
    first = part * CONFIG.UNIT_ROWS
    rows = tl.minimum(tl.load(tables.counts + at) - first, CONFIG.UNIT_ROWS)
    row = tl.load(tables.arena_rows + expert) + tl.load(tables.before + at) + first
    return expert, owner, first, tl.maximum(rows, 0), row


@triton.jit
def unit_span(ctx, call, tables, unit, CONFIG):
    """Row blocks [first, past) that a unit reads; none when it is empty."""
    _, _, _, rows, row = unit_rows(ctx, call, tables, unit, CONFIG)
    first = row // CONFIG.BLOCK_M
    past = tl.where(rows > 0, (row + rows - 1) // CONFIG.BLOCK_M + 1, first)
    return first, past


@triton.jit
def push_unit(ops, ctx, call, size, tables, unit, CONFIG):
    """Pushes the rows of a unit back and counts them in at their owner."""
    begin = trace_begin(ctx)
    expert, owner, first, rows, row = unit_rows(ctx, call, tables, unit, CONFIG)
    if rows > 0:
        # The owner's send list lists them in this order: one run there, one run here.
        place = tl.load(tables.starts + owner * CONFIG.EXPERTS + expert) + first
        to_ptr = peer_ptr(ctx, RETURN, owner, tl.bfloat16) + place.to(tl.int64) * size.hidden
        from_ptr = ops.y2_ptr + row.to(tl.int64) * size.hidden
        copy_run(from_ptr, to_ptr, rows * size.hidden, CONFIG.COPY_ELEMENTS, CONFIG.COPY_DEPTH)
        flag_arrive(returned_at(ctx, call, owner), "sys", ctx.TARGET, rows)
    trace_end(ctx, COMBINE, unit, begin)


@triton.jit
def poll_span(words_ptr, first, past, tiles):
    """How far a span of row blocks is finished; polls only, and never waits."""
    finished = first < past
    while finished:
        finished = flag_read(words_ptr + first, "gpu") >= tiles
        first += finished.to(tl.int32)
        finished = finished & (first < past)
    return first


@triton.jit
def await_span(ctx, call, ok, words_ptr, first, past, tiles):
    """Waits until a span of row blocks is finished.

    Returns (past, ok).
    """
    while (first < past) & (ok != 0):
        ok = flag_wait(
            ctx, call, words_ptr + first, tiles, call.rank, first, PHASE_COMBINE, FLAG_ARRIVAL,
            "gpu",
        )  # fmt: skip
        first += 1
    return past, ok


@triton.jit
def planned_tiles(size, row_blocks, combine_crew, CONFIG):
    """How many tiles each of a planned crew builds before it only combines.

    So many that, by the model's costs, it has pushed all rows when the others have built the rest:
    with T tiles, rows whose push costs as much as P tiles, G workgroups and C of them in the crew,
    T / G - P (1 / C - 1 / G).

    Source: the planned split of the paper's Table 2.
    """
    columns2 = tl.cdiv(size.hidden, CONFIG.BLOCK_N)
    columns1 = tl.cdiv(size.inter, CONFIG.BLOCK_N // 2)
    tiles = row_blocks * (columns1 + columns2)
    if CONFIG.BACKWARD:
        wgrads2, wgrads1 = num_wgrads(size.hidden, size.inter, CONFIG)
        tiles += CONFIG.LOCAL_EXPERTS * (wgrads2 + wgrads1)
    pushed = (row_blocks * CONFIG.BLOCK_M).to(tl.float32) * (CONFIG.ROW_COST * 1e-6)
    wgs = tl.num_programs(0).to(tl.float32)
    crew = tl.maximum(combine_crew, 1).to(tl.float32)
    share = tiles.to(tl.float32) / wgs - pushed * (1.0 / crew - 1.0 / wgs)
    return tl.maximum(share, 0.0).to(tl.int32)


@triton.jit
def build_and_combine(ops, ctx, call, standing, size, tables, combine_crew, call_hash, CONFIG):
    """A builder, or a dual-role mover: tiles in queue order, and units between them."""
    if CONFIG.BACKWARD:
        views = gradient_views(ops, ctx, call, size, False, CONFIG)
    else:
        views = all_views(ops, ctx, call, size, CONFIG)
    # What was acquired up to here, tables and starts included, is older than what tiles load.
    fence_async_proxy(ctx.TARGET)
    ticket = call.ticket
    held = standing.held
    ok = standing.ok
    builds = ticket >= 0
    combines = ticket < combine_crew
    # Tiles that a workgroup of a planned crew has yet to build.
    left = ticket * 0
    if CONFIG.POLICY == PLANNED:
        if combines:
            blocks = tl.load(tables.head + ROW_BLOCKS)
            left = planned_tiles(size, blocks, combine_crew, CONFIG)
        builds = (ticket >= combine_crew) | (left > 0)
        combines = combines & (left == 0)
    elif CONFIG.POLICY != TWO_WAY:
        builds = ticket >= combine_crew
    unit = ticket * 0 - 1
    first = unit * 0
    past = unit * 0
    # Nothing is kept over a tile's sums that can be made anew: registers are full of them. (The
    # loop carries no more than changes: triton 3.6 would make another loop of it, with hoisting.
    # The forward has registers enough, and its wgmma would be serialized.)
    while tl.condition(builds | combines | (unit >= 0), disable_licm=CONFIG.BACKWARD):
        own = call_again(ctx, ticket, call_hash)
        row_blocks = tl.load(tables.head + ROW_BLOCKS)
        columns = tl.cdiv(size.hidden, CONFIG.BLOCK_N)
        moved = unit < -1
        if combines & (unit < 0):
            unit = queue_claim(own.set_ptr + COMBINE_QUEUE)
            if unit < tl.load(tables.head + COMBINE_UNITS):
                first, past = unit_span(ctx, own, tables, unit, CONFIG)
            else:
                unit = unit * 0 - 1
                combines = unit >= 0
        if unit >= 0:
            words_ptr = finished_at(own, size)
            if builds:
                first = poll_span(words_ptr, first, past, columns)
            else:
                first, ok = await_span(ctx, own, ok, words_ptr, first, past, columns)
            if first >= past:
                if ok != 0:
                    push_unit(ops, ctx, own, size, tables, unit, CONFIG)
                unit = unit * 0 - 1
                moved = unit < 0
        if builds & (moved == 0):
            index = queue_claim(own.set_ptr + TILE_QUEUE)
            now = Standing(held, ok)
            if CONFIG.BACKWARD:
                now, built = build_gradient(
                    ops, ctx, own, now, size, tables, row_blocks, views, index, CONFIG
                )
            else:
                now, built = build_forward(
                    ctx, own, now, size, tables, row_blocks, views, index, CONFIG
                )
            ok = now.ok
            if not built:
                builds = index < 0
                if (CONFIG.POLICY != FIXED) and (CONFIG.POLICY != PLANNED):
                    combines = combines | (ticket >= combine_crew)
            if CONFIG.POLICY == PLANNED:
                left -= 1
                if (ticket < combine_crew) & ((left <= 0) | (not built)):
                    builds = index < 0
                    combines = index >= 0
    return call_again(ctx, ticket, call_hash), Standing(held, ok)
