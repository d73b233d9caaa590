"""Sums of what several ranks hold of the same elements."""

import triton
import triton.language as tl


@triton.jit
def reduce_run(src_ptr, stride, dst_ptr, num_elements, SOURCES: tl.constexpr, BLOCK: tl.constexpr):
    """Adds up a contiguous run of bf16 elements in fp32, source 0 first, and rounds each sum once.

    The sources lie `stride` elements apart. The order is fixed, so that the sum does not depend on
    who adds or when.
    """
    for i in range(0, num_elements, BLOCK):
        offsets = i + tl.arange(0, BLOCK)
        inside = offsets < num_elements
        total = tl.zeros([BLOCK], tl.float32)
        for source in tl.static_range(0, SOURCES):
            total += tl.load(src_ptr + source * stride + offsets, mask=inside).to(tl.float32)
        tl.store(dst_ptr + offsets, total.to(tl.bfloat16), mask=inside)
