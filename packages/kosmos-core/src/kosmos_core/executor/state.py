"""The executor that is active in this process (triton's language is patched globally: one)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .executor import Executor

_active: Executor | None = None


def active() -> Executor:
    """The active executor.

    Raises:
        RuntimeError: no executor is active.
    """
    if _active is None:
        raise RuntimeError("no Executor is active: use `with Executor(num_ranks) as ex:`")
    return _active


def is_active() -> bool:
    """Whether an executor is active."""
    return _active is not None


def activate(executor: Executor) -> None:
    """Make `executor` the active one.

    Raises:
        RuntimeError: another executor is active.
    """
    global _active
    if _active is not None:
        raise RuntimeError("only one Executor can be active in a process: close the other first")
    _active = executor


def deactivate() -> None:
    """Leave no executor active."""
    global _active
    _active = None
