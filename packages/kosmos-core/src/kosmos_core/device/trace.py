"""In-kernel trace: spans of a workgroup's roles, compiled away when off.

Buffer: int64 [workgroups, 1 + 4 * events]; word 0 counts the events of a workgroup, an event is
(kind, argument, begin ns, end ns). Each workgroup writes only its own row.
"""

import triton
import triton.language as tl

from kosmos_core.device.target import clock_ns

COPY_IN = tl.constexpr(1)
MOVE = tl.constexpr(2)
WAIT = tl.constexpr(3)
BUILD = tl.constexpr(4)
KEEP = tl.constexpr(5)
CALL = tl.constexpr(6)
REDUCE = tl.constexpr(7)
ROUTE = tl.constexpr(8)
PLAN = tl.constexpr(9)
COMBINE = tl.constexpr(10)
FOLD = tl.constexpr(11)

EVENT_WORDS = tl.constexpr(4)
KIND_NAMES = {
    1: "copy_in",
    2: "move",
    3: "wait",
    4: "build",
    5: "keep",
    6: "call",
    7: "reduce",
    8: "route",
    9: "plan",
    10: "combine",
    11: "fold",
}


@triton.jit
def trace_begin(ctx):
    """Time at which a span begins; 0 when the trace is off."""
    if ctx.TRACE > 0:
        return clock_ns(ctx.TARGET)
    else:
        return tl.full((), 0, tl.int64)


@triton.jit
def trace_end(ctx, KIND: tl.constexpr, argument, begin):
    """Appends a span to this workgroup's row; spans past the row's end are counted but not kept."""
    if ctx.TRACE > 0:
        row_ptr = ctx.trace_ptr + tl.program_id(0) * (1 + EVENT_WORDS * ctx.TRACE)
        count = tl.load(row_ptr)
        if count < ctx.TRACE:
            event_ptr = row_ptr + 1 + count * EVENT_WORDS
            tl.store(event_ptr, tl.full((), KIND, tl.int64))
            tl.store(event_ptr + 1, argument.to(tl.int64))
            tl.store(event_ptr + 2, begin)
            tl.store(event_ptr + 3, clock_ns(ctx.TARGET))
        # The row is this workgroup's own, but thread 0 writes the count that all threads read next.
        tl.debug_barrier()
        tl.store(row_ptr, count + 1)
        tl.debug_barrier()
