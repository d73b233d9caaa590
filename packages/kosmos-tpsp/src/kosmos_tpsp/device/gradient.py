"""A weight gradient beside a reduction of what the same backward has of the input gradient.

The builders multiply two complete matrices, and the movers add up complete ones: neither waits for
the other. Pulled, the movers read the rows where each rank has them; pushed, they first send every
peer the rows that it owns, and the owner adds up what has arrived. With two-way roles a mover does
so one unit at a time, before each tile that it builds.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from kosmos_core.device.barrier import start_hold_all
from kosmos_core.device.gemm import add_accumulator
from kosmos_core.device.layout import HANDOVER, PHASE_REDUCE, REDUCE_QUEUE, TILE_QUEUE, UNIT_QUEUE
from kosmos_core.device.peers import peer_ptr
from kosmos_core.device.queue import queue_claim
from kosmos_core.device.roles import TWO_WAY, is_mover_first
from kosmos_core.device.target import fence_async_proxy, matrix_view
from kosmos_core.device.tiles import Grid

from kosmos_tpsp.device.beside import locate
from kosmos_tpsp.device.build import build_tiles, store_output, tile_sum
from kosmos_tpsp.device.config import BUILD_ONLY, PUSH, GradientOperands
from kosmos_tpsp.device.gather import move, move_unit, num_units
from kosmos_tpsp.device.scatter import add_unit, add_up, await_sources, num_late


class GradientJob(NamedTuple):
    """What the builders of one call work on.

    Attributes:
        ops: the matrices.
        grid: the output tiles, all rows in one chunk.
        rows: the own rows of what is reduced beside it.
        n: columns of both.
        k: contraction, the tokens.
        num_movers: workgroups that move first.
        left: view of the left factor.
        right: view of the right factor.
        gradient: view of the weight gradient.
    """

    ops: GradientOperands
    grid: Grid
    rows: Grid
    n: tl.tensor
    k: tl.tensor
    num_movers: tl.tensor
    left: tl.tensor
    right: tl.tensor
    gradient: tl.tensor


@triton.jit
def multiply(job, ctx, call, standing, tile, k_begin, k_end, CONFIG):
    """The fp32 tile over part of the tokens."""
    return tile_sum(
        job.left, job.right, 0, standing, tile, k_begin, k_end, CONFIG, ctx.TARGET, CONFIG.EVEN_M
    )


@triton.jit
def store(job, ctx, call, standing, place, tile, acc, CONFIG):
    """Rounds a complete tile and stores it, or adds it to what the parameter has gathered."""
    if CONFIG.MAIN_GRAD:
        add_accumulator(
            job.gradient, 0, tile.row_block * CONFIG.BLOCK_M, tile.column * CONFIG.BLOCK_N, acc,
            CONFIG.BLOCK_M, CONFIG.BLOCK_N, CONFIG.STORE_SPLITS, ctx.TARGET,
        )  # fmt: skip
    else:
        row = tile.row_block * CONFIG.BLOCK_M
        store_output(job.gradient, 0, row, tile, acc, CONFIG, ctx.TARGET)
    return place


@triton.jit
def build_gradient(ops, ctx, call, standing, rows, m, n, k, num_movers, split_tiles, CONFIG):
    """A builder: tiles of the weight gradient in queue order until none is left.

    Returns (standing, place): with two-way roles `place` is a unit that this workgroup has claimed
    and not added up yet; -1 if it has none.
    """
    return build_product(
        ops, ctx, call, standing, -1, rows, m, n, k, num_movers, split_tiles, CONFIG, alternate,
        TILE_QUEUE,
    )  # fmt: skip


@triton.jit
def build_product(
    ops,
    ctx,
    call,
    standing,
    state,
    rows,
    m,
    n,
    k,
    num_movers,
    split_tiles,
    CONFIG,
    BEFORE: tl.constexpr,
    QUEUE: tl.constexpr,
):
    """As `build_gradient`, of tiles in any queue that wait for something.

    state, BEFORE, QUEUE: as `build_tiles` has them. Returns (standing, state).
    """
    T: tl.constexpr = ctx.TARGET
    grid = Grid(m, tl.cdiv(m, CONFIG.BLOCK_M), tl.cdiv(n, CONFIG.BLOCK_N))
    left = matrix_view(ops.left_ptr, 1, k, m, CONFIG.BLOCK_K, CONFIG.BLOCK_M, T)
    right = matrix_view(ops.right_ptr, 1, k, n, CONFIG.BLOCK_K, CONFIG.BLOCK_N, T)
    gradient = matrix_view(
        ops.gradient_ptr, 1, m, n, CONFIG.BLOCK_M, CONFIG.BLOCK_N // CONFIG.STORE_SPLITS, T
    )
    tiles = grid.tile_rows * grid.columns
    builders = tl.maximum(tl.num_programs(0) - num_movers, 1)
    job = GradientJob(ops, grid, rows, n, k, num_movers, left, right, gradient)
    return build_tiles(
        job, ctx, call, standing, tiles * 0 + state, tiles, builders, split_tiles, CONFIG,
        locate, BEFORE, multiply, store, QUEUE,
    )  # fmt: skip


@triton.jit
def hold_all(ctx, call, standing, grid, tile_row, CONFIG):
    """Pull: what a peer has is complete, and stays so, once its start of this call is held."""
    return start_hold_all(ctx, call, standing, PHASE_REDUCE)


@triton.jit
def await_sent(ctx, call, standing, grid, tile_row, CONFIG):
    """Push: waits until every peer has sent all slices of a tile row."""
    return await_sources(ctx, call, standing, tile_row, CONFIG.SLICES, 1)


@triton.jit
def handed_over(ops, ctx, call, chunk, CONFIG):
    """Pull: the own chunk in the handover region of every rank."""
    chunks = (peer_ptr(ctx, HANDOVER, call.rank * 0, tl.bfloat16) + call.rank * chunk,)
    for source in tl.static_range(1, ctx.WORLD):
        region_ptr = peer_ptr(ctx, HANDOVER, call.rank * 0 + source, tl.bfloat16)
        chunks = chunks + (region_ptr + call.rank * chunk,)
    return chunks


@triton.jit
def own_or_landed(ops, ctx, call, chunk, CONFIG):
    """Push: the own chunk where it lies here, and in the slots where the peers have put theirs.

    Alone it is all there is.
    """
    chunks = ()
    for source in tl.static_range(0, ctx.WORLD):
        source_ptr = ops.landing_ptr + source * chunk
        if call.rank == source:
            source_ptr = ops.x_ptr + source * chunk
        chunks = chunks + (source_ptr,)
    return chunks


@triton.jit
def reduce_chunk(ops, ctx, call, standing, grid, n, CONFIG, place):
    """A mover: brings what all ranks have of the own rows together and adds it up.

    place: as `add_up` has it.
    """
    if CONFIG.TRANSPORT == PUSH or ctx.WORLD == 1:
        if ctx.WORLD > 1:
            standing = move(ops, ctx, call, standing, grid, n, CONFIG)
        standing = add_up(
            ops, ctx, call, standing, grid, n, CONFIG, await_sent, own_or_landed, place=place
        )
    else:
        standing = add_up(
            ops, ctx, call, standing, grid, n, CONFIG, hold_all, handed_over, place=place
        )
    fence_async_proxy(ctx.TARGET)
    return standing


@triton.jit
def send_next(ops, ctx, call, standing, grid, n, CONFIG):
    """Push: sends the next slice to the rank that owns it.

    Returns (standing, whether there was one).
    """
    sent = grid.tile_rows < 0
    if CONFIG.TRANSPORT == PUSH:
        unit = queue_claim(call.set_ptr + UNIT_QUEUE)
        sent = unit < num_units(ctx, grid, CONFIG)
        if sent:
            standing, unit = move_unit(ops, ctx, call, standing, grid, n, unit, CONFIG, False)
    return standing, sent


@triton.jit
def add_if_here(ops, ctx, call, standing, grid, n, place, CONFIG):
    """Two-way: adds up a unit that this workgroup has claimed, unless some of it is missing.

    Returns (standing, the next unit, or the same one).
    """
    tile_row = place // CONFIG.SLICES
    if CONFIG.TRANSPORT == PUSH:
        here = num_late(ctx, call, tile_row, CONFIG.SLICES, 1) == 0
        chunks = own_or_landed(ops, ctx, call, grid.chunk_rows.to(tl.int64) * n, CONFIG)
    else:
        standing = hold_all(ctx, call, standing, grid, tile_row, CONFIG)
        here = place >= 0
        chunks = handed_over(ops, ctx, call, grid.chunk_rows.to(tl.int64) * n, CONFIG)
    if here:
        add_unit(ops, ctx, standing, grid, n, chunks, place, CONFIG)
        place = queue_claim(call.set_ptr + REDUCE_QUEUE)
    return standing, place


@triton.jit
def alternate(job, ctx, call, standing, place, tile, CONFIG):
    """With two-way roles, a mover moves a unit before each tile until none is left.

    It sends one while there are any, then adds up those of the own rows that have arrived: what is
    missing keeps it from nothing as long as there are tiles.

    place: the unit that it adds up next; -1 while it sends, past the last one once none is left.
    Returns (standing, place).
    """
    if CONFIG.POLICY == TWO_WAY and CONFIG.PHASE != BUILD_ONLY:
        if is_mover_first(call, job.num_movers):
            if place < 0:
                standing, sent = send_next(job.ops, ctx, call, standing, job.rows, job.n, CONFIG)
                if not sent:
                    place = queue_claim(call.set_ptr + REDUCE_QUEUE)
            elif place < job.rows.tile_rows * CONFIG.SLICES:
                standing, place = add_if_here(
                    job.ops, ctx, call, standing, job.rows, job.n, place, CONFIG
                )
            # A start was acquired, perhaps, or arrivals.
            fence_async_proxy(ctx.TARGET)
    return standing, place
