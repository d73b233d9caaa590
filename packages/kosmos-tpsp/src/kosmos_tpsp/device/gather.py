"""The movers of an all-gather: pull from the peers' shards, or push into their gather regions.

A unit is (tile row, slice, peer), peer fastest, so that few movers keep all links busy. Units are
claimed in gather order: tile row by tile row. What is dequantised on arrival: `unpack.py`.

=============== =================== ==================== ====== ============= ======================
word            writer              reader               scope  order         guards
=============== =================== ==================== ====== ============= ======================
copy done       whoever copied a    the last of them     gpu    barrier +     own shard, before the
                slice in, +1                                    acq_rel       start word
                (`elect_last`)
=============== =================== ==================== ====== ============= ======================
"""

import triton
import triton.language as tl
from kosmos_core.device.barrier import call_clean, elect_last, start_hold, start_publish
from kosmos_core.device.flags import flag_arrive, flag_read, flag_wait
from kosmos_core.device.layout import (
    ALL_READY,
    ARRIVAL,
    COPY_DONE,
    COPY_QUEUE,
    FLAG_ARRIVAL,
    GATHER,
    KEEP_QUEUE,
    PHASE_BUILD,
    PHASE_GATHER,
    SHARD,
    UNIT_QUEUE,
    Standing,
)
from kosmos_core.device.mover import copy_run, fill_nan
from kosmos_core.device.peers import peer_at, peer_ptr
from kosmos_core.device.queue import queue_claim
from kosmos_core.device.roles import TWO_WAY
from kosmos_core.device.target import fence_async_proxy
from kosmos_core.device.trace import COPY_IN, KEEP, MOVE, WAIT, trace_begin, trace_end

from kosmos_tpsp.device.config import BOTH, BUILD_ONLY, PULL, PUSH, UNPACKED
from kosmos_tpsp.device.rows import (
    Rows,
    columns_after,
    copy_elements,
    own_columns,
    own_rows,
    receive_elements,
    region_rows,
    rows_at,
    spoil_elements,
    unpack_elements,
)
from kosmos_tpsp.device.unpack import landed_word, ready_word, slice_rows, unpack_landed


@triton.jit
def arrival_word(ctx, call, src_rank, tile_row, CONFIG):
    """The counter that says how many slices of (source, tile row) builders may read."""
    if CONFIG.TRANSPORT == PUSH and CONFIG.FORMAT != UNPACKED:
        return landed_word(ctx, call, src_rank, tile_row)
    else:
        return ready_word(ctx, call, src_rank, tile_row)


@triton.jit
def copy_in(ops, ctx, call, standing, grid, k, CONFIG):
    """Pull: copies the own chunk into this parity's shard.

    Whoever completes the last slice publishes the start.
    """
    own = own_rows(ops, CONFIG)
    chunk = grid.chunk_rows.to(tl.int64) * k
    shard = region_rows(ctx, SHARD + call.parity, call.rank, chunk, CONFIG)
    units = grid.tile_rows * CONFIG.SLICES
    unit = queue_claim(call.set_ptr + COPY_QUEUE)
    while (unit < units) & (standing.ok != 0):
        begin = trace_begin(ctx)
        first, rows = slice_rows(grid, unit // CONFIG.SLICES, unit % CONFIG.SLICES, CONFIG)
        offset = first.to(tl.int64) * k
        copy_elements(
            rows_at(own, offset, CONFIG), rows_at(shard, offset, CONFIG), rows * k, CONFIG,
            ctx.TARGET,
        )  # fmt: skip
        if CONFIG.FORMAT == UNPACKED and CONFIG.COPIES == BOTH:
            columns = columns_after(shard, chunk)
            copy_elements(
                rows_at(own_columns(ops), offset, CONFIG), rows_at(columns, offset, CONFIG),
                rows * k, CONFIG, ctx.TARGET,
            )  # fmt: skip
        if elect_last(call.set_ptr + COPY_DONE, units, ctx.TARGET):
            start_publish(ctx, call)
        trace_end(ctx, COPY_IN, unit, begin)
        unit = queue_claim(call.set_ptr + COPY_QUEUE)
    fence_async_proxy(ctx.TARGET)


@triton.jit
def open_gather(ops, ctx, call, standing, grid, k, CONFIG):
    """Publishes the start once this rank's rows may be taken, and zeroes the next counters.

    Pull: every workgroup helps to copy the own chunk in, whoever completes it publishes. Push, or
    nothing to gather: ticket 0 publishes at once.
    """
    if CONFIG.PHASE == BUILD_ONLY:
        publishes = call.ticket == 0
    elif CONFIG.TRANSPORT == PULL and ctx.WORLD > 1:
        copy_in(ops, ctx, call, standing, grid, k, CONFIG)
        publishes = call.ticket < 0
    else:
        publishes = call.ticket == 0
    if publishes & (standing.ok != 0):
        start_publish(ctx, call)
    if call.ticket == 0:
        call_clean(ctx, call, standing)


@triton.jit
def unit_place(ctx, unit, CONFIG):
    """(tile row, slice, step to the peer) of a unit."""
    PEERS: tl.constexpr = ctx.WORLD - 1 if ctx.WORLD > 1 else 1
    return unit // PEERS // CONFIG.SLICES, unit // PEERS % CONFIG.SLICES, unit % PEERS


@triton.jit
def unit_target(ctx, call, tile_row, step, CONFIG):
    """(peer, counter that the unit is counted into).

    Push: peer d consumes the chunk of d + 1 first, so this rank serves rank - 1 first.
    """
    if CONFIG.TRANSPORT == PUSH:
        peer = peer_at(call.rank, -1 - step, ctx.WORLD)
        base = peer_ptr(ctx, ARRIVAL, peer, tl.int32) + call.parity * ctx.ARRIVAL_WORDS
        return peer, base + call.rank * ctx.MAX_ROWS + tile_row
    else:
        peer = peer_at(call.rank, 1 + step, ctx.WORLD)
        return peer, arrival_word(ctx, call, peer, tile_row, CONFIG)


@triton.jit
def sent_rows(ops, chunk, offset, peer, CONFIG):
    """Push: where the rows that a peer is to get lie here.

    A gather sends everybody the own chunk; a reduction sends each peer the chunk that it owns.
    """
    if CONFIG.SCATTERS:
        return rows_at(own_rows(ops, CONFIG), peer * chunk + offset, CONFIG)
    else:
        return rows_at(own_rows(ops, CONFIG), offset, CONFIG)


@triton.jit
def gathered_rows(ops, elements, offset, CONFIG):
    """The rows of the gathered input, of so many elements, that begin `offset` elements on."""
    if CONFIG.FORMAT == UNPACKED:
        return Rows(ops.gathered_ptr + offset, ops.gathered_ptr)
    else:
        return rows_at(Rows(ops.gathered_ptr, ops.gathered_ptr + elements), offset, CONFIG)


@triton.jit
def transport(ops, ctx, call, standing, grid, k, peer, tile_row, part, CONFIG):
    """Copies a unit: rows from here to the peer's gather region, or its rows to the gathered input.

    k: elements of a row.
    """
    standing = start_hold(ctx, call, standing, peer, PHASE_GATHER)
    first, rows = slice_rows(grid, tile_row, part, CONFIG)
    offset = first.to(tl.int64) * k
    chunk = grid.chunk_rows.to(tl.int64) * k
    if CONFIG.TRANSPORT == PUSH:
        if standing.ok != 0:
            landing = region_rows(ctx, GATHER, peer, chunk * ctx.WORLD, CONFIG)
            slot = call.rank * chunk + offset
            place = rows_at(landing, slot, CONFIG)
            sent = sent_rows(ops, chunk, offset, peer, CONFIG)
            copy_elements(sent, place, rows * k, CONFIG, ctx.TARGET)
            if CONFIG.FORMAT == UNPACKED and CONFIG.COPIES == BOTH:
                columns = columns_after(landing, chunk * ctx.WORLD)
                others = rows_at(own_columns(ops), offset, CONFIG)
                beside = rows_at(columns, slot, CONFIG)
                copy_elements(others, beside, rows * k, CONFIG, ctx.TARGET)
    else:
        place = gathered_rows(ops, chunk * ctx.WORLD, peer * chunk + offset, CONFIG)
        if standing.ok != 0:
            shard = region_rows(ctx, SHARD + call.parity, peer, chunk, CONFIG)
            source = rows_at(shard, offset, CONFIG)
            receive_elements(source, place, rows, k, CONFIG, ctx.TARGET)
            if CONFIG.FORMAT == UNPACKED and CONFIG.COPIES == BOTH:
                source = rows_at(columns_after(shard, chunk), offset, CONFIG)
                to_ptr = ops.left_ptr + (peer * chunk + offset)
                unpack_elements(source, to_ptr, rows, k, CONFIG, ctx.TARGET, True)
        else:
            spoil_elements(place, rows * k, CONFIG)
    return standing


@triton.jit
def carry_unit(
    ops, ctx, call, standing, grid, k, unit, tile_row, part, step, CONFIG, CLAIM_NEXT: tl.constexpr
):
    """Transports a unit and counts it in; as `move_unit`."""
    peer, word_ptr = unit_target(ctx, call, tile_row, step, CONFIG)
    standing = transport(ops, ctx, call, standing, grid, k, peer, tile_row, part, CONFIG)
    following = unit
    if CLAIM_NEXT:
        following = queue_claim(call.set_ptr + UNIT_QUEUE)
    if standing.ok != 0:
        flag_arrive(word_ptr, "sys" if CONFIG.TRANSPORT == PUSH else "gpu", ctx.TARGET)
        if CONFIG.TRANSPORT != PUSH and CONFIG.FORMAT == UNPACKED and CONFIG.COPIES == BOTH:
            flag_arrive(call.set_ptr + ALL_READY, "gpu", ctx.TARGET)
    return standing, following


@triton.jit
def move_unit(ops, ctx, call, standing, grid, k, unit, CONFIG, CLAIM_NEXT: tl.constexpr):
    """Transports a unit and counts it in. Pushed MXFP8: dequantises one of the tile row before.

    Returns (standing, next unit).
    CLAIM_NEXT: claims the next unit while the stores of this one drain; else returns this one.
    """
    begin = trace_begin(ctx)
    tile_row, part, step = unit_place(ctx, unit, CONFIG)
    if CONFIG.TRANSPORT == PUSH and CONFIG.FORMAT == UNPACKED and ctx.WORLD > 1:
        # A tile row is waited for once all units that push it stand earlier in every rank's queue:
        # whoever waits here waits for work that others have claimed before.
        following = unit
        if tile_row < grid.tile_rows:
            standing, following = carry_unit(
                ops, ctx, call, standing, grid, k, unit, tile_row, part, step, CONFIG, False
            )
        if CLAIM_NEXT:
            following = queue_claim(call.set_ptr + UNIT_QUEUE)
        if tile_row > 0:
            standing = unpack_landed(
                ops, ctx, call, standing, grid, k, tile_row - 1, part, step, CONFIG
            )
    else:
        standing, following = carry_unit(
            ops, ctx, call, standing, grid, k, unit, tile_row, part, step, CONFIG, CLAIM_NEXT
        )
    trace_end(ctx, MOVE, tile_row, begin)
    return standing, following


@triton.jit
def num_units(ctx, grid, CONFIG):
    """Units of the transport queue; where they lag, a tile row more."""
    tile_rows = grid.tile_rows
    if CONFIG.TRANSPORT == PUSH and CONFIG.FORMAT == UNPACKED:
        tile_rows += 1
    return tile_rows * (ctx.WORLD - 1) * CONFIG.SLICES


@triton.jit
def move(ops, ctx, call, standing, grid, k, CONFIG):
    """A mover: units in gather order until none is left."""
    units = num_units(ctx, grid, CONFIG)
    unit = queue_claim(call.set_ptr + UNIT_QUEUE)
    while unit < units:
        standing, unit = move_unit(ops, ctx, call, standing, grid, k, unit, CONFIG, True)
    fence_async_proxy(ctx.TARGET)
    return standing


@triton.jit
def await_rows(ops, ctx, call, standing, grid, k, src_rank, tile_row, CONFIG):
    """Waits until a tile row has arrived.

    With two-way roles, moves units while it is missing and units are left.
    """
    begin = trace_begin(ctx)
    word_ptr = arrival_word(ctx, call, src_rank, tile_row, CONFIG)
    COUNTED_BY_PEER: tl.constexpr = CONFIG.TRANSPORT == PUSH and CONFIG.FORMAT != UNPACKED
    SCOPE: tl.constexpr = "sys" if COUNTED_BY_PEER else "gpu"
    if CONFIG.POLICY == TWO_WAY:
        units = num_units(ctx, grid, CONFIG)
        unit = units * 0
        while (unit < units) & (flag_read(word_ptr, SCOPE) < CONFIG.SLICES):
            unit = queue_claim(call.set_ptr + UNIT_QUEUE)
            if unit < units:
                standing, unit = move_unit(ops, ctx, call, standing, grid, k, unit, CONFIG, False)
    ok = standing.ok
    if ok != 0:
        ok = flag_wait(
            ctx, call, word_ptr, CONFIG.SLICES, src_rank, tile_row, PHASE_BUILD, FLAG_ARRIVAL, SCOPE
        )
    fence_async_proxy(ctx.TARGET)
    trace_end(ctx, WAIT, src_rank * ctx.MAX_ROWS + tile_row, begin)
    return Standing(standing.held, ok)


@triton.jit
def await_all(ops, ctx, call, standing, grid, k, CONFIG):
    """Waits for every tile row of every peer, as a launch that only gathers must before it ends."""
    PEERS: tl.constexpr = ctx.WORLD - 1 if ctx.WORLD > 1 else 1
    units = grid.tile_rows * (ctx.WORLD - 1)
    unit = queue_claim(call.set_ptr + KEEP_QUEUE)
    while unit < units:
        peer = peer_at(call.rank, 1 + unit % PEERS, ctx.WORLD)
        standing = await_rows(ops, ctx, call, standing, grid, k, peer, unit // PEERS, CONFIG)
        unit = queue_claim(call.set_ptr + KEEP_QUEUE)
    return standing


@triton.jit
def keep_rows(ops, ctx, call, standing, grid, k, CONFIG):
    """Completes a kept gather output once all tiles are claimed.

    That is the own chunk, and with push the arrived ones. The arrivals have been counted by then or
    are being counted by movers that wait for nothing but starts.
    """
    sources = 1
    if CONFIG.TRANSPORT == PUSH:
        sources = ctx.WORLD
    units = grid.tile_rows * sources * CONFIG.SLICES
    # One claim only stands in the source: triton 3.6 on AMD merges two into an irreducible loop.
    unit = units * 0
    while unit < units:
        unit = queue_claim(call.set_ptr + KEEP_QUEUE)
        if unit < units:
            begin = trace_begin(ctx)
            place = unit // CONFIG.SLICES
            tile_row = place // sources
            peer = peer_at(call.rank, place % sources, ctx.WORLD)
            first, rows = slice_rows(grid, tile_row, unit % CONFIG.SLICES, CONFIG)
            offset = (peer.to(tl.int64) * grid.chunk_rows + first) * k
            from_ptr = ops.x_ptr + first.to(tl.int64) * k
            if peer != call.rank:
                standing = await_rows(ops, ctx, call, standing, grid, k, peer, tile_row, CONFIG)
                from_ptr = ops.gathered_ptr + offset
            to_ptr = ops.keep_ptr + offset
            if standing.ok != 0:
                copy_run(from_ptr, to_ptr, rows * k, CONFIG.COPY_ELEMENTS, CONFIG.COPY_DEPTH)
            else:
                fill_nan(to_ptr, rows * k, CONFIG.COPY_ELEMENTS)
            trace_end(ctx, KEEP, tile_row, begin)
    return standing
