"""Transport: contiguous runs of elements, 16 bytes a thread and load."""

import triton
import triton.language as tl


@triton.jit
def copy_run(src_ptr, dst_ptr, num_elements, BLOCK: tl.constexpr, DEPTH: tl.constexpr):
    """Copies a contiguous run, BLOCK elements a step.

    DEPTH: further steps whose loads are in flight, 1 or 2. A workgroup's rate is the bytes it
    keeps in flight over the latency of the link, which grows while builders load the memory system.
    """
    offsets = tl.arange(0, BLOCK)
    first = tl.load(src_ptr + offsets, mask=offsets < num_elements)
    if DEPTH == 2:
        second = tl.load(src_ptr + BLOCK + offsets, mask=BLOCK + offsets < num_elements)
    for i in range(0, num_elements, BLOCK):
        ahead = i + DEPTH * BLOCK + offsets
        following = tl.load(src_ptr + ahead, mask=ahead < num_elements)
        tl.store(dst_ptr + i + offsets, first, mask=i + offsets < num_elements)
        if DEPTH == 2:
            first = second
            second = following
        else:
            first = following


@triton.jit
def fill_nan(dst_ptr, num_elements, BLOCK: tl.constexpr):
    """Marks a run of an aborted call's output as never written."""
    for i in range(0, num_elements, BLOCK):
        offsets = i + tl.arange(0, BLOCK)
        value = tl.full([BLOCK], float("nan"), dst_ptr.dtype.element_ty)
        tl.store(dst_ptr + offsets, value, mask=offsets < num_elements)
