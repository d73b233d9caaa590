"""Beginning and end of a call, start words, and elections of the last to arrive.

=============== =================== ==================== ====== ============= ======================
word            writer              reader               scope  order         guards
=============== =================== ==================== ====== ============= ======================
epoch           last workgroup to   every workgroup at   launch plain         which slots and sets
                leave               entry                                     this call uses
ticket          every workgroup, +1 the same workgroup   gpu    relaxed       nothing: role by order
                                                                              of arrival
next counters   ticket 0, zeroes    workgroups of the    launch plain         that they are 0 when
                                    next call                                 next used
next arrivals   ticket 0, zeroes    peers, in the next   sys    plain, before that they are 0 when
                unless aborted      call                        the next      next used
                                                                start word
start word      the peer, exchange  whoever is about to  sys    barrier +     the peer's last call
                                    touch the peer; last        release;      is over, its input in
                                    to leave                    acquire       place; which call it
                                                                              makes
leave           every workgroup, +1 the last workgroup   gpu    barrier +     all this rank did,
                                                                acq_rel       before the epoch moves
elections       each of `total`, +1 the last of them     gpu    barrier +     what the others stored
                (`elect_last`)                                  acq_rel
status          last workgroup to   host                 launch plain         that the host learns
                leave;                                                        of an abort without a
                `fault_kernel`                                                copy
=============== =================== ==================== ====== ============= ======================

Scope "launch" is the boundary between two launches of a stream. Next counters and next arrivals are
the sets of the other parity. The counters that operations elect on stand in their own modules.

Start words are int64, hash << 32 | epoch, in two slots a peer by parity, compared for equality: a
peer may already be in the next call while this rank is still in this one.
"""

import triton
import triton.language as tl

from kosmos_core.device.flags import abort_all, abort_word, is_aborted, publish
from kosmos_core.device.layout import (
    ARRIVAL,
    BOUND_MS,
    EPOCH,
    FLAG_START,
    HEADER_WORDS,
    LEAVE,
    MAX_RANKS,
    MISMATCH,
    PHASE_LEAVE,
    PHASE_START,
    RANK,
    SET_GRANULE,
    SIGNAL,
    START,
    TICKET,
    TIMEOUT,
    Call,
    Standing,
)
from kosmos_core.device.peers import peer_at, peer_ptr
from kosmos_core.device.queue import queue_claim
from kosmos_core.device.target import clock_ns, is_over

EPOCH_MASK = tl.constexpr(0xFFFFFFFF)


@triton.jit
def elect_last(counter_ptr, total, TARGET: tl.constexpr):
    """Counts this workgroup in and elects the last.

    True for the last of `total`, who then sees what all the others stored.
    """
    publish("gpu", TARGET)
    return tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == total - 1


@triton.jit
def zero_words(ptr, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """Zeroes WORDS int32 words, a multiple of BLOCK."""
    for i in range(0, WORDS, BLOCK):
        tl.store(ptr + i + tl.arange(0, BLOCK), tl.zeros([BLOCK], tl.int32))


@triton.jit
def call_again(ctx, ticket, call_hash):
    """The call of a workgroup, read anew.

    For loops over large tiles: what is read again does not take registers beside their sums.
    """
    rank = tl.load(ctx.control_ptr + RANK)
    epoch = tl.load(ctx.control_ptr + EPOCH)
    bound_ns = tl.load(ctx.control_ptr + BOUND_MS).to(tl.int64) * 1000000
    parity = epoch & 1
    set_ptr = ctx.control_ptr + HEADER_WORDS + parity * ctx.SET_WORDS
    signal_ptr = peer_ptr(ctx, SIGNAL, rank, tl.int64)
    start_word = (call_hash.to(tl.int64) << 32) | (epoch.to(tl.int64) & EPOCH_MASK)
    return Call(rank, epoch, parity, start_word, ticket, set_ptr, signal_ptr, bound_ns)


@triton.jit
def call_enter(ctx, call_hash):
    """Takes an arrival ticket and reads which call this is.

    Returns (Call, Standing).
    """
    parity = tl.load(ctx.control_ptr + EPOCH) & 1
    set_ptr = ctx.control_ptr + HEADER_WORDS + parity * ctx.SET_WORDS
    ticket = queue_claim(set_ptr + TICKET)
    call = call_again(ctx, ticket, call_hash)
    ok = 1 - is_aborted(call.signal_ptr).to(tl.int32)
    return call, Standing(1 << call.rank, ok)


@triton.jit
def start_publish(ctx, call):
    """Tells every peer that this rank is in this call and that its input is in place."""
    publish("sys", ctx.TARGET)
    for step in range(1, ctx.WORLD):
        peer = peer_at(call.rank, step, ctx.WORLD)
        slot_ptr = (
            peer_ptr(ctx, SIGNAL, peer, tl.int64) + START + call.parity * MAX_RANKS + call.rank
        )
        tl.atomic_xchg(slot_ptr, call.start_word, sem="release", scope="sys")


@triton.jit
def call_clean(ctx, call, standing):
    """Zeroes the counters that this call does not use, for the next one.

    Done by whoever has ticket 0.
    """
    other_ptr = ctx.control_ptr + HEADER_WORDS + (1 - call.parity) * ctx.SET_WORDS
    zero_words(other_ptr, ctx.SET_WORDS, SET_GRANULE)
    # After an abort a peer's late arrivals may still come in: the reset zeroes that set instead.
    if standing.ok != 0:
        arrival_ptr = (
            peer_ptr(ctx, ARRIVAL, call.rank, tl.int32) + (1 - call.parity) * ctx.ARRIVAL_WORDS
        )
        zero_words(arrival_ptr, ctx.ARRIVAL_WORDS, SET_GRANULE)


@triton.jit
def start_judge(seen, wanted):
    """0 the peer has not started this call, 1 it has, 2 it has started another operation."""
    here = (seen & EPOCH_MASK) == (wanted & EPOCH_MASK)
    same = (seen >> 32) == (wanted >> 32)
    return tl.where(here, tl.where(same, 1, 2), 0)


@triton.jit
def start_wait(ctx, call, peer, phase):
    """Waits for a peer's start word of this call.

    Returns 1, or 0 when the call is aborted.
    """
    slot_ptr = call.signal_ptr + START + call.parity * MAX_RANKS + peer
    # 0 not yet, 1 here, 2 here with another call, 3 somebody gave up, 4 the bound is over.
    state = tl.full((), 0, tl.int32)
    seen = tl.full((), 0, tl.int64)
    begin = clock_ns(ctx.TARGET)
    while state == 0:
        seen = tl.atomic_add(slot_ptr, 0, sem="acquire", scope="sys")
        state = start_judge(seen, call.start_word)
        if state == 0:
            if is_aborted(call.signal_ptr):
                state = tl.full((), 3, tl.int32)
            elif is_over(begin, call.bound_ns, ctx.TARGET):
                state = tl.full((), 4, tl.int32)
    if (state == 2) | (state == 4):
        zero = state * 0
        code = tl.where(state == 2, MISMATCH, TIMEOUT)
        abort_all(
            ctx, call.rank, call.epoch, code, zero + peer, zero + phase, zero + FLAG_START,
            zero + peer, seen, call.start_word,
        )  # fmt: skip
    return (state == 1).to(tl.int32)


@triton.jit
def start_hold(ctx, call, standing, peer, phase):
    """`start_wait` once a peer: nobody reads or writes a peer's memory before holding its start."""
    held = standing.held
    ok = standing.ok
    if (ok != 0) & (((held >> peer) & 1) == 0):
        ok = start_wait(ctx, call, peer, phase)
        held = held | (1 << peer)
    return Standing(held, ok)


@triton.jit
def start_hold_all(ctx, call, standing, phase):
    """`start_hold` of every peer: all have left the call before."""
    for step in range(1, ctx.WORLD):
        peer = peer_at(call.rank, step, ctx.WORLD)
        standing = start_hold(ctx, call, standing, peer, phase)
    return standing


@triton.jit
def call_leave(ctx, call, standing):
    """The last workgroup to leave holds every peer's start, then moves the epoch on.

    Returns whether this one is the last.
    """
    last = elect_last(call.set_ptr + LEAVE, tl.num_programs(0), ctx.TARGET)
    if last:
        standing = start_hold_all(ctx, call, standing, PHASE_LEAVE)
        word = abort_word(call.signal_ptr)
        if word != 0:
            tl.store(ctx.status_ptr, word)
        tl.store(ctx.control_ptr + EPOCH, call.epoch + 1)
    return last


@triton.jit(do_not_specialize=["code", "reason"])
def fault_kernel(ctx, code, reason):
    """Sets the abort word of every rank, with the reason of a fault that this rank's host found.

    Launched with one workgroup.
    """
    rank = tl.load(ctx.control_ptr + RANK)
    epoch = tl.load(ctx.control_ptr + EPOCH)
    zero = rank * 0
    abort_all(
        ctx, rank, epoch, zero + code, rank, zero + PHASE_START, zero, zero, zero + reason, zero
    )
    tl.store(ctx.status_ptr, abort_word(peer_ptr(ctx, SIGNAL, rank, tl.int64)))


@triton.jit(do_not_specialize=["call_hash"])
def agree_kernel(ctx, call_hash):
    """A call that moves nothing: every rank learns whether all ranks make the same call."""
    call, standing = call_enter(ctx, call_hash)
    if call.ticket == 0:
        if standing.ok != 0:
            start_publish(ctx, call)
        call_clean(ctx, call, standing)
    call_leave(ctx, call, standing)
