"""Why a plan is what it is: the rule behind each field, and where the rule came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Reason:
    """One field of a plan with the rule that set it.

    Args:
        field: Name of the field.
        rule: The rule that fired, with its condition.
        source: Where the rule or its number came from.
    """

    field: str
    rule: str
    source: str


CALLER = "argument of the call"


def given(field: str) -> Reason:
    """The reason of a field that the caller set."""
    return Reason(field, "given by the caller", CALLER)


def format_reasons(values: Sequence[tuple[str, object]], reasons: Sequence[Reason]) -> str:
    """One line a field: ``name = value: rule [source]``, columns aligned."""
    by_field = {reason.field: reason for reason in reasons}
    width = max(len(f"{name} = {value}") for name, value in values)
    lines = []
    for name, value in values:
        reason = by_field.get(name)
        text = f"{reason.rule} [{reason.source}]" if reason else "derived from the fields above"
        lines.append(f"{f'{name} = {value}':<{width}}  {text}")
    return "\n".join(lines)
