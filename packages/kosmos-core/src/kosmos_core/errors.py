"""Exceptions.

A fault of a peer names rank, operation and flag; a bad argument names what it got and wanted.
"""

from __future__ import annotations


class KosmosError(RuntimeError):
    """Base of every error that KOSMOS raises at run time."""


class ArgumentError(KosmosError, ValueError):
    """A bad argument, found before launch.

    The message names the argument, what it got and what it wanted.
    """


class WorkspaceError(KosmosError, ValueError):
    """A workspace that is destroyed, too small, or of another group."""


class WorldError(KosmosError):
    """A world that cannot be made here, or is used outside its ranks."""


class PeerError(KosmosError):
    """A collective call was given up on every rank.

    Sticky until a collective `reset()` of the workspace.

    Attributes:
        rank: rank that raises this exception.
        raised_by: rank that gave up first.
        peer: rank that it waited for or that differs.
        op: the last call made on this rank.
        phase: step of the kernel.
        flag: kind of word that was waited for.
        index: which word (source * tile rows + tile row, or peer).
        seen: value of the word.
        wanted: value waited for.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int,
        raised_by: int,
        peer: int,
        op: str,
        phase: str,
        flag: str,
        index: int,
        seen: int,
        wanted: int,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.raised_by = raised_by
        self.peer = peer
        self.op = op
        self.phase = phase
        self.flag = flag
        self.index = index
        self.seen = seen
        self.wanted = wanted


class PeerTimeoutError(PeerError):
    """A wait for a peer outlasted the bound."""


class PeerMismatchError(PeerError):
    """The ranks did not make the same call (operation, shape, dtype or plan differ)."""


class PeerFaultError(PeerError):
    """A peer refused its call before launch, or left the workspace by an exception."""
