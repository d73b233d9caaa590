"""Stale views: what loads may still see of memory as it was at the last acquire."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .access import Access, Array

if TYPE_CHECKING:
    from .tasks import WorkGroup

_LOG_LIMIT = 4096
# Who saw a publication happen: everybody, the publishing rank only, the other ranks only.
PLAIN, RANK_ONLY, OTHERS_ONLY = 0, 1, 2


class StaleLog:
    """What each publication to a region overwrote, newest last."""

    __slots__ = ("accesses", "count", "dtypes", "old", "rows")

    def __init__(self) -> None:
        # Columns: sequence number, lo, hi, rank, kind, workgroup id.
        self.rows: Array = np.zeros((64, 6), np.int64)
        self.accesses: list[Access] = []
        self.dtypes: list[np.dtype[Any]] = []
        self.old: list[Array] = []
        self.count = 0

    def append(
        self,
        seq: int,
        access: Access,
        dtype: np.dtype[Any],
        old: Array,
        rank: int,
        kind: int,
        wid: int,
    ) -> None:
        """Note what a publication has overwritten; very old entries are forgotten."""
        if self.count == _LOG_LIMIT:
            half = _LOG_LIMIT // 2
            self.rows[:half] = self.rows[half:_LOG_LIMIT]
            del self.accesses[:half], self.dtypes[:half], self.old[:half]
            self.count = half
        if self.count == len(self.rows):
            self.rows = np.concatenate([self.rows, np.zeros_like(self.rows)])
        self.rows[self.count] = (seq, access.lo, access.hi, rank, kind, wid)
        self.accesses.append(access)
        self.dtypes.append(dtype)
        self.old.append(old)
        self.count += 1


def rollback(w: WorkGroup, a: Access, dtype: np.dtype[Any], source: Array) -> Array | None:
    """The elements as this WG may still see them; None if there is nothing to undo."""
    log = a.region.log
    assert log is not None
    rows = log.rows[: log.count]
    if rows[-1, 0] <= w.view_gpu and rows[-1, 0] <= w.view_sys:
        return None
    mine = rows[:, 3] == w.rank
    hit = (rows[:, 1] < a.hi) & (rows[:, 2] > a.lo)
    hit &= rows[:, 0] > np.where(mine, w.view_gpu, w.view_sys)
    hit &= rows[:, 4] != np.where(mine, OTHERS_ONLY, RANK_ONLY)
    own = hit & (rows[:, 5] == w.id)
    if not (hit & ~own).any():
        return None
    numbers = np.flatnonzero(hit)
    lo = min(a.lo, int(rows[numbers, 1].min())) & ~7
    hi = max(a.hi, int(rows[numbers, 2].max()))
    tmp = source[lo:hi].copy()
    fixed: Array | None = None
    seen = w.coherent.get(a.region)
    for k in numbers[::-1]:
        entry = log.accesses[k]
        if own[k]:
            if fixed is None:
                fixed = np.zeros(hi - lo, np.bool_)
            fixed[entry.lo - lo : entry.hi - lo] |= entry.byte_mask()
            continue
        keep = fixed
        if seen:
            number = int(rows[k, 0])
            for (slo, shi), at in seen.items():
                if at >= number and slo < entry.hi and shi > entry.lo:
                    keep = np.zeros(hi - lo, np.bool_) if keep is None else keep.copy()
                    keep[max(slo - lo, 0) : max(shi - lo, 0)] = True
        if keep is None:
            entry.scatter(tmp, log.dtypes[k], log.old[k], lo)
        else:
            undone = tmp.copy()
            entry.scatter(undone, log.dtypes[k], log.old[k], lo)
            np.copyto(tmp, undone, where=~keep)
    return a.gather(tmp, dtype, lo)
