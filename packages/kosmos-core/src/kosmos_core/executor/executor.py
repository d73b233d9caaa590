"""The concurrent executor: all workgroups of all ranks live at once, on one CPU core."""

from __future__ import annotations

import contextlib
import os
import random
import re
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

from . import state
from .arguments import Converter, Signature
from .asm import AsmHandler
from .clocktime import CostModel, DeviceClock
from .collectives import Collectives
from .errors import DataRace, ExecutorStopped
from .language import language
from .memory import Memory
from .model import MemoryModel
from .mutation import Mutation, mutated_twins
from .policies import Policy, RoundRobin, Timed
from .polls import Polls
from .races import RaceDetector
from .report import main_poll
from .scheduler import Scheduler
from .sites import Sites
from .spmd import run_spmd
from .tasks import Launch, WorkGroup
from .tensors import Tensors
from .tracing import Tracer
from .twins import Function
from .weak import WeakMemory


class Executor(Tensors):
    """Runs unmodified `@triton.jit` kernels of several ranks concurrently on the CPU.

    A context manager; one can be active at a time. While it is active, launches
    (``kernel[grid](...)``) go to it instead of a GPU, whether or not ``TRITON_INTERPRET`` is set.

    Args:
        num_ranks: number of virtual ranks.
        policy: who runs next (default `RoundRobin`).
        weak: None (stores are visible at once), "late" (at the release) or "random" (at the
            release or any time before).
        stale: loads may see memory as of the workgroup's last acquire (needs `weak`).
        race: None, "report" (collect in `races`) or "raise".
        strict: a release covers tile stores only after ``tl.debug_barrier()``.
        switch: "sync" (switch at atomics and volatile loads) or "memory" (at every access).
        slots: resident workgroups a rank, None for all.
        start: order in which workgroups of a launch start: "ascending", "descending", "random".
        seed: of everything random but the policy.
        patience: rounds without progress before time jumps or a deadlock is reported.
        watchdog_s: seconds that a workgroup may run without a synchronisation operation; None: no
            limit.
        max_switches: bound on scheduling steps.
        trace: record spans for `save_trace`.
        mutations: changed copies of functions to run instead of the originals.
        jump_clock: when everybody is parked and a loop reads the device clock, let time pass;
            False: report the deadlock at once.
        cost: what operations cost in simulated time; makes `Timed` the default policy.
        progress: called with the executor every `progress_every` steps.

    Attributes:
        races: data races found.
        schedule: task ids in the order in which they ran, for `Replay`.
    """

    def __init__(
        self,
        num_ranks: int = 1,
        *,
        policy: Policy | None = None,
        weak: str | None = None,
        stale: bool = False,
        race: str | None = None,
        strict: bool = False,
        switch: str = "sync",
        slots: int | None = None,
        start: str = "ascending",
        seed: int = 0,
        patience: int = 3,
        watchdog_s: float | None = 60.0,
        max_switches: int = 5_000_000,
        trace: bool = False,
        mutations: Sequence[Mutation] = (),
        jump_clock: bool = True,
        cost: CostModel | None = None,
        progress: Callable[[Executor], None] | None = None,
        progress_every: int = 1000,
    ) -> None:
        _choice("weak", weak, (None, "late", "random"))
        _choice("race", race, (None, "report", "raise"))
        _choice("switch", switch, ("sync", "memory"))
        _choice("start", start, ("ascending", "descending", "random"))
        _at_least("num_ranks", num_ranks, 1)
        _at_least("max_switches", max_switches, 1)
        _at_least("patience", patience, 0)
        if slots is not None:
            _at_least("slots", slots, 1)
        if stale and weak is None:
            raise ValueError("stale=True needs weak='late' or weak='random', got weak=None")
        self.num_ranks = num_ranks
        self.sites = Sites()
        self.memory = Memory()
        self.clock = DeviceClock(cost)
        self.polls = Polls(self.clock)
        self.tracer = Tracer() if trace else None
        self.num_dots = 0
        self.asm_handlers: list[tuple[re.Pattern[str], AsmHandler]] = []
        self._rng = random.Random(seed)
        self.scheduler = Scheduler(
            self,
            policy if policy is not None else RoundRobin() if cost is None else Timed(),
            slots=slots,
            start=start,
            patience=patience,
            max_switches=max_switches,
            jump_clock=jump_clock,
            watchdog_s=watchdog_s,
            rng=self._rng,
            progress=progress,
            progress_every=progress_every,
        )
        self.weak_memory = (
            WeakMemory(weak, stale, strict, num_ranks, self._rng, self.polls.wake)
            if weak is not None
            else None
        )
        self.race_detector = (
            RaceDetector(num_ranks, strict, race == "raise", self.sites, self.scheduler.live)
            if race is not None
            else None
        )
        self.model = MemoryModel(
            self.memory,
            self.weak_memory,
            self.race_detector,
            self.polls,
            self.clock,
            self.sites,
            switch == "memory",
        )
        self.model.scheduler = self.scheduler
        if self.tracer is not None:
            self.polls.on_unpark = self._trace_unpark
        self._mutations = tuple(mutations)
        self.collectives = Collectives(self)
        self._rank = 0
        self._stream: int | None = None
        self._entered = False
        self._launch_regions = []
        self.num_launches = [0] * num_ranks
        self._adopted_globals: set[int] = set()
        self._signatures: dict[Function, Signature] = {}
        self.twins: dict[Function, Function] = {}

    # ---- context
    def __enter__(self) -> Executor:
        if self._entered:
            raise RuntimeError("an Executor can be entered once: make a new one")
        state.activate(self)
        self._entered = True
        try:
            lang = language()
            lang.apply()
            self.builder = lang.builder
            self._converter = Converter(lang.semantic, self.register_argument)
            self.twins = {}
            for fn, twin in mutated_twins(self._mutations, lang.maker, self.sites).items():
                self.twins[fn] = twin
                self._adopt_globals(fn)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        queued = self.scheduler.streams.num_queued()
        self._close()
        if kind is None and queued:
            raise RuntimeError(f"{queued} launches were queued and never run: call run()")

    def _close(self) -> None:
        language().restore()
        self._adopted_globals.clear()
        self.twins = {}
        self.memory.clear()
        state.deactivate()

    def adopt(self, fn: Function) -> Function:
        """The twin of the Python function of a `@triton.jit` function."""
        twin = self.twins[fn] = language().maker.twin(fn)
        self._adopt_globals(fn)
        return twin

    def _adopt_globals(self, fn: Function) -> None:
        names = fn.__globals__
        if id(names) not in self._adopted_globals and not fn.__module__.startswith("triton."):
            self._adopted_globals.add(id(names))
            language().adopt_globals(names)

    # ---- launching
    @contextlib.contextmanager
    def on(self, rank: int) -> Iterator[None]:
        """Launches inside go to `rank` (not inside `spmd`, where the thread says the rank)."""
        self.check_rank(rank)
        if self.scheduler.baton.holder is not None:
            raise RuntimeError("on() cannot be used inside spmd(): the host thread is the rank")
        old, self._rank = self._rank, rank
        try:
            yield
        finally:
            self._rank = old

    @contextlib.contextmanager
    def stream(self, index: int) -> Iterator[None]:
        """Launches inside go to stream `index` of the rank; in `spmd` they do not block."""
        _at_least("stream", index, 0)
        old, self._stream = self._stream, index
        try:
            yield
        finally:
            self._stream = old

    @property
    def current(self) -> WorkGroup:
        """The workgroup that is running."""
        w = self.scheduler.current
        if w is None:
            raise RuntimeError("no workgroup is running")
        return w

    def launch(
        self, fn: Function, args: tuple[Any, ...], kwargs: dict[str, Any], grid: Any
    ) -> Launch:
        """Queue a launch (what ``kernel[grid](...)`` calls while the executor is active)."""
        self.check_running()
        host = self.scheduler.baton.holder
        rank = self.current_rank()
        signature = self._signatures.get(fn)
        if signature is None:
            signature = self._signatures[fn] = Signature(fn)
        named = signature.bind(args, kwargs)
        dims = _grid(grid(named) if callable(grid) else grid)
        twin = self.twins.get(fn)
        if twin is None:
            twin = self.adopt(fn)
        self.note_host_writes(None if host is None else rank)
        self._launch_regions = []
        converted = {
            k: v if k in signature.constexprs else self._converter.convert(v, k)
            for k, v in named.items()
        }
        stream = 0 if self._stream is None else self._stream
        self.num_launches[rank] += 1
        number = self.num_launches[rank]
        launch = Launch(
            rank, stream, twin, fn.__name__, dims, converted, number, self._launch_regions
        )
        if self.race_detector is not None:
            self.race_detector.clocks.enqueue(launch)
        self.scheduler.streams.enqueue(launch)
        if host is not None and self._stream is None:
            host.wait(lambda: launch.done, f"waits for {launch!r}")
            self.waited(rank, [stream])
        return launch

    def run(self) -> None:
        """Run everything that is queued to its end.

        Raises:
            Deadlock, DataRace, KernelFault: what went wrong; the executor is then unusable.
        """
        if self.scheduler.baton.holder is not None:
            raise RuntimeError("run() cannot be called inside spmd(): use synchronize()")
        self.check_running()
        self.note_host_writes(None)
        self.scheduler.run()
        for rank in range(self.num_ranks):
            self.waited(rank, self.scheduler.streams.used_by(rank))

    def spmd(
        self, fn: Callable[..., Any], *args: Any, return_exceptions: bool = False
    ) -> list[Any]:
        """Run host code ``fn(rank, *args)`` for every rank, each in an OS thread of its own.

        Exactly one thread runs at a time; a launch lets the others run until it is done.
        After an exception in one rank the others go on.

        Args:
            fn: the host code.
            args: passed on.
            return_exceptions: return exceptions in place of results.

        Returns:
            The results in rank order.

        Raises:
            BaseException: the first exception of any rank, with a note that names the rank.
            Deadlock: ranks are blocked for ever.
        """
        return run_spmd(self, lambda rank: fn(rank, *args), return_exceptions)

    def synchronize(self) -> None:
        """Wait for all streams of the calling rank (in `spmd`), or run everything (outside)."""
        host = self.scheduler.baton.holder
        if host is None:
            self.run()
            return
        rank = host.rank
        self.check_running()
        host.wait(lambda: self.scheduler.streams.idle(rank), "synchronize(): waits for its streams")
        self.waited(rank, self.scheduler.streams.used_by(rank))

    def host_barrier(self) -> None:
        """All ranks' host code meets (in `spmd`); outside, orders all ranks' host code."""
        self.collectives.barrier()

    def host_all_gather(self, value: Any) -> list[Any]:
        """Values of all ranks in rank order (in `spmd`)."""
        return self.collectives.all_gather(value)

    def waited(self, rank: int, streams: Sequence[int]) -> None:
        """The host code of a rank has waited for some of its streams."""
        for stream in streams:
            self.clock.host_waited(rank, stream)
            if self.race_detector is not None:
                self.race_detector.clocks.host_waits(rank, stream)
        host = self.scheduler.baton.holder
        if host is not None:
            host.time = self.clock.host_time(rank)

    def join_hosts(self) -> None:
        """The host code of all ranks has met."""
        self.clock.hosts_met(self.num_ranks)
        if self.race_detector is not None:
            self.race_detector.clocks.join_hosts()

    def check_running(self) -> None:
        """Refuse to go on after a failure.

        Raises:
            ExecutorStopped: the executor has failed.
        """
        failure = self.scheduler.failure
        if failure is not None:
            first = str(failure).splitlines()[0]
            raise ExecutorStopped(
                f"this Executor has stopped with {type(failure).__name__}: {first}; make a new one"
            )

    # ---- extension and results
    def register_asm(self, pattern: str, handler: AsmHandler) -> None:
        """Emulate inline assembly that matches a regular expression (before the built-in ones).

        Args:
            pattern: searched in the assembly text.
            handler: ``handler(executor, workgroup, asm, arrays, types)``; returns a value (array
                or number) per result, or one for all, or None for zero.
        """
        self.asm_handlers.append((re.compile(pattern), handler))

    @property
    def races(self) -> list[DataRace]:
        """Data races found (each pair of lines once)."""
        return [] if self.race_detector is None else self.race_detector.found

    @property
    def lints(self) -> list[str]:
        """Suspicious things that are no errors on the CPU."""
        return list(self.model.lints)

    @property
    def schedule(self) -> list[int]:
        """Task ids in the order in which they ran."""
        return self.scheduler.schedule

    @property
    def schedule_hash(self) -> str:
        """Hash of the schedule and of all decisions about visibility."""
        return self.scheduler.hash()

    @property
    def traffic(self) -> dict[tuple[int, int, str], int]:
        """Bytes of plain accesses to other ranks' memory: (rank, owner, tensor name) -> bytes."""
        return self.model.traffic

    @property
    def stats(self) -> dict[str, int]:
        """Counts of what has happened so far."""
        return {
            "switches": len(self.scheduler.schedule),
            "launches": sum(self.num_launches),
            "workgroups": self.scheduler.num_finished,
            "loads": self.model.num_loads,
            "stores": self.model.num_stores,
            "atomics": self.model.num_atomics,
            "dots": self.num_dots,
            "parks": self.polls.num_parks,
            "drains": self.scheduler.num_drains,
            "clock_jumps": self.scheduler.num_jumps,
            "clock_ns": self.clock.ns,
        }

    def save_trace(self, path: str | os.PathLike[str]) -> int:
        """Write the trace as JSON for Perfetto; returns the number of events.

        Raises:
            RuntimeError: the executor was made without ``trace=True``.
        """
        if self.tracer is None:
            raise RuntimeError("save_trace needs Executor(..., trace=True)")
        return self.tracer.save(path)

    def _trace_unpark(self, w: WorkGroup) -> None:
        poll = main_poll(w)
        now = self.clock.now(w)
        if self.tracer is not None and poll is not None and now > w.wait_start:
            site, region, offset, _, _ = poll
            where, line = region.where(offset), self.sites.line(site)
            self.tracer.span(w, "spin", w.wait_start, now, "spin", on=where, line=line)


def _choice(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {allowed}, got {value!r}")


def _at_least(name: str, value: int, least: int) -> None:
    if not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")


def _grid(grid: Any) -> tuple[int, int, int]:
    dims = tuple(int(n) for n in grid) if isinstance(grid, (tuple, list)) else (int(grid),)
    if not 1 <= len(dims) <= 3 or any(n < 0 for n in dims):
        raise ValueError(f"grid must have 1 to 3 sizes >= 0, got {grid!r}")
    x, y, z = dims + (1,) * (3 - len(dims))
    return x, y, z
