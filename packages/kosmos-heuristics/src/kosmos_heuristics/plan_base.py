"""What all plans have in common: fields checked one by one, one line of text, explanations."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from kosmos_heuristics.cap import MIN_CAP
from kosmos_heuristics.checks import check_choice, check_int, check_power_of_two
from kosmos_heuristics.errors import PlanError
from kosmos_heuristics.explain import Reason, format_reasons
from kosmos_heuristics.machine import TRANSPORTS

POLICIES = ("one_way", "two_way", "fixed", "serial")
ORDERS = ("local_first", "chunk_major", "naive")
RS_ORDERS = ("band_major", "row_major")
MOE_POLICIES = ("two_way", "dedicated_combine", "planned_split", "fixed", "serial")
PUSH_ORDERS = ("destination_minor", "destination_major")
COLUMN_INPUTS = ("none", "forward", "backward")
# Most steps in flight beyond the one that a mover stores: with more, the buffers of four steps of
# 32 KiB would not fit into shared memory.
MAX_COPY_DEPTH = 3
# Partials are combined pair by pair, on at most three levels.
MAX_SPLIT_K = 8
# Pieces of a row in flight at once: Table B.3 row 10 has no larger depth.
MAX_BURST_DEPTH = 8
FIX = "change the override or leave the field to the rules"
_POWERS_OF_TWO = {
    "block_m": 16,
    "block_n": 16,
    "block_k": 16,
    "num_warps": 1,
    "tile_row_rows": 1,
    "slices": 1,
    "split_k": 1,
    "copy_elements": 1,
    "unit_rows": 1,
    "unit_cols": 16,
    "source_unroll": 1,
    "router_block_m": 16,
    "router_block_n": 16,
}
_CHOICES = {
    "transport": TRANSPORTS,
    "policy": POLICIES,
    "order": ORDERS,
    "column_input": COLUMN_INPUTS,
}
_COUNTS = {
    "movers_per_peer": 0,
    "reducers_per_peer": 0,
    "num_movers": 0,
    "max_movers": 0,
    "dispatch_crew": 1,
    "combine_crew": 1,
    "burst_depth": 1,
    "num_stages": 1,
    "group_m": 1,
    "group_rows": 1,
    "band_rows": 1,
    "split_tiles": 0,
    "claim_run": 1,
    "num_xcds": 1,
    "copy_depth": 1,
}
_MOST = {
    "copy_depth": MAX_COPY_DEPTH,
    "split_k": MAX_SPLIT_K,
    "burst_depth": MAX_BURST_DEPTH,
    "source_unroll": 4,
}


def check_field(name: str, value: object, choices: tuple[str, ...] | None = None) -> None:
    """Check a field of a plan by itself, without its relation to others.

    Args:
        name: Name of the field.
        value: Its value.
        choices: Choices of the field where they depend on the operation.

    Raises:
        PlanError: The value is outside what the kernels accept.
    """
    if name in _CHOICES:
        check_choice(PlanError, name, value, choices or _CHOICES[name], FIX)
    elif name in _POWERS_OF_TWO:
        check_power_of_two(PlanError, name, value, _POWERS_OF_TWO[name], FIX)
    elif name in _COUNTS:
        check_int(PlanError, name, value, _COUNTS[name], FIX)
    elif name == "xcd_bucketing" and not isinstance(value, bool):
        raise PlanError(name, value, "a bool", FIX)
    elif name == "rule" and not isinstance(value, str):
        raise PlanError(name, value, "a text", FIX)
    if name in _MOST and isinstance(value, int) and value > _MOST[name]:
        raise PlanError(name, value, f"at most {_MOST[name]}", FIX)


@dataclass(frozen=True)
class PlanBase:
    """Text, JSON and checks of a plan; the fields are the subclasses'.

    Subclasses declare ``cap``, ``rule`` (the rule that set the crew) and ``reasons`` among their
    fields. Equal plans are equal on every rank: ``str`` is canonical.
    """

    OP: ClassVar[str]
    OP_ORDERS: ClassVar[tuple[str, ...]] = ORDERS
    OP_POLICIES: ClassVar[tuple[str, ...]] = POLICIES

    def check_fields(self) -> None:
        """Check every field by itself."""
        values: dict[str, Any] = vars(self)
        least = "leave at least one mover and one builder"
        check_int(PlanError, "cap", values["cap"], MIN_CAP, least)
        choices = {"order": self.OP_ORDERS, "policy": self.OP_POLICIES}
        for item in fields(self):
            check_field(item.name, values[item.name], choices.get(item.name))

    def check_movers(self, name: str) -> None:
        """Check that ``num_movers`` fits the cap and the count ``name`` per peer."""
        values: dict[str, Any] = vars(self)
        cap, movers, per_peer = values["cap"], values["num_movers"], values[name]
        if movers > cap // 2:
            wanted = f"at most {cap // 2}, half the cap {cap}"
            raise PlanError("num_movers", movers, wanted, "lower it or raise the cap")
        if (movers == 0) != (per_peer == 0):
            raise PlanError("num_movers", movers, f"0 exactly when {name} ({per_peer}) is 0", FIX)

    def check_saturation(self) -> None:
        """Check that ``max_movers`` is neither below ``num_movers`` nor above the cap."""
        values: dict[str, Any] = vars(self)
        cap, movers, most = values["cap"], values["num_movers"], values["max_movers"]
        if not movers <= most <= cap:
            raise PlanError("max_movers", most, f"from num_movers {movers} to the cap {cap}", FIX)

    def check_bucketing(self) -> None:
        """Check that the bucketing fields go together."""
        values: dict[str, Any] = vars(self)
        if values["xcd_bucketing"] != (values["num_xcds"] > 1):
            wanted = "more than 1 with xcd_bucketing, 1 without"
            raise PlanError("num_xcds", values["num_xcds"], wanted, "set both fields together")

    def check_split(self) -> None:
        """Check that the split fields go together, and the bucketing fields."""
        self.check_bucketing()
        values: dict[str, Any] = vars(self)
        if (values["split_k"] == 1) != (values["split_tiles"] == 0):
            wanted = f"0 exactly when split_k ({values['split_k']}) is 1"
            raise PlanError(
                "split_tiles", values["split_tiles"], wanted, "set both fields together"
            )

    def check_divides(self, name: str, of: str) -> None:
        """Check that field ``of`` is a multiple of field ``name``; blames ``of``'s value."""
        values: dict[str, Any] = vars(self)
        if values[of] % values[name]:
            raise PlanError(of, values[of], f"a multiple of {name} {values[name]}", FIX)

    def to_dict(self) -> dict[str, int | bool | str]:
        """All fields but the reasons, in order, the rule last."""
        data = {item.name: getattr(self, item.name) for item in fields(self) if item.compare}
        data["rule"] = data.pop("rule")
        return data

    def __str__(self) -> str:
        """One line with every field."""
        return f"{self.OP} " + " ".join(f"{name}={value}" for name, value in self.to_dict().items())

    def explain(self) -> str:
        """One line a field: its value, the rule that fired, and the rule's source."""
        values = [pair for pair in self.to_dict().items() if pair[0] != "rule"]
        reasons: tuple[Reason, ...] = vars(self)["reasons"]
        return format_reasons(values, reasons)
