"""A GEMM whose rows are summed at the ranks that own them: builders push, movers add up.

Every rank has a part of the contraction, hence a partial sum of every row. A builder computes a
tile of it and stores it into the landing region of the rank that owns the rows, in this rank's
slot; that rank's movers add up the slots once all tiles of a tile row have arrived in each.

=============== =================== ==================== ====== ============= ======================
word            writer              reader               scope  order         guards
=============== =================== ==================== ====== ============= ======================
arrival counter the source's        the owner's movers,  sys    barrier +     the rows of that tile
                builders, +1 a tile >= tiles of the row         release;      in the source's slot
                                                                acquire
joined          builders that find  the same workgroup   gpu    relaxed       nothing: how many move
                no tile left, +1
=============== =================== ==================== ====== ============= ======================

A slot is written only under the owner's start word of this call, by when the owner has left the
call before: one copy of the landing region is enough.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from kosmos_core.device.barrier import start_hold
from kosmos_core.device.flags import flag_arrive, flag_read, flag_wait
from kosmos_core.device.layout import (
    ARRIVAL,
    FLAG_ARRIVAL,
    GATHER,
    PHASE_BUILD,
    PHASE_REDUCE,
    REDUCE_QUEUE,
    UNIT_QUEUE,
    Standing,
)
from kosmos_core.device.mover import fill_nan
from kosmos_core.device.peers import peer_at, peer_ptr
from kosmos_core.device.queue import queue_claim
from kosmos_core.device.reduce import reduce_run
from kosmos_core.device.roles import TWO_WAY
from kosmos_core.device.target import NVIDIA, fence_async_proxy, matrix_view
from kosmos_core.device.tiles import Grid, num_scattered_tiles, scattered_tile
from kosmos_core.device.trace import REDUCE, WAIT, trace_begin, trace_end

from kosmos_tpsp.device.build import build_claim, build_tiles, store_output, tile_sum, view_weights
from kosmos_tpsp.device.config import REDUCE_ONLY, ScatterOperands
from kosmos_tpsp.device.gather import slice_rows


class ScatteredJob(NamedTuple):
    """What the builders of one call work on.

    Attributes:
        ops: the matrices.
        grid: the output tiles.
        n: columns of the output.
        k: contraction.
        own: view of this rank's part of the contraction, a chunk an owner.
        weights: view of the weights.
        views: where each owner's rows go (`owner_views`); or one, of the staging region.
        tiles: indices of the queue.
        split_tiles: the last of them, which are built in parts.
        builders: workgroups that begin as builders.
    """

    ops: ScatterOperands
    grid: Grid
    n: tl.tensor
    k: tl.tensor
    own: tl.tensor
    weights: tl.tensor
    views: tuple[tl.tensor, ...]
    tiles: tl.tensor
    split_tiles: tl.tensor
    builders: tl.tensor


@triton.jit
def owner_view(ops, ctx, owner, grid, n, CONFIG):
    """Where this rank's partial sums of an owner's rows go: the owner's slots, by source.

    Alone they are the sums.
    """
    base_ptr = ops.out_ptr
    if ctx.WORLD > 1:
        base_ptr = peer_ptr(ctx, GATHER, owner, tl.bfloat16)
    return matrix_view(
        base_ptr, ctx.WORLD, grid.chunk_rows, n, CONFIG.BLOCK_M,
        CONFIG.BLOCK_N // CONFIG.STORE_SPLITS, ctx.TARGET,
    )  # fmt: skip


@triton.jit
def owner_views(ops, ctx, grid, n, CONFIG):
    """The views of all owners, by rank, where building one at every tile would cost too much.

    Descriptors do; pointers are free.
    """
    views = (owner_view(ops, ctx, grid.columns * 0, grid, n, CONFIG),)
    if ctx.TARGET == NVIDIA:
        for owner in tl.static_range(1, ctx.WORLD):
            views = views + (owner_view(ops, ctx, grid.columns * 0 + owner, grid, n, CONFIG),)
    return views


@triton.jit
def pick_view(views, ops, ctx, owner, grid, n, CONFIG):
    """The view of one owner."""
    if ctx.TARGET == NVIDIA:
        view = views[0]
        for other in tl.static_range(1, ctx.WORLD):
            if owner == other:
                view = views[other]
        return view
    else:
        return owner_view(ops, ctx, owner, grid, n, CONFIG)


@triton.jit
def tiles_of_row(grid, tile_row, CONFIG):
    """Tiles that a source sends of a tile row; the last one may be ragged."""
    rows = tl.minimum(grid.chunk_rows - tile_row * CONFIG.TILE_ROW_ROWS, CONFIG.TILE_ROW_ROWS)
    return tl.cdiv(rows, CONFIG.BLOCK_M) * grid.columns


@triton.jit
def locate(job, ctx, call, index, CONFIG):
    """Tile `index` of the queue."""
    return scattered_tile(
        index, job.grid, call.rank, CONFIG.ORDER, ctx.WORLD, CONFIG.TILE_ROW_ROWS, CONFIG.BLOCK_M,
        CONFIG.BAND_ROWS,
    )  # fmt: skip


@triton.jit
def hold_owner(job, ctx, call, standing, sent, tile, CONFIG):
    """Holds the start of the rank that a tile goes to, before anything of it is computed.

    Waiting with a sum in registers would cost more of them than there are. Returns (standing,
    sent). A start depends on no arrival: tiles that are not counted yet do not delay it.
    """
    owner = tile.src_rank
    if (owner != call.rank) & (((standing.held >> owner) & 1) == 0):
        standing = start_hold(ctx, call, standing, owner, PHASE_BUILD)
        # What the owner read before may be overwritten by descriptor stores.
        fence_async_proxy(ctx.TARGET)
    return standing, sent


@triton.jit
def multiply(job, ctx, call, standing, tile, k_begin, k_end, CONFIG):
    """The fp32 tile over part of the contraction."""
    return tile_sum(
        job.own, job.weights, tile.src_rank, standing, tile, k_begin, k_end, CONFIG, ctx.TARGET
    )


@triton.jit
def count_sent(ctx, call, sent):
    """Counts a tile at the owner of its rows: owner * MAX_ROWS + tile row, or -1 for none."""
    if ctx.WORLD > 1:
        if sent >= 0:
            owner = sent // ctx.MAX_ROWS
            words_ptr = peer_ptr(ctx, ARRIVAL, owner, tl.int32) + call.parity * ctx.ARRIVAL_WORDS
            word_ptr = words_ptr + call.rank * ctx.MAX_ROWS + sent % ctx.MAX_ROWS
            flag_arrive(word_ptr, "sys", ctx.TARGET)


@triton.jit
def send_tile(job, ctx, call, standing, sent, tile, acc, CONFIG):
    """Stores a complete partial tile at the owner of its rows; returns what to count for it.

    Counts the tile before, whose store was on its way while this one was computed: to wait for
    each store would cost a trip to the owner a tile. Nothing is sent once the call is aborted: its
    owner's output is NaN, whatever lands there. An empty tile is neither stored nor counted.
    """
    count_sent(ctx, call, sent)
    row = tile.row_block * CONFIG.BLOCK_M
    goes = row < job.grid.chunk_rows
    if ctx.WORLD > 1:
        goes = goes & (standing.ok != 0)
    # The store stands in no branch: the next tile would not overlap it.
    row = tl.where(goes, row, job.grid.chunk_rows)
    view = pick_view(job.views, job.ops, ctx, tile.src_rank, job.grid, job.n, CONFIG)
    store_output(view, call.rank, row, tile, acc, CONFIG, ctx.TARGET)
    return tl.where(goes, tile.src_rank * ctx.MAX_ROWS + tile.tile_row, -1)


@triton.jit
def scattered_job(ops, ctx, views, grid, n, k, builders, split_tiles, CONFIG):
    """What the builders of one call work on; `views` are of where the tiles go."""
    own = matrix_view(
        ops.x_ptr, ctx.WORLD, grid.chunk_rows, k, CONFIG.BLOCK_M, CONFIG.BLOCK_K, ctx.TARGET
    )
    weights = view_weights(ops.w_ptr, n, k, CONFIG, ctx.TARGET)
    tiles = num_scattered_tiles(grid, ctx.WORLD, CONFIG.TILE_ROW_ROWS, CONFIG.BLOCK_M)
    return ScatteredJob(ops, grid, n, k, own, weights, views, tiles, split_tiles, builders)


@triton.jit
def build_and_send(job, ctx, call, standing, CONFIG):
    """A builder: tiles in queue order until none is left, each sent to the owner of its rows."""
    standing, sent = build_tiles(
        job, ctx, call, standing, job.tiles * 0 - 1, job.tiles, job.builders, job.split_tiles,
        CONFIG, locate, hold_owner, multiply, send_tile,
    )  # fmt: skip
    count_sent(ctx, call, sent)
    return standing


@triton.jit
def num_late(ctx, call, tile_row, wanted, FIRST: tl.constexpr):
    """Ranks that have counted less than `wanted` into a tile row of the own chunk, at one look.

    FIRST: 0, or 1 to leave out this rank itself.
    """
    words_ptr = peer_ptr(ctx, ARRIVAL, call.rank, tl.int32) + call.parity * ctx.ARRIVAL_WORDS
    late = tile_row * 0
    for step in range(FIRST, ctx.WORLD):
        source = peer_at(call.rank, step, ctx.WORLD)
        seen = flag_read(words_ptr + source * ctx.MAX_ROWS + tile_row, "sys")
        late += (seen < wanted).to(tl.int32)
    return late


@triton.jit
def send_meanwhile(job, ctx, call, standing, tile_row, CONFIG):
    """Two-way: builds and sends tiles while a tile row is missing and whole tiles are left.

    Each is counted at once: its owner may wait for it while this workgroup waits for others.
    """
    wanted = tiles_of_row(job.grid, tile_row, CONFIG)
    more = job.tiles > 0
    while more & (num_late(ctx, call, tile_row, wanted, 0) > 0):
        fence_async_proxy(ctx.TARGET)
        standing, sent, more = build_claim(
            job, ctx, call, standing, job.tiles * 0 - 1, job.tiles, job.builders, job.split_tiles,
            CONFIG, locate, hold_owner, multiply, send_tile,
        )  # fmt: skip
        count_sent(ctx, call, sent)
    return standing


@triton.jit
def await_sources(ctx, call, standing, tile_row, wanted, FIRST: tl.constexpr):
    """Waits until every rank has counted `wanted` arrivals into a tile row of the own chunk.

    FIRST: 0, or 1 to leave out this rank itself.
    """
    words_ptr = peer_ptr(ctx, ARRIVAL, call.rank, tl.int32) + call.parity * ctx.ARRIVAL_WORDS
    ok = standing.ok
    for step in range(FIRST, ctx.WORLD):
        source = peer_at(call.rank, step, ctx.WORLD)
        # After an abort this returns at once, too.
        arrived = flag_wait(
            ctx, call, words_ptr + source * ctx.MAX_ROWS + tile_row, wanted, source, tile_row,
            PHASE_REDUCE, FLAG_ARRIVAL, "sys",
        )  # fmt: skip
        ok = tl.minimum(ok, arrived)
    return Standing(standing.held, ok)


@triton.jit
def await_arrivals(ctx, call, standing, grid, tile_row, CONFIG):
    """Waits until all tiles of a tile row of the own chunk have arrived from every rank."""
    return await_sources(ctx, call, standing, tile_row, tiles_of_row(grid, tile_row, CONFIG), 0)


@triton.jit
def await_unless_here(ctx, call, standing, grid, tile_row, CONFIG):
    """`await_arrivals`, but in a launch that only adds up: it follows one that has waited."""
    if CONFIG.PHASE != REDUCE_ONLY:
        standing = await_arrivals(ctx, call, standing, grid, tile_row, CONFIG)
    return standing


@triton.jit
def landing_slots(ops, ctx, call, chunk, CONFIG):
    """Where the own rows of every rank lie: in the slots of the landing region, by source."""
    slots = (ops.landing_ptr,)
    for source in tl.static_range(1, ctx.WORLD):
        slots = slots + (ops.landing_ptr + source * chunk,)
    return slots


@triton.jit
def advance_all(sources, offset, SOURCES: tl.constexpr):
    """Every pointer `offset` elements further."""
    further = (sources[0] + offset,)
    for source in tl.static_range(1, SOURCES):
        further = further + (sources[source] + offset,)
    return further


@triton.jit
def await_all_partials(ctx, call, standing, grid, CONFIG):
    """Waits for every tile row, as a launch that adds nothing up must before it ends.

    What arrives after a call would be counted into words that the next one clears.
    """
    tile_row = grid.tile_rows * 0
    while tile_row < grid.tile_rows:
        tile_row = queue_claim(call.set_ptr + UNIT_QUEUE)
        if tile_row < grid.tile_rows:
            begin = trace_begin(ctx)
            standing = await_arrivals(ctx, call, standing, grid, tile_row, CONFIG)
            trace_end(ctx, WAIT, tile_row, begin)
    return standing


@triton.jit
def add_unit(ops, ctx, standing, grid, n, sources, unit, CONFIG):
    """Adds up a unit of the own chunk; leaves NaN once the call is aborted.

    sources: the address of the own chunk at each rank, by rank.
    """
    begin = trace_begin(ctx)
    first, rows = slice_rows(grid, unit // CONFIG.SLICES, unit % CONFIG.SLICES, CONFIG)
    offset = first.to(tl.int64) * n
    if standing.ok != 0:
        reduce_run(
            advance_all(sources, offset, ctx.WORLD), ops.out_ptr + offset, rows * n, ctx.WORLD,
            CONFIG.REDUCE_ELEMENTS,
        )  # fmt: skip
    else:
        fill_nan(ops.out_ptr + offset, rows * n, CONFIG.REDUCE_ELEMENTS)
    trace_end(ctx, REDUCE, unit, begin)


@triton.jit
def add_up(
    ops,
    ctx,
    call,
    standing,
    grid,
    n,
    CONFIG,
    AWAIT: tl.constexpr,
    SOURCES: tl.constexpr,
    job=None,
    place=None,
):
    """A mover: units of the own chunk in queue order until none is left.

    AWAIT: (ctx, call, standing, grid, tile_row, CONFIG) waits for a tile row at all sources.
    SOURCES: (ops, ctx, call, chunk, CONFIG) gives the address of the own chunk at each of them, in
        rank order; a chunk has `chunk` elements.
    job: tiles that it builds while rows are missing, with two-way roles.
    place: with two-way roles, a unit that it has claimed already, or -1.
    """
    units = grid.tile_rows * CONFIG.SLICES
    chunk = grid.chunk_rows.to(tl.int64) * n
    sources = SOURCES(ops, ctx, call, chunk, CONFIG)
    ready = units * 0 - 1
    # One claim only stands in the source: triton 3.6 on AMD merges two into an irreducible loop.
    unit = units * 0
    while unit < units:
        if place is None or CONFIG.POLICY != TWO_WAY:
            unit = queue_claim(call.set_ptr + REDUCE_QUEUE)
        else:
            unit = place
            if place < 0:
                unit = queue_claim(call.set_ptr + REDUCE_QUEUE)
            place = unit * 0 - 1
        if unit < units:
            tile_row = unit // CONFIG.SLICES
            # Units are claimed in order, and neighbours share a tile row.
            if tile_row != ready:
                if job is not None:
                    standing = send_meanwhile(job, ctx, call, standing, tile_row, CONFIG)
                begin = trace_begin(ctx)
                standing = AWAIT(ctx, call, standing, grid, tile_row, CONFIG)
                trace_end(ctx, WAIT, tile_row, begin)
                ready = tile_row
            add_unit(ops, ctx, standing, grid, n, sources, unit, CONFIG)
    return standing
