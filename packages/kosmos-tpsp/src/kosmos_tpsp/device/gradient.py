"""A weight gradient beside a reduction of what the same backward has of the input gradient.

The builders multiply two complete matrices, and the movers add up complete ones: neither waits for
the other. Pulled, the movers read the rows where each rank has them; pushed, they first send every
peer the rows that it owns, and the owner adds up what has arrived.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from kosmos_core.device.barrier import start_hold_all
from kosmos_core.device.gemm import add_accumulator
from kosmos_core.device.layout import HANDOVER, PHASE_REDUCE
from kosmos_core.device.peers import peer_ptr
from kosmos_core.device.target import fence_async_proxy, matrix_view
from kosmos_core.device.tiles import Grid

from kosmos_tpsp.device.beside import locate
from kosmos_tpsp.device.build import build_tiles, store_output, tile_sum
from kosmos_tpsp.device.config import PUSH, GradientOperands
from kosmos_tpsp.device.gather import move
from kosmos_tpsp.device.scatter import add_up, await_sources


class GradientJob(NamedTuple):
    """What the builders of one call work on.

    Attributes:
        ops: the matrices.
        grid: the output tiles, all rows in one chunk.
        k: contraction, the tokens.
        left: view of the left factor.
        right: view of the right factor.
        gradient: view of the weight gradient.
    """

    ops: GradientOperands
    grid: Grid
    k: tl.tensor
    left: tl.tensor
    right: tl.tensor
    gradient: tl.tensor


@triton.jit
def await_nothing(job, ctx, call, standing, state, tile, CONFIG):
    """Both factors are complete before the call."""
    return standing, state


@triton.jit
def multiply(job, ctx, call, standing, tile, k_begin, k_end, CONFIG):
    """The fp32 tile over part of the tokens."""
    return tile_sum(
        job.left, job.right, 0, standing, tile, k_begin, k_end, CONFIG, ctx.TARGET, CONFIG.EVEN_M
    )


@triton.jit
def store(job, ctx, call, standing, state, tile, acc, CONFIG):
    """Rounds a complete tile and stores it, or adds it to what the parameter has gathered."""
    if CONFIG.MAIN_GRAD:
        add_accumulator(
            job.gradient, tile.row_block * CONFIG.BLOCK_M, tile.column * CONFIG.BLOCK_N, acc,
            CONFIG.BLOCK_M, CONFIG.BLOCK_N, CONFIG.STORE_SPLITS, ctx.TARGET,
        )  # fmt: skip
    else:
        row = tile.row_block * CONFIG.BLOCK_M
        store_output(job.gradient, 0, row, tile, acc, CONFIG, ctx.TARGET)
    return state


@triton.jit
def build_gradient(ops, ctx, call, standing, m, n, k, builders, split_tiles, CONFIG):
    """A builder: tiles of the weight gradient in queue order until none is left."""
    T: tl.constexpr = ctx.TARGET
    grid = Grid(m, tl.cdiv(m, CONFIG.BLOCK_M), tl.cdiv(n, CONFIG.BLOCK_N))
    left = matrix_view(ops.left_ptr, 1, k, m, CONFIG.BLOCK_K, CONFIG.BLOCK_M, T)
    right = matrix_view(ops.right_ptr, 1, k, n, CONFIG.BLOCK_K, CONFIG.BLOCK_N, T)
    gradient = matrix_view(
        ops.gradient_ptr, 1, m, n, CONFIG.BLOCK_M, CONFIG.BLOCK_N // CONFIG.STORE_SPLITS, T
    )
    tiles = grid.tile_rows * grid.columns
    job = GradientJob(ops, grid, k, left, right, gradient)
    standing, _ = build_tiles(
        job, ctx, call, standing, tiles, tiles, builders, split_tiles, CONFIG,
        locate, await_nothing, multiply, store,
    )  # fmt: skip
    return standing


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
def reduce_chunk(ops, ctx, call, standing, grid, n, CONFIG):
    """A mover: brings what all ranks have of the own rows together and adds it up."""
    if CONFIG.TRANSPORT == PUSH or ctx.WORLD == 1:
        if ctx.WORLD > 1:
            standing = move(ops, ctx, call, standing, grid, n, CONFIG)
        standing = add_up(ops, ctx, call, standing, grid, n, CONFIG, await_sent, own_or_landed)
    else:
        standing = add_up(ops, ctx, call, standing, grid, n, CONFIG, hold_all, handed_over)
    fence_async_proxy(ctx.TARGET)
    return standing
