"""The backward of an MoE layer: dispatch || dgrads and wgrads || combine, router, fold.

Source: paper, section 3.3.2. Protocol table: docs/moe.md.
"""

import triton
import triton.language as tl
from kosmos_core.device.barrier import (
    call_clean,
    call_enter,
    call_leave,
    start_hold,
    start_publish,
)
from kosmos_core.device.flags import flag_arrive
from kosmos_core.device.layout import PHASE_START, Standing
from kosmos_core.device.peers import peer_at
from kosmos_core.device.trace import CALL, trace_begin, trace_end

from kosmos_moe.device.combine import build_and_combine
from kosmos_moe.device.dispatch import dispatch
from kosmos_moe.device.fold import fold
from kosmos_moe.device.gradient import build_shared, clear_pads
from kosmos_moe.device.layout import STARTED, Size, tables_at
from kosmos_moe.device.plan import await_word
from kosmos_moe.device.router_grad import route_back

ROW_SHIFT = tl.constexpr(3)  # 8 bf16 elements are 16 bytes


@triton.jit(
    do_not_specialize=["tokens", "arena_blocks", "dispatch_crew", "combine_crew", "call_hash"]
)
def moe_backward_kernel(
    ops, ctx, factors, tokens, hidden, inter, shared_inter, arena_blocks, dispatch_crew,
    combine_crew, call_hash, CONFIG,
):  # fmt: skip
    """One launch of the backward; a workgroup takes these steps in order.

    1. Enter; ticket 0 publishes the start, clears the counters of the next call, and waits for
       every peer's start: nobody pushes before it has told so.
    2. Clear pad rows.
    3. Dispatch gradients, then token rows: the first `dispatch_crew` to arrive.
    4. Build tiles, the shared expert's first; the first `combine_crew` to arrive combine between
       the others, all of them afterwards.
    5. The router's gradients.
    6. Fold.
    7. Leave: the last one moves the epoch on.
    """
    hidden = (hidden >> ROW_SHIFT) << ROW_SHIFT
    inter = (inter >> ROW_SHIFT) << ROW_SHIFT
    shared_inter = (shared_inter >> ROW_SHIFT) << ROW_SHIFT
    call, standing = call_enter(ctx, call_hash)
    begin = trace_begin(ctx)
    route_blocks = tl.cdiv(tokens, CONFIG.ROUTE_M)
    size = Size(tokens, hidden, inter, shared_inter, route_blocks, arena_blocks)
    tables = tables_at(ops.tables_ptr, ctx.WORLD, CONFIG)
    if call.ticket == 0:
        if standing.ok != 0:
            start_publish(ctx, call)
        call_clean(ctx, call, standing)
        for step in range(1, ctx.WORLD):
            peer = peer_at(call.rank, step, ctx.WORLD)
            standing = start_hold(ctx, call, standing, peer, PHASE_START)
        if standing.ok != 0:
            flag_arrive(call.set_ptr + STARTED, "gpu", ctx.TARGET)
    standing = await_word(ctx, call, standing, STARTED, 1, PHASE_START)
    # Once a call is given up nobody asks for it: a constant, and no register.
    standing = Standing(standing.held * 0 + ((1 << ctx.WORLD) - 1), standing.ok)
    standing = clear_pads(ctx, call, standing, size, tables, CONFIG)
    if call.ticket < dispatch_crew:
        standing = dispatch(ops, ctx, call, standing, size, tables, CONFIG)
    if CONFIG.SHARED:
        call, standing = build_shared(ops, ctx, call, standing, size, tables, call_hash, CONFIG)
    call, standing = build_and_combine(
        ops, ctx, call, standing, size, tables, combine_crew, call_hash, CONFIG
    )
    call, standing = route_back(ops, ctx, call, standing, size, tables, factors, call_hash, CONFIG)
    shared_tiles = tl.cdiv(tokens, CONFIG.BLOCK_M) * tl.cdiv(hidden, CONFIG.BLOCK_N)
    standing = fold(ops, ctx, call, standing, size, tables, shared_tiles, CONFIG)
    trace_end(ctx, CALL, call.ticket, begin)
    call_leave(ctx, call, standing)
