"""Polling: workgroups that see nothing new are parked until what they poll changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .clocktime import DeviceClock
from .region import Region
from .tasks import WorkGroup


class Poll(NamedTuple):
    """A synchronising read of a workgroup.

    Attributes:
        value: what it read.
        clock_reads: how often the workgroup had read the clock.
        number: which of the workgroup's reads it was.
        place: region and bytes.
        contents: the bytes in memory.
    """

    value: Any
    clock_reads: int
    number: int
    place: tuple[Region, int, int]
    contents: bytes


class Polls:
    """Recognises polling loops by their reads.

    A workgroup whose synchronising reads (atomics, volatile loads) repeat the same values at the
    same places, with no store, load or new value in between, is parked.

    Attributes:
        progress: grows whenever anything new happens.
        num_parks: how often a workgroup was parked.
        running: the workgroup that runs, None while the scheduler does.
        on_unpark: called with a workgroup that runs again, if not None.

    Args:
        clock: the device clock.
    """

    def __init__(self, clock: DeviceClock) -> None:
        self._clock = clock
        self.progress = 0
        self.num_parks = 0
        self.running: WorkGroup | None = None
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
        last = w.seen.get(key)
        w.num_notes += 1
        now = Poll(value, w.clock_reads, w.num_notes, (region, lo, hi), region.mem[lo:hi].tobytes())
        w.seen[key] = now
        if last is None or last.value != value:
            w.rep = 0
            self.progress += 1
            return
        # Whether the loop looks at the clock: then passing time can end it.
        w.timed = w.clock_reads != last.clock_reads
        w.rep += 1
        w.num_polls += 1
        if w.rep > len(w.seen):
            self._park(w)

    def _park(self, w: WorkGroup) -> None:
        # Words that an earlier loop has polled are still in `seen`: take those of this loop.
        loop = [p for p in w.seen.values() if p.number > w.num_notes - w.rep]
        w.rep = 0
        for p in loop:
            region, lo, hi = p.place
            if region.mem[lo:hi].tobytes() != p.contents:
                return  # it has changed since the loop looked at it
        w.parked = True
        w.wait_start = self._clock.now(w)
        w.num_parks += 1
        self.num_parks += 1
        w.watches = list(dict.fromkeys([*(p.place for p in loop), *w.spins]))
        for region, lo, hi in w.watches:
            region.watch.append((lo, hi, w))

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
        """Bytes [lo, hi) of `region` have changed, by an operation of `running`."""
        for w in [w for wlo, whi, w in region.watch if wlo < hi and whi > lo]:
            if w.parked:
                self._clock.woken(w, self.running)
                self.unpark(w)
