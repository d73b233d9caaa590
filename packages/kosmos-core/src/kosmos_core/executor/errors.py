"""Exceptions of the concurrent CPU executor.

Every report carries the same facts twice: as text for people and as fields for tests.
"""

from __future__ import annotations

from dataclasses import dataclass


class ExecutorError(RuntimeError):
    """Base class of everything the executor reports about the code under test."""


@dataclass(frozen=True)
class Wait:
    """What one workgroup was waiting for when nothing could run any more.

    Attributes:
        wg: workgroup, e.g. ``rank1.wg2``.
        kernel: name of its kernel.
        region: name of the tensor polled, or ``""`` if unknown.
        index: element index in that tensor, -1 if unknown.
        rank: rank that owns the tensor, -1 if unknown.
        line: ``file:line`` of the poll.
        source: text of that line.
        seen: value read last, as text.
        wanted: what the loop waits for, as text (``""`` if it cannot be told).
    """

    wg: str
    kernel: str
    region: str
    index: int
    rank: int
    line: str
    source: str
    seen: str
    wanted: str


class Deadlock(ExecutorError):
    """No workgroup and no host thread can make progress.

    Attributes:
        waits: one `Wait` per live workgroup.
        hosts: one line per blocked host thread.
        wg, region, index, rank, line, seen, wanted: those of the first entry of `waits`.
    """

    def __init__(
        self, message: str, waits: tuple[Wait, ...] = (), hosts: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message)
        self.waits = waits
        self.hosts = hosts
        first = waits[0] if waits else Wait("", "", "", -1, -1, "", "", "", "")
        self.wg = first.wg
        self.region = first.region
        self.index = first.index
        self.rank = first.rank
        self.line = first.line
        self.seen = first.seen
        self.wanted = first.wanted

    def again(self) -> Deadlock:
        """A second exception object with the same contents (one per blocked thread)."""
        return Deadlock(str(self), self.waits, self.hosts)


class DataRace(ExecutorError):
    """Two accesses that no synchronisation orders, or a scope that does not reach the reader.

    Attributes:
        kind: what kind of conflict.
        wg, line: the access that found it (`line` is ``file:line``).
        other, other_line: the access it conflicts with.
        stack: ``file:line in function`` of the finding access and its callers, innermost first.
        region, index, rank: tensor, element index and owning rank.
    """

    def __init__(
        self,
        message: str,
        *,
        kind: str = "",
        wg: str = "",
        line: str = "",
        other: str = "",
        other_line: str = "",
        stack: tuple[str, ...] = (),
        region: str = "",
        index: int = -1,
        rank: int = -1,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.wg = wg
        self.line = line
        self.other = other
        self.other_line = other_line
        self.stack = stack
        self.region = region
        self.index = index
        self.rank = rank


class KernelFault(ExecutorError):
    """A kernel raised (assertion, unsupported feature, watchdog, ...).

    The original exception is the cause.

    Attributes:
        wg, line: where (`line` is ``file:line``).
        region, index: tensor and element for memory faults, else ``""`` and -1.
    """

    def __init__(
        self, message: str, *, wg: str = "", line: str = "", region: str = "", index: int = -1
    ) -> None:
        super().__init__(message)
        self.wg = wg
        self.line = line
        self.region = region
        self.index = index


class MemoryFault(KernelFault):
    """An access outside every registered tensor."""


class ExecutorStopped(ExecutorError):
    """Host code of one rank was cut short, or came too late, after a fault of another."""


class UnsupportedAsm(NotImplementedError):
    """Inline assembly without an emulation."""


class HostStopped(BaseException):
    """Unwinds a host thread whose `Executor.spmd` is being torn down."""


class WatchdogBite(BaseException):
    """Raised inside a kernel that ran too long without a synchronisation operation."""
