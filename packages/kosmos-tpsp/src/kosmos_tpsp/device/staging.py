"""A GEMM whose rows are summed at the ranks that own them: builders store at home, movers pull.

A builder stores its partial tile in its own rank's staging region, whose elements hold the sentinel
until then. The owner of the rows polls them there and adds up what all ranks have: every element is
its own arrival. The region has two halves, which calls use by turns.

=============== =================== ==================== ====== ============= ======================
word            writer              reader               scope  order         guards
=============== =================== ==================== ====== ============= ======================
staging [half]  own builders;       movers of the rows'  value  itself; the   itself: a partial sum
                poison: own         owner, volatile             poison:
                workgroups, into    polls                       start word
                the other half
turn            last workgroup to   every workgroup at   launch plain         which half a call uses
                leave, +1           entry
extent [half]   last workgroup to   every workgroup at   launch plain         how much of a half is
                leave               entry                                     to be poisoned again
poison queue    every workgroup, +1 the claimer          gpu    relaxed       which run to poison
=============== =================== ==================== ====== ============= ======================

A half is poisoned again in the call after the one that has used it, with every peer's start word
held: by then all peers have left the call that polled it. And it is polled next in the call after
that, under the owner's start word: by then it is poisoned. Movers may not poll a peer before they
hold its start.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from kosmos_core.device.barrier import start_hold, start_hold_all
from kosmos_core.device.flags import start_word_of
from kosmos_core.device.layout import (
    EXTENT_ELEMENTS,
    PHASE_REDUCE,
    POISON_QUEUE,
    REDUCE_QUEUE,
    STAGE_EXTENT,
    STAGE_TURN,
    STAGING,
    Standing,
)
from kosmos_core.device.peers import peer_ptr
from kosmos_core.device.queue import queue_claim
from kosmos_core.device.sentinel import data_add, num_missing, poison, poll_sources
from kosmos_core.device.target import fence_async_proxy, matrix_view
from kosmos_core.device.tiles import ROW_MAJOR
from kosmos_core.device.trace import REDUCE, trace_begin, trace_end

from kosmos_tpsp.device.build import build_claim, build_tiles, store_output
from kosmos_tpsp.device.scatter import locate, multiply

POISON_STEPS = tl.constexpr(8)  # of REDUCE_ELEMENTS each, for a claim


class Stage(NamedTuple):
    """How one call uses the staging region.

    Attributes:
        turn: calls that have used it before.
        half: the half that this call fills, turn & 1.
        stale: elements of the other half that the call before has filled.
    """

    turn: tl.tensor
    half: tl.tensor
    stale: tl.tensor


@triton.jit
def stage_enter(ctx):
    """Which half is this call's, and what is to be poisoned in the other one."""
    turn = tl.load(ctx.control_ptr + STAGE_TURN)
    half = turn & 1
    runs = tl.load(ctx.control_ptr + STAGE_EXTENT + 1 - half)
    return Stage(turn, half, runs.to(tl.int64) * EXTENT_ELEMENTS)


@triton.jit
def stage_leave(ctx, stage, m, n):
    """Passes the turn on; done by the last workgroup to leave a call.

    By then the other half is poisoned, unless the call is aborted: only a reset helps then.
    """
    runs = m.to(tl.int64) * (n // EXTENT_ELEMENTS)
    tl.store(ctx.control_ptr + STAGE_EXTENT + stage.half, runs.to(tl.int32))
    tl.store(ctx.control_ptr + STAGE_TURN, stage.turn + 1)


@triton.jit
def poison_stale(ctx, call, standing, stage, CONFIG):
    """Poisons what the call before has filled, run by run, once all peers have left that call.

    Nothing is poisoned once the call is aborted.
    """
    RUN: tl.constexpr = POISON_STEPS * CONFIG.REDUCE_ELEMENTS
    base_ptr = peer_ptr(ctx, STAGING + 1 - stage.half, call.rank, tl.int16)
    runs = ((stage.stale + RUN - 1) // RUN).to(tl.int32)
    run = runs * 0
    while run < runs:
        run = queue_claim(call.set_ptr + POISON_QUEUE)
        if run < runs:
            standing = start_hold_all(ctx, call, standing, PHASE_REDUCE)
            first = run.to(tl.int64) * RUN
            if standing.ok != 0:
                elements = tl.minimum(stage.stale - first, RUN).to(tl.int32)
                poison(base_ptr + first, elements, CONFIG.REDUCE_ELEMENTS)
    return standing


@triton.jit
def hold_nothing(job, ctx, call, standing, state, tile, CONFIG):
    """A tile that stays at home waits for nobody. Returns (standing, state)."""
    return standing, state


@triton.jit
def stage_tile(job, ctx, call, standing, state, tile, acc, CONFIG):
    """Stores a complete partial tile in this call's half, where its owner polls for it.

    Once the call is aborted it ends outside its chunk: peers may still read what it would replace.
    Returns the state.
    """
    row = tl.where(standing.ok != 0, tile.row_block * CONFIG.BLOCK_M, job.grid.chunk_rows)
    store_output(job.views[0], tile.src_rank, row, tile, acc, CONFIG, ctx.TARGET, True)
    return state


@triton.jit
def staging_view(ctx, call, stage, grid, n, CONFIG):
    """The half that this call fills, a chunk an owner."""
    return matrix_view(
        peer_ptr(ctx, STAGING + stage.half, call.rank, tl.int16), ctx.WORLD, grid.chunk_rows, n,
        CONFIG.BLOCK_M, CONFIG.BLOCK_N // CONFIG.STORE_SPLITS, ctx.TARGET,
    )  # fmt: skip


@triton.jit
def build_and_stage(job, ctx, call, standing, CONFIG):
    """A builder: tiles in queue order until none is left, each stored in the staging region."""
    standing, _ = build_tiles(
        job, ctx, call, standing, job.tiles * 0, job.tiles, job.builders, job.split_tiles, CONFIG,
        locate, hold_nothing, multiply, stage_tile,
    )  # fmt: skip
    return standing


@triton.jit
def unit_place(unit, grid, n, ROWS: tl.constexpr, COLS: tl.constexpr, CONFIG):
    """(first row, first column) of a unit of the own chunk.

    Units are numbered as their tiles are built: band by band (row block by row block if
    row_major), and in each column by column.
    """
    BAND: tl.constexpr = (
        CONFIG.BLOCK_M if CONFIG.ORDER == ROW_MAJOR else CONFIG.BAND_ROWS * CONFIG.TILE_ROW_ROWS
    )
    SLICES: tl.constexpr = BAND // ROWS
    band_units = SLICES * tl.cdiv(n, COLS)
    first = unit // band_units * SLICES
    slices = tl.minimum(tl.cdiv(grid.chunk_rows, ROWS) - first, SLICES)
    within = unit % band_units
    return (first + within % slices) * ROWS, within // slices * COLS


@triton.jit
def unit_elements(grid, n, row, col, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Offsets of a unit's elements from its first one, and which of them are in the own chunk."""
    rows = tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)
    inside = (row + rows < grid.chunk_rows)[:, None] & (col + cols < n)[None, :]
    return rows[:, None] * n + cols[None, :], inside


@triton.jit
def pull_unit(
    ctx, call, standing, stage, grid, n, row, col, unit, ROWS: tl.constexpr, COLS: tl.constexpr,
    CONFIG,
):  # fmt: skip
    """Polls a unit at all ranks and adds up what they have, rank 0 first.

    Returns (standing, sum), where the sum is NaN once the call is aborted.
    """
    # [ROWS, COLS] fp32
    total = tl.zeros([ROWS, COLS], tl.float32)
    offsets, inside = unit_elements(grid, n, row, col, ROWS, COLS)
    origin = (call.rank.to(tl.int64) * grid.chunk_rows + row) * n + col
    for first in range(0, ctx.WORLD, CONFIG.SOURCE_UNROLL):
        for step in tl.static_range(0, CONFIG.SOURCE_UNROLL):
            source = tl.minimum(first + step, ctx.WORLD - 1)
            standing = start_hold(ctx, call, standing, source, PHASE_REDUCE)
        if standing.ok != 0:
            total, ok = data_add(
                ctx, call, STAGING + stage.half, first, origin, offsets, inside, total, unit,
                PHASE_REDUCE, CONFIG.SOURCE_UNROLL,
            )  # fmt: skip
            standing = Standing(standing.held, ok)
    return standing, tl.where(standing.ok != 0, total, float("nan"))


@triton.jit
def num_late(ctx, call, standing, stage, grid, n, row, col, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Elements of a unit that the first rank to lack some lacks, as of one look.

    A rank that has not started this call lacks all. Returns (standing, number).
    """
    offsets, inside = unit_elements(grid, n, row, col, ROWS, COLS)
    origin = (call.rank.to(tl.int64) * grid.chunk_rows + row) * n + col
    late = row * 0
    for source in range(ctx.WORLD):
        if (late == 0) & (standing.ok != 0):
            if (source == call.rank) | (start_word_of(call, source) == call.start_word):
                standing = start_hold(ctx, call, standing, source, PHASE_REDUCE)
                if standing.ok != 0:
                    bits = poll_sources(
                        ctx, STAGING + stage.half, source, origin, offsets, inside, 1
                    )
                    late = num_missing(bits)
            else:
                late += ROWS * COLS
    return standing, late


@triton.jit
def stage_meanwhile(
    job, ctx, call, standing, stage, n, row, col, ROWS: tl.constexpr, COLS: tl.constexpr, CONFIG
):
    """Two-way: builds tiles while a unit is missing and whole tiles are left."""
    standing, late = num_late(ctx, call, standing, stage, job.grid, n, row, col, ROWS, COLS)
    more = job.tiles > 0
    while more & (late > 0):
        fence_async_proxy(ctx.TARGET)
        standing, _, more = build_claim(
            job, ctx, call, standing, job.tiles * 0, job.tiles, job.builders, job.split_tiles,
            CONFIG, locate, hold_nothing, multiply, stage_tile,
        )  # fmt: skip
        standing, late = num_late(ctx, call, standing, stage, job.grid, n, row, col, ROWS, COLS)
    return standing


@triton.jit
def pull_units(ops, ctx, call, standing, stage, grid, n, CONFIG, job=None):
    """A mover: units of the own chunk in queue order until none is left.

    job: tiles that it builds while a unit is missing, with two-way roles.
    """
    ROWS: tl.constexpr = CONFIG.TILE_ROW_ROWS // CONFIG.SLICES
    COLS: tl.constexpr = CONFIG.REDUCE_ELEMENTS // ROWS
    units = tl.cdiv(grid.chunk_rows, ROWS) * tl.cdiv(n, COLS)
    # One claim only stands in the source: triton 3.6 on AMD merges two into an irreducible loop.
    unit = units * 0
    while unit < units:
        unit = queue_claim(call.set_ptr + REDUCE_QUEUE)
        if unit < units:
            row, col = unit_place(unit, grid, n, ROWS, COLS, CONFIG)
            if job is not None:
                standing = stage_meanwhile(
                    job, ctx, call, standing, stage, n, row, col, ROWS, COLS, CONFIG
                )
            begin = trace_begin(ctx)
            standing, total = pull_unit(
                ctx, call, standing, stage, grid, n, row, col, unit, ROWS, COLS, CONFIG
            )
            offsets, inside = unit_elements(grid, n, row, col, ROWS, COLS)
            to_ptr = ops.out_ptr + row.to(tl.int64) * n + col
            tl.store(to_ptr + offsets, total.to(tl.bfloat16), mask=inside)
            trace_end(ctx, REDUCE, unit, begin)
    return standing
