"""Plans of ``gemm_rs``, ``bulk_ag`` and ``bulk_rs``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from kosmos_heuristics.explain import Reason
from kosmos_heuristics.plan_base import RS_ORDERS, PlanBase
from kosmos_heuristics.plans import AgGemmPlan


@dataclass(frozen=True)
class GemmRsPlan(PlanBase):
    """Plan of one ``gemm_rs`` call.

    Args:
        cap: WGs in the grid.
        reducers_per_peer: WGs that start as reducers, for each remote peer; 0 without peers.
        num_movers: The same over all peers, at most half the cap.
        max_movers: WGs that reduce at once when builders that found the tile queue empty have
            joined (saturation), from ``num_movers`` to the cap.
        block_m: Rows of an output tile.
        block_n: Columns of an output tile.
        block_k: Contraction step.
        num_warps: Warps (NVIDIA) or waves (AMD) of a WG.
        num_stages: Depth of the software pipeline.
        band_rows: Rows of a band, whole row blocks: band b of every chunk is built before b + 1.
        unit_rows: Rows of a reducer's unit.
        unit_cols: Columns of a reducer's unit.
        source_unroll: Sources whose loads a reducer has in flight at once.
        split_k: Contraction splits of each of the last ``split_tiles`` tiles.
        split_tiles: Tiles at the end of the queue that are split; 0 when ``split_k`` is 1.
        claim_run: Tiles claimed at once while the queue is deep.
        xcd_bucketing: Whether the tile queue is bucketed by XCD.
        num_xcds: XCDs to bucket by, 1 when ``xcd_bucketing`` is off.
        transport: ``pull`` (reducers fetch partial sums) or ``push`` (builders store them into the
            owner's memory).
        policy: ``one_way`` (builders become reducers), ``two_way``, ``fixed`` or ``serial``.
        order: ``band_major`` or ``row_major``.
        rule: The rule that set the crew.
        reasons: Rule and source of every field; not part of equality.

    Raises:
        PlanError: A field is outside what kernels accept.
    """

    cap: int
    reducers_per_peer: int
    num_movers: int
    max_movers: int
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    band_rows: int
    unit_rows: int
    unit_cols: int
    source_unroll: int
    split_k: int
    split_tiles: int
    claim_run: int
    xcd_bucketing: bool
    num_xcds: int
    transport: str
    policy: str
    order: str
    rule: str
    reasons: tuple[Reason, ...] = field(default=(), compare=False, repr=False)

    OP: ClassVar[str] = "gemm_rs"
    OP_ORDERS: ClassVar[tuple[str, ...]] = RS_ORDERS

    def __post_init__(self) -> None:
        self.check_fields()
        self.check_split()
        self.check_movers("reducers_per_peer")
        self.check_divides("block_m", "band_rows")
        self.check_divides("unit_rows", "band_rows")
        self.check_saturation()


@dataclass(frozen=True)
class BulkAgPlan(PlanBase):
    """Plan of one ``bulk_ag`` call.

    Args:
        cap: WGs in the grid.
        movers_per_peer: Movers for each remote peer, 0 without peers.
        num_movers: WGs that start as movers, all peers together, at most half the cap.
        block_m: Rows of an output tile.
        block_n: Columns of an output tile.
        block_k: Contraction step.
        num_warps: Warps (NVIDIA) or waves (AMD) of a WG.
        num_stages: Depth of the software pipeline.
        group_m: Row blocks swept together per column.
        unit_rows: Rows of a mover's unit, over the whole width.
        copy_elements: Elements that a mover moves per step.
        copy_depth: Further steps whose loads a mover keeps in flight, 1 to 3.
        split_k: Contraction splits of each of the last ``split_tiles`` tiles.
        split_tiles: Tiles at the end of the queue that are split; 0 when ``split_k`` is 1.
        claim_run: Tiles claimed at once while the queue is deep.
        xcd_bucketing: Whether the tile queue is bucketed by XCD.
        num_xcds: XCDs to bucket by, 1 when ``xcd_bucketing`` is off.
        transport: ``pull`` or ``push``.
        policy: ``one_way``, ``two_way``, ``fixed`` or ``serial``.
        rule: The rule that set the crew.
        reasons: Rule and source of every field; not part of equality.

    Raises:
        PlanError: A field is outside what kernels accept.
    """

    cap: int
    movers_per_peer: int
    num_movers: int
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int
    unit_rows: int
    copy_elements: int
    copy_depth: int
    split_k: int
    split_tiles: int
    claim_run: int
    xcd_bucketing: bool
    num_xcds: int
    transport: str
    policy: str
    rule: str
    reasons: tuple[Reason, ...] = field(default=(), compare=False, repr=False)

    OP: ClassVar[str] = "bulk_ag"

    def __post_init__(self) -> None:
        self.check_fields()
        self.check_split()
        self.check_movers("movers_per_peer")


@dataclass(frozen=True)
class BulkRsPlan(PlanBase):
    """Plan of one ``bulk_rs`` call.

    Args:
        cap: WGs in the grid.
        reducers_per_peer: WGs that start as reducers, for each remote peer; 0 without peers.
        num_movers: The same over all peers, at most half the cap.
        max_movers: WGs that reduce at once when builders that found the tile queue empty have
            joined (saturation), from ``num_movers`` to the cap.
        block_m: Rows of an output tile.
        block_n: Columns of an output tile.
        block_k: Contraction step.
        num_warps: Warps (NVIDIA) or waves (AMD) of a WG.
        num_stages: Depth of the software pipeline.
        group_m: Row blocks swept together per column.
        unit_rows: Rows of a reducer's unit.
        unit_cols: Columns of a reducer's unit.
        source_unroll: Sources whose loads a reducer has in flight at once.
        copy_elements: Pushed, elements that a reducer sends per step.
        copy_depth: Further steps whose loads it keeps in flight, 1 to 3.
        split_k: Contraction splits of each of the last ``split_tiles`` tiles.
        split_tiles: Tiles at the end of the queue that are split; 0 when ``split_k`` is 1.
        claim_run: Tiles claimed at once while the queue is deep.
        xcd_bucketing: Whether the tile queue is bucketed by XCD.
        num_xcds: XCDs to bucket by, 1 when ``xcd_bucketing`` is off.
        transport: ``pull``: the input is complete before the call, so nobody waits for it;
            ``push``: for one that does not lie in symmetric memory.
        policy: ``one_way``, ``two_way``, ``fixed`` or ``serial``.
        rule: The rule that set the crew.
        reasons: Rule and source of every field; not part of equality.

    Raises:
        PlanError: A field is outside what kernels accept.
    """

    cap: int
    reducers_per_peer: int
    num_movers: int
    max_movers: int
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int
    unit_rows: int
    unit_cols: int
    source_unroll: int
    copy_elements: int
    copy_depth: int
    split_k: int
    split_tiles: int
    claim_run: int
    xcd_bucketing: bool
    num_xcds: int
    transport: str
    policy: str
    rule: str
    reasons: tuple[Reason, ...] = field(default=(), compare=False, repr=False)

    OP: ClassVar[str] = "bulk_rs"

    def __post_init__(self) -> None:
        self.check_fields()
        self.check_split()
        self.check_movers("reducers_per_peer")
        self.check_saturation()


TpPlan = AgGemmPlan | GemmRsPlan | BulkAgPlan | BulkRsPlan
