"""Host code of each rank in an OS thread of its own, one running at a time (baton passing)."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Any

import torch

from .errors import ExecutorStopped, HostStopped
from .tasks import Task


class Baton:
    """Passes control between the scheduler's thread and the host threads.

    Exactly one thread runs at any time, so that everything is deterministic.

    Attributes:
        holder: the host that runs now, None while the scheduler does.
    """

    def __init__(self) -> None:
        self.holder: Host | None = None
        self._lent = False
        self._back = threading.Lock()
        self._back.acquire()

    def lend(self, host: Host) -> None:
        """Let a host run until it blocks or ends."""
        self.holder = host
        self._lent = True
        host.go.release()
        self._back.acquire()
        self.holder = None

    def reclaim(self) -> None:
        """After an interrupt, anywhere in `lend`: wait until the host blocks or ends."""
        self._back.acquire(blocking=self._lent)
        self.holder = None

    def give_back(self) -> None:
        """Called in the host's thread: let the scheduler run."""
        self._lent = False
        self._back.release()


class Host(Task):
    """The host thread of one rank.

    Attributes:
        blocked: condition it waits for (called by the scheduler), None if it can run.
        why: what it waits for, for reports.
        finished: whether its function has ended.
        result, error: what it returned or raised.
    """

    __slots__ = (
        "_baton", "_call", "_context", "_grad", "_thread", "blocked", "collectives", "error",
        "finished", "go", "inject", "result", "why",
    )  # fmt: skip

    def __init__(self, rank: int, baton: Baton, call: Callable[[], Any]) -> None:
        super().__init__(rank + 1, rank, -1, (-1, -1, -1))
        self._baton = baton
        self._call = call
        self._context = contextvars.copy_context()
        self._grad = torch.is_grad_enabled()
        self.go = threading.Lock()
        self.go.acquire()
        self.blocked: Callable[[], bool] | None = None
        self.why = ""
        self.finished = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.inject: BaseException | None = None
        self.collectives = 0
        self._thread = threading.Thread(
            target=self._context.run, args=(self._main,), name=f"rank {rank}", daemon=True
        )

    def __repr__(self) -> str:
        return f"host of rank {self.rank}"

    def start(self) -> None:
        """Start the thread (it waits for its first turn)."""
        self._thread.start()

    def _main(self) -> None:
        self.go.acquire()
        try:
            if self.inject is not None:
                raise self.inject
            # Whether autograd records is a property of the thread.
            with torch.set_grad_enabled(self._grad):
                self.result = self._call()
        except HostStopped:
            self.error = ExecutorStopped(f"host code of rank {self.rank} was stopped")
        except BaseException as e:
            self.error = e
        self.finished = True
        self._baton.give_back()

    def ready(self) -> bool:
        """Whether it can run."""
        if self.blocked is None:
            return True
        if self.blocked():
            self.blocked = None
            return True
        return False

    def wait(self, condition: Callable[[], bool], why: str) -> None:
        """Called in its thread: let others run until `condition` holds.

        Raises:
            Deadlock: it never will.
            KernelFault, DataRace: the launch it waits for failed.
            ExecutorStopped: the run has failed for a reason of another rank.
        """
        self.blocked = condition
        self.why = why
        self._baton.give_back()
        self.go.acquire()
        self.blocked = None
        if self.inject is not None:
            error, self.inject = self.inject, None
            raise error

    def join(self) -> None:
        """Wait for the end of the thread."""
        self._thread.join()


def name_rank(error: BaseException, rank: int) -> BaseException:
    """Attach the rank to an exception of its host code (a note, and the attribute `rank`)."""
    note = f"raised in the host code of rank {rank}"
    notes = getattr(error, "__notes__", [])
    if note not in notes:
        if hasattr(error, "add_note"):
            error.add_note(note)
        else:  # Python 3.10 shows no notes: say it in the chain of causes.
            error.__notes__ = [*notes, note]  # type: ignore[attr-defined]
            if error.__cause__ is None:
                error.__cause__ = ExecutorStopped(note)
    if not hasattr(error, "rank"):
        try:
            error.rank = rank  # type: ignore[attr-defined]
        except AttributeError:
            return error
    return error
