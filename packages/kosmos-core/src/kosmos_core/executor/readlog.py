"""Log of reads: what a later write must be ordered after."""

from __future__ import annotations

from typing import Any

import numpy as np

from .access import Access, Array
from .clocks import CLOCK_MASK, CLOCK_SHIFT, SITE_MASK, SLOT_SHIFT
from .tasks import Clock

_PRUNE_AT = 2048


class ReadLog:
    """Reads of a region that a later write must be ordered after."""

    __slots__ = ("accesses", "count", "limit", "numbers", "rows")

    def __init__(self) -> None:
        # Columns: slot, clock, lo, hi, site, whether the read is atomic.
        self.rows: Array = np.zeros((32, 6), np.int64)
        self.accesses: list[Access] = []
        self.numbers: dict[Any, int] = {}
        self.count = 0
        self.limit = _PRUNE_AT

    def add(self, epoch: int, a: Access, atomic: bool) -> None:
        """Remember a read (a repeated one replaces the earlier one)."""
        slot, site = epoch >> SLOT_SHIFT, epoch & SITE_MASK
        shape: Any = a.strides if a.index is None else a.index.tobytes()
        key = (slot, site, a.lo, a.hi, a.shape, shape)
        number = self.numbers.get(key)
        if number is None:
            number = self.numbers[key] = self.count
            self.count += 1
            if number >= len(self.rows):
                self.rows = np.concatenate([self.rows, np.zeros_like(self.rows)])
            self.accesses.append(a)
        clk = epoch >> CLOCK_SHIFT & CLOCK_MASK
        self.rows[number] = (slot, clk, a.lo, a.hi, site, atomic)

    def prune(self, oldest: Clock) -> None:
        """Forget reads that everybody is ordered after."""
        rows = self.rows[: self.count]
        keep = np.flatnonzero(rows[:, 1] > oldest[rows[:, 0]])
        numbers = {int(old): new for new, old in enumerate(keep)}
        self.numbers = {k: numbers[v] for k, v in self.numbers.items() if v in numbers}
        self.accesses = [self.accesses[int(i)] for i in keep]
        self.count = len(keep)
        self.rows[: self.count] = rows[keep]
        self.limit = max(_PRUNE_AT, 2 * self.count)
