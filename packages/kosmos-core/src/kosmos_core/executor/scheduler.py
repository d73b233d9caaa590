"""The scheduler: one greenlet per workgroup, one thread per host, one of them at a time."""

from __future__ import annotations

import contextlib
import random
from array import array
from collections.abc import Callable
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np
from greenlet import GreenletExit, getcurrent, greenlet  # type: ignore[import-untyped]

from .errors import (
    DataRace,
    Deadlock,
    ExecutorError,
    ExecutorStopped,
    KernelFault,
    WatchdogBite,
)
from .hosts import Baton, Host
from .policies import Policy
from .report import deadlock, fingerprint, kernel_fault
from .streams import Streams
from .tasks import Task, WorkGroup
from .watchdog import Watchdog

if TYPE_CHECKING:
    from .executor import Executor


# Rounds granted to loops that count their polls, since they may end by themselves.
_COUNTING_ROUNDS = 1000


class Scheduler:
    """Runs launches and host threads.

    Attributes:
        live: workgroups that have started and not ended.
        hosts: host threads that have not ended.
        streams: launches that are queued or running.
        current: the workgroup that runs.
        schedule: ids of the tasks in the order in which they ran.
        failure: what ended the run, if it failed.
    """

    def __init__(
        self,
        ex: Executor,
        policy: Policy,
        *,
        slots: int | None,
        start: str,
        patience: int,
        max_switches: int,
        jump_clock: bool,
        watchdog_s: float | None,
        rng: random.Random,
        progress: Callable[[Executor], None] | None,
        progress_every: int,
    ) -> None:
        self.ex = ex
        self.policy = policy
        self.live: list[WorkGroup] = []
        self.hosts: list[Host] = []
        self.baton = Baton()
        self.current: WorkGroup | None = None
        self.schedule: list[int] = []
        self.decisions: list[int] = []
        self.failure: ExecutorError | None = None
        self.failing_rank: int | None = None
        # Called with each host whose function has ended.
        self.on_host_end: Callable[[Host], None] = _ignore
        self.num_drains = 0
        self.num_jumps = 0
        self.num_finished = 0
        self.streams = Streams(ex, slots, start, rng)
        self._patience = patience
        self._max_switches = max_switches
        self._jump_clock = jump_clock
        self._watchdog = None if watchdog_s is None else Watchdog(watchdog_s)
        self._progress = progress
        self._progress_every = progress_every
        self._hub = getcurrent()
        self._stuck = 0
        self._stuck_at = -1

    def _pump(self) -> None:
        """Start what can start."""
        for w in self.streams.pump(self.live):
            w.greenlet = greenlet(self._main, self._hub)
            self.live.append(w)

    def _main(self) -> None:
        w = self.current
        assert w is not None
        w.span_start = self.ex.clock.now(w)
        # NumPy's error state belongs to the greenlet's context: GPUs do not warn.
        with np.errstate(all="ignore"):
            w.launch.fn(**w.launch.args)

    def _finish(self, w: WorkGroup) -> None:
        ex = self.ex
        self.live.remove(w)
        ex.polls.progress += 1
        self.num_finished += 1
        ex.clock.finish(w)
        if ex.weak_memory is not None:
            ex.weak_memory.finish(w)
        if ex.race_detector is not None:
            ex.race_detector.clocks.finish(w)
        launch = w.launch
        if ex.tracer is not None:
            ex.tracer.span(w, launch.name, w.span_start, ex.clock.now(w), "kernel")
        if self.streams.ended(w) and ex.weak_memory is not None:
            ex.weak_memory.finish_launch(launch)

    def pause(self, w: WorkGroup) -> None:
        """Called in a workgroup: a scheduling point."""
        self._hub.switch()

    # ---- the loop
    def run(self) -> None:
        """Run until nothing is left to do.

        Raises:
            Deadlock, DataRace, KernelFault: see there.
        """
        self._hub = getcurrent()
        if self._watchdog is not None:
            self._watchdog.start()
        try:
            self._loop()
        except WatchdogBite:
            raise self._fail(self._bitten()) from None
        except ExecutorError as e:
            raise self._fail(e) from e.__cause__
        except BaseException as e:
            self._fail(ExecutorStopped(f"{type(e).__name__}: {e}"))
            raise
        finally:
            if self._watchdog is not None:
                self._watchdog.stop()
            self._kill()

    def _loop(self) -> None:
        ex = self.ex
        weak = ex.weak_memory
        randomly = weak is not None and weak.random
        schedule = self.schedule
        while True:
            if self.streams.pending:
                self._pump()
            runnable: list[Task] = [h for h in self.hosts if h.ready()]
            runnable += [w for w in self.live if not w.parked]
            if not runnable:
                if not self.live and not self.hosts and not self.streams.num_queued():
                    return
                self._stall()
                continue
            task = self.policy.pick(runnable)
            if len(schedule) >= self._max_switches:
                raise deadlock(ex, f"{self._max_switches} switches and no end (livelock?)")
            if randomly and self.live:
                assert weak is not None
                decision = weak.publish_some(self.live)
                if decision is not None:
                    self.decisions.append(len(schedule))
                    self.decisions.extend(decision)
                    ex.polls.progress += 1
            schedule.append(task.id)
            if self._progress is not None and len(schedule) % self._progress_every == 0:
                self._progress(ex)
            if isinstance(task, WorkGroup):
                self._step(task)
            else:
                assert isinstance(task, Host)
                self._lend(task)

    def _step(self, w: WorkGroup) -> None:
        self.current = self.ex.polls.running = w
        self.failing_rank = w.rank
        assert w.greenlet is not None
        watchdog = self._watchdog
        try:
            if watchdog is not None:
                watchdog.step = len(self.schedule)
                w.greenlet.switch()
                watchdog.step = 0
            else:
                w.greenlet.switch()
        except (DataRace, Deadlock):
            raise
        except WatchdogBite as e:
            raise self._bitten(e) from None
        except Exception as e:
            raise kernel_fault(self.ex, w, e) from e
        self.ex.polls.running = None
        if w.greenlet.dead:
            self._finish(w)

    def _bitten(self, error: BaseException | None = None) -> KernelFault:
        assert self._watchdog is not None
        seconds = self._watchdog.seconds
        text = f"no synchronisation operation for {seconds:g} s (a loop without one?)"
        fault = TimeoutError(text).with_traceback(error.__traceback__ if error else None)
        assert self.current is not None
        return kernel_fault(self.ex, self.current, fault)

    def _lend(self, host: Host) -> None:
        self.ex.polls.progress += 1
        self.failing_rank = host.rank
        self.baton.lend(host)
        self.ex.note_host_writes(host.rank)
        if host.finished:
            self.hosts.remove(host)
            self.on_host_end(host)

    def _stall(self) -> None:
        """Nobody can run: let buffered stores arrive, look again, let time pass, or give up."""
        ex = self.ex
        if ex.weak_memory is not None:
            drained = ex.weak_memory.drain(self.live)
            if drained:
                self.num_drains += 1
                whose = "; ".join(drained[:4])
                ex.model.lint(f"nobody could run until unreleased stores became visible: {whose}")
                return
        if self.live:
            if self._stuck_at == ex.polls.progress:
                self._stuck += 1
            else:
                self._stuck, self._stuck_at = 1, ex.polls.progress
                ex.clock.settle()
            counting = self._counting()
            if self._stuck <= self._patience:
                self._unpark(self.live)
                return
            if counting and self._stuck <= self._patience + _COUNTING_ROUNDS:
                self._unpark(counting)
                return
            timed = [w for w in self.live if w.timed]
            if self._jump_clock and timed and ex.clock.jump():
                self.num_jumps += 1
                for w in timed:
                    ex.clock.jumped(w)
                self._unpark(timed)
                return
        raise deadlock(ex, "nobody can make progress")

    def _counting(self) -> list[WorkGroup]:
        """Workgroups whose local variables change from round to round, other than by the clock."""
        out = []
        for w in self.live:
            if w.timed:
                continue
            now = fingerprint(w)
            if now != w.fingerprint:
                w.fingerprint = now
                out.append(w)
        return out

    def _unpark(self, workgroups: list[WorkGroup]) -> None:
        for w in workgroups:
            if w.parked:
                self.ex.polls.unpark(w)

    def _fail(self, error: ExecutorError) -> ExecutorError:
        self.failure = error
        return error

    def _kill(self) -> None:
        """End the workgroups that are left after a failure."""
        for w in self.live:
            if w.greenlet is not None and w.greenlet:
                with contextlib.suppress(GreenletExit):
                    w.greenlet.throw(GreenletExit)
            w.greenlet = None
        self.live.clear()
        if self.failure is not None:
            self.streams.clear()

    def unwind_hosts(self) -> None:
        """After a failure: raise it in every host thread that is left, the failing rank first."""
        failure = self.failure
        assert failure is not None
        self.baton.reclaim()
        culprit = None if isinstance(failure, Deadlock) else self.failing_rank
        for i, host in enumerate(sorted(self.hosts, key=lambda h: h.rank != culprit)):
            if isinstance(failure, Deadlock):
                host.inject = failure if i == 0 else failure.again()
            elif host.rank == culprit:
                host.inject = failure
            else:
                host.inject = stopped(failure)
            while not host.finished:
                self.baton.lend(host)
                host.inject = host.inject or stopped(failure)
            self.on_host_end(host)
        self.hosts.clear()

    def hash(self) -> str:
        """Hash of all scheduling and visibility decisions."""
        h = blake2b(array("q", self.schedule).tobytes(), digest_size=16)
        h.update(array("q", self.decisions).tobytes())
        return h.hexdigest()


def stopped(failure: ExecutorError) -> ExecutorError:
    """What other ranks' host code gets after a failure."""
    first = str(failure).splitlines()[0]
    return ExecutorStopped(f"stopped by {type(failure).__name__}: {first}")


def _ignore(host: Host) -> None:
    """Nobody wants to know."""
