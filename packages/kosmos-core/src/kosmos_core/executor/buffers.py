"""Store buffers: stores that are not visible to everybody yet."""

from __future__ import annotations

from typing import Any

import numpy as np

from .access import UINT, Access, Array


class Store:
    """A store that waits in a store buffer."""

    __slots__ = ("access", "dtype", "values")

    def __init__(self, access: Access, dtype: np.dtype[Any], values: Array) -> None:
        self.access = access
        self.dtype = dtype
        self.values = values


class Dirty:
    """Bytes of a region that one rank sees already and the others do not."""

    __slots__ = ("hi", "lo", "mask")

    def __init__(self, nbytes: int) -> None:
        self.mask: Array = np.zeros(nbytes, np.uint8)
        self.lo = nbytes
        self.hi = 0

    def mark(self, access: Access) -> None:
        """These bytes are dirty."""
        width = UINT[access.itemsize]
        access.scatter(self.mask, width, ~np.zeros((), width))
        self.lo = min(self.lo, access.lo)
        self.hi = max(self.hi, access.hi)

    def take(self) -> Array:
        """Byte offsets that are dirty; afterwards none is."""
        if self.hi <= self.lo:
            return np.zeros(0, np.int64)
        part = self.mask[self.lo : self.hi]
        out: Array = np.flatnonzero(part) + self.lo
        part[:] = 0
        self.lo, self.hi = len(self.mask), 0
        return out


def overlapped(stores: list[Store] | None, a: Access) -> bool:
    """Whether any of the stores shares a byte with the access."""
    return stores is not None and any(s.access.overlaps(a) for s in stores)


def patch(a: Access, dtype: np.dtype[Any], out: Array, stores: list[Store]) -> Array:
    """`out`, overwritten by the buffered stores that overlap it."""
    over = [s for s in stores if s.access.lo < a.hi and s.access.hi > a.lo]
    if not over:
        return out
    lo = min(a.lo, min(s.access.lo for s in over)) & ~7
    hi = max(a.hi, max(s.access.hi for s in over))
    tmp = np.zeros(hi - lo, np.uint8)
    a.scatter(tmp, dtype, out, lo)
    for s in over:
        s.access.scatter(tmp, s.dtype, s.values, lo)
    return a.gather(tmp, dtype, lo)


def split(stores: list[Store], salt: int) -> tuple[list[Store], list[Store]]:
    """Partition the elements of `stores` by a hash of their address.

    So stores to one address stay in order.
    """
    now: list[Store] = []
    later: list[Store] = []
    for s in stores:
        a = s.access
        offsets = a.offsets()
        numbers = offsets.astype(np.uint64) // np.uint64(a.itemsize) + np.uint64(1)
        mixed = numbers * np.uint64(salt)
        chosen = (mixed >> np.uint64(33)) & np.uint64(1) == 1
        values = np.broadcast_to(s.values, a.shape if a.index is None else (len(offsets),)).ravel()
        for target, part in ((now, chosen), (later, ~chosen)):
            if part.any():
                o = offsets[part]
                lo, hi = int(o.min()), int(o.max()) + a.itemsize
                size = o.size * a.itemsize
                some = Access(a.region, a.itemsize, o.shape, 0, None, o, None, lo, hi, size)
                target.append(Store(some, s.dtype, values[part]))
    return now, later
