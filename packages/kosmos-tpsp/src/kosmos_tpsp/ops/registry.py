"""Integer handles for what an operator's schema cannot carry: a workspace and a call's choices."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

from kosmos_core.errors import WorkspaceError
from kosmos_core.worlds import World

from kosmos_tpsp.sharing import SharedWorkspace
from kosmos_tpsp.workspaces import TpSpWorkspace

AnyWorkspace = TpSpWorkspace | SharedWorkspace

_CALLS: dict[int, tuple[weakref.ref[AnyWorkspace], Any]] = {}
_HANDLES: dict[tuple[int, Any], int] = {}
_COUNT = itertools.count()
HANDLE_STRIDE = 16  # above the largest number of ranks


def call_handle(workspace: AnyWorkspace, options: Any) -> int:
    """The handle of (workspace, options), the same one while the workspace lives."""
    key = (id(workspace), options)
    handle = _HANDLES.get(key)
    if handle is None:
        # Shapes depend on the number of ranks: with that in it, a graph that torch.compile keeps on
        # disk is never taken for one of another number.
        handle = next(_COUNT) * HANDLE_STRIDE + workspace.world.size
        _HANDLES[key] = handle

        def forget(_: object) -> None:
            _CALLS.pop(_HANDLES.pop(key))

        _CALLS[handle] = (weakref.ref(workspace, forget), options)
    return handle


def resolve(handle: int) -> tuple[TpSpWorkspace, Any]:
    """The workspace and options of a handle; makes a shared workspace that is not made yet.

    Raises:
        WorkspaceError: the handle is unknown or its workspace is gone.
    """
    workspace, options = _entry(handle)
    return workspace.get() if isinstance(workspace, SharedWorkspace) else workspace, options


def world_of_call(handle: int) -> World:
    """The world of a handle's workspace, which need not be made for that.

    Raises:
        WorkspaceError: the handle is unknown or its workspace is gone.
    """
    return _entry(handle)[0].world


def _entry(handle: int) -> tuple[AnyWorkspace, Any]:
    entry = _CALLS.get(handle)
    workspace = None if entry is None else entry[0]()
    if entry is None or workspace is None:
        raise WorkspaceError(
            f"call handle {handle}: its workspace no longer exists; make a new one with "
            "call_handle()"
        )
    return workspace, entry[1]
