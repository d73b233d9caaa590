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
from kosmos_moe.device.layout import (
    ARENA,
    DISPATCH_QUEUE,
    DISPATCH_UNITS,
    INPUTS,
    LISTED,
    SCALARS,
    arrivals_at,
)
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
def dispatch_unit(
    ops, ctx, call, size, tables, unit, units, rows_ptr, word, region, weighs, CONFIG
):
    """Pushes rows of a unit's tokens and counts them in at their owner.

    rows_ptr: what to push, [tokens, hidden].
    word: first of the owner's words that count rows of this rank.
    region: where to push it.
    weighs: whether the weights of the tokens' choices go with them, in a backward.
    """
    K: tl.constexpr = CONFIG.TOPK
    local, part, owner = unit_of(
        tables.dispatches, unit, units, call.rank, ctx.WORLD, CONFIG.ORDER == DESTINATION_MAJOR,
        CONFIG,
    )  # fmt: skip
    expert = owner * CONFIG.LOCAL_EXPERTS + local
    at = call.rank * CONFIG.EXPERTS + expert
    first = part * CONFIG.UNIT_ROWS
    rows = tl.minimum(tl.load(tables.counts + at) - first, CONFIG.UNIT_ROWS)
    if rows > 0:
        begin = tl.load(tables.starts + at) + first
        to_row = tl.load(tables.arena_rows + expert) + tl.load(tables.before + at) + first
        arena_ptr = peer_ptr(ctx, region, owner, tl.bfloat16)
        for i in range(0, rows, CONFIG.COPY_ROWS):
            places = i + tl.arange(0, CONFIG.COPY_ROWS)
            inside = places < rows
            tokens = tl.load(ops.list_ptr + begin + places, mask=inside, other=0)
            copy_rows(
                rows_ptr, tokens, arena_ptr, to_row + places, inside, size.hidden, CONFIG.PIECE,
                CONFIG.BURST,
            )  # fmt: skip
            if CONFIG.BACKWARD:
                inside = inside & weighs
                weight = tl.zeros((CONFIG.COPY_ROWS,), tl.float32)
                for j in tl.static_range(0, K):
                    choice = tokens * K + j
                    place = tl.load(ops.places_ptr + choice, mask=inside, other=-1)
                    own = tl.load(ops.weights_ptr + choice, mask=inside, other=0.0)
                    weight = tl.where(place == begin + places, own, weight)
                scalars_ptr = peer_ptr(ctx, SCALARS, owner, tl.float32)
                tl.store(scalars_ptr + to_row + places, weight, mask=inside)
        word_ptr = arrivals_at(ctx, call, owner) + call.rank * ctx.MAX_ROWS + word + local
        flag_arrive(word_ptr, "sys", ctx.TARGET, rows)


@triton.jit
def dispatch(ops, ctx, call, standing, size, tables, CONFIG):
    """A dispatcher: units in queue order until none is left.

    Backward: gradients with their weights first, token rows afterwards.
    """
    if not CONFIG.BACKWARD:
        standing = await_word(ctx, call, standing, LISTED, size.route_blocks, PHASE_PLAN)
    units = tl.load(tables.head + DISPATCH_UNITS)
    passes = 2 if CONFIG.BACKWARD else 1
    unit = units * 0
    while (unit < units * passes) & (standing.ok != 0):
        unit = queue_claim(call.set_ptr + DISPATCH_QUEUE)
        if unit < units * passes:
            begin = trace_begin(ctx)
            rows_ptr = ops.x_ptr
            word = unit * 0
            region = word + ARENA
            weighs = unit < 0
            if CONFIG.BACKWARD:
                weighs = unit < units
                if weighs:
                    rows_ptr = ops.dy_ptr
                else:
                    word += CONFIG.LOCAL_EXPERTS
                    region = word * 0 + INPUTS
            dispatch_unit(
                ops, ctx, call, size, tables, unit % units, units, rows_ptr, word, region, weighs,
                CONFIG,
            )  # fmt: skip
            trace_end(ctx, MOVE, unit, begin)
    return standing
