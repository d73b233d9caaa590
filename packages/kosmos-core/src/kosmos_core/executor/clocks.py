"""Vector clocks: who has happened before whom.

Every workgroup index of every stream of every rank has a *slot* in the clocks, taken over by the
workgroup of the same index of the next launch on that stream (which happens after it), so that
clocks do not grow with the number of launches. Slots 1..num_ranks are the hosts. In strict mode a
workgroup has two slots: thread 0, and the other threads, which `tl.debug_barrier()` joins.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from .tasks import Clock, Launch, WorkGroup

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .region import Region

# An epoch packs slot, clock and source site in one int64.
SLOT_SHIFT = 43
CLOCK_SHIFT = 14
CLOCK_MASK = (1 << 29) - 1
SITE_MASK = (1 << 14) - 1
MAX_SLOTS = 1 << 20
# Launches whose workgroups can be named in reports, per slot.
_KEEP_NAMES = 64


class SyncVar:
    """What atomics on one address have published.

    Attributes:
        system: clock published with scope ``sys``.
        rank: clock published by each rank, any scope.
        scopes: which (rank, wide) pairs have accessed it; wide means scope ``sys``.
        last: epoch of the last atomic write.
    """

    __slots__ = ("last", "rank", "scopes", "system")

    def __init__(self) -> None:
        self.system: Clock | None = None
        self.rank: dict[int, Clock] = {}
        self.scopes: set[tuple[int, bool]] = set()
        self.last = 0


class Clocks:
    """The clocks of hosts, streams and workgroups.

    Args:
        num_ranks: number of ranks.
        strict: two slots a workgroup.
    """

    def __init__(self, num_ranks: int, strict: bool) -> None:
        self.num_ranks = num_ranks
        self.strict = strict
        self.width = max(64, num_ranks + 1)
        self._next_slot = num_ranks + 1
        self._slots: dict[tuple[int, int, int], int] = {}
        self._slot_clk: dict[int, int] = {}
        self._names: dict[int, list[tuple[int, int, str]]] = {}
        self.hosts = [np.zeros(self.width, np.int64) for _ in range(num_ranks)]
        self.streams: dict[tuple[int, int], Clock] = {}
        self.queued: dict[Launch, None] = {}
        for rank in range(num_ranks):
            self.hosts[rank][rank + 1] = 1

    # ---- hosts
    def host_epoch(self, rank: int) -> int:
        """Epoch of what the host of `rank` does now."""
        return (rank + 1) << SLOT_SHIFT | int(self.hosts[rank][rank + 1]) << CLOCK_SHIFT

    def tick_host(self, rank: int) -> None:
        """What the host of `rank` does from now on is later than what it has published."""
        self.hosts[rank][rank + 1] += 1

    def join_hosts(self) -> None:
        """All hosts meet (a host barrier)."""
        together = np.maximum.reduce(self.hosts)
        for rank in range(self.num_ranks):
            self.hosts[rank] = together.copy()
            self.tick_host(rank)

    def host_waits(self, rank: int, stream: int) -> None:
        """The host of `rank` has waited for everything on one of its streams."""
        done = self.streams.get((rank, stream))
        if done is not None:
            self.hosts[rank] = np.maximum(self.hosts[rank], done)

    # ---- launches and workgroups
    def enqueue(self, launch: Launch) -> None:
        """The launch happens after what its host has done."""
        launch.clock = self.hosts[launch.rank].copy()
        self.queued[launch] = None
        self.tick_host(launch.rank)

    def begin(self, launch: Launch, live: Sequence[WorkGroup], regions: Sequence[Region]) -> None:
        """The launch starts: after everything on its stream; make room for its workgroups."""
        self.queued.pop(launch, None)
        gx, gy, gz = launch.grid
        step = 2 if self.strict else 1
        for wg in range(gx * gy * gz):
            key = (launch.rank, launch.stream, wg)
            if key not in self._slots:
                self._slots[key] = self._next_slot
                self._next_slot += step
        if self._next_slot > MAX_SLOTS:
            raise ValueError(f"grid {launch.grid} is too large for the race detector")
        assert launch.clock is not None
        if self._next_slot > self.width:
            self._grow(launch, live, regions)
        done = self.streams.get((launch.rank, launch.stream))
        if done is not None:
            launch.clock = np.maximum(launch.clock, done)

    def _grow(self, launch: Launch, live: Sequence[WorkGroup], regions: Sequence[Region]) -> None:
        width = max(self._next_slot, 2 * self.width)

        def wide(v: Clock) -> Clock:
            out = np.zeros(width, np.int64)
            out[: len(v)] = v
            return out

        self.width = width
        self.hosts = [wide(v) for v in self.hosts]
        self.streams = {k: wide(v) for k, v in self.streams.items()}
        for q in [launch, *self.queued]:
            assert q.clock is not None
            q.clock = wide(q.clock)
        for other in {w.launch for w in live} - {launch}:
            assert other.clock is not None
            other.clock = wide(other.clock)
        for w in live:
            same = w.vc_tile is w.vc
            w.vc = wide(w.vc)
            w.vc_tile = w.vc if same else wide(w.vc_tile)
            w.pending = None if w.pending is None else wide(w.pending)
            w.fence = None if w.fence is None else wide(w.fence)
        for region in regions:
            for var in region.sync.values():
                var.system = None if var.system is None else wide(var.system)
                var.rank = {k: wide(v) for k, v in var.rank.items()}

    def start(self, w: WorkGroup) -> None:
        """A workgroup starts."""
        launch = w.launch
        assert launch.clock is not None
        w.slot = slot = self._slots[(w.rank, launch.stream, w.wg)]
        w.clk = self._slot_clk.get(slot, 0) + 1
        names = self._names.setdefault(slot, [])
        names.append((w.clk, launch.number, repr(w)))
        if len(names) > 2 * _KEEP_NAMES:
            del names[:_KEEP_NAMES]
        w.vc = launch.clock.copy()
        w.vc[slot] = w.clk
        if self.strict:
            w.clk_tile = self._slot_clk.get(slot + 1, 0) + 1
            w.vc_tile = launch.clock.copy()
            w.vc_tile[slot + 1] = w.clk_tile
        else:
            w.clk_tile = w.clk
            w.vc_tile = w.vc

    def finish(self, w: WorkGroup) -> None:
        """A workgroup has ended: its stream is after it."""
        self._slot_clk[w.slot] = w.clk
        end = w.vc
        if self.strict:
            self._slot_clk[w.slot + 1] = w.clk_tile
            end = np.maximum(end, w.vc_tile)
        key = (w.rank, w.launch.stream)
        done = self.streams.get(key)
        self.streams[key] = end.copy() if done is None else np.maximum(done, end)

    def advance(self, w: WorkGroup) -> None:
        """After a release: what thread 0 does from now on is not covered by it."""
        w.clk += 1
        w.vc = w.vc.copy()
        w.vc[w.slot] = w.clk
        if not self.strict:
            w.vc_tile = w.vc
            w.clk_tile = w.clk

    def barrier(self, w: WorkGroup) -> None:
        """``tl.debug_barrier()``: all threads of the workgroup meet (strict mode)."""
        if not self.strict:
            return
        joined = np.maximum(w.vc, w.vc_tile)
        w.vc, w.vc_tile = joined, joined.copy()
        w.clk += 1
        w.clk_tile += 1
        w.vc[w.slot] = w.clk
        w.vc_tile[w.slot + 1] = w.clk_tile

    def learn(self, w: WorkGroup, clock: Clock) -> None:
        """An acquire: all threads of the workgroup are after `clock`."""
        w.vc = np.maximum(w.vc, clock)
        w.vc_tile = np.maximum(w.vc_tile, clock) if self.strict else w.vc

    def epoch(self, w: WorkGroup, tile: bool, site: int) -> int:
        """Packed epoch of an access of `w`: by all threads if `tile`, else by thread 0."""
        if tile and self.strict:
            return (w.slot + 1) << SLOT_SHIFT | w.clk_tile << CLOCK_SHIFT | site
        return w.slot << SLOT_SHIFT | w.clk << CLOCK_SHIFT | site

    def everyone(self, live: Sequence[WorkGroup]) -> Iterator[Clock]:
        """All clocks that can still perform an access."""
        yield from self.hosts
        yield from self.streams.values()
        for launch in self.queued:
            assert launch.clock is not None
            yield launch.clock
        for w in live:
            yield w.vc
            yield w.vc_tile
            assert w.launch.clock is not None
            yield w.launch.clock

    def name(self, epoch: int, launch: int) -> str:
        """Who performed the access of an epoch; the launch is named if it is not `launch`."""
        slot = epoch >> SLOT_SHIFT
        if slot <= self.num_ranks:
            return f"host of rank {slot - 1}" if slot else "initialisation"
        names = self._names.get(slot) or self._names.get(slot - 1) or []
        clk = epoch >> CLOCK_SHIFT & CLOCK_MASK
        out = ""
        for first, number, name in names:
            if self.strict and slot not in self._names:
                first = 0
            if first <= clk:
                out = name if number == launch else f"{name} (launch {number})"
        return out
