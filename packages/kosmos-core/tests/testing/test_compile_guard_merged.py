"""Where LLVM merges two polls, what is left may stand at the place of a caller."""

from __future__ import annotations

import pytest
from kosmos_core.testing.compile_guard import ordering
from kosmos_core.testing.compile_guard.listing import Event, Instruction, Listing
from kosmos_core.testing.compile_guard.ttir import Module, Op, Place, Source, parse

READ, WAIT, ROWS, TILE = (
    Source("flags.py", 63), Source("flags.py", 137), Source("gemm.py", 180), Source("gemm.py", 262)
)  # fmt: skip
POLL = "%1 = tt.atomic_rmw add, acquire, sys, %0, %c0, %true : (!tt.ptr<i32>, i32, i1) -> i32"


def acquire(scope: str, place: Place) -> Instruction:
    return Instruction("buffer_inv", place, (Event("acquire", scope),))


@pytest.mark.parametrize(
    ("place", "passes"),
    [
        (Place(READ, WAIT), True),
        # Another line of the function that waits, called from the same place.
        (Place(Source("gemm.py", 179), TILE), True),
        (Place(TILE), True),
        (Place(Source("barrier.py", 156), Source("barrier.py", 185)), False),
        (Place(Source("gemm.py", 179), Source("gemm.py", 300)), False),
    ],
)
def test_a_scope_counts_where_a_caller_stands(place: Place, passes: bool) -> None:
    op = Op(POLL, Place(READ, WAIT, (WAIT, ROWS, TILE)), [])
    listing = Listing([acquire("gpu", Place(READ, WAIT)), acquire("sys", place)])
    findings = ordering.check_atomics(Module([op]), listing, True)
    assert [f.check for f in findings] == ([] if passes else ["scope"])


def test_all_callers_are_read_from_the_ir() -> None:
    text = """
#loc1 = loc("a/flags.py":63:11)
#loc2 = loc("a/flags.py":137:15)
#loc3 = loc("b/gemm.py":180:8)
#loc4 = loc(callsite(#loc1 at #loc2))
#loc5 = loc(callsite(#loc4 at #loc3))
%1 = tt.atomic_rmw add, acquire, sys, %0 loc(#loc5)
"""
    (op,) = parse(text).ops
    assert (op.place.source, op.place.caller) == (READ, ROWS)
    assert op.place.callers == (WAIT, ROWS)
