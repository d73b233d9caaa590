"""Arrival counters and the abort word.

=============== =================== ==================== ====== ============= ======================
word            writer              reader               scope  order         guards
=============== =================== ==================== ====== ============= ======================
arrival counter mover, +1 a unit    whoever needs the    gpu;   barrier +     the rows of that unit
                                    rows, >= units of    sys    release;
                                    the tile row         when   acquire
                                                         pushed
raised          workgroup that      the same workgroup   gpu    relaxed       one record and one
                gives up, +1                                                  abort word a rank
abort record    first workgroup of  host, once the       sys;   plain, before what the exception
                a rank to give up,  status word is set   launch the abort     says
                on every rank                                   word
abort word      first workgroup of  every workgroup, at  sys    barrier +     that nobody waits for
                a rank to give up,  entry and in every          release;      the bound after
                max on every rank   poll; last to leave         relaxed       somebody gave up
=============== =================== ==================== ====== ============= ======================

A record is a row of the signal words a raiser; the status word (`barrier`) names whose to read.

The publish rule (docs/memory-model.md): stores; drain; barrier; one release. Triton 3.6 to 3.8 emit
no barrier before a release atomic, so without ours the release of one thread does not cover the
stores of the others. The consume rule: an acquire whose result is used, then the proxy fence before
descriptor loads.
"""

import triton
import triton.language as tl

from kosmos_core.device.layout import (
    ABORT,
    FLAG_START,
    MAX_RANKS,
    RAISED,
    RECORD,
    RECORD_WORDS,
    SIGNAL,
    START,
    TIMEOUT,
)
from kosmos_core.device.peers import peer_ptr
from kosmos_core.device.target import clock_ns, drain_stores, is_over


@triton.jit
def publish(SCOPE: tl.constexpr, TARGET: tl.constexpr):
    """What must stand between a workgroup's stores and the release that announces them."""
    drain_stores(SCOPE, TARGET)
    tl.debug_barrier()


@triton.jit
def flag_arrive(flag_ptr, SCOPE: tl.constexpr, TARGET: tl.constexpr, count=1):
    """Counts `count` more units into a counter, after all that this workgroup stored before."""
    publish(SCOPE, TARGET)
    tl.atomic_add(flag_ptr, count, sem="release", scope=SCOPE)


@triton.jit
def flag_read(flag_ptr, SCOPE: tl.constexpr):
    """The counter's value; everything counted so far is visible to the workgroup afterwards."""
    return tl.atomic_add(flag_ptr, 0, sem="acquire", scope=SCOPE)


@triton.jit
def is_aborted(signal_ptr):
    """True once any rank gave up on the workspace."""
    return tl.atomic_add(signal_ptr + ABORT, 0, sem="relaxed", scope="sys") != 0


@triton.jit
def abort_word(signal_ptr):
    """The packed abort word: code | raiser << 8 | peer << 16; 0 while nobody gave up."""
    return tl.atomic_add(signal_ptr + ABORT, 0, sem="relaxed", scope="sys")


@triton.jit
def abort_all(ctx, rank, epoch, code, peer, phase, flag, index, seen, wanted):
    """Leaves a record on every rank, then sets every rank's abort word.

    Only the first workgroup of a rank to give up writes.
    """
    first = tl.atomic_add(ctx.control_ptr + RAISED, 1, sem="relaxed", scope="gpu") == 0
    if first:
        word = code.to(tl.int64) | (rank.to(tl.int64) << 8) | (peer.to(tl.int64) << 16)
        for r in range(ctx.WORLD):
            record_ptr = peer_ptr(ctx, SIGNAL, r, tl.int64) + RECORD + rank * RECORD_WORDS
            tl.store(record_ptr, code.to(tl.int64))
            tl.store(record_ptr + 1, peer.to(tl.int64))
            tl.store(record_ptr + 2, phase.to(tl.int64))
            tl.store(record_ptr + 3, flag.to(tl.int64))
            tl.store(record_ptr + 4, index.to(tl.int64))
            tl.store(record_ptr + 5, seen.to(tl.int64))
            tl.store(record_ptr + 6, wanted.to(tl.int64))
            tl.store(record_ptr + 7, epoch.to(tl.int64))
        publish("sys", ctx.TARGET)
        for r in range(ctx.WORLD):
            tl.atomic_max(
                peer_ptr(ctx, SIGNAL, r, tl.int64) + ABORT, word, sem="release", scope="sys"
            )


@triton.jit
def start_word_of(call, peer):
    """The start word that a peer left here for calls of this parity; orders nothing."""
    slot_ptr = call.signal_ptr + START + call.parity * MAX_RANKS + peer
    return tl.atomic_add(slot_ptr, 0, sem="relaxed", scope="sys")


@triton.jit
def absent_peer(ctx, call):
    """The lowest peer that has not started this call, or -1."""
    absent = call.rank * 0 - 1
    for step in range(ctx.WORLD):
        peer = ctx.WORLD - 1 - step
        if peer != call.rank:
            if start_word_of(call, peer) != call.start_word:
                absent = call.rank * 0 + peer
    return absent


@triton.jit
def flag_wait(ctx, call, flag_ptr, wanted, peer, index, phase, flag, SCOPE: tl.constexpr):
    """Waits until an arrival counter reaches `wanted`.

    Returns 1, or 0 when the call is aborted. A wait that outlasts the bound aborts the call on
    every rank, naming `peer`, `phase` and `flag`; or a peer that has not even started, since
    whatever is missing then waits for it, at whichever rank.
    """
    # 0 waiting, 1 arrived, 2 somebody gave up, 3 the bound is over. One poll only stands in the
    # loop: two are merged into an irreducible loop by triton 3.6 on AMD.
    state = tl.full((), 0, tl.int32)
    seen = tl.full((), 0, tl.int32)
    begin = clock_ns(ctx.TARGET)
    while state == 0:
        seen = flag_read(flag_ptr, SCOPE)
        if seen >= wanted:
            state = tl.full((), 1, tl.int32)
        elif is_aborted(call.signal_ptr):
            state = tl.full((), 2, tl.int32)
        elif is_over(begin, call.bound_ns, ctx.TARGET):
            state = tl.full((), 3, tl.int32)
    if state == 3:
        zero = seen * 0
        blamed = zero + peer
        word = zero + flag
        place = zero + index
        found = seen.to(tl.int64)
        needed = (zero + wanted).to(tl.int64)
        absent = absent_peer(ctx, call)
        if absent >= 0:
            # Its rows, or what others were to do once it is there, are what is missing.
            blamed = absent
            word = zero + FLAG_START
            place = absent
            found = start_word_of(call, absent)
            needed = call.start_word
        abort_all(
            ctx, call.rank, call.epoch, zero + TIMEOUT, blamed, zero + phase, word, place, found,
            needed,
        )  # fmt: skip
    return (state == 1).to(tl.int32)
