"""What a caller may choose besides operands and router."""

from __future__ import annotations

from dataclasses import dataclass

from kosmos_core.arguments import check_cap, check_choice, check_flag, check_int

POLICIES = ("two_way", "dedicated_combine", "planned_split", "fixed", "serial")
ORDERS = ("destination_minor", "destination_major")
TRANSPORTS = ("push",)
OVERFLOWS = ("reference", "raise")


@dataclass(frozen=True)
class MoeOptions:
    """Choices of a call; None leaves one to the plan.

    Attributes:
        cap: most workgroups to use.
        policy: who combines. "two_way": dual-role movers, between tiles; "dedicated_combine": a
            crew that does nothing else, joined by all once no tile is left; "fixed": never joined;
            "planned_split": a crew that builds as many tiles as a model of the costs gives it and
            then only combines; "serial": all dispatch, then all build, then all combine.
        order: "destination_minor" or "destination_major", the order in which rows are pushed.
        transport: "push".
        dispatch_crew: workgroups that dispatch before they build.
        combine_crew: workgroups that combine between tiles.
        overflow: what a call does whose routing does not fit the arena: takes the "reference" path,
            or "raise".
        save: keep what a backward needs.
        main_grad: in backwards, add weight gradients into the `main_grad` (FP32) of w1, w2 and the
            shared expert's weights where all of them have one.
        traced: record role spans into the workspace's trace buffer.
    """

    cap: int | None = None
    policy: str = "two_way"
    order: str = "destination_minor"
    transport: str = "push"
    dispatch_crew: int | None = None
    combine_crew: int | None = None
    overflow: str = "reference"
    save: bool = False
    main_grad: bool = True
    traced: bool = False

    def check(self) -> None:
        """Checks every choice by itself.

        Raises:
            Rejected: one is not allowed.
        """
        check_choice("policy", self.policy, POLICIES)
        check_choice("order", self.order, ORDERS)
        check_choice("transport", self.transport, TRANSPORTS)
        check_choice("overflow", self.overflow, OVERFLOWS)
        for name in ("save", "main_grad", "traced"):
            check_flag(name, getattr(self, name))
        for name in ("dispatch_crew", "combine_crew"):
            check_int(name, getattr(self, name))
        check_cap(self.cap)

    def overrides(self) -> dict[str, int]:
        """Fields of the plan that are given."""
        given = {"dispatch_crew": self.dispatch_crew, "combine_crew": self.combine_crew}
        return {name: value for name, value in given.items() if value is not None}
