"""Happens-before race detector: vector clocks with scopes, per element of every region."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .access import UINT, Access, Array
from .clocks import CLOCK_MASK, CLOCK_SHIFT, SITE_MASK, SLOT_SHIFT, Clocks, SyncVar
from .errors import DataRace
from .readlog import ReadLog
from .region import Region
from .sites import Sites
from .tasks import Ordering, WorkGroup


class RaceDetector:
    """Finds accesses that no synchronisation orders.

    Args:
        num_ranks: number of ranks.
        strict: tile accesses belong to all threads, atomics to thread 0.
        fatal: raise at the first race instead of collecting.
        sites: numbering of source lines.
        live: the live workgroups (shared list).
    """

    def __init__(
        self, num_ranks: int, strict: bool, fatal: bool, sites: Sites, live: Sequence[WorkGroup]
    ) -> None:
        self.clocks = Clocks(num_ranks, strict)
        self.strict = strict
        self.fatal = fatal
        self.found: list[DataRace] = []
        self._keys: set[tuple[str, int, int]] = set()
        self._sites = sites
        self._live = live

    # ---- reports
    def _report(
        self, kind: str, who: str, launch: int, site: int, region: Region, offset: int, other: int
    ) -> None:
        other_site = other & SITE_MASK
        key = (kind, site, other_site)
        if key in self._keys:
            return
        self._keys.add(key)
        name = self.clocks.name(other, launch)
        sites = self._sites
        stack = sites.stack() if site else []
        first = f"{who} at {sites.describe(site)}" if site else who
        if len(stack) > 1:
            first += f" (from {', '.join(stack[1:])})"
        second = f" vs {name} at {sites.describe(other_site)}" if other_site else f" vs {name}"
        race = DataRace(
            f"{kind}: {first}{second if other else ''} on {region.where(offset)}",
            kind=kind,
            wg=who,
            line=sites.line(site),
            other=name,
            other_line=sites.line(other_site),
            stack=tuple(stack),
            region=region.name,
            index=region.index(offset),
            rank=region.rank,
        )
        self.found.append(race)
        if self.fatal:
            raise race

    def _report_wg(
        self, kind: str, w: WorkGroup, site: int, region: Region, offset: int, other: int
    ) -> None:
        self._report(kind, repr(w), w.launch.number, site, region, offset, other)

    # ---- plain accesses
    def read(self, w: WorkGroup, a: Access, site: int) -> None:
        """A plain load."""
        region = a.region
        self._check_writes(w, a, site, "unsynchronised read")
        if region.atomics is not None:
            self._check(w, a, region.atomics, site, "plain read of a word updated by atomics")
        self.log_read(w, a, site)

    def log_read(self, w: WorkGroup, a: Access, site: int, atomic: bool = False) -> None:
        """Later writes to these elements must be ordered after this read."""
        log = a.region.reads
        if log is None:
            log = a.region.reads = ReadLog()
        elif log.count > log.limit:
            oldest = np.minimum.reduce(list(self.clocks.everyone(self._live)))
            log.prune(oldest)
        log.add(self.clocks.epoch(w, a.is_tile and not atomic, site), a, atomic)

    def write(self, w: WorkGroup, a: Access, values: Array, site: int) -> None:
        """A plain store."""
        region = a.region
        self._check_writes(w, a, site, "write/write race")
        if region.atomics is not None:
            self._check(w, a, region.atomics, site, "plain store to a word updated by atomics")
        self._check_reads(w, a, site, False)
        epoch = self.clocks.epoch(w, a.is_tile, site)
        a.set_shadow(self._writes(region), region.grain, epoch)
        if region.sentinel is not None:
            self._note_poison(a, values, epoch)

    def _writes(self, region: Region) -> Array:
        if region.writes is None:
            n = -(-region.nbytes // region.grain)
            region.writes = np.full(n, region.base_write, np.int64)
        return region.writes

    def _check_reads(self, w: WorkGroup, a: Access, site: int, atomic: bool) -> None:
        """Reads of these elements must have happened before this write."""
        log = a.region.reads
        if log is None or not log.count:
            return
        rows = log.rows[: log.count]
        vc = w.vc_tile if a.is_tile and not atomic else w.vc
        late = rows[:, 1] > vc[rows[:, 0]]
        if not late.any():
            return
        if atomic:
            late &= rows[:, 5] == 0
        late &= (rows[:, 2] < a.hi) & (rows[:, 3] > a.lo) & (rows[:, 0] != w.slot)
        if self.strict:
            late &= rows[:, 0] != w.slot + 1
        for i in np.flatnonzero(late):
            if log.accesses[i].overlaps(a):
                slot, clk, lo, _, read_site, _ = (int(x) for x in rows[i])
                other = slot << SLOT_SHIFT | clk << CLOCK_SHIFT | read_site
                kind = "write after unsynchronised read"
                if atomic:
                    kind = "atomic write after unsynchronised plain read"
                self._report_wg(kind, w, site, a.region, max(a.lo, lo), other)

    def _check_writes(self, w: WorkGroup, a: Access, site: int, kind: str) -> None:
        region = a.region
        if region.writes is not None:
            self._check(w, a, region.writes, site, kind)
        elif region.base_write:
            vc = w.vc_tile if a.is_tile else w.vc
            e = region.base_write
            if e >> CLOCK_SHIFT & CLOCK_MASK > vc[e >> SLOT_SHIFT]:
                self._report_wg(kind, w, site, region, a.lo, e)

    def _check(self, w: WorkGroup, a: Access, shadow: Array, site: int, kind: str) -> None:
        """Every entry of the shadow must have happened before this access."""
        grain = a.region.grain
        entries = a.shadow(shadow, grain)
        vc = w.vc_tile if a.is_tile else w.vc
        first = entries.item(0)
        if entries.size == 1 or bool((entries == first).all()):
            slot = first >> SLOT_SHIFT
            if first >> CLOCK_SHIFT & CLOCK_MASK <= vc[slot]:
                return
            if slot == w.slot or (self.strict and slot == w.slot + 1):
                return
            position: tuple[int, ...] = (0,) * entries.ndim
        else:
            slots = entries >> SLOT_SHIFT
            bad = (entries >> CLOCK_SHIFT & CLOCK_MASK) > vc[slots]
            if not bad.any():
                return
            bad &= slots != w.slot
            if self.strict:
                bad &= slots != w.slot + 1
            if not bad.any():
                return
            where = np.unravel_index(int(np.argmax(bad)), bad.shape)
            position = tuple(int(x) for x in where)
        offset = a.element(position, grain)
        self._report_wg(kind, w, site, a.region, offset, int(entries[position]))

    # ---- regions polled in their data. A poll need not be ordered after the write it sees, but it
    # must be after the last poison (else it may see the generation before), and whoever
    # overwrites the data must be after the read.
    def _note_poison(self, a: Access, values: Array, epoch: int) -> None:
        region = a.region
        v = np.ascontiguousarray(values).reshape(-1)
        if v.size and bool((v.view(UINT[a.itemsize]) == region.sentinel).all()):
            if region.poison is None:
                region.poison = np.zeros(-(-region.nbytes // region.grain), np.int64)
            a.set_shadow(region.poison, region.grain, epoch)

    def poll_data(self, w: WorkGroup, a: Access, seen: Array, site: int) -> None:
        """A volatile load of a sentinel region that returned `seen`."""
        region = a.region
        if region.poison is not None:
            self._check(w, a, region.poison, site, "poll of data not after its poison")
        bits = np.ascontiguousarray(seen).view(UINT[a.itemsize])
        if bool((bits == region.sentinel).any()):
            return
        if region.coherent:
            # What is ordered after this read is ordered after the write that it saw.
            epoch = self.clocks.epoch(w, a.is_tile, site)
            a.set_shadow(self._writes(region), region.grain, epoch)
        self.log_read(w, a, site)

    # ---- atomics and volatile loads
    def sync(
        self, w: WorkGroup, a: Access, order: Ordering, updates: bool, changed: bool, site: int
    ) -> None:
        """An atomic access; one that does not update is a volatile or atomic load.

        Args:
            w: who.
            a: what.
            order: order and scope.
            updates: it is a read-modify-write.
            changed: it has altered memory (else it counts as a read: a poll by adding 0).
            site: source line.
        """
        region = a.region
        kind = "atomic or volatile access to a plainly written word"
        self._check_writes(w, a, site, kind)
        if changed:
            self._check_reads(w, a, site, True)
        else:
            self.log_read(w, a, site, True)
        if updates or region.sync:
            for offset in a.offsets() if a.is_tile else (a.lo,):
                self._sync_one(w, region, int(offset), order, updates, site)
        if changed:
            if region.atomics is None:
                region.atomics = np.zeros(-(-region.nbytes // region.grain), np.int64)
            a.set_shadow(region.atomics, region.grain, self.clocks.epoch(w, False, site))
        if order.release and updates:
            self.clocks.advance(w)

    def _sync_one(
        self, w: WorkGroup, region: Region, offset: int, order: Ordering, updates: bool, site: int
    ) -> None:
        system = order.system
        var = region.sync.get(offset)
        if var is None:
            var = region.sync[offset] = SyncVar()
        scope = (w.rank, system)
        if scope not in var.scopes:
            var.scopes.add(scope)
            ranks = {rank for rank, _ in var.scopes} | {region.rank}
            if len(ranks) > 1 and not all(wide for _, wide in var.scopes):
                kind = "scope error: atomics from several ranks, not all scope='sys'"
                self._report_wg(kind, w, site, region, offset, var.last)
        clocks = self.clocks
        got = var.rank.get(w.rank)
        if system and var.system is not None:
            got = var.system if got is None else np.maximum(got, var.system)
        if got is not None:
            if order.acquire:
                clocks.learn(w, got)
            else:
                w.pending = got if w.pending is None else np.maximum(w.pending, got)
        if not updates:
            return
        published = w.vc if order.release else w.fence
        if published is not None:
            old = var.rank.get(w.rank)
            new = published if old is None else np.maximum(old, published)
            var.rank[w.rank] = new
            if system:
                var.system = published if var.system is None else np.maximum(var.system, published)
        var.last = clocks.epoch(w, False, site)

    def fence(self, w: WorkGroup) -> None:
        """An acquire-release fence by thread 0."""
        if w.pending is not None:
            self.clocks.learn(w, w.pending)
        w.fence = w.vc
        self.clocks.advance(w)

    # ---- host code
    def host_wrote(self, region: Region, rank: int) -> None:
        """Host code of `rank` wrote the whole region."""
        clocks = self.clocks
        vc = clocks.hosts[rank]
        who = f"host of rank {rank}"
        for shadow in (region.writes, region.atomics):
            if shadow is None:
                continue
            bad = (shadow >> CLOCK_SHIFT & CLOCK_MASK) > vc[shadow >> SLOT_SHIFT]
            if bad.any():
                j = int(np.argmax(bad))
                kind = "host write over unsynchronised write"
                self._report(kind, who, -1, 0, region, j * region.grain, int(shadow[j]))
        e = region.base_write
        if region.writes is None and e >> CLOCK_SHIFT & CLOCK_MASK > vc[e >> SLOT_SHIFT]:
            self._report("host write over unsynchronised write", who, -1, 0, region, 0, e)
        if region.reads is not None and region.reads.count:
            rows = region.reads.rows[: region.reads.count]
            late = np.flatnonzero(rows[:, 1] > vc[rows[:, 0]])
            if len(late):
                slot, clk, lo, _, site, _ = (int(x) for x in rows[late[0]])
                other = slot << SLOT_SHIFT | clk << CLOCK_SHIFT | site
                kind = "host write after unsynchronised read"
                self._report(kind, who, -1, 0, region, lo, other)
        region.writes = None
        region.reads = None
        region.base_write = clocks.host_epoch(rank)
        region.poison = None
        if region.sentinel is not None:
            n = -(-region.nbytes // region.grain)
            region.poison = np.full(n, region.base_write, np.int64)

    def initialised(self, region: Region) -> None:
        """The region's contents are ordered before everything."""
        region.writes = region.poison = region.reads = None
        region.base_write = 0
