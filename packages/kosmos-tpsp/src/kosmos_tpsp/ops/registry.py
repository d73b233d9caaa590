"""Handles of calls, as `kosmos_core.handles` has them, whose workspace may not be made yet."""

from __future__ import annotations

from typing import Any

from kosmos_core import handles
from kosmos_core.handles import HANDLE_STRIDE, call_handle
from kosmos_core.worlds import World

from kosmos_tpsp.sharing import SharedWorkspace
from kosmos_tpsp.workspaces import TpSpWorkspace

AnyWorkspace = TpSpWorkspace | SharedWorkspace


def resolve(handle: int) -> tuple[TpSpWorkspace, Any]:
    """The workspace and options of a handle; makes a shared workspace that is not made yet.

    Raises:
        WorkspaceError: the handle is unknown or its workspace is gone.
    """
    workspace, options = handles.resolve(handle)
    return workspace.get() if isinstance(workspace, SharedWorkspace) else workspace, options


def world_of_call(handle: int) -> World:
    """The world of a handle's workspace, which need not be made for that.

    Raises:
        WorkspaceError: the handle is unknown or its workspace is gone.
    """
    world: World = handles.resolve(handle)[0].world
    return world


__all__ = ["HANDLE_STRIDE", "AnyWorkspace", "call_handle", "resolve", "world_of_call"]
