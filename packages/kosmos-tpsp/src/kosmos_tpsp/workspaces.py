"""The workspace of the TP+SP operations: sized for a maximum, shared by every layer of a group."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from kosmos_core.device import layout
from kosmos_core.errors import WorkspaceError
from kosmos_core.workspace import (
    DEFAULT_TIMEOUT_S,
    SPLIT_TICKETS,
    Region,
    Workspace,
    workspace_num_bytes,
)
from kosmos_core.worlds import World
from kosmos_heuristics import Machine, load_machine

TRANSPORTS = ("pull", "push")


def _tile_rows(max_tokens: int, world_size: int, machine: Machine) -> int:
    chunk = -(-max_tokens // world_size)
    return max(1, -(-chunk // machine.tile_row_rows))


def _regions(
    world_size: int, max_tokens: int, max_features: int, transports: tuple[str, ...]
) -> list[Region]:
    chunk = -(-max_tokens // world_size) * max_features if world_size > 1 else 8
    regions = [Region("gather", int(layout.GATHER.value), chunk * world_size, torch.bfloat16)]
    if "pull" in transports:
        # Two-deep: the owner refills its shard before it holds its peers' starts.
        regions.insert(0, Region("shard", int(layout.SHARD.value), chunk, torch.bfloat16, depth=2))
    return regions


class TpSpWorkspace(Workspace):
    """Symmetric memory and words for the TP+SP operations of one group.

    Collective: every rank of the world creates, resets and destroys it together, with equal
    arguments.

    Args:
        world: where the ranks live.
        max_tokens: largest number of gathered rows m of any call.
        max_features: largest width k of a gathered row.
        transports: which transports calls may use; "pull" needs a two-deep shard region.
        machine: machine model that plans are made for; rank 0's is used by all. None takes the
            world's own.
        timeout_s: bound of every wait.
        trace_events: events a workgroup may record in traced calls.
        first_epoch: epoch of the first call.

    Raises:
        WorkspaceError: a size is not positive or a transport is unknown.
    """

    def __init__(
        self,
        world: World,
        max_tokens: int,
        max_features: int,
        *,
        transports: tuple[str, ...] = TRANSPORTS,
        machine: Machine | str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        trace_events: int = 0,
        first_epoch: int = 1,
    ) -> None:
        for name, value in (("max_tokens", max_tokens), ("max_features", max_features)):
            if value <= 0:
                raise WorkspaceError(f"{name}: got {value}, wanted a positive number")
        unknown = set(transports) - set(TRANSPORTS)
        if unknown or not transports:
            raise WorkspaceError(f"transports: got {transports}, wanted some of {TRANSPORTS}")
        self.max_tokens = max_tokens
        self.max_features = max_features
        self.transports = tuple(transports)
        chosen = load_machine(machine if machine is not None else (world.machine or "executor"))
        # All ranks must decide alike, so all of them plan with rank 0's model.
        self.machine = Machine.from_dict(world.all_gather_object(chosen.to_dict())[0])
        self.prepared: dict[Hashable, Any] = {}
        self.partials: torch.Tensor | None = None
        self._outgrown: list[torch.Tensor | None] = []
        super().__init__(
            world,
            _regions(world.size, max_tokens, max_features, self.transports),
            _tile_rows(max_tokens, world.size, self.machine),
            timeout_s=timeout_s,
            trace_events=trace_events,
            first_epoch=first_epoch,
        )

    @staticmethod
    def required_bytes(
        world_size: int,
        max_tokens: int,
        max_features: int,
        machine: Machine | str,
        transports: tuple[str, ...] = TRANSPORTS,
    ) -> int:
        """Bytes a rank that a workspace of this size will take, before it is created."""
        model = load_machine(machine)
        regions = _regions(world_size, max_tokens, max_features, transports)
        return workspace_num_bytes(regions, _tile_rows(max_tokens, world_size, model))

    def reserve_partials(self, tiles: int, split_k: int, block_m: int, block_n: int) -> None:
        """Makes room for the FP32 partial tiles of split-K.

        Raises:
            WorkspaceError: more parts than there are tickets, or growth during graph capture.
        """
        if split_k > 1 and tiles * split_k > SPLIT_TICKETS:
            raise WorkspaceError(
                f"split_k: {tiles} tiles in {split_k} parts, wanted at most {SPLIT_TICKETS} parts; "
                "use split_k=1"
            )
        needed = tiles * split_k * block_m * block_n if split_k > 1 else 4
        if self.partials is None or self.partials.numel() < needed:
            if self.world.is_capturing():
                raise WorkspaceError(
                    "split_k: the partials would be allocated during graph capture; call "
                    "prepare_ag_gemm() first"
                )
            # A captured graph may still replay on the smaller one.
            self._outgrown.append(self.partials)
            self.partials = self.world.local("partials", needed, torch.float32)

    def destroy(self) -> None:
        """Collective and idempotent: releases the memory."""
        self.prepared.clear()
        self.partials = None
        self._outgrown.clear()
        super().destroy()
