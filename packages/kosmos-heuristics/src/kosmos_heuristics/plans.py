"""The plan of an operation: frozen numbers that a launch is made from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from kosmos_heuristics.errors import PlanError
from kosmos_heuristics.explain import Reason
from kosmos_heuristics.plan_base import (
    FIX,
    MAX_COPY_DEPTH,
    MAX_SPLIT_K,
    ORDERS,
    POLICIES,
    PlanBase,
    check_field,
)

__all__ = [
    "MAX_COPY_DEPTH",
    "MAX_SPLIT_K",
    "ORDERS",
    "POLICIES",
    "AgGemmPairPlan",
    "AgGemmPlan",
    "check_field",
]


@dataclass(frozen=True)
class AgGemmPlan(PlanBase):
    """Plan of one ``ag_gemm`` call. Equal plans are equal on every rank: ``str`` is canonical.

    Args:
        cap: WGs in the grid.
        movers_per_peer: Movers for each remote peer, 0 without peers.
        num_movers: WGs that start as movers, all peers together, at most half the cap. Below
            ``movers_per_peer`` times the peers only when not even one a peer fits.
        block_m: Rows of an output tile.
        block_n: Columns of an output tile.
        block_k: Contraction step.
        num_warps: Warps (NVIDIA) or waves (AMD) of a WG.
        num_stages: Depth of the software pipeline.
        tile_row_rows: Rows of a tile row, the unit at which gathered data is declared ready.
        slices: Mover units of a tile row; each is ``tile_row_rows / slices`` rows.
        group_m: Row blocks swept together per column in the local part of the tile queue.
        group_rows: Tile rows swept together per column in the remote part.
        split_k: Contraction splits of each of the last ``split_tiles`` tiles, a power of two up to
            8, combined pair by pair in fixed order.
        split_tiles: Tiles at the end of the queue that are split; 0 when ``split_k`` is 1.
        claim_run: Tiles claimed at once while the queue is deep.
        xcd_bucketing: Whether the tile queue is bucketed by XCD.
        num_xcds: XCDs to bucket by, 1 when ``xcd_bucketing`` is off.
        transport: ``pull`` or ``push``.
        policy: ``one_way``, ``two_way``, ``fixed`` or ``serial``.
        order: ``local_first``, ``chunk_major`` or ``naive``.
        copy_elements: Elements that a mover moves per step.
        copy_depth: Further steps whose loads a mover keeps in flight, 1 to 3.
        rule: The rule that set the crew.
        reasons: Rule and source of every field; not part of equality.

    Raises:
        PlanError: A field is outside what the kernels accept.
    """

    cap: int
    movers_per_peer: int
    num_movers: int
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    tile_row_rows: int
    slices: int
    group_m: int
    group_rows: int
    split_k: int
    split_tiles: int
    claim_run: int
    xcd_bucketing: bool
    num_xcds: int
    transport: str
    policy: str
    order: str
    copy_elements: int
    copy_depth: int
    rule: str
    reasons: tuple[Reason, ...] = field(default=(), compare=False, repr=False)

    OP: ClassVar[str] = "ag_gemm"

    def __post_init__(self) -> None:
        self.check_fields()
        self.check_split()
        self.check_movers("movers_per_peer")
        self.check_divides("block_m", "tile_row_rows")
        if self.tile_row_rows % self.slices:
            wanted = f"a divisor of tile_row_rows {self.tile_row_rows}"
            raise PlanError("slices", self.slices, wanted, FIX)

    @property
    def row_blocks_per_tile_row(self) -> int:
        """Row blocks of a tile row, ``tile_row_rows / block_m``."""
        return self.tile_row_rows // self.block_m


@dataclass(frozen=True)
class AgGemmPairPlan(AgGemmPlan):
    """Plan of one ``ag_gemm_pair`` call; fields as in ``AgGemmPlan``.

    The queue that they describe is that of the data gradient. The tiles of the weight gradient
    stand behind it in a queue of their own, swept in groups of ``group_m``, never split.
    """

    OP: ClassVar[str] = "ag_gemm_pair"
