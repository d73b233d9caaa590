"""Times of calls: events on the device, of each call the slowest rank."""

from __future__ import annotations

import abc
import statistics
from collections.abc import Callable, Iterable
from typing import Any

import torch

from kosmos_core.errors import KosmosError
from kosmos_core.worlds.base import World

# Device cycles for which the GPU is kept busy while the host queues a timed call, about 0.15 ms.
HOLD_CYCLES = 300_000


class MeasurementError(KosmosError):
    """What was to be measured gave wrong results; nothing is written."""


class Timer(abc.ABC):
    """How calls are timed."""

    @abc.abstractmethod
    def times(
        self,
        call: Callable[[], Any],
        before: Callable[[], Any] | None = None,
        *,
        warmup: int,
        repeats: int,
    ) -> list[float]:
        """Milliseconds of each of `repeats` calls on the rank that took longest. Collective.

        Args:
            call: what is timed.
            before: runs ahead of each call, untimed.
            warmup: calls that are not timed.
            repeats: calls that are.
        """

    def median(
        self,
        call: Callable[[], Any],
        before: Callable[[], Any] | None = None,
        *,
        warmup: int,
        repeats: int,
    ) -> float:
        """The median of `times`, in milliseconds."""
        return statistics.median(self.times(call, before, warmup=warmup, repeats=repeats))


class EventTimer(Timer):
    """CUDA events. Ranks start each timed call together, and the host is ahead of the GPU by then.

    Args:
        world: ranks, a GPU each.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._token = torch.zeros(16, device=world.device)

    def times(
        self,
        call: Callable[[], Any],
        before: Callable[[], Any] | None = None,
        *,
        warmup: int,
        repeats: int,
    ) -> list[float]:
        """As `Timer.times`."""
        self._world.barrier()
        pairs = []
        for i in range(warmup + repeats):
            begin, end = new_event(), new_event()
            if before is not None:
                before()
            # The collective is the ranks' common start; the wait before it hides what the host
            # takes to queue it, the call and the events.
            torch.cuda._sleep(HOLD_CYCLES)  # type: ignore[no-untyped-call]
            if self._world.size > 1:
                self._world.all_gather_tensor(self._token)
            begin.record()
            call()
            end.record()
            if i >= warmup:
                pairs.append((begin, end))
        self._world.synchronize()
        own = [begin.elapsed_time(end) for begin, end in pairs]
        return slowest(self._world, own)


def new_event() -> torch.cuda.Event:
    """An event that notes the time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def figures(value: float) -> float:
    """A rate or a time to five figures, which is more than its noise."""
    return float(f"{value:.5g}")


def by_crew(
    what: str, counts: Iterable[int], rate: Callable[[int], float], tick: Callable[[str], None]
) -> dict[str, float]:
    """A curve: the rate of each number of workgroups, by that number as JSON has it."""
    curve = {}
    for wgs in counts:
        tick(f"{what}, {wgs} WGs")
        curve[str(wgs)] = figures(rate(wgs))
    return curve


def slowest(world: World, times: list[float]) -> list[float]:
    """Each call's time on the rank that took longest. Collective."""
    return [max(call) for call in zip(*world.all_gather_object(times), strict=True)]


def agree(world: World, fault: str | None) -> None:
    """Raises on every rank when one of them found a fault. Collective.

    Raises:
        MeasurementError: with the first rank's fault.
    """
    for rank, found in enumerate(world.all_gather_object(fault)):
        if found is not None:
            raise MeasurementError(f"rank {rank}: {found}")
