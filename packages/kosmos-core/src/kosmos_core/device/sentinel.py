"""Data that carries its own arrival: a region is poisoned with a bit pattern that no result has.

=========  =====================  =====================  =======  ==========================
word       writer                 reader                 scope    order, and what it guards
=========  =====================  =====================  =======  ==========================
element    producer, plain;       consumer, volatile     value    itself: the element is its
           owner, poison          poll                            own arrival
=========  =====================  =====================  =======  ==========================

A consumer polls only after it knows that the poison of its elements is older (the producer's start
word of the call), and the owner poisons again only once no producer of the last round can still
write. The pattern is a signalling NaN, which arithmetic never yields; `result_bits` also keeps user
data from looking like it.
"""

import triton
import triton.language as tl

from kosmos_core.device.flags import abort_all, is_aborted
from kosmos_core.device.layout import FLAG_DATA, TIMEOUT
from kosmos_core.device.peers import peer_ptr
from kosmos_core.device.target import AMD, clock_ns, is_over

# bf16 bits: "not here yet", and what every NaN result is rewritten to.
SENTINEL = tl.constexpr(0x7FA1)
QUIET_NAN = tl.constexpr(0x7FC0)


@triton.jit
def result_bits(value):
    """The bf16 bits (int16) of an fp32 tile, rounded once; every NaN becomes the quiet one."""
    bits = value.to(tl.bfloat16).to(tl.int16, bitcast=True)
    return tl.where(value != value, QUIET_NAN, bits).to(tl.int16)


@triton.jit
def poison(ptr, num_elements, BLOCK: tl.constexpr):
    """Marks a run of int16 elements as not here yet."""
    for i in range(0, num_elements, BLOCK):
        offsets = i + tl.arange(0, BLOCK)
        tl.store(ptr + offsets, tl.full([BLOCK], SENTINEL, tl.int16), mask=offsets < num_elements)


@triton.jit
def data_poll(ptr, mask, TARGET: tl.constexpr):
    """Reads elements past every cache; elements outside the mask read 0.

    On AMD a poll needs the cache modifier as well, without which it is served from a cache for
    ever; NVIDIA's assembler refuses the two together.
    """
    if TARGET == AMD:
        return tl.load(ptr, mask=mask, other=0, volatile=True, cache_modifier=".cv")
    else:
        return tl.load(ptr, mask=mask, other=0, volatile=True)


@triton.jit
def num_missing(bits):
    """How many elements of a tuple of tiles of bits are not here yet."""
    missing = (bits[0] == SENTINEL).to(tl.int32)
    for source in tl.static_range(1, len(bits)):
        missing += (bits[source] == SENTINEL).to(tl.int32)
    return tl.sum(missing)


@triton.jit
def poll_sources(ctx, region, first, origin, offsets, mask, SOURCES: tl.constexpr):
    """What SOURCES ranks from `first` on have at `origin` + `offsets`; ranks past the last have 0.

    All loads are issued before the first is used: links answer slowly, but many at a time.
    """
    bits = ()
    for step in tl.static_range(0, SOURCES):
        source = tl.minimum(first + step, ctx.WORLD - 1)
        ptr = peer_ptr(ctx, region, source, tl.int16) + origin + offsets
        bits = bits + (data_poll(ptr, mask & (first + step < ctx.WORLD), ctx.TARGET),)
    return bits


@triton.jit
def data_add(
    ctx, call, region, first, origin, offsets, mask, total, index, phase, SOURCES: tl.constexpr
):
    """Adds to an fp32 tile what SOURCES ranks from `first` on have of it, in rank order.

    Polls the ranks' parts of a region until no element is the sentinel. Returns (sum, 1), or
    (anything, 0) after an abort. A wait that outlasts the bound aborts the call on every rank,
    naming a rank whose elements are missing and how many.
    origin: where the tile begins in the region, in elements, divisible by 8; `offsets` are from
        there.
    """
    # 0 waiting, 1 arrived, 2 somebody gave up, 3 the bound is over.
    state = tl.full((), 0, tl.int32)
    added = total
    begin = clock_ns(ctx.TARGET)
    while state == 0:
        bits = poll_sources(ctx, region, first, origin, offsets, mask, SOURCES)
        if num_missing(bits) == 0:
            added = total
            for step in tl.static_range(0, SOURCES):
                added += bits[step].to(tl.bfloat16, bitcast=True).to(tl.float32)
            state = tl.full((), 1, tl.int32)
        elif is_aborted(call.signal_ptr):
            state = tl.full((), 2, tl.int32)
        elif is_over(begin, call.bound_ns, ctx.TARGET):
            state = tl.full((), 3, tl.int32)
    if state == 3:
        zero = state * 0
        blamed = zero + first
        missing = zero
        for step in range(SOURCES):
            if missing == 0:
                blamed = zero + first + step
                bits = poll_sources(ctx, region, blamed, origin, offsets, mask, 1)
                missing = num_missing(bits)
        abort_all(
            ctx, call.rank, call.epoch, zero + TIMEOUT, blamed, zero + phase, zero + FLAG_DATA,
            zero + index, missing, zero,
        )  # fmt: skip
    return added, (state == 1).to(tl.int32)
