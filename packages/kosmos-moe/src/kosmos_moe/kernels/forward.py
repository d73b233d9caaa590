"""The forward of an MoE layer: route, plan, dispatch || GEMM1, GEMM2 || combine, fold.

Source: paper, section 3.3.1 and Figure 6. Protocol table: docs/protocols.md.
"""

import triton
import triton.language as tl
from kosmos_core.device.barrier import call_again, call_clean, call_enter, call_leave
from kosmos_core.device.trace import CALL, trace_begin, trace_end

from kosmos_moe.device.combine import build_and_combine
from kosmos_moe.device.dispatch import dispatch
from kosmos_moe.device.fold import fold
from kosmos_moe.device.layout import FITS, VERDICT, Size, tables_at
from kosmos_moe.device.plan import plan_and_list
from kosmos_moe.device.route import route

ROW_SHIFT = tl.constexpr(3)  # 8 bf16 elements are 16 bytes


@triton.jit(
    do_not_specialize=["tokens", "arena_blocks", "dispatch_crew", "combine_crew", "call_hash"]
)
def moe_forward_kernel(
    ops, ctx, factors, tokens, hidden, inter, shared_inter, arena_blocks, dispatch_crew,
    combine_crew, call_hash, CONFIG,
):  # fmt: skip
    """One launch of the forward; a workgroup takes these steps in order.

    1. Enter: arrival ticket, epoch, abort word; ticket 0 clears the counters of the next call.
    2. Route blocks of tokens.
    3. Plan, if it is the last to have routed: counts are the start word. List what is to be sent.
    4. Dispatch, the first `dispatch_crew` to arrive.
    5. Build tiles; the first `combine_crew` to arrive combine between them, all of them afterwards.
    6. Fold.
    7. Leave: the last one moves the epoch on.

    Where an arena would overflow, all ranks know it after step 3, and no row moves.
    """
    # Rows are multiples of 16 bytes; said this way the compiler knows it too.
    hidden = (hidden >> ROW_SHIFT) << ROW_SHIFT
    inter = (inter >> ROW_SHIFT) << ROW_SHIFT
    shared_inter = (shared_inter >> ROW_SHIFT) << ROW_SHIFT
    call, standing = call_enter(ctx, call_hash)
    begin = trace_begin(ctx)
    route_blocks = tl.cdiv(tokens, CONFIG.ROUTE_M)
    size = Size(tokens, hidden, inter, shared_inter, route_blocks, arena_blocks)
    tables = tables_at(ops.tables_ptr, ctx.WORLD, CONFIG)
    if call.ticket == 0:
        call_clean(ctx, call, standing)
    plans, standing = route(ops, ctx, call, standing, size, factors, CONFIG)
    call = call_again(ctx, call.ticket, call_hash)
    standing = plan_and_list(ops, ctx, call, standing, size, factors, tables, plans, CONFIG)
    fits = standing.ok != 0
    if fits:
        fits = tl.load(tables.head + VERDICT) == FITS
    if fits:
        if call.ticket < dispatch_crew:
            standing = dispatch(ops, ctx, call, standing, size, tables, CONFIG)
        call, standing = build_and_combine(
            ops, ctx, call, standing, size, tables, combine_crew, call_hash, CONFIG
        )
    if fits | (standing.ok == 0):
        shared_tiles = tl.cdiv(tokens, CONFIG.BLOCK_M) * tl.cdiv(hidden, CONFIG.BLOCK_N)
        standing = fold(ops, ctx, call, standing, size, tables, shared_tiles, CONFIG)
    trace_end(ctx, CALL, call.ticket, begin)
    call_leave(ctx, call, standing)
