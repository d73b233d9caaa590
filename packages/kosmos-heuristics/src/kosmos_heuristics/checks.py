"""Small validators shared by the dataclasses; each raises the error class it is given."""

from __future__ import annotations

from collections.abc import Sequence

from kosmos_heuristics.errors import HeuristicsError

LARGEST_NUMBER = 1e6


def check_int(
    error: type[HeuristicsError], name: str, value: object, minimum: int, remedy: str
) -> int:
    """Return ``value`` if it is an int (bool excluded) of at least ``minimum``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise error(name, value, f"an integer of at least {minimum}", remedy)
    return value


def check_number(
    error: type[HeuristicsError], name: str, value: object, remedy: str, *, positive: bool = True
) -> float:
    """Return ``value`` as a float, above 0 (or not below 0 if not ``positive``), at most 10^6.

    The bound is far above any rate or latency in this package's units: what exceeds it was written
    in other units, such as FLOPS for TFLOPS.
    """
    wanted = f"a number {'above' if positive else 'of at least'} 0, at most {LARGEST_NUMBER:g}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise error(name, value, wanted, remedy)
    if not 0 <= value <= LARGEST_NUMBER or (positive and value == 0):
        raise error(name, value, wanted, remedy)
    return float(value)


def check_power_of_two(
    error: type[HeuristicsError], name: str, value: object, minimum: int, remedy: str
) -> int:
    """Return ``value`` if it is a power of two of at least ``minimum``."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or value < minimum
        or value & (value - 1)
    ):
        raise error(name, value, f"a power of two of at least {minimum}", remedy)
    return value


def check_choice(
    error: type[HeuristicsError], name: str, value: object, choices: Sequence[str], remedy: str
) -> str:
    """Return ``value`` if it is one of ``choices``."""
    if not isinstance(value, str) or value not in choices:
        raise error(name, value, "one of " + ", ".join(choices), remedy)
    return value


def cdiv(a: int, b: int) -> int:
    """Quotient ``a / b`` rounded up, for non-negative integers."""
    return -(-a // b)
