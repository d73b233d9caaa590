"""What `check` runs: the wanted shape and shapes derived from it, interleaved in one workspace."""

from __future__ import annotations

from typing import Any

from kosmos_tpsp.cli.calls import Call
from kosmos_tpsp.ops.catalog import Driver, Shape

# Rows of this many bf16 elements are 16-byte aligned, as the fused path needs.
ALIGNED = 8


def _odd_multiple(value: int) -> int:
    """An odd multiple of `ALIGNED`, at most `value` where that is possible: no tile divides it."""
    return ((value // ALIGNED - 1) | 1) * ALIGNED if value >= 2 * ALIGNED else ALIGNED


def shapes(driver: Driver, wanted: Shape, size: int, dtype: str = "bf16") -> list[Shape]:
    """The shape, an odd one of about two thirds of it in each dimension, and one token a rank.

    Where a rank's tokens are whole groups, those are counted instead.
    """
    granule = driver.granule(dtype)
    tokens, n, other = driver.num_tokens(wanted), wanted[1], driver.other_of(wanted)
    rows = ((tokens // size // granule * 2 // 3) | 1) * granule
    odd = driver.shape_of(rows * size, _odd_multiple(n * 2 // 3), _odd_multiple(other * 2 // 3))
    return list(dict.fromkeys([wanted, odd, driver.shape_of(size * granule, ALIGNED, ALIGNED)]))


def sequence(wanted: list[Shape], calls: int, options: Any, dtype: str = "bf16") -> list[Call]:
    """Every shape `calls` times on fresh data, by turns, then each again on its first data."""
    fresh = [Call(*shape, data, options, dtype) for data in range(calls) for shape in wanted]
    return fresh + [Call(*shape, 0, options, dtype) for shape in wanted[::-1]]
