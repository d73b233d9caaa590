"""How kernels are timed: back-to-back calls, the slowest rank of each, shuffled rounds, quantiles.

Nothing here knows what is timed. `Timer` is the seam: `EventTimer` reads the GPU's clock, a test
passes one of its own.
"""

from __future__ import annotations

import gc
import math
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol

import torch
import triton

from kosmos_core.worlds import World

WARMUP_CALLS = 10
TIMED_CALLS = 25


class Timer(Protocol):
    """Times a call on all ranks at once."""

    def time(self, name: str, fn: Callable[[], object], warmup: int, calls: int) -> list[float]:
        """Milliseconds of each of `calls` calls on the slowest rank, after `warmup` others.

        Collective.
        """


class EventTimer:
    """Times calls with CUDA events. The ranks start in step; no host wait stands between calls.

    Args:
        world: the ranks; every rank times the same calls in the same order.
    """

    def __init__(self, world: World) -> None:
        self._world = world

    def time(self, name: str, fn: Callable[[], object], warmup: int, calls: int) -> list[float]:
        """Milliseconds of each call on the slowest rank."""
        for _ in range(warmup):
            fn()
        self._world.synchronize()
        self._world.barrier()
        marks = []
        for _ in range(calls):
            begin, end = _event(), _event()
            begin.record()
            fn()
            end.record()
            marks.append((begin, end))
        self._world.synchronize()
        mine = torch.tensor([[b.elapsed_time(e) for b, e in marks]], device=self._world.device)
        slowest: list[float] = self._world.all_gather_tensor(mine).amax(0).tolist()
        return slowest


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Timing:
    """Times of one variant, in milliseconds, of the slowest rank.

    Attributes:
        median_ms: median of the rounds' medians.
        p20_ms: 20 % of all calls are faster.
        p80_ms: 80 % of all calls are faster.
        round_ms: median of each round.
        spread: (slowest - fastest round) / median; how far to trust a comparison.
    """

    median_ms: float
    p20_ms: float
    p80_ms: float
    round_ms: tuple[float, ...]
    spread: float

    @classmethod
    def of(cls, rounds: Sequence[Sequence[float]]) -> Timing:
        """Summary of the calls of each round.

        Raises:
            ValueError: there is no round, or one without calls.
        """
        if not rounds or not all(rounds):
            raise ValueError("rounds: got none or an empty one, wanted at least one call in each")
        medians = tuple(statistics.median(calls) for calls in rounds)
        every = [ms for calls in rounds for ms in calls]
        median = statistics.median(medians)
        spread = (max(medians) - min(medians)) / median if median > 0 else 0.0
        return cls(median, quantile(every, 0.2), quantile(every, 0.8), medians, spread)

    def to_dict(self) -> dict[str, Any]:
        """All fields, for JSON."""
        return asdict(self)


def quantile(values: Iterable[float], q: float) -> float:
    """Linear interpolation between order statistics, 0 <= q <= 1."""
    ordered = sorted(values)
    at = q * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def geomean(values: Iterable[float | None]) -> float | None:
    """Geometric mean of the values that are there; None if none is."""
    present = [v for v in values if v is not None]
    return math.exp(math.fsum(map(math.log, present)) / len(present)) if present else None


def time_rounds(
    variants: Mapping[str, Callable[[], object]],
    timer: Timer,
    *,
    rounds: int,
    warmup: int = WARMUP_CALLS,
    calls: int = TIMED_CALLS,
    seed: int = 0,
    advance: Callable[[str], None] = lambda name: None,
) -> dict[str, Timing]:
    """Times every variant in each round, in an order shuffled for each round, equal on all ranks.

    Clocks and temperatures drift; shuffling keeps the drift from favouring a variant.

    Args:
        variants: name to call.
        timer: measures.
        rounds: how often each variant is measured.
        warmup: calls before the clock starts, in every round.
        calls: timed calls of a round.
        seed: of the order; the same on every rank.
        advance: told the variant before it is measured.

    Returns:
        name to summary, in the order of `variants`.
    """
    order = random.Random(seed)
    measured: dict[str, list[list[float]]] = {name: [] for name in variants}
    for _ in range(rounds):
        names = list(variants)
        order.shuffle(names)
        for name in names:
            advance(name)
            measured[name].append(timer.time(name, variants[name], warmup, calls))
    return {name: Timing.of(times) for name, times in measured.items()}


def host_microseconds(
    fn: Callable[[], object], world: World, *, calls: int = 200, repeats: int = 3
) -> float:
    """Host microseconds of a warm call: the median of `repeats` means over `calls` calls.

    Nothing is waited for between the calls, so they must fit into the device's launch queue. As
    with `timeit`, garbage is not collected meanwhile: what a long program has left behind is no
    part of the call.
    """
    means = []
    for _ in range(repeats):
        for _ in range(20):
            fn()
        world.synchronize()
        world.barrier()
        with _no_garbage_collection():
            begin = time.perf_counter()
            for _ in range(calls):
                fn()
            means.append((time.perf_counter() - begin) / calls * 1e6)
    world.synchronize()
    return statistics.median(means)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def environment(world: World) -> dict[str, Any]:
    """Machine, versions, commit and date, as every result file has them."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": _machine(world),
        "versions": _versions(),
        "commit": _commit(),
    }


def _machine(world: World) -> dict[str, Any]:
    described: dict[str, Any] = {
        "ranks": world.size,
        "world": world.describe(),
        "model": world.machine,
        "wgs_per_rank": world.num_wgs,
        "cpu": platform.machine(),
    }
    if world.device.type == "cuda":
        properties = torch.cuda.get_device_properties(world.device)
        described["gpu"] = properties.name
        described["memory_gib"] = round(properties.total_memory / 2**30, 1)
    return described


def _versions() -> dict[str, str]:
    versions = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": str(triton.__version__),
    }
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    if torch.version.hip:
        versions["hip"] = torch.version.hip
    return versions


def _commit() -> str | None:
    """Commit of the source tree this file is in, "+" behind it where changed; None outside one."""
    here = Path(__file__)

    def git(*arguments: str) -> str:
        # In containers the tree often belongs to another user, which git refuses by itself.
        trusted = ("-c", "safe.directory=*")
        command = ("git", *trusted, "-C", str(here.parent), *arguments)
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", here.name)
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return None
