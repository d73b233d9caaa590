"""Transport: contiguous runs of elements, 16 bytes a thread and load."""

import triton
import triton.language as tl


@triton.jit
def copy_run(src_ptr, dst_ptr, num_elements, BLOCK: tl.constexpr, DEPTH: tl.constexpr):
    """Copies a contiguous run, BLOCK elements a step.

    DEPTH: further steps whose loads are in flight. A workgroup's rate is the bytes it keeps in
        flight over the latency of what it reads, which grows while builders load the memory system.
        One or two stay in registers, which is faster where the stores set the pace; more do not fit
        there: the pipeliner brings them to shared memory.
    """
    offsets = tl.arange(0, BLOCK)
    if DEPTH > 2:
        for i in tl.range(0, num_elements, BLOCK, num_stages=DEPTH + 1):
            inside = i + offsets < num_elements
            step = tl.load(src_ptr + i + offsets, mask=inside)
            tl.store(dst_ptr + i + offsets, step, mask=inside)
    else:
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
def copy_rows(
    src_ptr, src_rows, dst_ptr, dst_rows, inside, cols, PIECE: tl.constexpr, DEPTH: tl.constexpr
):
    """Copies rows of `cols` elements from anywhere to anywhere, DEPTH pieces of each in flight.

    src_rows, dst_rows: [ROWS] which rows.
    inside: [ROWS] which of them to copy.
    PIECE: elements of a row in a piece.
    """
    from_ptr = src_ptr + src_rows.to(tl.int64)[:, None] * cols
    to_ptr = dst_ptr + dst_rows.to(tl.int64)[:, None] * cols
    for k in range(0, cols, PIECE * DEPTH):
        at = k + tl.arange(0, PIECE)[None, :]
        pieces = (tl.load(from_ptr + at, mask=inside[:, None] & (at < cols)),)
        for i in tl.static_range(1, DEPTH):
            next_at = at + i * PIECE
            pieces = pieces + (
                tl.load(from_ptr + next_at, mask=inside[:, None] & (next_at < cols)),
            )
        for i in tl.static_range(0, DEPTH):
            next_at = at + i * PIECE
            tl.store(to_ptr + next_at, pieces[i], mask=inside[:, None] & (next_at < cols))


@triton.jit
def fill_nan(dst_ptr, num_elements, BLOCK: tl.constexpr):
    """Marks a run of an aborted call's output as never written."""
    for i in range(0, num_elements, BLOCK):
        offsets = i + tl.arange(0, BLOCK)
        value = tl.full([BLOCK], float("nan"), dst_ptr.dtype.element_ty)
        tl.store(dst_ptr + offsets, value, mask=offsets < num_elements)
