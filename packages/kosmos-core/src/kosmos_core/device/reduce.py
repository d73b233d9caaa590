"""Sums of what several ranks hold of the same elements."""

import triton
import triton.language as tl


@triton.jit
def load_sources(sources, offsets, inside, SOURCES: tl.constexpr):
    """The same elements of every source, all loads issued before any is used."""
    loaded = (tl.load(sources[0] + offsets, mask=inside),)
    for source in tl.static_range(1, SOURCES):
        loaded = loaded + (tl.load(sources[source] + offsets, mask=inside),)
    return loaded


@triton.jit
def add_sources(loaded, SOURCES: tl.constexpr):
    """Their sum in fp32, source 0 first, rounded once to bf16."""
    total = loaded[0].to(tl.float32)
    for source in tl.static_range(1, SOURCES):
        total += loaded[source].to(tl.float32)
    return total.to(tl.bfloat16)


@triton.jit
def reduce_run(
    sources,
    dst_ptr,
    num_elements,
    SOURCES: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Adds up a contiguous run of bf16 elements in fp32 and rounds each sum once.

    The order is fixed, so that the sum does not depend on who adds or when.

    sources: a pointer to the first element at each of SOURCES, in the order of summation.
    AHEAD: the next step's loads are issued before this step's sum is stored. What comes over a link
        needs it, as `copy_run` says; two sources leave enough registers for longer steps, too.
    """
    offsets = tl.arange(0, BLOCK)
    if AHEAD:
        loaded = load_sources(sources, offsets, offsets < num_elements, SOURCES)
        for i in range(0, num_elements, BLOCK):
            ahead = i + BLOCK + offsets
            following = load_sources(sources, ahead, ahead < num_elements, SOURCES)
            total = add_sources(loaded, SOURCES)
            tl.store(dst_ptr + i + offsets, total, mask=i + offsets < num_elements)
            loaded = following
    else:
        for i in range(0, num_elements, BLOCK):
            inside = i + offsets < num_elements
            total = tl.load(sources[0] + i + offsets, mask=inside).to(tl.float32)
            for source in tl.static_range(1, SOURCES):
                total += tl.load(sources[source] + i + offsets, mask=inside).to(tl.float32)
            tl.store(dst_ptr + i + offsets, total.to(tl.bfloat16), mask=inside)
