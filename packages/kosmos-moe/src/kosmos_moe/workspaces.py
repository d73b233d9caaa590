"""The workspace of the MoE layers of a group: sized for a maximum, shared by all of them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, fields
from typing import Any

import torch
from kosmos_core.errors import WorkspaceError
from kosmos_core.workspace import DEFAULT_TIMEOUT_S, Workspace, workspace_num_bytes
from kosmos_core.worlds import World
from kosmos_heuristics import Machine, load_machine

from kosmos_moe.memory import MoeLimits, Needs, needs_of

LEAST_WGS = 2


@dataclass(frozen=True)
class _Settings:
    """What must be equal on all ranks: it decides where their words and rows lie."""

    kind: str
    limits: MoeLimits
    timeout_s: float
    first_epoch: int


def _agree(world: World, mine: _Settings, machine: dict[str, Any]) -> dict[str, Any]:
    """Rank 0's machine, once all ranks are seen to create the same workspace.

    Raises:
        WorkspaceError: a rank refused to create its workspace, or creates another one.
    """
    everybody = world.all_gather_object((mine, machine))
    for rank, theirs in enumerate(everybody):
        if isinstance(theirs, str):
            raise WorkspaceError(f"workspace: rank {rank} refused to create it: {theirs}")
    for rank, (settings, _) in enumerate(everybody):
        for field in fields(_Settings):
            theirs, wanted = getattr(settings, field.name), getattr(everybody[0][0], field.name)
            if theirs != wanted:
                raise WorkspaceError(
                    f"{field.name}: got {theirs} on rank {rank} and {wanted} on rank 0, wanted the "
                    "same on every rank"
                )
    first: dict[str, Any] = everybody[0][1]
    return first


class MoEWorkspace(Workspace):
    """Symmetric memory, words and scratch memory for the MoE layers of one group.

    Collective: every rank of the world creates, resets and destroys it together, with equal
    arguments. Layers whose sizes do not exceed its own share it.

    Args:
        world: where the ranks live.
        max_tokens: most tokens of a rank in a call.
        hidden: largest width of a token.
        inter: largest width of a routed expert.
        experts: most experts of a layer.
        topk: most experts that a token chooses.
        shared_inter: largest width of a shared expert, 0 for none.
        capacity: rows that an arena has room for, as a multiple of `max_tokens * topk`, what each
            rank is sent when all are sent equally many; None makes room for the worst case, so that
            no call can overflow.
        training: also make room for backwards.
        machine: machine model that plans are made for; rank 0's is used by all. None takes the
            world's own.
        timeout_s: bound of every wait.
        trace_events: events a workgroup may record in traced calls.
        first_epoch: epoch of the first call.

    Raises:
        WorkspaceError: an argument is out of range, or the ranks differ in anything but `machine`
            and `trace_events`; on every rank, before memory is shared.
    """

    def __init__(
        self,
        world: World,
        max_tokens: int,
        hidden: int,
        inter: int,
        experts: int,
        topk: int,
        *,
        shared_inter: int = 0,
        capacity: float | None = None,
        training: bool = False,
        machine: Machine | str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        trace_events: int = 0,
        first_epoch: int = 1,
    ) -> None:
        try:
            limits = MoeLimits(
                world.size, max_tokens, hidden, inter, experts, topk, shared_inter, capacity,
                training,
            )  # fmt: skip
            if world.fused and world.num_wgs < LEAST_WGS:
                raise WorkspaceError(
                    f"world: got {world.num_wgs} workgroups, wanted at least {LEAST_WGS} (a mover "
                    "beside a builder); reserve fewer SMs"
                )
            chosen = load_machine(machine if machine is not None else (world.machine or "executor"))
            mine = _Settings(type(self).__name__, limits, float(timeout_s), first_epoch)
        except Exception as error:
            # Told before it is raised: the peers stand in this same collective.
            world.all_gather_object(str(error))
            raise
        self.machine = Machine.from_dict(_agree(world, mine, chosen.to_dict()))
        self.limits = limits
        self.prepared: dict[Hashable, Any] = {}
        self.needs = needs_of(limits, self.machine)
        self._scratch: dict[str, torch.Tensor] = {}
        super().__init__(
            world,
            self.needs.regions,
            self.needs.max_tile_rows,
            timeout_s=timeout_s,
            trace_events=trace_events,
            first_epoch=first_epoch,
            num_counters=self.needs.num_counters,
        )

    @staticmethod
    def required_bytes(limits: MoeLimits, machine: Machine | str) -> int:
        """Bytes a rank that a workspace of these limits will take, a trace buffer aside."""
        needs = needs_of(limits, load_machine(machine))
        return _num_bytes(needs)

    def _allocate(self) -> None:
        super()._allocate()
        for name, (elements, dtype) in self.needs.scratch.items():
            self._scratch[name] = self.world.local(name, elements, dtype)

    def scratch(self, name: str) -> torch.Tensor:
        """Memory of this rank that one call uses and the next one overwrites."""
        return self._scratch[name]

    def num_bytes(self) -> int:
        """Bytes that this workspace takes on each rank."""
        if not self.world.fused:
            return 0
        return super().num_bytes() + self.needs.scratch_bytes

    def _release(self) -> None:
        super()._release()
        for tensor in self._scratch.values():
            self.world.release(tensor)
        self._scratch.clear()

    def destroy(self) -> None:
        """Releases the memory, as `Workspace.destroy()` does, and what calls prepared.

        Collective and idempotent.
        """
        try:
            super().destroy()
        finally:
            self.prepared.clear()


def _num_bytes(needs: Needs) -> int:
    shared = workspace_num_bytes(needs.regions, needs.max_tile_rows, 0, needs.num_counters)
    return shared + needs.scratch_bytes
