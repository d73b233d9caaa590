"""Sums of what several ranks hold of the same elements."""

import triton
import triton.language as tl

# Further steps whose loads are in flight, which the pipeliner brings to shared memory.
STEPS_AHEAD = tl.constexpr(3)


@triton.jit
def reduce_run(sources, dst_ptr, num_elements, SOURCES: tl.constexpr, BLOCK: tl.constexpr):
    """Adds up a contiguous run of bf16 elements in fp32 and rounds each sum once.

    The order is fixed, so that the sum does not depend on who adds or when.

    sources: a pointer to the first element at each of SOURCES, in the order of summation.
    BLOCK: elements of each source a step.
    """
    offsets = tl.arange(0, BLOCK)
    for i in tl.range(0, num_elements, BLOCK, num_stages=STEPS_AHEAD + 1):
        inside = i + offsets < num_elements
        total = tl.load(sources[0] + i + offsets, mask=inside).to(tl.float32)
        for source in tl.static_range(1, SOURCES):
            total += tl.load(sources[source] + i + offsets, mask=inside).to(tl.float32)
        tl.store(dst_ptr + i + offsets, total.to(tl.bfloat16), mask=inside)
