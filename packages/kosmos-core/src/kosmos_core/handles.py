"""Integer handles for what an operator's schema cannot carry: a workspace and a call's choices."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Hashable
from typing import Any

from kosmos_core.errors import WorkspaceError

_CALLS: dict[int, tuple[weakref.ref[Any], Any]] = {}
_HANDLES: dict[tuple[int, Hashable], int] = {}
_COUNT = itertools.count()
_LOCK = threading.Lock()  # autograd makes calls in threads of its own
HANDLE_STRIDE = 16  # above the largest number of ranks


def call_handle(workspace: Any, choices: Hashable) -> int:
    """The handle of (workspace, choices), the same one while the workspace lives.

    Args:
        workspace: a workspace, or what stands for one that is not made yet; it has a `world`.
        choices: of the call.
    """
    key = (id(workspace), choices)
    handle = _HANDLES.get(key)
    if handle is None:
        with _LOCK:
            handle = _HANDLES.get(key)
            if handle is None:
                handle = _new_handle(key, workspace, choices)
    return handle


def _new_handle(key: tuple[int, Hashable], workspace: Any, choices: Hashable) -> int:
    # Shapes depend on the number of ranks: with that in it, a graph that torch.compile keeps on
    # disk is never taken for one of another number.
    handle: int = next(_COUNT) * HANDLE_STRIDE + workspace.world.size

    def forget(_: object) -> None:
        _CALLS.pop(_HANDLES.pop(key))

    _CALLS[handle] = (weakref.ref(workspace, forget), choices)
    _HANDLES[key] = handle
    return handle


def resolve(handle: int) -> tuple[Any, Any]:
    """The workspace and choices of a handle.

    Raises:
        WorkspaceError: the handle is unknown or its workspace is gone.
    """
    entry = _CALLS.get(handle)
    workspace = None if entry is None else entry[0]()
    if entry is None or workspace is None:
        raise WorkspaceError(
            f"call handle {handle}: its workspace no longer exists; make a new one with "
            "call_handle()"
        )
    return workspace, entry[1]
