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
def data_wait(ctx, call, ptr, mask, peer, index, phase):
    """Polls a tile until none of its elements is the sentinel.

    Returns (bits, 1), or (bits, 0) after an abort. A wait that outlasts the bound aborts the call
    on every rank, naming `peer` and how many are missing.
    """
    state = tl.full((), 0, tl.int32)
    missing = tl.full((), 0, tl.int32)
    begin = clock_ns(ctx.TARGET)
    bits = tl.zeros(mask.shape, tl.int16)
    while state == 0:
        bits = data_poll(ptr, mask, ctx.TARGET)
        missing = tl.sum((bits == SENTINEL).to(tl.int32).reshape(bits.numel))
        if missing == 0:
            state = tl.full((), 1, tl.int32)
        elif is_aborted(call.signal_ptr):
            state = tl.full((), 2, tl.int32)
        elif is_over(begin, call.bound_ns, ctx.TARGET):
            state = tl.full((), 3, tl.int32)
    if state == 3:
        zero = missing * 0
        abort_all(
            ctx, call.rank, call.epoch, zero + TIMEOUT, zero + peer, zero + phase, zero + FLAG_DATA,
            zero + index, missing, zero,
        )  # fmt: skip
    return bits, (state == 1).to(tl.int32)
