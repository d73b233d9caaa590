"""The builders of an all-gathered GEMM: each tile waits for the rows that it multiplies."""

from typing import NamedTuple

import triton
import triton.language as tl
from kosmos_core.device.target import matrix_view
from kosmos_core.device.tiles import Grid, gathered_tile, num_gathered_tiles

from kosmos_tpsp.device.build import build_tiles, store_output, tile_sum, view_weights
from kosmos_tpsp.device.config import BUILD_ONLY, SCALED, UNPACKED, Operands
from kosmos_tpsp.device.gather import await_rows
from kosmos_tpsp.device.scaled import ScaledView, scaled_sum


class GatheredJob(NamedTuple):
    """What the builders of one call work on.

    Attributes:
        ops: the matrices.
        grid: the output tiles.
        k: contraction.
        own: view of the own chunk of the input.
        gathered: view of all gathered chunks.
        weights: view of the weights.
        out: view of the output, a chunk a rank.
    """

    ops: Operands
    grid: Grid
    k: tl.tensor
    own: tl.tensor
    gathered: tl.tensor
    weights: tl.tensor
    out: tl.tensor


@triton.jit
def locate(job, ctx, call, index, CONFIG):
    """Tile `index` of the queue."""
    return gathered_tile(
        index, job.grid, call.rank, CONFIG.ORDER, ctx.WORLD, CONFIG.TILE_ROW_ROWS, CONFIG.BLOCK_M,
        CONFIG.GROUP_M, CONFIG.GROUP_ROWS,
    )  # fmt: skip


@triton.jit
def await_tile(job, ctx, call, standing, ready, tile, CONFIG):
    """Waits for a tile's rows unless they are this rank's own or those of `ready`.

    Own rows that are dequantised first are waited for like others.

    Returns (standing, ready), where ready is the last tile row waited for: neighbours in the queue
    share a tile row, which is waited for once.
    """
    arrival = tile.src_rank * ctx.MAX_ROWS + tile.tile_row
    DEQUANTISES: tl.constexpr = CONFIG.FORMAT == UNPACKED
    if CONFIG.PHASE != BUILD_ONLY and (ctx.WORLD > 1 or DEQUANTISES):
        if ((tile.src_rank != call.rank) | DEQUANTISES) & (arrival != ready):
            standing = await_rows(
                job.ops, ctx, call, standing, job.grid, job.k, tile.src_rank, tile.tile_row, CONFIG
            )
            ready = arrival
    return standing, ready


@triton.jit
def multiply(job, ctx, call, standing, tile, k_begin, k_end, CONFIG):
    """The fp32 tile over part of the contraction, of own or of gathered rows."""
    # One K loop serves both sources: two in a branch would each claim their own shared memory.
    a_view = job.gathered
    chunk = tile.src_rank
    if CONFIG.FORMAT != UNPACKED:
        if tile.src_rank == call.rank:
            a_view = job.own
            chunk = tile.src_rank * 0
    if CONFIG.FORMAT == SCALED:
        return scaled_sum(a_view, job.weights, chunk, standing, tile, k_begin, k_end, CONFIG)
    else:
        return tile_sum(
            a_view, job.weights, chunk, standing, tile, k_begin, k_end, CONFIG, ctx.TARGET
        )


@triton.jit
def store(job, ctx, call, standing, ready, tile, acc, CONFIG):
    """Stores a complete tile in the rows of the rank that its input came from; returns ready."""
    row = tile.row_block * CONFIG.BLOCK_M
    store_output(job.out, tile.src_rank, row, tile, acc, CONFIG, ctx.TARGET)
    return ready


@triton.jit
def view_operands(ops, ctx, grid, n, k, CONFIG):
    """(own rows, gathered rows, weights); what is dequantised is read from the gathered rows."""
    T: tl.constexpr = ctx.TARGET
    rows = grid.chunk_rows
    if CONFIG.FORMAT == SCALED:
        scale_ptr = ops.gathered_ptr + rows.to(tl.int64) * k * ctx.WORLD
        return (
            ScaledView(ops.x_ptr, ops.x_scale_ptr, rows, k),
            ScaledView(ops.gathered_ptr, scale_ptr, rows, k),
            ScaledView(ops.w_ptr, ops.w_scale_ptr, n, k),
        )
    else:
        gathered = matrix_view(
            ops.gathered_ptr, ctx.WORLD, rows, k, CONFIG.BLOCK_M, CONFIG.BLOCK_K, T
        )
        own = gathered
        if CONFIG.FORMAT != UNPACKED:
            own = matrix_view(ops.x_ptr, 1, rows, k, CONFIG.BLOCK_M, CONFIG.BLOCK_K, T)
        return own, gathered, view_weights(ops.w_ptr, n, k, CONFIG, T)


@triton.jit
def build(ops, ctx, call, standing, grid, n, k, builders, split_tiles, CONFIG):
    """A builder: tiles in queue order until none is left."""
    T: tl.constexpr = ctx.TARGET
    own, gathered, weights = view_operands(ops, ctx, grid, n, k, CONFIG)
    out = matrix_view(
        ops.out_ptr, ctx.WORLD, grid.chunk_rows, n, CONFIG.BLOCK_M,
        CONFIG.BLOCK_N // CONFIG.STORE_SPLITS, T,
    )  # fmt: skip
    tiles = num_gathered_tiles(grid, CONFIG.ORDER, ctx.WORLD, CONFIG.TILE_ROW_ROWS, CONFIG.BLOCK_M)
    job = GatheredJob(ops, grid, k, own, gathered, weights, out)
    standing, _ = build_tiles(
        job, ctx, call, standing, tiles * 0 - 1, tiles, builders, split_tiles, CONFIG,
        locate, await_tile, multiply, store,
    )  # fmt: skip
    return standing
