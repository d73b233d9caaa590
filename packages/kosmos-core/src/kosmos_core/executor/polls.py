"""Polling: workgroups that see nothing new are parked until what they poll changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .clocktime import DeviceClock
from .memory import Region
from .tasks import WorkGroup

_MISSING = object()


class Polls:
    """Recognises polling loops by their reads.

    A workgroup whose synchronising reads (atomics, volatile loads) repeat the same values at the
    same places, with no store, load or new value in between, is parked.

    Attributes:
        progress: grows whenever anything new happens.
        num_parks: how often a workgroup was parked.
        on_unpark: called with a workgroup that runs again, if not None.

    Args:
        clock: the device clock.
    """

    def __init__(self, clock: DeviceClock) -> None:
        self._clock = clock
        self.progress = 0
        self.num_parks = 0
        self.on_unpark: Callable[[WorkGroup], None] | None = None

    def note(
        self,
        w: WorkGroup,
        region: Region,
        lo: int,
        hi: int,
        value: Any,
        changed: bool,
        acquire: bool,
        site: int,
    ) -> None:
        """`w` has read `value` from bytes [lo, hi) of `region` (`changed`: and altered them)."""
        w.trail.append((site, region, lo, value, acquire))
        if changed:
            self.productive(w)
            return
        key = (site, region.base + lo)
        last, reads = w.seen.get(key, (_MISSING, 0))
        if last is _MISSING or last != value:
            w.seen[key] = (value, w.clock_reads)
            w.spins.append((region, lo, hi))
            w.rep = 0
            self.progress += 1
            return
        # Whether the loop looks at the clock: then passing time can end it.
        w.timed = w.clock_reads != reads
        w.seen[key] = (value, w.clock_reads)
        w.rep += 1
        w.num_polls += 1
        if w.rep > len(w.seen):
            w.parked = True
            w.wait_start = self._clock.ns
            w.rep = 0
            w.num_parks += 1
            self.num_parks += 1
            w.watches = list(dict.fromkeys(w.spins))
            for place in w.watches:
                place[0].watch.append((place[1], place[2], w))

    def productive(self, w: WorkGroup) -> None:
        """`w` did something that is not polling."""
        if w.seen:
            w.seen.clear()
            w.spins.clear()
            w.rep = 0
            w.timed = False
        self.progress += 1

    def unpark(self, w: WorkGroup) -> None:
        """Let `w` run again."""
        w.parked = False
        for region, lo, hi in w.watches:
            region.watch.remove((lo, hi, w))
        w.watches = []
        if self.on_unpark is not None:
            self.on_unpark(w)

    def wake(self, region: Region, lo: int, hi: int) -> None:
        """Bytes [lo, hi) of `region` have changed."""
        for w in [w for wlo, whi, w in region.watch if wlo < hi and whi > lo]:
            if w.parked:
                self.unpark(w)
