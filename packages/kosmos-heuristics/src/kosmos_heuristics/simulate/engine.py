"""The simulator's core in Python: the definition that the native core is held equal to.

Builders of a rank share its power and movers of a flow its bandwidth, so each of these is a
*resource* with a clock of its own: while ``c`` items are on it, the clock advances at the rate that
each of them gets, and an item of cost ``x`` ends when the clock has advanced by ``x``. Items that
start later end later or earlier by their cost alone, whatever the rate does meanwhile; so the next
event is the smallest of the resources' next ends.
"""

from __future__ import annotations

import heapq

from kosmos_heuristics.simulate.program import (
    BUILDER,
    DOWNSTREAM,
    DUAL,
    GONE,
    MOVER,
    PLANNED,
    REDUCER,
    TILES,
    UPSTREAM,
    Played,
    Program,
    Span,
)

_INFINITY = float("inf")


class Stalled(RuntimeError):
    """A program in which workgroups wait for what nobody will do."""


class Engine:
    """One run of a program.

    Args:
        program: What to run.
        trace: Whether to keep every item's span.
    """

    def __init__(self, program: Program, trace: bool) -> None:
        self._p = program
        self._trace = trace
        self._now = 0.0
        self._counters = list(program.counters)
        self._waiters: dict[int, list[tuple[int, int, int, int]]] = {}
        ranks = len(program.ranks)
        resources = ranks + len(program.flows)
        # A resource is a rank's builders (its index) or a flow (ranks + its index).
        self._clock = [0.0] * resources
        self._rate = [0.0] * resources
        self._active: list[list[tuple[float, int, int, int, int]]] = [[] for _ in range(resources)]
        self._serial = 0
        self._timers: list[tuple[float, int, int, int, int, int]] = []
        self._sharing = [0] * program.groups
        self._moving = [0] * ranks
        self._heads = [[0, 0, 0] for _ in range(ranks)]
        self._joined = [0] * ranks
        self._roles = [list(rank.roles) for rank in program.ranks]
        self._reserved = [[-1] * len(rank.roles) for rank in program.ranks]
        self._stolen = [[0] * len(rank.roles) for rank in program.ranks]
        self._turn = [[False] * len(rank.roles) for rank in program.ranks]
        self._claimed = [[0.0] * len(rank.roles) for rank in program.ranks]
        self._started = [[0.0] * len(rank.roles) for rank in program.ranks]
        self._end = [0.0] * ranks
        self._busy = [[0.0, 0.0, 0.0] for _ in range(ranks)]
        self._wait = [[0.0, 0.0, 0.0] for _ in range(ranks)]
        self._spans: list[Span] = []

    def run(self) -> Played:
        """Play the program to its end.

        Raises:
            Stalled: Items are left that nothing can start.
        """
        for index, rank in enumerate(self._p.ranks):
            for wg, start in enumerate(rank.starts):
                self._timer(start, index, wg, -1, 0)
        events = 0
        while True:
            best, which = self._timers[0][0] if self._timers else _INFINITY, -1
            for resource, active in enumerate(self._active):
                if active:
                    left = (active[0][0] - self._clock[resource]) / self._rate[resource]
                    at = self._now + (left if left > 0.0 else 0.0)
                    if at < best:
                        best, which = at, resource
            if best == _INFINITY:
                break
            events += 1
            self._advance(best)
            if which < 0:
                self._fire()
            else:
                self._finish(which)
            self._share()
        self._check_done()
        return Played(self._end, self._busy, self._wait, events, self._spans)

    def _advance(self, to: float) -> None:
        step = to - self._now
        for resource, active in enumerate(self._active):
            if active:
                self._clock[resource] += self._rate[resource] * step
        self._now = to

    def _timer(self, at: float, rank: int, wg: int, low: int, high: int) -> None:
        heapq.heappush(self._timers, (at, self._serial, rank, wg, low, high))
        self._serial += 1

    def _fire(self) -> None:
        _, _, rank, wg, low, high = heapq.heappop(self._timers)
        if low < 0:
            self._next(rank, wg)
        else:
            self._signal(low, high)

    def _finish(self, resource: int) -> None:
        end, _, wg, queue, item = heapq.heappop(self._active[resource])
        # The clock is put where the item ends, so that rounding never leaves it behind.
        self._clock[resource] = end
        ranks = len(self._p.ranks)
        if resource < ranks:
            rank = resource
        else:
            flow = self._p.flows[resource - ranks]
            rank = flow.rank
            self._moving[rank] -= 1
            self._sharing[flow.sender[1]] -= 1
            if flow.receiver[1] >= 0:
                self._sharing[flow.receiver[1]] -= 1
        started = self._started[rank][wg]
        self._busy[rank][queue] += self._now - started
        self._end[rank] = self._now
        if self._trace:
            claimed = self._claimed[rank][wg]
            self._spans.append(Span(rank, wg, queue, item, claimed, started, self._now))
        items = self._p.ranks[rank].queues[queue]
        low, high = items.sig_lo[item], items.sig_hi[item]
        if low < high:
            if self._p.flag_us > 0.0:
                self._timer(self._now + self._p.flag_us, rank, wg, low, high)
            else:
                self._signal(low, high)
        if items.then[item] >= 0:
            self._claimed[rank][wg] = self._now
            self._start_or_wait(rank, wg, queue, items.then[item])
        else:
            self._next(rank, wg)

    def _signal(self, low: int, high: int) -> None:
        for counter in range(low, high):
            self._counters[counter] -= 1
            if self._counters[counter] == 0:
                for rank, wg, queue, item in self._waiters.pop(counter, ()):
                    self._start_or_wait(rank, wg, queue, item)

    def _share(self) -> None:
        """Set every resource's rate from who is on it now."""
        p, ranks = self._p, len(self._p.ranks)
        for rank in range(ranks):
            builders = len(self._active[rank])
            self._rate[rank] = p.build_rate[builders] * p.build_drag[self._moving[rank]]
        for index, flow in enumerate(p.flows):
            if not self._active[ranks + index]:
                continue
            rate = p.tables[flow.sender[0]][self._sharing[flow.sender[1]]]
            if flow.receiver[1] >= 0:
                other = p.tables[flow.receiver[0]][self._sharing[flow.receiver[1]]]
                rate = other if other < rate else rate
            self._rate[ranks + index] = rate * p.move_drag[len(self._active[flow.rank])]

    def _ready(self, rank: int, queue: int, item: int) -> int:
        """The first counter that holds the item back, or -1."""
        items = self._p.ranks[rank].queues[queue]
        for counter in range(items.need_lo[item], items.need_hi[item]):
            if self._counters[counter] > 0:
                return counter
        return -1

    def _take(self, rank: int, wg: int, queue: int) -> None:
        """Claim the next item of a queue that has one."""
        item = self._heads[rank][queue]
        self._heads[rank][queue] = item + 1
        self._claimed[rank][wg] = self._now
        self._start_or_wait(rank, wg, queue, item)

    def _start_or_wait(self, rank: int, wg: int, queue: int, item: int) -> None:
        held_by = self._ready(rank, queue, item)
        if held_by >= 0:
            self._waiters.setdefault(held_by, []).append((rank, wg, queue, item))
            return
        self._wait[rank][queue] += self._now - self._claimed[rank][wg]
        self._started[rank][wg] = self._now
        items = self._p.ranks[rank].queues[queue]
        resource = rank
        index = items.flow[item] - 1 if queue == TILES else items.flow[item]
        if index >= 0:
            flow = self._p.flows[index]
            resource = len(self._p.ranks) + index
            self._moving[rank] += 1
            self._sharing[flow.sender[1]] += 1
            if flow.receiver[1] >= 0:
                self._sharing[flow.receiver[1]] += 1
        end = self._clock[resource] + items.cost[item]
        heapq.heappush(self._active[resource], (end, self._serial, wg, queue, item))
        self._serial += 1

    def _left(self, rank: int, queue: int) -> bool:
        return self._heads[rank][queue] < self._p.ranks[rank].queues[queue].claims

    def _next(self, rank: int, wg: int) -> None:
        """What a free workgroup does: the role policies."""
        spec, roles = self._p.ranks[rank], self._roles[rank]
        if roles[wg] == MOVER:
            if self._move(rank, wg):
                return
            roles[wg] = spec.after[wg]
        if roles[wg] == GONE:
            return
        if roles[wg] == DUAL:
            self._dual(rank, wg)
            return
        if roles[wg] == PLANNED:
            head = self._heads[rank][TILES]
            early = self._stolen[rank][wg] < spec.steal and head < spec.switch_at
            if early and self._left(rank, TILES):
                self._stolen[rank][wg] += 1
                self._take(rank, wg, TILES)
                return
            roles[wg] = REDUCER
        if roles[wg] == BUILDER:
            blocked = (
                spec.alternate
                and self._left(rank, TILES)
                and self._ready(rank, TILES, self._heads[rank][TILES]) >= 0
            )
            if blocked and self._left(rank, UPSTREAM):
                self._take(rank, wg, UPSTREAM)
                return
            if self._left(rank, TILES):
                self._take(rank, wg, TILES)
                return
            if self._joined[rank] >= spec.join:
                return
            self._joined[rank] += 1
            roles[wg] = REDUCER
        for queue in (DOWNSTREAM, UPSTREAM):
            if self._left(rank, queue):
                self._take(rank, wg, queue)
                return

    def _move(self, rank: int, wg: int) -> bool:
        """A mover's next transfer, or between two of them a tile that is ready (two-way)."""
        if not self._left(rank, UPSTREAM):
            return False
        turn = self._turn[rank]
        turn[wg] = not turn[wg]
        if self._p.ranks[rank].alternate and not turn[wg] and self._left(rank, TILES):
            tile = self._heads[rank][TILES]
            if self._ready(rank, TILES, tile) < 0:
                self._take(rank, wg, TILES)
                return True
        self._take(rank, wg, UPSTREAM)
        return True

    def _dual(self, rank: int, wg: int) -> None:
        """A transfer once its data is ready, else a tile; waits only when no tile is left."""
        held = self._reserved[rank]
        if held[wg] < 0 and self._left(rank, DOWNSTREAM):
            held[wg] = self._heads[rank][DOWNSTREAM]
            self._heads[rank][DOWNSTREAM] += 1
        tiles = self._left(rank, TILES)
        if held[wg] >= 0 and (not tiles or self._ready(rank, DOWNSTREAM, held[wg]) < 0):
            item, held[wg] = held[wg], -1
            self._claimed[rank][wg] = self._now
            self._start_or_wait(rank, wg, DOWNSTREAM, item)
        elif tiles:
            self._take(rank, wg, TILES)

    def _check_done(self) -> None:
        for rank, spec in enumerate(self._p.ranks):
            for queue, items in enumerate(spec.queues):
                left = items.claims - self._heads[rank][queue]
                if left > 0:
                    raise Stalled(
                        f"rank {rank}: {left} items of queue {queue} were never claimed; "
                        "give a crew to that queue"
                    )
        if self._waiters:
            counter = min(self._waiters)
            raise Stalled(
                f"{sum(map(len, self._waiters.values()))} items wait for ever, the first for "
                f"counter {counter} at {self._counters[counter]}; signal it"
            )


def play(program: Program, trace: bool = False) -> Played:
    """Run a program with the Python core."""
    return Engine(program, trace).run()
