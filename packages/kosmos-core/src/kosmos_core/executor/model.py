"""What a memory instruction of a workgroup does: values, visibility, races, polling."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .access import Access, Array
from .tasks import Ordering, WorkGroup

if TYPE_CHECKING:
    from .clocktime import DeviceClock
    from .memory import Memory
    from .polls import Polls
    from .races import RaceDetector
    from .scheduler import Scheduler
    from .sites import Sites
    from .weak import WeakMemory

# Returns (values before, values after) given the values in memory.
Update = Callable[[Array, Access], tuple[Array, Array]]

_PLAIN_POLL_READS = 200


RELAXED_SYSTEM = Ordering(False, False, True)


class MemoryModel:
    """Executes memory instructions.

    Args:
        memory: regions.
        weak: weak memory, or None for sequential consistency.
        races: race detector, or None.
        strict: releases need a barrier after tile stores.
        switch_memory: plain accesses are scheduling points too.
    """

    def __init__(
        self,
        memory: Memory,
        weak: WeakMemory | None,
        races: RaceDetector | None,
        polls: Polls,
        clock: DeviceClock,
        sites: Sites,
        switch_memory: bool,
    ) -> None:
        self.memory = memory
        self.weak = weak
        self.races = races
        self.polls = polls
        self.clock = clock
        self.sites = sites
        self.switch_memory = switch_memory
        self.scheduler: Scheduler | None = None
        self.lints: dict[str, None] = {}
        self.traffic: dict[tuple[int, int, str], int] = {}
        self.num_loads = 0
        self.num_stores = 0
        self.num_atomics = 0

    def pause(self, w: WorkGroup) -> None:
        """A scheduling point."""
        self.clock.tick()
        assert self.scheduler is not None
        self.scheduler.pause(w)

    # ---- plain accesses
    def load(
        self,
        w: WorkGroup,
        pointers: Array,
        mask: Array | None,
        other: Array | None,
        dtype: np.dtype[Any],
    ) -> Array:
        """A plain load; masked elements are `other`, or 0."""
        if self.switch_memory:
            self.pause(w)
        accesses = self.memory.resolve(pointers, mask, dtype.itemsize)
        if len(accesses) == 1 and accesses[0].select is None:
            a = accesses[0]
            out = self.read(w, a, dtype)
            if a.index is not None:
                out = out.reshape(pointers.shape)
            if pointers.size == 1:
                self._plain_poll(w, a, out)
            elif w.seen:
                self.polls.productive(w)
            return out
        out = filled(pointers.shape, other, dtype)
        for a in accesses:
            out[a.select] = self.read(w, a, dtype)
        return out

    def read(self, w: WorkGroup, a: Access, dtype: np.dtype[Any]) -> Array:
        """Read an access."""
        self.num_loads += 1
        w.spin_reads = 0
        self._account(w, a)
        if self.races is not None:
            self.races.read(w, a, self.sites.here())
        if self.weak is not None:
            return self.weak.read(w, a, dtype)
        return a.gather(a.region.mem, dtype)

    def _account(self, w: WorkGroup, a: Access) -> None:
        """Time and traffic of a plain access."""
        region = a.region
        cost = self.clock.cost
        if cost is not None:
            self.clock.charge(w, cost.access_ns(region.rank == w.rank, a.nbytes))
        if region.rank != w.rank:
            key = (w.rank, region.rank, region.name)
            self.traffic[key] = self.traffic.get(key, 0) + a.nbytes

    def _plain_poll(self, w: WorkGroup, a: Access, out: Array) -> None:
        """Plain scalar loads in a loop: somebody spins without volatile or atomic."""
        w.num_plain += 1
        if w.num_plain > _PLAIN_POLL_READS:
            site = self.sites.here()
            value = out.item()
            self.polls.note(w, a.region, a.lo, a.hi, value, False, False, site)
            if w.parked:
                self.lint(f"plain (non-volatile) polling at {self.sites.describe(site)}")
                self.pause(w)

    def store(
        self, w: WorkGroup, pointers: Array, mask: Array | None, values: Array, dtype: np.dtype[Any]
    ) -> None:
        """A plain store."""
        if self.switch_memory:
            self.pause(w)
        if values.shape != pointers.shape:
            values = np.broadcast_to(values, pointers.shape)
        for a in self.memory.resolve(pointers, mask, dtype.itemsize):
            self.write(w, a, dtype, a.pick(values))
        self.polls.productive(w)

    def write(self, w: WorkGroup, a: Access, dtype: np.dtype[Any], values: Array) -> None:
        """Write an access (`values` shaped like its `gather`)."""
        self.num_stores += 1
        w.spin_reads = 0
        self._account(w, a)
        site = self.sites.here()
        w.unbarred = site
        if self.races is not None:
            self.races.write(w, a, values, site)
        if self.weak is not None:
            self.weak.write(w, a, dtype, values)
        else:
            a.scatter(a.region.mem, dtype, values)
            if a.region.watch:
                self.polls.wake(a.region, a.lo, a.hi)

    # ---- synchronising accesses
    def sync(
        self,
        w: WorkGroup,
        pointers: Array,
        mask: Array | None,
        other: Array | None,
        dtype: np.dtype[Any],
        order: Ordering,
        update: Update | None = None,
    ) -> Array:
        """An atomic or volatile load (no `update`) or a read-modify-write; returns old values."""
        self.pause(w)
        w.num_plain = 0
        accesses = self.memory.resolve(pointers, mask, dtype.itemsize)
        return self.sync_accesses(w, accesses, pointers.shape, other, dtype, order, update)

    def sync_accesses(
        self,
        w: WorkGroup,
        accesses: list[Access],
        shape: tuple[int, ...],
        other: Array | None,
        dtype: np.dtype[Any],
        order: Ordering,
        update: Update | None,
    ) -> Array:
        """`sync` on accesses that are resolved already."""
        site = self.sites.here()
        self.num_atomics += 1
        w.spin_reads = 0
        release = order.release and update is not None
        weak = self.weak
        if release:
            if w.unbarred:
                self.lint(
                    f"release at {self.sites.describe(site)} after a plain store at "
                    f"{self.sites.describe(w.unbarred)} without tl.debug_barrier() between"
                )
            if weak is not None:
                weak.flush(w, order.system)
        whole = len(accesses) == 1 and accesses[0].select is None
        out = np.zeros(0, dtype) if whole else filled(shape, other, dtype)
        changed = False
        for a in accesses:
            old, altered = self._sync_access(w, a, dtype, update)
            changed = changed or altered
            if self.races is not None:
                if a.region.sentinel is not None and update is None:
                    self.races.poll_data(w, a, old, site)
                else:
                    self.races.sync(w, a, order, update is not None, altered, site)
            if whole:
                out = old if a.index is None else old.reshape(shape)
            else:
                out[a.select] = old
        if order.acquire:
            w.proxy_dirty = True
            if weak is not None:
                weak.acquire(w, order.system)
        if accesses:
            a = accesses[0]
            value = out.item() if out.size == 1 else out.tobytes()
            self.polls.note(w, a.region, a.lo, a.hi, value, changed, order.acquire, site)
            for a in accesses[1:]:
                w.spins[a.region, a.lo, a.hi] = None
        return out

    def _sync_access(
        self, w: WorkGroup, a: Access, dtype: np.dtype[Any], update: Update | None
    ) -> tuple[Array, bool]:
        region = a.region
        cost = self.clock.cost
        if cost is not None:
            local = region.rank == w.rank
            self.clock.charge(w, cost.atomic_ns if local else cost.remote_atomic_ns)
            # Nobody reads a word before it was written, whatever the policy.
            w.time = max(w.time, region.stamps.get(a.lo, 0))
        weak = self.weak
        if weak is not None:
            weak.settle(w, a)
        old = a.gather(region.mem, dtype)
        changed = False
        if update is not None:
            old, new = update(old, a)
            new = np.ascontiguousarray(new, dtype)
            changed = new.tobytes() != old.tobytes()
            if changed:
                if cost is not None:
                    region.stamps[a.lo] = w.time
                if weak is not None:
                    weak.put(region, a, dtype, new)
                else:
                    a.scatter(region.mem, dtype, new)
                if region.watch:
                    self.polls.wake(region, a.lo, a.hi)
        if weak is not None:
            weak.note_coherent(w, a)
        return old, changed

    # ---- barriers and fences
    def barrier(self, w: WorkGroup) -> None:
        """``tl.debug_barrier()``."""
        w.unbarred = 0
        if self.weak is not None:
            self.weak.barrier(w)
        if self.races is not None:
            self.races.clocks.barrier(w)

    def fence(self, w: WorkGroup, system: bool) -> None:
        """An acquire-release fence of thread 0 (strict), or of all threads."""
        if self.weak is not None:
            self.weak.flush(w, system)
            self.weak.acquire(w, system)
        if self.races is not None:
            self.races.fence(w)

    def read_clock(self, w: WorkGroup) -> int:
        """The device clock in ns."""
        if self.clock.read(w):
            self.pause(w)
        return self.clock.now(w)

    def lint(self, text: str) -> None:
        """Note something suspicious (once)."""
        self.lints[text] = None


def filled(shape: tuple[int, ...], other: Array | None, dtype: np.dtype[Any]) -> Array:
    """What masked elements of a load are."""
    if other is None:
        return np.zeros(shape, dtype)
    return np.array(np.broadcast_to(other, shape), dtype)
