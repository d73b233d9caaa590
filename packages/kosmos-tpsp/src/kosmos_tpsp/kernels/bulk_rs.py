"""Reduce-scatter of an input gradient beside the weight gradient of the same layer.

Sums dX [k, n] over ranks into [k / world, n] at the rank that owns the rows, and multiplies dY
[k, m] transposed by X [k, n] meanwhile. The tokens are k.

Source: paper, section 3.2.3. Protocol table: docs/protocols.md.
"""

import triton
import triton.language as tl
from kosmos_core.device.barrier import call_clean, call_enter, call_leave, start_publish
from kosmos_core.device.layout import JOIN_QUEUE
from kosmos_core.device.queue import queue_claim
from kosmos_core.device.roles import FIXED, TWO_WAY, is_builder_last, is_mover_first
from kosmos_core.device.tiles import Grid
from kosmos_core.device.trace import CALL, trace_begin, trace_end

from kosmos_tpsp.device.config import BUILD_ONLY, FUSED, REDUCE_ONLY
from kosmos_tpsp.device.gradient import build_gradient, reduce_chunk

ROW_SHIFT = tl.constexpr(3)  # 8 bf16 elements are 16 bytes


@triton.jit(do_not_specialize=["k", "num_movers", "max_movers", "split_tiles", "call_hash"])
def bulk_rs_kernel(ops, ctx, m, n, k, num_movers, max_movers, split_tiles, call_hash, CONFIG):
    """One launch of `bulk_rs`; a workgroup takes these steps in order.

    1. Enter: arrival ticket, epoch, abort word; ticket 0 publishes the start word, since the input
       is complete.
    2. Movers, the first to arrive, add up the own rows of all ranks.
    3. Builders, and movers once no rows are left, build tiles of the weight gradient. With two-way
       roles movers build at once, and move something before each tile.
    4. Movers that have rows left, and builders, up to `max_movers`, add up what is left.
    5. Leave: the last one holds every peer's start and moves the epoch on.
    """
    # As in `ag_gemm`: rows are multiples of 16 bytes, and the compiler is to know it.
    m = (m >> ROW_SHIFT) << ROW_SHIFT
    n = (n >> ROW_SHIFT) << ROW_SHIFT
    call, standing = call_enter(ctx, call_hash)
    begin = trace_begin(ctx)
    chunk_rows = k // ctx.WORLD
    rows = Grid(chunk_rows, tl.cdiv(chunk_rows, CONFIG.TILE_ROW_ROWS), tl.cdiv(n, CONFIG.BLOCK_N))
    if call.ticket == 0:
        if standing.ok != 0:
            start_publish(ctx, call)
        call_clean(ctx, call, standing)
    first = is_mover_first(call, num_movers)
    place = call.ticket * 0 - 1
    if CONFIG.PHASE != BUILD_ONLY and CONFIG.POLICY != TWO_WAY:
        if first:
            standing = reduce_chunk(ops, ctx, call, standing, rows, n, CONFIG, place)
    if CONFIG.PHASE != REDUCE_ONLY:
        if is_builder_last(call, num_movers, CONFIG.POLICY):
            standing, place = build_gradient(
                ops, ctx, call, standing, rows, m, n, k, num_movers, split_tiles, CONFIG
            )
    if CONFIG.PHASE == FUSED and CONFIG.POLICY != FIXED:
        joins = first & (CONFIG.POLICY == TWO_WAY)
        if not first:
            # What moves beyond saturation only takes bandwidth from what moves already.
            joins = queue_claim(call.set_ptr + JOIN_QUEUE) < max_movers - num_movers
        if joins:
            standing = reduce_chunk(ops, ctx, call, standing, rows, n, CONFIG, place)
    trace_end(ctx, CALL, call.ticket, begin)
    call_leave(ctx, call, standing)
