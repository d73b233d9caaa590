"""A GEMM of local operands beside an all-gather: neither waits for the other.

=============== =================== ==================== ====== ============= ======================
word            writer              reader               scope  order         guards
=============== =================== ==================== ====== ============= ======================
start word      the peer, exchange  builders, before     sys    barrier +     that the peer has left
                                    their first tile of         release;      the call in which it
                                    a handed-over               acquire       read the product of an
                                    product                                   earlier one
=============== =================== ==================== ====== ============= ======================

A handed-over product lies in this rank's symmetric memory and is read by peers, each in a later
call under this rank's start word of that call. One copy is enough: a peer that is in this call has
left all earlier ones.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from kosmos_core.device.barrier import start_hold_all
from kosmos_core.device.layout import PHASE_BUILD, UNIT_QUEUE
from kosmos_core.device.queue import queue_claim
from kosmos_core.device.roles import TWO_WAY, is_mover_first
from kosmos_core.device.target import fence_async_proxy, matrix_view
from kosmos_core.device.tiles import Grid, Tile, swept_tile

from kosmos_tpsp.device.build import build_tiles, store_output, tile_sum, view_weights
from kosmos_tpsp.device.config import BUILD_ONLY, UNPACKED, BulkAgOperands
from kosmos_tpsp.device.gather import keep_rows, move, move_unit, num_units
from kosmos_tpsp.device.unpack import unpack_own


class BesideJob(NamedTuple):
    """What the builders of one call work on.

    Attributes:
        ops: the matrices.
        grid: the output tiles, all rows as one chunk.
        rows: the chunk that is gathered beside it.
        n: columns of both.
        k: contraction.
        num_movers: workgroups that move first.
        own: view of the left operand.
        weights: view of the weights.
        out: view of the product.
    """

    ops: BulkAgOperands
    grid: Grid
    rows: Grid
    n: tl.tensor
    k: tl.tensor
    num_movers: tl.tensor
    own: tl.tensor
    weights: tl.tensor
    out: tl.tensor


@triton.jit
def locate(job, ctx, call, index, CONFIG):
    """Tile `index` of the queue."""
    blocks = tl.cdiv(job.grid.chunk_rows, CONFIG.BLOCK_M)
    row_block, column = swept_tile(index, blocks, job.grid.columns, CONFIG.GROUP_M)
    return Tile(index * 0, row_block, column, index * 0)


@triton.jit
def alternate(job, ctx, call, standing, left, tile, CONFIG):
    """With two-way roles, a mover moves a unit before each tile until none is left.

    Returns (standing, left), where left is 0 once none is.
    """
    if CONFIG.POLICY == TWO_WAY and CONFIG.PHASE != BUILD_ONLY:
        if is_mover_first(call, job.num_movers) & (left != 0):
            unit = queue_claim(call.set_ptr + UNIT_QUEUE)
            if unit < num_units(ctx, job.rows, CONFIG):
                standing, unit = move_unit(
                    job.ops, ctx, call, standing, job.rows, job.n, unit, CONFIG, False
                )
                # A start was acquired, perhaps.
                fence_async_proxy(ctx.TARGET)
            else:
                left = left * 0
    return standing, left


@triton.jit
def multiply(job, ctx, call, standing, tile, k_begin, k_end, CONFIG):
    """The fp32 tile over part of the contraction."""
    return tile_sum(
        job.own, job.weights, tile.src_rank, standing, tile, k_begin, k_end, CONFIG, ctx.TARGET
    )


@triton.jit
def store(job, ctx, call, standing, left, tile, acc, CONFIG):
    """Stores a complete tile; returns the state as it was.

    Once the call is aborted nothing is handed over: a peer may still be reading what was.
    """
    row = tile.row_block * CONFIG.BLOCK_M
    if CONFIG.HANDOVER:
        # A store past the end is none. In a branch it would not overlap the next tile.
        row = tl.where(standing.ok != 0, row, job.grid.chunk_rows)
    store_output(job.out, tile.src_rank, row, tile, acc, CONFIG, ctx.TARGET)
    return left


@triton.jit
def build_beside(ops, ctx, call, standing, grid, rows, n, k, num_movers, split_tiles, CONFIG):
    """A builder: tiles of a local GEMM in queue order until none is left."""
    T: tl.constexpr = ctx.TARGET
    if CONFIG.HANDOVER and ctx.WORLD > 1:
        # Nobody reads what earlier calls have handed over any more.
        standing = start_hold_all(ctx, call, standing, PHASE_BUILD)
        fence_async_proxy(ctx.TARGET)
    own = matrix_view(ops.dy_ptr, 1, grid.chunk_rows, k, CONFIG.BLOCK_M, CONFIG.BLOCK_K, T)
    weights = view_weights(ops.w_ptr, n, k, CONFIG, T)
    out = matrix_view(
        ops.out_ptr, 1, grid.chunk_rows, n, CONFIG.BLOCK_M, CONFIG.BLOCK_N // CONFIG.STORE_SPLITS, T
    )
    tiles = tl.cdiv(grid.chunk_rows, CONFIG.BLOCK_M) * grid.columns
    builders = tl.maximum(tl.num_programs(0) - num_movers, 1)
    job = BesideJob(ops, grid, rows, n, k, num_movers, own, weights, out)
    standing, _ = build_tiles(
        job, ctx, call, standing, tiles * 0 + 1, tiles, builders, split_tiles, CONFIG,
        locate, alternate, multiply, store,
    )  # fmt: skip
    return standing


@triton.jit
def gather_beside(ops, ctx, call, standing, rows, n, CONFIG):
    """A mover: units until none is left, then its share of what completes the gather output.

    Where rows are dequantised that is the own chunk: the others are in the output already.
    """
    standing = move(ops, ctx, call, standing, rows, n, CONFIG)
    if CONFIG.FORMAT == UNPACKED:
        unpack_own(ops, ctx, call, standing, rows, n, CONFIG)
    else:
        standing = keep_rows(ops, ctx, call, standing, rows, n, CONFIG)
    return standing
