"""Defects to plant in kosmos-core's own device functions, for the plant lists of all packages."""

from __future__ import annotations

from typing import Any, NamedTuple

from kosmos_core.device import barrier, flags


class Defect(NamedTuple):
    """A defect; the first fields of each package's `Plant`.

    Attributes:
        name: of the defect.
        rule: of docs/memory-model.md that it breaks.
        what: the defect in a line.
        edits: (function, text that occurs once in its source, text in its place).
    """

    name: str
    rule: str
    what: str
    edits: tuple[tuple[Any, str, str], ...]


NO_BARRIER = Defect(
    "no_barrier",
    "publish",
    "no barrier between a workgroup's stores and the release that announces them",
    ((flags.publish, "tl.debug_barrier()", "pass"),),
)
ARRIVAL_RELAXED = Defect(
    "arrival_relaxed",
    "publish",
    "an arrival is counted with a relaxed atomic instead of a release",
    ((flags.flag_arrive, 'sem="release"', 'sem="relaxed"'),),
)
START_RELAXED = Defect(
    "start_relaxed",
    "publish",
    "a start word is published relaxed",
    ((barrier.start_publish, 'sem="release"', 'sem="relaxed"'),),
)
START_GPU_SCOPE = Defect(
    "start_gpu_scope",
    "scope",
    "a start word is published with scope gpu",
    ((barrier.start_publish, 'sem="release", scope="sys"', 'sem="release", scope="gpu"'),),
)
SET_NOT_ZEROED = Defect(
    "set_not_zeroed",
    "epochs",
    "the counter set of the next call is not zeroed",
    ((barrier.call_clean, "zero_words(other_ptr, ctx.SET_WORDS, SET_GRANULE)", "pass"),),
)
ARRIVALS_NOT_ZEROED = Defect(
    "arrivals_not_zeroed",
    "epochs",
    "the counters that peers add to are not zeroed",
    ((barrier.call_clean, "zero_words(arrival_ptr, ctx.ARRIVAL_WORDS, SET_GRANULE)", "pass"),),
)
ELECTION_WITHOUT_RELEASE = Defect(
    "election_without_release",
    "claims",
    "workgroups count themselves in without releasing what they have stored",
    ((barrier.elect_last, 'sem="acq_rel"', 'sem="acquire"'),),
)
