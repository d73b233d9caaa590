"""Weak memory: store buffers, visibility by scope, and stale views.

A plain store goes to the store buffer of its workgroup. A release of scope ``gpu`` makes the
buffer visible to the workgroup's rank, one of scope ``sys`` to everybody, together with all that
its rank has seen. In strict mode a tile store is young (done by all threads) until
``tl.debug_barrier()``, and a release by one thread does not cover it.

With stale views, a load before an acquire may see memory as it was at the last acquire: `StaleLog`
holds what each publication overwrote, and a load undoes what became visible too late.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .access import Access, Array
from .buffers import Dirty, Store, overlapped, patch, split
from .region import Region
from .stale import OTHERS_ONLY, PLAIN, RANK_ONLY, StaleLog, rollback

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from .tasks import Launch, WorkGroup

_U8 = np.dtype(np.uint8)


class WeakMemory:
    """Store buffers and views of all workgroups.

    Args:
        mode: "late" or "random".
        stale: whether loads may be stale.
        strict: whether tile stores need a barrier before a release.
        num_ranks: number of ranks.
        rng: source of random publications.
        wake: called as ``wake(region, lo, hi)`` when bytes change visibly.
    """

    def __init__(
        self,
        mode: str,
        stale: bool,
        strict: bool,
        num_ranks: int,
        rng: random.Random,
        wake: Callable[[Region, int, int], None],
    ) -> None:
        self.random = mode == "random"
        self.stale = stale
        self.strict = strict
        self.num_ranks = num_ranks
        self._rng = rng
        self._wake = wake
        self.seq = 0
        # Ended workgroups of launches that have not ended, with stores left in their buffers.
        self._ended: list[WorkGroup] = []
        self._rank_dirty: list[dict[Region, None]] = [{} for _ in range(num_ranks)]

    # ---- loads and stores
    def read(self, w: WorkGroup, a: Access, dtype: np.dtype[Any]) -> Array:
        """Value of a plain load."""
        region = a.region
        source = region.views.get(w.rank) if region.views else None
        if source is None:
            source = region.mem
        out = None
        if region.log is not None:
            out = rollback(w, a, dtype, source)
        if out is None:
            out = a.gather(source, dtype)
        if w.buffer and (stores := w.buffer.get(region)):
            out = patch(a, dtype, out, stores)
        if w.young and (stores := w.young.get(region)):
            out = patch(a, dtype, out, stores)
        return out

    def write(self, w: WorkGroup, a: Access, dtype: np.dtype[Any], values: Array) -> None:
        """A plain store: into the store buffer."""
        target = w.buffer
        if self.strict and (a.is_tile or overlapped(w.young.get(a.region), a)):
            # Also a scalar store over a young one: one address is written in program order.
            target = w.young
        stores = target.get(a.region)
        if stores is None:
            stores = target[a.region] = []
        stores.append(Store(a, dtype, values))

    def settle(self, w: WorkGroup, a: Access) -> None:
        """Before an atomic access: earlier plain stores of this WG or rank to its address."""
        region = a.region
        if overlapped(w.buffer.get(region), a):
            self._publish(w.id, w.rank, region, w.buffer.pop(region))
        dirty = region.dirty.get(w.rank) if region.dirty else None
        if dirty is not None and dirty.lo < a.hi and dirty.hi > a.lo:
            self._publish_dirty(region, w.rank)

    def note_coherent(self, w: WorkGroup, a: Access) -> None:
        """A coherent (atomic, volatile) read: later loads of these bytes see nothing older."""
        if self.stale and self.seq:
            seen = w.coherent.setdefault(a.region, {})
            if len(seen) >= 256:
                seen.pop(next(iter(seen)))
            seen[(a.lo, a.hi)] = self.seq

    # ---- synchronisation
    def barrier(self, w: WorkGroup) -> None:
        """``tl.debug_barrier()``: tile stores join the stores of thread 0."""
        for region, young in w.young.items():
            w.buffer.setdefault(region, []).extend(young)
        w.young.clear()

    def flush(self, w: WorkGroup, system: bool) -> None:
        """A release: publish the store buffer to the rank, or to everybody."""
        if system or self.num_ranks == 1:
            self._publish_rank(w.rank)
            for region, stores in w.buffer.items():
                self._publish(w.id, w.rank, region, stores)
        else:
            for region, stores in w.buffer.items():
                self._publish_to_rank(w, region, stores)
        w.buffer.clear()

    def acquire(self, w: WorkGroup, system: bool) -> None:
        """An acquire: loads from now on see what is visible now."""
        w.view_gpu = self.seq
        if system:
            w.view_sys = self.seq

    def finish(self, w: WorkGroup) -> None:
        """End of a workgroup: what it has stored need not be visible before its launch ends."""
        self.barrier(w)
        if w.buffer:
            self._ended.append(w)

    def finish_launch(self, launch: Launch) -> None:
        """End of a launch: everything becomes visible."""
        for w in [w for w in self._ended if w.launch is launch]:
            self.flush(w, True)
            self._ended.remove(w)
        self._publish_rank(launch.rank)

    def drain(self, live: Sequence[WorkGroup]) -> list[str]:
        """Publish everything: stores become visible eventually.

        Returns:
            Whose stores to what, as text.
        """
        did = []
        for rank in range(self.num_ranks):
            names = ", ".join(dict.fromkeys(r.name for r in self._rank_dirty[rank]))
            if self._publish_rank(rank):
                did.append(f"rank {rank} to {names}")
        for w in (*live, *self._ended):
            self.barrier(w)
            for region, stores in w.buffer.items():
                self._publish(w.id, w.rank, region, stores)
                did.append(f"{w} to {region.name}")
            w.buffer.clear()
        self._ended.clear()
        return did

    def publish_some(self, live: Sequence[WorkGroup]) -> tuple[int, ...] | None:
        """At random, make some buffered stores of some workgroup visible (mode "random").

        Returns:
            The decision, for the hash of the schedule; None if nothing was published.
        """
        rng = self._rng
        if rng.random() >= 0.1:
            return None
        number = int(rng.random() * (len(live) + len(self._ended)))
        w = live[number] if number < len(live) else self._ended[number - len(live)]
        choices = [(w.buffer, r) for r in w.buffer]
        choices += [(w.young, r) for r in w.young if r.sentinel is not None]
        if not choices:
            return None
        which = int(rng.random() * len(choices))
        buffer, region = choices[which]
        stores = buffer.pop(region)
        if region.sentinel is not None and rng.random() < 0.8:
            # Polled data becomes visible element by element, in any order.
            salt = rng.getrandbits(62) | 1
            now, later = split(stores, salt)
            if later:
                buffer[region] = later
            if now:
                self._publish(w.id, w.rank, region, now)
            return (w.id, which, salt)
        count = 1 + int(rng.random() * len(stores))
        if count < len(stores):
            buffer[region] = stores[count:]
        self._publish(w.id, w.rank, region, stores[:count])
        return (w.id, which, count)

    # ---- publishing
    def put(self, region: Region, a: Access, dtype: np.dtype[Any], values: Any) -> None:
        """Write bytes so that everybody sees them (atomics)."""
        a.scatter(region.mem, dtype, values)
        for view in region.views.values():
            a.scatter(view, dtype, values)

    def _publish(self, wid: int, rank: int, region: Region, stores: list[Store]) -> None:
        for s in stores:
            a = s.access
            if self.stale:
                self._log(region, a, s.dtype, a.gather(region.mem, s.dtype), rank, PLAIN, wid)
            self.put(region, a, s.dtype, s.values)
            if region.watch:
                self._wake(region, a.lo, a.hi)

    def _publish_to_rank(self, w: WorkGroup, region: Region, stores: list[Store]) -> None:
        view = region.views.get(w.rank)
        if view is None:
            view = region.views[w.rank] = region.mem.copy()
            region.dirty[w.rank] = Dirty(region.nbytes)
        dirty = region.dirty[w.rank]
        self._rank_dirty[w.rank][region] = None
        for s in stores:
            a = s.access
            if self.stale:
                self._log(region, a, s.dtype, a.gather(view, s.dtype), w.rank, RANK_ONLY, w.id)
            a.scatter(view, s.dtype, s.values)
            dirty.mark(a)
            if region.watch:
                self._wake(region, a.lo, a.hi)

    def _publish_rank(self, rank: int) -> bool:
        """What the rank sees becomes visible to everybody; whether there was anything."""
        did = False
        for region in self._rank_dirty[rank]:
            did = self._publish_dirty(region, rank) or did
        self._rank_dirty[rank].clear()
        return did

    def _publish_dirty(self, region: Region, rank: int) -> bool:
        offsets = region.dirty[rank].take()
        if not len(offsets):
            return False
        lo, hi = int(offsets[0]), int(offsets[-1]) + 1
        a = Access(region, 1, offsets.shape, 0, None, offsets, None, lo, hi, len(offsets))
        if self.stale:
            self._log(region, a, _U8, region.mem[offsets], rank, OTHERS_ONLY, -1)
        values = region.views[rank][offsets]
        region.mem[offsets] = values
        for other, view in region.views.items():
            if other != rank:
                view[offsets] = values
        if region.watch:
            self._wake(region, lo, hi)
        return True

    def _log(
        self,
        region: Region,
        a: Access,
        dtype: np.dtype[Any],
        old: Array,
        rank: int,
        kind: int,
        wid: int,
    ) -> None:
        self.seq += 1
        if region.log is None:
            region.log = StaleLog()
        region.log.append(self.seq, a, dtype, old, rank, kind, wid)
