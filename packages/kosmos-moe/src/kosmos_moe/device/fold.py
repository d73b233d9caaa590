"""Fold: each token's k rows, weighted and summed in fp32 in the order of its choices."""

import triton
import triton.language as tl
from kosmos_core.device.flags import flag_wait
from kosmos_core.device.layout import FLAG_ARRIVAL, PHASE_FOLD, Standing
from kosmos_core.device.mover import fill_nan
from kosmos_core.device.peers import peer_ptr
from kosmos_core.device.queue import queue_claim
from kosmos_core.device.trace import FOLD, WAIT, trace_begin, trace_end

from kosmos_moe.device.config import GIVEN
from kosmos_moe.device.layout import (
    FOLD_QUEUE,
    LISTED,
    OWED,
    RETURN,
    ROUTER_DONE,
    SHARED_DONE,
    returned_at,
)
from kosmos_moe.device.plan import await_word
from kosmos_moe.device.router_grad import num_router_tiles


@triton.jit
def fold_rows(ops, ctx, call, size, block, CONFIG):
    """Folds FOLD_ROWS tokens; rounds each sum once."""
    K: tl.constexpr = CONFIG.TOPK
    rows = block * CONFIG.FOLD_ROWS + tl.arange(0, CONFIG.FOLD_ROWS)
    inside = rows < size.tokens
    return_ptr = peer_ptr(ctx, RETURN, call.rank, tl.bfloat16)
    row_at = rows.to(tl.int64)[:, None] * size.hidden
    for k in range(0, size.hidden, CONFIG.PIECE):
        at = k + tl.arange(0, CONFIG.PIECE)[None, :]
        wanted = inside[:, None] & (at < size.hidden)
        total = tl.zeros((CONFIG.FOLD_ROWS, CONFIG.PIECE), tl.float32)
        for j in tl.static_range(0, K):
            place = tl.load(ops.places_ptr + rows * K + j, mask=inside, other=-1)
            weight = tl.load(ops.weights_ptr + rows * K + j, mask=inside, other=0.0)
            if CONFIG.BACKWARD:
                # They were applied to what the experts' gradients were made of.
                weight = tl.where(inside, 1.0, 0.0)
            row_ptr = return_ptr + place.to(tl.int64)[:, None] * size.hidden
            row = tl.load(row_ptr + at, mask=wanted & (place >= 0)[:, None], other=0.0)
            total += weight[:, None] * row.to(tl.float32)
        if CONFIG.BACKWARD and CONFIG.ROUTING != GIVEN:
            total += tl.load(ops.router_dx_ptr + row_at + at, mask=wanted, other=0.0)
        if CONFIG.SHARED:
            total += tl.load(ops.shared_y_ptr + row_at + at, mask=wanted, other=0.0).to(tl.float32)
        tl.store(ops.y_ptr + row_at + at, total.to(tl.bfloat16), mask=wanted)


@triton.jit
def await_returned(ctx, call, standing, size, tables, shared_tiles, CONFIG):
    """Waits until everything that a fold reads is there."""
    begin = trace_begin(ctx)
    if CONFIG.BACKWARD:
        standing = await_word(
            ctx, call, standing, ROUTER_DONE, num_router_tiles(size, CONFIG), PHASE_FOLD
        )
    else:
        standing = await_word(ctx, call, standing, LISTED, size.route_blocks, PHASE_FOLD)
    ok = standing.ok
    if ok != 0:
        ok = flag_wait(
            ctx, call, returned_at(ctx, call, call.rank), tl.load(tables.head + OWED), call.rank,
            call.rank, PHASE_FOLD, FLAG_ARRIVAL, "sys",
        )  # fmt: skip
    standing = Standing(standing.held, ok)
    if CONFIG.SHARED:
        standing = await_word(ctx, call, standing, SHARED_DONE, shared_tiles, PHASE_FOLD)
    trace_end(ctx, WAIT, call.ticket, begin)
    return standing


@triton.jit
def fold(ops, ctx, call, standing, size, tables, shared_tiles, CONFIG):
    """All workgroups fold; once the call is aborted what is left of the output is NaN."""
    blocks = tl.cdiv(size.tokens, CONFIG.FOLD_ROWS)
    if blocks > 0:
        standing = await_returned(ctx, call, standing, size, tables, shared_tiles, CONFIG)
    block = blocks * 0
    while block < blocks:
        block = queue_claim(call.set_ptr + FOLD_QUEUE)
        if block < blocks:
            begin = trace_begin(ctx)
            if standing.ok != 0:
                fold_rows(ops, ctx, call, size, block, CONFIG)
            else:
                first = block * CONFIG.FOLD_ROWS
                rows = tl.minimum(size.tokens - first, CONFIG.FOLD_ROWS)
                fill_nan(
                    ops.y_ptr + first.to(tl.int64) * size.hidden, rows * size.hidden,
                    CONFIG.COPY_ELEMENTS,
                )  # fmt: skip
            trace_end(ctx, FOLD, block, begin)
    return standing
