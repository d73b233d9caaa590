"""All-gather beside a GEMM that does not need it.

Gathers X [m, n] from every rank's chunk while it multiplies dY [m, k] by W [k, n]: the backward of
a column-parallel layer, whose weight gradient needs X afterwards.

Source: paper, section 3.2.3. Protocol table: docs/protocols.md.
"""

import triton
import triton.language as tl
from kosmos_core.device.barrier import call_enter, call_leave
from kosmos_core.device.roles import FIXED, TWO_WAY, is_builder_last, is_mover_first
from kosmos_core.device.tiles import Grid
from kosmos_core.device.trace import CALL, trace_begin, trace_end

from kosmos_tpsp.device.beside import build_beside, gather_beside
from kosmos_tpsp.device.config import BUILD_ONLY, FUSED, GATHER_ONLY
from kosmos_tpsp.device.gather import open_gather

ROW_SHIFT = tl.constexpr(3)  # 8 bf16 elements are 16 bytes


@triton.jit(do_not_specialize=["m", "num_movers", "split_tiles", "call_hash"])
def bulk_ag_kernel(ops, ctx, m, n, k, num_movers, split_tiles, call_hash, CONFIG):
    """One launch of `bulk_ag`; a workgroup takes these steps in order.

    1. Enter: arrival ticket, epoch, abort word.
    2. Pull: help to copy the own chunk into symmetric memory; whoever completes it publishes the
       start word. Push: ticket 0 publishes it at once.
    3. Movers, the first to arrive, transport units and complete the gather output. (Two-way: they
       build at once, and move a unit before each tile.)
    4. Builders, and movers once nothing is left to move, build tiles of dY W.
    5. Builders move what is left of the gather.
    6. Leave: the last one holds every peer's start and moves the epoch on.
    """
    # As in `ag_gemm`: rows are multiples of 16 bytes, and the compiler is to know it.
    n = (n >> ROW_SHIFT) << ROW_SHIFT
    k = (k >> ROW_SHIFT) << ROW_SHIFT
    call, standing = call_enter(ctx, call_hash)
    begin = trace_begin(ctx)
    chunk_rows = m // ctx.WORLD
    columns = tl.cdiv(n, CONFIG.BLOCK_N)
    rows = Grid(chunk_rows, tl.cdiv(chunk_rows, CONFIG.TILE_ROW_ROWS), columns)
    grid = Grid(m, tl.cdiv(m, CONFIG.TILE_ROW_ROWS), columns)
    open_gather(ops, ctx, call, standing, rows, n, CONFIG)
    moves = is_mover_first(call, num_movers)
    if CONFIG.PHASE != BUILD_ONLY and CONFIG.POLICY != TWO_WAY:
        if moves:
            standing = gather_beside(ops, ctx, call, standing, rows, n, CONFIG)
    if CONFIG.PHASE != GATHER_ONLY:
        if is_builder_last(call, num_movers, CONFIG.POLICY):
            standing = build_beside(
                ops, ctx, call, standing, grid, rows, n, k, num_movers, split_tiles, CONFIG
            )
    # With fixed roles those that build do not move; without peers nobody has moved yet.
    if CONFIG.PHASE == FUSED and (CONFIG.POLICY != FIXED or ctx.WORLD == 1):
        standing = gather_beside(ops, ctx, call, standing, rows, n, CONFIG)
    trace_end(ctx, CALL, call.ticket, begin)
    call_leave(ctx, call, standing)
