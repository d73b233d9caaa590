"""Exceptions of kosmos-heuristics.

Every message names the argument, what it got, what it wanted and the remedy, in one line.
"""

from __future__ import annotations

MOST_SHOWN = 80


def _shown(got: object) -> str:
    """``repr`` in one line, shortened when long; the type where there is no ``repr``."""
    try:
        shown = " ".join(repr(got).split())
    except (ValueError, RecursionError):  # thousands of digits, or of nested lists
        shown = f"a value of type {type(got).__name__}"
    return shown if len(shown) <= MOST_SHOWN else shown[: MOST_SHOWN - 3] + "..."


class HeuristicsError(ValueError):
    """Base of all errors raised for bad input of this package.

    Args:
        argument: Name of the argument or field at fault.
        got: The offending value; printed with ``repr``, shortened when long.
        wanted: What would have been accepted.
        remedy: What the caller can do about it.
    """

    def __init__(self, argument: str, got: object, wanted: str, remedy: str) -> None:
        super().__init__(f"{argument}: got {_shown(got)}, wanted {wanted}; {remedy}")
        self.argument = argument
        self.got = got
        self.wanted = wanted
        self.remedy = remedy


class ProblemError(HeuristicsError):
    """A problem that no plan can be made for, such as m not divisible by the group."""


class MachineError(HeuristicsError):
    """An unknown machine, or a machine or measurement file that does not hold together."""


class PlanError(HeuristicsError):
    """A plan field outside what the kernels accept, such as a cap below 2."""


class ValidationError(HeuristicsError):
    """Measured times that cannot be read, or none at all."""
