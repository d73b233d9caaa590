"""Dispatch: token rows are pushed straight to their place in the arena of the expert's owner.

=============== =================== ==================== ====== ============= ======================
word            writer              reader               scope  order         guards
=============== =================== ==================== ====== ============= ======================
arrival         dispatchers of the  GEMM1 tiles that     sys    barrier +     arena rows of (source,
[source][local  source, +rows       read the rows, ==           release;      expert)
expert] at the                      rows of (source,            acquire
owner                               expert)
=============== =================== ==================== ====== ============= ======================

A unit is (local expert, slice, destination): experts in the order in which GEMM1 consumes them, the
destination fastest, each rank beginning with the next one, so that few movers keep all links busy.
"""

import triton
import triton.language as tl
from kosmos_core.device.flags import flag_arrive
from kosmos_core.device.layout import PHASE_PLAN
from kosmos_core.device.mover import copy_rows
from kosmos_core.device.peers import peer_at, peer_ptr
from kosmos_core.device.queue import queue_claim
from kosmos_core.device.trace import MOVE, trace_begin, trace_end

from kosmos_moe.device.config import DESTINATION_MAJOR
from kosmos_moe.device.layout import ARENA, DISPATCH_QUEUE, DISPATCH_UNITS, LISTED, arrivals_at
from kosmos_moe.device.plan import await_word


@triton.jit
def find_local(prefix_ptr, index, CONFIG):
    """The local expert in whose span of a prefix table an index lies; empty ones have none."""
    places = tl.arange(0, CONFIG.LOCAL_P2)
    ends = tl.load(prefix_ptr + 1 + places, mask=places < CONFIG.LOCAL_EXPERTS, other=2147483647)
    return tl.sum((ends <= index).to(tl.int32), axis=0)


@triton.jit
def unit_of(prefix_ptr, unit, units, rank, WORLD: tl.constexpr, MAJOR: tl.constexpr, CONFIG):
    """(local expert, slice, peer) of a dispatch or combine unit."""
    if MAJOR:
        # Peer after peer, each with all its experts.
        span = units // WORLD
        peer = peer_at(rank, 1 + unit // tl.maximum(span, 1), WORLD)
        unit = unit % tl.maximum(span, 1) * WORLD
        local = find_local(prefix_ptr, unit, CONFIG)
        within = unit - tl.load(prefix_ptr + local)
    else:
        local = find_local(prefix_ptr, unit, CONFIG)
        within = unit - tl.load(prefix_ptr + local)
        peer = peer_at(rank, 1 + within % WORLD, WORLD)
    return local, within // WORLD, peer


@triton.jit
def dispatch_unit(ops, ctx, call, size, tables, unit, units, CONFIG):
    """Pushes the rows of a unit and counts them in at their owner."""
    local, part, owner = unit_of(
        tables.dispatches, unit, units, call.rank, ctx.WORLD, CONFIG.ORDER == DESTINATION_MAJOR,
        CONFIG,
    )  # fmt: skip
    expert = owner * CONFIG.LOCAL_EXPERTS + local
    at = call.rank * CONFIG.EXPERTS + expert
    first = part * CONFIG.UNIT_ROWS
    rows = tl.minimum(tl.load(tables.counts + at) - first, CONFIG.UNIT_ROWS)
    if rows > 0:
        list_ptr = ops.list_ptr + tl.load(tables.starts + at) + first
        to_row = tl.load(tables.arena_rows + expert) + tl.load(tables.before + at) + first
        arena_ptr = peer_ptr(ctx, ARENA, owner, tl.bfloat16)
        for i in range(0, rows, CONFIG.COPY_ROWS):
            places = i + tl.arange(0, CONFIG.COPY_ROWS)
            inside = places < rows
            tokens = tl.load(list_ptr + places, mask=inside, other=0)
            copy_rows(
                ops.x_ptr, tokens, arena_ptr, to_row + places, inside, size.hidden, CONFIG.PIECE,
                CONFIG.BURST,
            )  # fmt: skip
        word_ptr = arrivals_at(ctx, call, owner) + call.rank * ctx.MAX_ROWS + local
        flag_arrive(word_ptr, "sys", ctx.TARGET, rows)


@triton.jit
def dispatch(ops, ctx, call, standing, size, tables, CONFIG):
    """A dispatcher: units in queue order until none is left."""
    standing = await_word(ctx, call, standing, LISTED, size.route_blocks, PHASE_PLAN)
    units = tl.load(tables.head + DISPATCH_UNITS)
    unit = units * 0
    while (unit < units) & (standing.ok != 0):
        unit = queue_claim(call.set_ptr + DISPATCH_QUEUE)
        if unit < units:
            begin = trace_begin(ctx)
            dispatch_unit(ops, ctx, call, size, tables, unit, units, CONFIG)
            trace_end(ctx, MOVE, unit, begin)
    return standing
