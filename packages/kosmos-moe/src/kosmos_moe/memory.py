"""How much memory MoE layers need: regions, counters and scratch, from the sizes alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from kosmos_core.device import layout as core_layout
from kosmos_core.errors import WorkspaceError
from kosmos_core.workspace import Region
from kosmos_heuristics import Machine
from kosmos_heuristics.moe import ROUTER_TILE

from kosmos_moe.device import layout
from kosmos_moe.router import MAX_TOPK

# The word in which peers count returned rows stands on another line than arrival words.
LINE = 32


def cdiv(a: int, b: int) -> int:
    """The quotient, rounded up."""
    return -(-a // b)


@dataclass(frozen=True)
class MoeLimits:
    """Largest sizes of the layers that share a workspace; see `MoEWorkspace`.

    Raises:
        WorkspaceError: a size is out of range.
    """

    world_size: int
    max_tokens: int
    hidden: int
    inter: int
    experts: int
    topk: int
    shared_inter: int = 0
    capacity: float | None = None
    training: bool = False

    def __post_init__(self) -> None:
        for name in ("world_size", "max_tokens", "hidden", "inter", "experts", "topk"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise WorkspaceError(f"{name}: got {value!r}, wanted a positive integer")
        if not isinstance(self.shared_inter, int) or self.shared_inter < 0:
            raise WorkspaceError(f"shared_inter: got {self.shared_inter!r}, wanted 0 or more")
        if self.experts % self.world_size:
            raise WorkspaceError(
                f"experts: got {self.experts}, wanted a multiple of the {self.world_size} ranks"
            )
        if self.topk > min(MAX_TOPK, self.experts):
            most = min(MAX_TOPK, self.experts)
            raise WorkspaceError(f"topk: got {self.topk}, wanted at most {most}")
        factor = self.capacity
        if factor is not None and (isinstance(factor, bool) or not 0 < factor < math.inf):
            raise WorkspaceError(f"capacity: got {factor!r}, wanted a positive number or None")

    @property
    def local_experts(self) -> int:
        """Experts of a rank."""
        return self.experts // self.world_size

    def worst_rows(self) -> int:
        """Rows that a rank can be sent at most."""
        return self.world_size * self.max_tokens * min(self.topk, self.local_experts)

    def arena_blocks(self, block_m: int) -> int:
        """Row blocks of the arena; each expert may leave a part of one empty."""
        rows = self.worst_rows()
        if self.capacity is not None:
            rows = min(rows, math.ceil(self.capacity * self.max_tokens * self.topk))
        return cdiv(rows, block_m) + self.local_experts

    def worst_blocks(self, block_m: int) -> int:
        """Row blocks that no routing can exceed."""
        return cdiv(self.worst_rows(), block_m) + self.local_experts


@dataclass(frozen=True)
class Needs:
    """What a workspace consists of.

    Attributes:
        regions: symmetric memory.
        max_tile_rows: stride of the arrival words.
        num_counters: words of a set beyond those of kosmos-core.
        scratch: elements and dtype of each piece of this rank's own memory.
        arena_blocks: row blocks of the arena.
    """

    regions: tuple[Region, ...]
    max_tile_rows: int
    num_counters: int
    scratch: dict[str, tuple[int, torch.dtype]]
    arena_blocks: int

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the scratch memory."""
        return sum(elements * dtype.itemsize for elements, dtype in self.scratch.values())


def needs_of(limits: MoeLimits, machine: Machine) -> Needs:
    """What layers within these limits need on a machine."""
    tokens, hidden, experts = limits.max_tokens, limits.hidden, limits.experts
    blocks = limits.arena_blocks(machine.tile.block_m)
    rows = blocks * machine.tile.block_m
    route_blocks = cdiv(tokens, ROUTER_TILE[machine.rule_set][0])
    token_blocks = cdiv(tokens, machine.tile.block_m)
    counters = route_blocks + 2 * blocks + max(token_blocks, limits.local_experts)
    own_words = int(layout.BLOCKS.value) - int(core_layout.COUNTERS.value)
    table = layout.table_words(limits.world_size, experts, route_blocks)
    choices = tokens * limits.topk
    counts = limits.world_size * experts
    bf16, fp32, int32 = torch.bfloat16, torch.float32, torch.int32
    shared = tokens if limits.shared_inter else 0
    regions = [
        Region("counts", int(layout.COUNTS.value), counts, int32, depth=2),
        Region("arena", int(layout.ARENA.value), rows * hidden, bf16),
        Region("return", int(layout.RETURN.value), choices * hidden, bf16),
    ]
    more: dict[str, tuple[int, torch.dtype]] = {}
    if limits.training:
        regions.append(Region("inputs", int(layout.INPUTS.value), rows * hidden, bf16))
        regions.append(Region("scalars", int(layout.SCALARS.value), rows + choices, fp32))
        columns = cdiv(limits.inter, machine.tile.block_n // 2)
        more = {
            "dgu": (2 * rows * limits.inter, bf16),
            "partials": (columns * rows, fp32),
            "dlogits": (tokens * experts, fp32),
            "router_dx": (tokens * hidden, fp32),
            "shared_dgu": (max(8, 2 * shared * limits.shared_inter), bf16),
        }
    return Needs(
        regions=tuple(regions),
        max_tile_rows=2 * limits.local_experts + LINE,
        num_counters=max(0, own_words) + counters,
        scratch={
            "h": (rows * limits.inter, bf16),
            "y2": (rows * hidden, bf16),
            "shared_h": (max(8, shared * limits.shared_inter), bf16),
            "shared_y": (max(8, shared * hidden), bf16),
            "logits": (tokens * experts, fp32),
            "sums": (route_blocks * (experts + 1), fp32),
            "route_counts": (route_blocks * experts, int32),
            "list": (choices, int32),
            "tables": (table, int32),
            "verdict": (4, int32),
            **more,
        },
        arena_blocks=blocks,
    )
