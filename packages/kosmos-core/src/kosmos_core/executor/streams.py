"""Streams of launches, and which of their workgroups are resident."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .tasks import Launch, WorkGroup

if TYPE_CHECKING:
    from .executor import Executor


class Streams:
    """Launches of all streams of all ranks; those of one stream run one after the other.

    Args:
        ex: the executor.
        slots: resident workgroups a rank, None for all.
        start: order in which the workgroups of a launch start.
        rng: for ``start="random"``.

    Attributes:
        pending: something may be able to start.
    """

    def __init__(self, ex: Executor, slots: int | None, start: str, rng: random.Random) -> None:
        self.pending = False
        self._ex = ex
        self._slots = slots
        self._start = start
        self._rng = rng
        self._queues: dict[tuple[int, int], deque[Launch]] = {}
        self._running: dict[tuple[int, int], Launch] = {}
        self._resident: dict[int, int] = {}
        self._next_id = ex.num_ranks + 1

    def enqueue(self, launch: Launch) -> None:
        """Queue a launch on its stream."""
        self._queues.setdefault((launch.rank, launch.stream), deque()).append(launch)
        self.pending = True

    def num_queued(self) -> int:
        """Launches that have not started."""
        return sum(len(q) for q in self._queues.values())

    def idle(self, rank: int) -> bool:
        """Whether nothing is queued or running on any stream of a rank."""
        keys = [k for k in self._queues if k[0] == rank]
        return not any(self._queues[k] or k in self._running for k in keys)

    def used_by(self, rank: int) -> list[int]:
        """Streams that a rank has used."""
        return [k[1] for k in self._queues if k[0] == rank]

    def waiting(self) -> list[str]:
        """One line for each launch that has not started, or not all of whose workgroups have."""
        out = [
            f"{launch!r}: {len(launch.pending)} workgroups have found no slot"
            for launch in self._running.values()
            if launch.pending
        ]
        return out + [f"{n!r}: has not started" for q in self._queues.values() for n in q]

    def clear(self) -> None:
        """Forget everything (after a failure)."""
        self._queues.clear()
        self._running.clear()
        self.pending = False

    def pump(self, live: Sequence[WorkGroup]) -> list[WorkGroup]:
        """Begin launches whose turn it is; returns the workgroups that become resident."""
        self.pending = False
        out: list[WorkGroup] = []
        for key, queue in self._queues.items():
            launch = self._running.get(key)
            while launch is None and queue:
                launch = self._begin(queue.popleft(), [*live, *out])
            if launch is not None:
                self._running[key] = launch
                self._admit(launch, out)
        return out

    def _begin(self, launch: Launch, live: Sequence[WorkGroup]) -> Launch | None:
        gx, gy, gz = launch.grid
        pids = [(x, y, z) for z in range(gz) for y in range(gy) for x in range(gx)]
        if self._start == "descending":
            pids.reverse()
        elif self._start == "random":
            self._rng.shuffle(pids)
        self._ex.clock.begin(launch)
        races = self._ex.race_detector
        if races is not None:
            races.clocks.begin(launch, live, self._ex.memory.regions)
        if not pids:
            launch.finish()
            return None
        launch.pending = pids[::-1]
        return launch

    def _admit(self, launch: Launch, out: list[WorkGroup]) -> None:
        rank = launch.rank
        races, weak = self._ex.race_detector, self._ex.weak_memory
        while launch.pending:
            if self._slots is not None and self._resident.get(rank, 0) >= self._slots:
                return
            w = WorkGroup(self._next_id, launch, launch.pending.pop())
            self._next_id += 1
            self._resident[rank] = self._resident.get(rank, 0) + 1
            launch.num_live += 1
            self._ex.clock.start(w)
            if weak is not None:
                w.view_gpu = w.view_sys = weak.seq
            if races is not None:
                races.clocks.start(w)
            out.append(w)

    def ended(self, w: WorkGroup) -> bool:
        """A workgroup has ended; returns whether its launch has."""
        launch = w.launch
        self._resident[w.rank] -= 1
        self.pending = True
        launch.num_live -= 1
        if launch.num_live or launch.pending:
            return False
        launch.finish()
        del self._running[launch.rank, launch.stream]
        return True
