"""The plan of one MoE layer in one direction."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from kosmos_heuristics.errors import PlanError
from kosmos_heuristics.explain import Reason
from kosmos_heuristics.plan_base import FIX, MOE_POLICIES, PUSH_ORDERS, PlanBase


@dataclass(frozen=True)
class MoePlan(PlanBase):
    """What ``moe_forward`` and ``moe_backward`` have in common.

    Args:
        cap: WGs in the grid.
        dispatch_crew: WGs that push token rows (backward: dY) first and then build; at most half
            the cap.
        combine_crew: Dual-role movers of the combine; at most half the cap.
        burst_depth: Pieces of a row that a mover has in flight at once.
        column_input: When the column-wise copy of X is sent: ``none``, ``forward``, ``backward``.
        block_m: Rows of an expert's output tile.
        block_n: Columns of an expert's output tile.
        block_k: Contraction step.
        num_warps: Warps (NVIDIA) or waves (AMD) of a WG.
        num_stages: Depth of the software pipeline.
        router_block_m: Rows of a tile of the router's GEMM.
        router_block_n: Columns of a tile of the router's GEMM.
        split_k: Contraction splits; 1.
        xcd_bucketing: Whether the tile queue is bucketed by XCD.
        num_xcds: XCDs to bucket by, 1 when ``xcd_bucketing`` is off.
        transport: ``push`` or ``pull``.
        policy: ``two_way``, ``dedicated_combine``, ``planned_split``, ``fixed`` or ``serial``.
        order: ``destination_minor`` or ``destination_major``, the order of the push lists.
        rule: The rules that set the crews.
        reasons: Rule and source of every field; not part of equality.

    Raises:
        PlanError: A field is outside what kernels accept.
    """

    cap: int
    dispatch_crew: int
    combine_crew: int
    burst_depth: int
    column_input: str
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    router_block_m: int
    router_block_n: int
    split_k: int
    xcd_bucketing: bool
    num_xcds: int
    transport: str
    policy: str
    order: str
    rule: str
    reasons: tuple[Reason, ...] = field(default=(), compare=False, repr=False)

    OP_ORDERS: ClassVar[tuple[str, ...]] = PUSH_ORDERS
    OP_POLICIES: ClassVar[tuple[str, ...]] = MOE_POLICIES

    def __post_init__(self) -> None:
        self.check_fields()
        self.check_bucketing()
        for name in ("dispatch_crew", "combine_crew"):
            crew: int = getattr(self, name)
            if crew > self.cap // 2:
                wanted = f"at most {self.cap // 2}, half the cap {self.cap}"
                raise PlanError(name, crew, wanted, "lower it or raise the cap")
        if self.split_k != 1:
            raise PlanError("split_k", self.split_k, "1: expert GEMMs are not split", FIX)


@dataclass(frozen=True)
class MoeForwardPlan(MoePlan):
    """Plan of one ``moe_forward`` call; fields as in ``MoePlan``."""

    OP: ClassVar[str] = "moe_forward"


@dataclass(frozen=True)
class MoeBackwardPlan(MoePlan):
    """Plan of one ``moe_backward`` call; fields as in ``MoePlan``."""

    OP: ClassVar[str] = "moe_backward"
