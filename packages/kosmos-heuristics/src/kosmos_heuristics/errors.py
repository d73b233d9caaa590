"""Exceptions of kosmos-heuristics.

Every message names the argument, what it got, what it wanted and the remedy, in one line.
"""

from __future__ import annotations


class HeuristicsError(ValueError):
    """Base of all errors raised for bad input of this package.

    Args:
        argument: Name of the argument or field at fault.
        got: The offending value; printed with ``repr``, shortened when long.
        wanted: What would have been accepted.
        remedy: What the caller can do about it.
    """

    def __init__(self, argument: str, got: object, wanted: str, remedy: str) -> None:
        shown = " ".join(repr(got).split())
        if len(shown) > 80:
            shown = shown[:77] + "..."
        super().__init__(f"{argument}: got {shown}, wanted {wanted}; {remedy}")
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
