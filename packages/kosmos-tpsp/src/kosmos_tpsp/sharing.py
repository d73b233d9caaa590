"""One workspace for all layers of a group, made when the first of them is called.

Layers say in their constructor how much room they take. Every rank constructs the same layers in
the same order, so the ranks agree on it without a word.
"""

from __future__ import annotations

import torch.distributed as dist
from kosmos_core.errors import WorkspaceError
from kosmos_core.uncopied import Uncopied
from kosmos_core.worlds import World, group_world

from kosmos_tpsp.workspaces import TpSpWorkspace

_KEY = "kosmos_tpsp.sharing"
_WORLDS: dict[dist.ProcessGroup | None, World] = {}


class SharedWorkspace(Uncopied):
    """A workspace that is made at first use, and until then grows with what layers reserve.

    Args:
        world: where the ranks live.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.max_tokens = 0
        self.max_features = 0
        self._made: TpSpWorkspace | None = None
        self._destroyed = False

    def reserve(self, max_tokens: int, max_features: int) -> bool:
        """Whether calls of this size have room in it; makes some while that is possible."""
        if self._made is None:
            self.max_tokens = max(self.max_tokens, max_tokens)
            self.max_features = max(self.max_features, max_features)
            return True
        return (
            not self._made.destroyed
            and max_tokens <= self.max_tokens
            and max_features <= self.max_features
        )

    def get(self) -> TpSpWorkspace:
        """The workspace.

        Collective at first use, when it is made.

        Raises:
            WorkspaceError: it would be made during graph capture, or is destroyed.
        """
        if self._made is None:
            if self._destroyed:
                # Nothing would ever destroy it.
                raise WorkspaceError(
                    "workspace: it is destroyed; construct the layers anew on every rank"
                )
            if self.world.is_capturing():
                raise WorkspaceError(
                    "workspace: it would be made during graph capture; call the layer or its "
                    "prepare() once before"
                )
            self._made = TpSpWorkspace(self.world, self.max_tokens, self.max_features)
        return self._made

    def reset(self) -> None:
        """Revives the workspace after a call was given up. Collective."""
        if self._made is not None:
            self._made.reset()

    def destroy(self) -> None:
        """Releases the memory, if there is any. Collective."""
        self._destroyed = True
        if self._made is not None:
            self._made.destroy()


def world_of(group: dist.ProcessGroup | World | None) -> World:
    """The world of a group: itself, or one that all layers of the process group share.

    Args:
        group: a process group, None for the default group, or a world.
    """
    if isinstance(group, World):
        return group
    if dist.is_initialized():
        group = group if group is not None else dist.group.WORLD
        living = dist.distributed_c10d._world.pg_map
        # Groups that were destroyed are forgotten, with what their layers shared.
        for gone in [g for g in _WORLDS if g not in living]:
            del _WORLDS[gone]
    world = _WORLDS.get(group)
    if world is None:
        world = _WORLDS[group] = group_world(group)
    return world


def shared_workspace(world: World, max_tokens: int, max_features: int) -> SharedWorkspace:
    """The workspace of the group that has, or can still get, room for calls of this size.

    Where the one that is in use is too small, later layers share a new one; the earlier layers keep
    theirs.

    Raises:
        WorkspaceError: a size is no positive integer.
    """
    for name, value in (("max_tokens", max_tokens), ("max_features", max_features)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise WorkspaceError(f"{name}: got {value!r}, wanted a positive integer")
    mine: list[SharedWorkspace] = world.kept.setdefault((_KEY, world.rank), [])
    if not mine or not mine[-1].reserve(max_tokens, max_features):
        mine.append(SharedWorkspace(world))
        mine[-1].reserve(max_tokens, max_features)
    return mine[-1]


def destroy_workspaces(group: dist.ProcessGroup | World | None = None) -> None:
    """Releases what the layers of a group share; they cannot be called any more.

    Collective.
    """
    world = world_of(group)
    for workspace in world.kept.pop((_KEY, world.rank), []):
        workspace.destroy()
