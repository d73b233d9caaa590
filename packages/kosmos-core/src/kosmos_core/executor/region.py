"""Regions: one allocation each, and all that the executor knows about it."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np
import torch

from .access import Array

if TYPE_CHECKING:
    from .buffers import Dirty
    from .clocks import SyncVar
    from .readlog import ReadLog
    from .stale import StaleLog
    from .tasks import WorkGroup


def version_of(tensor: torch.Tensor) -> int:
    """How often in-place operations have written the tensor (0 if torch does not count)."""
    return 0 if tensor.is_inference() else int(tensor._version)


class Region:
    """One allocation: the bytes, and all that the executor knows about them.

    Attributes:
        base, nbytes: address range.
        mem: the bytes, as NumPy uint8.
        rank: owning rank.
        name: for reports.
        itemsize: bytes an element (for reports and shadow memory).
        tensor: a torch tensor on the same storage; its version counter shows host writes.
        version: version of `tensor` that has been accounted for.
        watch: parked workgroups and the byte ranges they poll.
        sentinel: bit pattern of "not here yet" in a region polled in its data, or None.
        coherent: per-location coherence assumed for such polls.
    """

    __slots__ = (
        "atomics", "base", "base_write", "coherent", "dirty", "grain", "itemsize", "log", "mem",
        "name", "nbytes", "pinned", "poison", "rank", "reads", "sentinel", "stamps", "sync",
        "tensor", "users", "version", "views", "watch", "writes",
    )  # fmt: skip

    def __init__(
        self, base: int, nbytes: int, rank: int, name: str, itemsize: int, tensor: torch.Tensor
    ) -> None:
        self.base = base
        self.nbytes = nbytes
        self.rank = rank
        self.name = name
        self.itemsize = itemsize
        self.tensor = tensor
        self.version = version_of(tensor)
        self.pinned = False
        # Unfinished launches that have received it.
        self.users = 0
        self.mem: Array = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(base))
        self.watch: list[tuple[int, int, WorkGroup]] = []
        # Weak memory: what each rank sees (gpu-scope releases), bytes not yet visible to others.
        self.views: dict[int, Array] = {}
        self.dirty: dict[int, Dirty] = {}
        self.log: StaleLog | None = None
        # Race detector.
        self.grain = itemsize if itemsize in (1, 2, 4, 8) else 1
        self.base_write = 0
        self.writes: Array | None = None
        self.atomics: Array | None = None
        self.poison: Array | None = None
        self.reads: ReadLog | None = None
        self.sync: dict[int, SyncVar] = {}
        # Simulated time at which words were last altered by atomics (cost model only).
        self.stamps: dict[int, int] = {}
        self.sentinel: int | None = None
        self.coherent = False

    def index(self, offset: int) -> int:
        """Element index of a byte offset."""
        return offset // self.itemsize

    def where(self, offset: int) -> str:
        """``name[index] (rank r)`` of a byte offset."""
        return f"{self.name}[{offset // self.itemsize}] (rank {self.rank})"

    def host_changed(self) -> None:
        """Host code has written the bytes: what ranks see follows, but for unpublished stores."""
        self.log = None
        for rank, view in self.views.items():
            keep = self.dirty[rank].mask != 0
            np.copyto(view, self.mem, where=~keep)

    def refine(self, grain: int) -> None:
        """Make shadow entries at most `grain` bytes wide (an access was narrower)."""
        k = self.grain // grain
        for name in ("writes", "atomics", "poison"):
            array = getattr(self, name)
            if array is not None:
                setattr(self, name, np.repeat(array, k))
        self.grain = grain
