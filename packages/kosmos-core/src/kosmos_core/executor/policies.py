"""Scheduling policies: which runnable workgroup (or host thread) runs next."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from .tasks import Task


class Policy:
    """Decides who runs until its next synchronisation point.

    Subclass and override `pick`. A policy object holds state: use one per executor.
    """

    def pick(self, runnable: Sequence[Task]) -> Task:
        """Choose from `runnable` (never empty, ascending task ids)."""
        return runnable[0]


class RoundRobin(Policy):
    """Takes turns in the order of task ids."""

    def __init__(self) -> None:
        self._last = -1

    def pick(self, runnable: Sequence[Task]) -> Task:
        """The next id after the one that ran last."""
        task = next((t for t in runnable if t.id > self._last), runnable[0])
        self._last = task.id
        return task


class Random(Policy):
    """Picks uniformly; the same seed gives the same schedule."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = random.Random(seed)

    def pick(self, runnable: Sequence[Task]) -> Task:
        """Any of them."""
        return runnable[int(self._rng.random() * len(runnable))]


class PriorityRandom(Policy):
    """Probabilistic concurrency testing: random fixed priorities, a few random drops.

    Source: Burckhardt et al., "A randomized scheduler with probabilistic guarantees of finding
    bugs", ASPLOS 2010. Finds bugs that need few but particular preemptions.

    Args:
        seed: of priorities and drops.
        depth: the number of priority drops is ``depth - 1``.
        steps: the drops happen at random steps below this.
    """

    def __init__(self, seed: int = 0, depth: int = 3, steps: int = 2000) -> None:
        self._rng = random.Random(seed)
        self._step = 0
        self._drops = {self._rng.randrange(steps) for _ in range(depth - 1)}
        self._priority: dict[int, float] = {}
        self._low = 0.0

    def pick(self, runnable: Sequence[Task]) -> Task:
        """The one of highest priority."""
        priority = self._priority
        for t in runnable:
            if t.id not in priority:
                priority[t.id] = 1 + self._rng.random()
        task = max(runnable, key=lambda t: priority[t.id])
        self._step += 1
        if self._step in self._drops:
            self._low -= 1
            priority[task.id] = self._low
        return task


class Starve(Policy):
    """Tasks for which `victim` is true run only when nobody else can.

    Args:
        victim: predicate over a `Task` (``.rank``, ``.wg``, ``.pid``, ``.is_host``), e.g.
            ``lambda t: t.rank == 1``.
        inner: policy among the others; `Random` with `seed` if None.
        seed: for the default inner policy.
    """

    def __init__(
        self, victim: Callable[[Task], bool], inner: Policy | None = None, seed: int = 0
    ) -> None:
        self._victim = victim
        self._inner = inner if inner is not None else Random(seed)

    def pick(self, runnable: Sequence[Task]) -> Task:
        """A victim only if there is nobody else."""
        others = [t for t in runnable if not self._victim(t)]
        return self._inner.pick(others or runnable)


class Timed(Policy):
    """The task that is furthest behind in simulated time runs next (needs a cost model).

    The run is then a discrete-event simulation, and its trace looks like one of real hardware.
    """

    def pick(self, runnable: Sequence[Task]) -> Task:
        """The one with the smallest time."""
        return min(runnable, key=lambda t: (t.time, t.id))


class Replay(Policy):
    """Repeats a recorded `Executor.schedule` step by step.

    The executor must be made with the same arguments (seed included) as the recorded one.

    Args:
        schedule: task ids in the order in which they ran.
    """

    def __init__(self, schedule: Sequence[int]) -> None:
        self._schedule = list(schedule)
        self._step = 0

    def pick(self, runnable: Sequence[Task]) -> Task:
        """The recorded one.

        Raises:
            ValueError: it cannot run.
        """
        step = self._step
        self._step += 1
        if step >= len(self._schedule):
            return runnable[0]
        wanted = self._schedule[step]
        for t in runnable:
            if t.id == wanted:
                return t
        raise ValueError(
            f"Replay: task {wanted} of step {step} cannot run: the executor or the kernels differ "
            "from the recorded run; make the Executor with the same arguments and seed"
        )
