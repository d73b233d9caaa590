"""GEMM fused with reduce-scatter.

Multiplies this rank's part of the contraction, X [m, k] times W, and sums the products of all ranks
into [m / world, n] at the rank that owns the rows.

Source: paper, section 3.2.2. Protocol table: docs/protocols.md.
"""

import triton
import triton.language as tl
from kosmos_core.device.barrier import call_clean, call_enter, call_leave, start_publish
from kosmos_core.device.layout import JOIN_QUEUE
from kosmos_core.device.queue import queue_claim
from kosmos_core.device.roles import FIXED, TWO_WAY, is_mover_last
from kosmos_core.device.tiles import Grid
from kosmos_core.device.trace import CALL, trace_begin, trace_end

from kosmos_tpsp.device.config import BUILD_ONLY, PULL, REDUCE_ONLY
from kosmos_tpsp.device.scatter import (
    add_up,
    await_all_partials,
    await_unless_here,
    build_and_send,
    landing_slots,
    owner_views,
    scattered_job,
)
from kosmos_tpsp.device.staging import (
    build_and_stage,
    poison_stale,
    pull_units,
    stage_enter,
    stage_leave,
    staging_view,
)

ROW_SHIFT = tl.constexpr(3)  # 8 bf16 elements are 16 bytes


@triton.jit(do_not_specialize=["m", "num_movers", "max_movers", "split_tiles", "call_hash"])
def gemm_rs_kernel(ops, ctx, m, n, k, num_movers, max_movers, split_tiles, call_hash, CONFIG):
    """One launch of `gemm_rs`; a workgroup takes these steps in order.

    1. Enter: arrival ticket, epoch, abort word; ticket 0 publishes the start word.
    2. Builders, all but the last `num_movers` to arrive, build tiles band by band. Push: each is
       sent to the owner of its rows. Pull: it stays in the staging region.
    3. Pull: poison what the call before has left in the other half of the staging region.
    4. Movers, and builders once no tile is left, up to `max_movers`, add up what has arrived here,
       or is there at the other ranks. With two-way roles they build tiles while it is missing.
    5. Leave: the last one holds every peer's start and moves the epoch on.
    """
    PULLS: tl.constexpr = CONFIG.TRANSPORT == PULL and ctx.WORLD > 1
    # As in `ag_gemm`: rows are multiples of 16 bytes, and the compiler is to know it.
    n = (n >> ROW_SHIFT) << ROW_SHIFT
    k = (k >> ROW_SHIFT) << ROW_SHIFT
    call, standing = call_enter(ctx, call_hash)
    begin = trace_begin(ctx)
    chunk_rows = m // ctx.WORLD
    grid = Grid(chunk_rows, tl.cdiv(chunk_rows, CONFIG.TILE_ROW_ROWS), tl.cdiv(n, CONFIG.BLOCK_N))
    if PULLS:
        stage = stage_enter(ctx)
    if call.ticket == 0:
        if standing.ok != 0:
            start_publish(ctx, call)
        call_clean(ctx, call, standing)
    moves = is_mover_last(call, num_movers)
    job = None
    if CONFIG.PHASE != REDUCE_ONLY:
        if PULLS:
            views = (staging_view(ctx, call, stage, grid, n, CONFIG),)
        else:
            views = owner_views(ops, ctx, grid, n, CONFIG)
        builders = tl.num_programs(0) - num_movers
        job = scattered_job(ops, ctx, views, grid, n, k, builders, split_tiles, CONFIG)
        if not moves:
            if PULLS:
                standing = build_and_stage(job, ctx, call, standing, CONFIG)
            else:
                standing = build_and_send(job, ctx, call, standing, CONFIG)
            if CONFIG.POLICY != FIXED:
                # What moves beyond saturation only takes bandwidth from what moves already.
                moves = queue_claim(call.set_ptr + JOIN_QUEUE) < max_movers - num_movers
    if CONFIG.POLICY != TWO_WAY:
        job = None
    if PULLS:
        if CONFIG.PHASE != BUILD_ONLY:
            standing = poison_stale(ctx, call, standing, stage, CONFIG)
            if moves:
                standing = pull_units(ops, ctx, call, standing, stage, grid, n, CONFIG, job)
    elif ctx.WORLD > 1:
        if CONFIG.PHASE == BUILD_ONLY:
            standing = await_all_partials(ctx, call, standing, grid, CONFIG)
        elif moves:
            standing = add_up(
                ops, ctx, call, standing, grid, n, CONFIG, await_unless_here, landing_slots, job
            )
    trace_end(ctx, CALL, call.ticket, begin)
    last = call_leave(ctx, call, standing)
    if PULLS and CONFIG.PHASE != BUILD_ONLY:
        if last:
            stage_leave(ctx, stage, m, n)
