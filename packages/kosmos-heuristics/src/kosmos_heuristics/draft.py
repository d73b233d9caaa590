"""A plan in the making: values and reasons, field by field, overrides taken as given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kosmos_heuristics.cap import fit_movers, resolve_cap
from kosmos_heuristics.checks import check_choice, check_int
from kosmos_heuristics.errors import PlanError
from kosmos_heuristics.explain import Reason, given
from kosmos_heuristics.machine import TRANSPORTS, Machine
from kosmos_heuristics.movers import FIXED_MOVERS_PER_PEER, MoverChoice
from kosmos_heuristics.parts import TileShape
from kosmos_heuristics.plan_base import POLICIES, check_field
from kosmos_heuristics.problems import TpProblem
from kosmos_heuristics.tiles import choose_tile

TILE_FIELDS = ("block_m", "block_n", "block_k", "num_warps", "num_stages")
NOT_PRINTED = "not in paper Table B.3 (docs/decisions/0004-paper-rules.md)"


class Draft:
    """Collects what a plan is made of.

    Args:
        machine: The GPU and its node.
        overrides: Fields that the caller gave.
        allowed: Fields that may be given.

    Raises:
        PlanError: An override has no such field, or is out of range.
    """

    def __init__(
        self, machine: Machine, overrides: Mapping[str, Any], allowed: tuple[str, ...]
    ) -> None:
        self.machine = machine
        self.values: dict[str, Any] = {}
        self._reasons: dict[str, Reason] = {}
        self._overrides = dict(overrides)
        for name, value in overrides.items():
            if name not in allowed:
                raise PlanError("override", name, "one of " + ", ".join(allowed), "check the name")
            check_field(name, value)

    def set(self, name: str, value: Any, rule: str, source: str) -> Any:
        """Set a field by a rule, unless the caller gave it; returns what the plan will hold."""
        if name in self._overrides:
            self.values[name], self._reasons[name] = self._overrides[name], given(name)
        else:
            self.values[name], self._reasons[name] = value, Reason(name, rule, source)
        return self.values[name]

    def choose(
        self,
        name: str,
        value: str | None,
        default: str,
        choices: tuple[str, ...],
        rule: str,
        source: str,
        *,
        optional: bool = False,
    ) -> str:
        """Set a field to the caller's choice, or to the default; None only where it is optional."""
        if value is not None or not optional:
            check_choice(PlanError, name, value, choices, f"choose a {name}")
        if value is None or value == default:
            self.values[name], self._reasons[name] = default, Reason(name, rule, source)
        else:
            self.values[name], self._reasons[name] = value, given(name)
        return str(self.values[name])

    def set_cap(self, cap: int | None) -> int:
        """Set the cap, at most what is resident."""
        grid = resolve_cap(cap, self.machine.num_wgs)
        reason = Reason("cap", "all resident WGs", self.machine.source("num_wgs"))
        self.values["cap"] = grid
        self._reasons["cap"] = reason if cap is None else given("cap")
        return grid

    def set_policy(self, policy: str) -> None:
        """Set the switching policy of an operation whose demand is monotonic."""
        rule, source = "demand of a collective is monotonic", "paper Table 2"
        self.choose("policy", policy, "one_way", POLICIES, rule, source)

    def set_transport(self, transport: str | None, source: str | None = None) -> str:
        """Set the transport: the caller's, or the machine's; returns it.

        Args:
            transport: ``pull``, ``push``, or None for the machine's.
            source: Where the machine's comes from, if measured for this operation.
        """
        default = self.machine.transport
        rule, source = f"the machine's: {default}", source or self.machine.source("transport")
        return self.choose("transport", transport, default, TRANSPORTS, rule, source, optional=True)

    def set_crew(self, name: str, problem: TpProblem, choice: MoverChoice, cap: int) -> None:
        """Set the crew: the rule's count per peer, fitted to the cap, and its total."""
        fitted, num_movers = fit_movers(choice.movers_per_peer, problem.num_peers, cap)
        rule = choice.rule
        if fitted != choice.movers_per_peer:
            rule += f"; fitted to cap {cap}: {fitted} instead of {choice.movers_per_peer}"
        self.set(name, fitted, rule, choice.source)
        self.values["rule"] = rule
        fit = f"{name} x peers, at most half the cap"
        self.set("num_movers", num_movers, fit, "paper Table B.3, caption (reading A12)")

    def set_tile(self, problem: TpProblem, cap: int) -> TileShape:
        """Set the tile shape; returns it with what the caller gave."""
        tile, reason = choose_tile(problem, self.machine, cap)
        source = self.machine.source("tiles")
        taken: dict[str, Any] = {}
        for name in TILE_FIELDS:
            rule = reason.rule if name == "block_n" else "goes with block_n"
            taken[name] = self.set(name, getattr(tile, name), rule, source)
        return replace(tile, **taken)

    def set_split(
        self, split_k: int | None, ids: int, by_rule: tuple[int, int, tuple[Reason, Reason]]
    ) -> None:
        """Set split-K: the caller's factor for all tiles, or the rule's."""
        splits, split_tiles, (one, other) = by_rule
        if split_k is not None:
            check_field("split_k", split_k)
            splits, split_tiles = (split_k, ids) if split_k > 1 and ids else (1, 0)
            one = given("split_k")
            other = Reason("split_tiles", "all tiles", "follows a given split_k")
        self.values["split_k"], self._reasons["split_k"] = splits, one
        self.set("split_tiles", split_tiles, other.rule, other.source)

    def set_no_bucketing(self) -> None:
        """Set XCD bucketing off, as for everything that row 13 does not name."""
        self.set("xcd_bucketing", False, "B.3 row 13 covers AG+GEMM only: off", "paper Table B.3")
        num_xcds = self.machine.num_xcds if self.values["xcd_bucketing"] else 1
        rule = "the machine's with xcd_bucketing"
        self.set("num_xcds", num_xcds, rule, self.machine.source("num_xcds"))

    def finish(self) -> dict[str, Any]:
        """The fields of the plan, reasons in the order in which they were set."""
        return {**self.values, "reasons": tuple(self._reasons.values())}


def crew_given(
    problem: TpProblem, policy: str, machine: Machine, count: int | None, name: str
) -> MoverChoice | None:
    """The crew that the caller or the ``fixed`` policy decides; None where the rules do.

    Args:
        problem: Sizes of the call.
        policy: The switching policy.
        machine: The GPU and its node.
        count: The caller's count per peer, or None.
        name: Field of the count, for messages.

    Raises:
        PlanError: The count is below 1.
    """
    if count is not None:
        least = 0 if problem.num_peers == 0 else 1
        check_int(PlanError, name, count, least, "pass a crew of at least 1")
        reason = given(name)
        return MoverChoice(count if problem.num_peers else 0, reason.rule, reason.source)
    if policy == "fixed" and problem.num_peers and machine.rule_set != "executor":
        why = f"policy fixed: {FIXED_MOVERS_PER_PEER} WGs per peer"
        return MoverChoice(FIXED_MOVERS_PER_PEER, why, "paper Figures A.2 and A.3")
    return None
