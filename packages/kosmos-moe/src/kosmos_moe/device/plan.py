"""Plan: counts of all ranks, the layout of every arena, this rank's send list.

=============== =================== ==================== ====== ============= ======================
word            writer              reader               scope  order         guards
=============== =================== ==================== ====== ============= ======================
start word      the peer's planner, the planner          sys    barrier +     the peer's counts; its
                exchange                                        release;      last call is over
                                                                acquire
counted         the planner, 1      every workgroup      gpu    barrier +     base of each block,
                                                                release;      start of each list,
                                                                acquire       choices
listed          who has listed a    dispatchers; fold    gpu    barrier +     send list, places
                block, +1                                       release;
                                                                acquire
laid out        the planner, 1      every workgroup      gpu    barrier +     tables; the starts of
                                                                release;      all peers
                                                                acquire
=============== =================== ==================== ====== ============= ======================

Counts lie at every rank twice, by parity: a peer may still read those of its call before. All ranks
lay out all arenas from the same matrix: so they agree on the verdict, dispatchers know where a row
goes, combiners know where it came from, and no row carries an index.
"""

import triton
import triton.language as tl
from kosmos_core.device.barrier import start_hold, start_publish
from kosmos_core.device.flags import flag_arrive, flag_wait
from kosmos_core.device.layout import FLAG_ARRIVAL, PHASE_PLAN, Standing
from kosmos_core.device.peers import peer_at, peer_ptr
from kosmos_core.device.queue import queue_claim
from kosmos_core.device.trace import PLAN, trace_begin, trace_end

from kosmos_moe.device.layout import (
    COMBINE_UNITS,
    COUNTED,
    COUNTS,
    DISPATCH_UNITS,
    FITS,
    LAID_OUT,
    LIST_QUEUE,
    LISTED,
    OVERFLOW,
    OWED,
    ROW_BLOCKS,
    VERDICT,
)
from kosmos_moe.device.route import choices_of


@triton.jit
def await_word(ctx, call, standing, word, wanted, phase):
    """Waits for a word of this rank's own set."""
    ok = standing.ok
    if ok != 0:
        ok = flag_wait(
            ctx, call, call.set_ptr + word, wanted, call.rank, word, phase, FLAG_ARRIVAL, "gpu"
        )
    return Standing(standing.held, ok)


@triton.jit
def sum_blocks(ops, size, tables, CONFIG):
    """[experts] rows that this rank has for each expert; writes those of earlier blocks."""
    experts = tl.arange(0, CONFIG.EXPERTS_P2)
    known = (experts < CONFIG.EXPERTS)[None, :]
    total = tl.zeros((CONFIG.EXPERTS_P2,), tl.int32)
    for first in range(0, size.route_blocks, CONFIG.PLAN_ROWS):
        blocks = first + tl.arange(0, CONFIG.PLAN_ROWS)
        inside = (blocks < size.route_blocks)[:, None] & known
        at = blocks[:, None] * CONFIG.EXPERTS + experts[None, :]
        counts = tl.load(ops.counts_ptr + at, mask=inside, other=0)
        earlier = tl.cumsum(counts, axis=0) - counts + total[None, :]
        tl.store(tables.base + at, earlier, mask=inside)
        total += tl.sum(counts, axis=0)
    return total


@triton.jit
def reduce_losses(ops, size, factors, chosen, CONFIG):
    """Writes the auxiliary loss of this rank's tokens: blocks are added in order."""
    experts = tl.arange(0, CONFIG.EXPERTS_P2)
    known = (experts < CONFIG.EXPERTS)[None, :]
    shares = tl.zeros((CONFIG.EXPERTS_P2,), tl.float32)
    squares = size.tokens * 0.0
    for first in range(0, size.route_blocks, CONFIG.PLAN_ROWS):
        blocks = first + tl.arange(0, CONFIG.PLAN_ROWS)
        inside = blocks < size.route_blocks
        row_ptr = ops.sums_ptr + blocks * (CONFIG.EXPERTS + 1)
        at = row_ptr[:, None] + experts[None, :]
        shares += tl.sum(tl.load(at, mask=inside[:, None] & known, other=0.0), axis=0)
        squares += tl.sum(tl.load(row_ptr + CONFIG.EXPERTS, mask=inside, other=0.0), axis=0)
    real = (tl.sum(chosen, axis=0) // CONFIG.TOPK).to(tl.float32)
    balance = tl.sum(chosen.to(tl.float32) * shares, axis=0)
    tokens = tl.maximum(real, 1.0)
    loss = factors.aux * CONFIG.EXPERTS * balance / (CONFIG.TOPK * tokens * tokens)
    tl.store(ops.loss_ptr, loss + factors.z * squares / tokens)


@triton.jit
def send_counts(ctx, call, tables, total, CONFIG):
    """Stores this rank's counts at every rank, and where its lists begin."""
    experts = tl.arange(0, CONFIG.EXPERTS_P2)
    known = experts < CONFIG.EXPERTS
    own = call.rank * CONFIG.EXPERTS + experts
    tl.store(tables.starts + own, tl.cumsum(total, axis=0) - total, mask=known)
    tl.store(tables.head + OWED, tl.sum(total, axis=0))
    for step in range(ctx.WORLD):
        peer = peer_at(call.rank, step, ctx.WORLD)
        counts_ptr = peer_ptr(ctx, COUNTS + call.parity, peer, tl.int32)
        tl.store(counts_ptr + own, total, mask=known)


@triton.jit
def lay_out(ops, ctx, call, size, tables, CONFIG):
    """Builds the tables from the counts of all ranks."""
    counts_ptr = peer_ptr(ctx, COUNTS + call.parity, call.rank, tl.int32)
    owners = tl.arange(0, CONFIG.WORLD_P2)
    locals_ = tl.arange(0, CONFIG.LOCAL_P2)
    known = (owners < ctx.WORLD)[:, None] & (locals_ < CONFIG.LOCAL_EXPERTS)[None, :]
    # [owner, local expert]
    expert = owners[:, None] * CONFIG.LOCAL_EXPERTS + locals_[None, :]
    total = tl.zeros((CONFIG.WORLD_P2, CONFIG.LOCAL_P2), tl.int32)
    back = tl.zeros((CONFIG.WORLD_P2, CONFIG.LOCAL_P2), tl.int32)
    there = tl.zeros((CONFIG.WORLD_P2, CONFIG.LOCAL_P2), tl.int32)
    for source in tl.static_range(0, ctx.WORLD):
        at = source * CONFIG.EXPERTS + expert
        counts = tl.load(counts_ptr + at, mask=known, other=0)
        tl.store(tables.counts + at, counts, mask=known)
        tl.store(tables.before + at, total, mask=known)
        # This rank's own lists have begun to be written by them.
        of_owner = tl.sum(counts, axis=1)
        begin = (tl.cumsum(of_owner, axis=0) - of_owner)[:, None]
        begin += tl.cumsum(counts, axis=1) - counts
        tl.store(tables.starts + at, begin, mask=known & (source != call.rank))
        units = tl.cdiv(counts, CONFIG.UNIT_ROWS)
        back = tl.maximum(back, units)
        there = tl.where(source == call.rank, units, there)
        total += counts
    row_blocks = tl.cdiv(total, CONFIG.BLOCK_M)
    up_to = tl.cumsum(row_blocks, axis=1)
    tl.store(tables.arena_rows + expert, (up_to - row_blocks) * CONFIG.BLOCK_M, mask=known)
    fullest = tl.max(tl.sum(row_blocks, axis=1), axis=0)
    verdict = tl.where(fullest > size.arena_blocks, OVERFLOW, FITS)
    mine = (owners == call.rank)[:, None]
    blocks = tl.sum(tl.where(mine, up_to, 0), axis=0)
    combines = tl.cumsum(tl.sum(tl.where(mine, back, 0), axis=0), axis=0) * ctx.WORLD
    dispatches = tl.cumsum(tl.max(there, axis=0), axis=0) * ctx.WORLD
    local = locals_ < CONFIG.LOCAL_EXPERTS
    zero = verdict * 0
    tl.store(tables.blocks, zero)
    tl.store(tables.combines, zero)
    tl.store(tables.dispatches, zero)
    tl.store(tables.blocks + 1 + locals_, blocks, mask=local)
    tl.store(tables.combines + 1 + locals_, combines, mask=local)
    tl.store(tables.dispatches + 1 + locals_, dispatches, mask=local)
    tl.store(tables.head + ROW_BLOCKS, tl.max(blocks, axis=0))
    tl.store(tables.head + COMBINE_UNITS, tl.max(combines, axis=0))
    tl.store(tables.head + DISPATCH_UNITS, tl.max(dispatches, axis=0))
    tl.store(tables.head + VERDICT, verdict)
    tl.store(ops.verdict_ptr, verdict)


@triton.jit
def plan(ops, ctx, call, standing, size, factors, tables, CONFIG):
    """The last workgroup to have routed plans: the only wait for other ranks before rows arrive."""
    begin = trace_begin(ctx)
    if standing.ok != 0:
        total = sum_blocks(ops, size, tables, CONFIG)
        if CONFIG.LOSS:
            reduce_losses(ops, size, factors, total, CONFIG)
        else:
            tl.store(ops.loss_ptr, 0.0)
        send_counts(ctx, call, tables, total, CONFIG)
        start_publish(ctx, call)
        flag_arrive(call.set_ptr + COUNTED, "gpu", ctx.TARGET)
    else:
        tl.store(ops.loss_ptr, float("nan"))
    for step in range(1, ctx.WORLD):
        peer = peer_at(call.rank, step, ctx.WORLD)
        standing = start_hold(ctx, call, standing, peer, PHASE_PLAN)
    if standing.ok != 0:
        lay_out(ops, ctx, call, size, tables, CONFIG)
        flag_arrive(call.set_ptr + LAID_OUT, "gpu", ctx.TARGET)
    trace_end(ctx, PLAN, call.ticket, begin)
    return standing


@triton.jit
def list_block(ops, size, tables, rank, block, CONFIG):
    """Puts a block of tokens in the send list, tokens of an expert in order."""
    K: tl.constexpr = CONFIG.TOPK
    experts = tl.arange(0, CONFIG.EXPERTS_P2)
    known = experts < CONFIG.EXPERTS
    next_place = tl.load(tables.base + block * CONFIG.EXPERTS + experts, mask=known, other=0)
    next_place += tl.load(tables.starts + rank * CONFIG.EXPERTS + experts, mask=known, other=0)
    for first in range(0, CONFIG.ROUTE_M, CONFIG.ROUTE_ROWS):
        rows = block * CONFIG.ROUTE_M + first + tl.arange(0, CONFIG.ROUTE_ROWS)
        inside = rows < size.tokens
        real = inside
        if CONFIG.PADDING:
            real = real & (tl.load(ops.padding_ptr + rows, mask=inside, other=1) == 0)
        chosen, _ = choices_of(ops, size, rows, experts, CONFIG)
        chosen = tl.where(real[:, None], chosen, 0)
        places = tl.cumsum(chosen, axis=0) - chosen + next_place[None, :]
        for j in tl.static_range(0, K):
            expert = tl.load(ops.ids_ptr + rows * K + j, mask=inside, other=-1)
            listed = real & (expert >= 0) & (expert < CONFIG.EXPERTS)
            hit = experts[None, :] == expert[:, None]
            place = tl.sum(tl.where(hit, places, 0), axis=1)
            tl.store(ops.places_ptr + rows * K + j, tl.where(listed, place, -1), mask=inside)
            tl.store(ops.list_ptr + place, rows, mask=listed)
        next_place += tl.sum(chosen, axis=0)


@triton.jit
def list_all(ops, ctx, call, standing, size, tables, CONFIG):
    """All workgroups build the send list."""
    block = size.route_blocks * 0
    while (block < size.route_blocks) & (standing.ok != 0):
        block = queue_claim(call.set_ptr + LIST_QUEUE)
        if block < size.route_blocks:
            list_block(ops, size, tables, call.rank, block, CONFIG)
            flag_arrive(call.set_ptr + LISTED, "gpu", ctx.TARGET)
    return standing


@triton.jit
def plan_and_list(ops, ctx, call, standing, size, factors, tables, plans, CONFIG):
    """From routed tokens to tables and a send list that all workgroups may read.

    Afterwards every peer's start is held, by way of the planner.
    """
    if plans:
        standing = plan(ops, ctx, call, standing, size, factors, tables, CONFIG)
    standing = await_word(ctx, call, standing, COUNTED, 1, PHASE_PLAN)
    standing = list_all(ops, ctx, call, standing, size, tables, CONFIG)
    standing = await_word(ctx, call, standing, LAID_OUT, 1, PHASE_PLAN)
    # Once a call is given up nobody asks for it: a constant, and no register.
    return Standing(standing.held * 0 + ((1 << ctx.WORLD) - 1), standing.ok)
