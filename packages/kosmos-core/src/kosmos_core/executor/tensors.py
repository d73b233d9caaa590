"""Tensors in the memory of the ranks, and what host code does to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from .memory import Memory
from .region import Region, version_of

if TYPE_CHECKING:
    from .races import RaceDetector
    from .scheduler import Scheduler
    from .weak import WeakMemory


class Tensors:
    """The part of an `Executor` that makes and declares tensors.

    Attributes:
        num_ranks: number of ranks.
        num_launches: launches so far, by rank.
    """

    num_ranks: int
    num_launches: list[int]
    memory: Memory
    race_detector: RaceDetector | None
    weak_memory: WeakMemory | None
    scheduler: Scheduler
    _rank: int
    _launch_regions: list[Region]

    @property
    def in_spmd(self) -> bool:
        """Whether host code of a rank is running (in `spmd`)."""
        return self.scheduler.baton.holder is not None

    def current_rank(self) -> int:
        """Rank whose host code is running (in `spmd`), or that of `on` (0 by default)."""
        host = self.scheduler.baton.holder
        return self._rank if host is None else host.rank

    def empty(
        self, rank: int, shape: Sequence[int] | int, dtype: torch.dtype = torch.float32,
        name: str = "tensor",
    ) -> torch.Tensor:  # fmt: skip
        """Uninitialised tensor in the memory of `rank`."""
        self.check_rank(rank)
        dims = (shape,) if isinstance(shape, int) else tuple(int(n) for n in shape)
        return self.memory.allocate(rank, dims, dtype, name)[0]

    def tensor(self, rank: int, data: torch.Tensor, name: str = "tensor") -> torch.Tensor:
        """Copy of `data` in the memory of `rank`, written by that rank's host code.

        Other ranks must synchronise with the rank before they read it.
        """
        self.check_rank(rank)
        out, region = self.memory.allocate(rank, tuple(data.shape), data.dtype, name)
        out.copy_(data)
        region.version = version_of(out)
        if self.race_detector is not None:
            self.race_detector.host_wrote(region, rank)
        return out

    def symmetric(
        self, shape: Sequence[int] | int, dtype: torch.dtype = torch.float32,
        name: str = "symmetric",
    ) -> list[torch.Tensor]:  # fmt: skip
        """One zeroed tensor per rank; the initialisation is ordered before everything."""
        out = [self.empty(rank, shape, dtype, name) for rank in range(self.num_ranks)]
        for t in out:
            t.zero_()
            self.initialised(t)
        return out

    def pointers(
        self, rank: int, tensors: Sequence[torch.Tensor], name: str = "pointers"
    ) -> torch.Tensor:
        """Table of addresses (int64) in the memory of `rank`, ordered before everything."""
        out = self.empty(rank, (len(tensors),), torch.int64, name)
        addresses = [t.data_ptr() for t in tensors]
        out.copy_(torch.tensor(addresses, dtype=torch.int64, device="cpu"))
        self.initialised(out)
        return out

    def register(self, tensor: torch.Tensor, rank: int, name: str) -> None:
        """Make a tensor made elsewhere accessible to kernels by its address.

        Tensors that a launch receives are registered by themselves.
        """
        self.check_rank(rank)
        region, _ = self.memory.register(tensor, rank, name)
        if region is not None:
            region.name, region.rank, region.pinned = name, rank, True

    def initialised(self, tensor: torch.Tensor) -> None:
        """Declare the contents of a tensor ordered before everything that follows."""
        region = self._region(tensor)
        region.version = version_of(tensor)
        region.host_changed()
        if self.race_detector is not None:
            self.race_detector.initialised(region)

    def sentinel(self, tensor: torch.Tensor, pattern: int, coherent: bool = False) -> None:
        """Declare a region that is polled in its data.

        Args:
            tensor: the tensor.
            pattern: bits of an element that mean "not here yet".
            coherent: assume per-location coherence: a write ordered after a read is ordered
                after the write that the read saw.
        """
        region = self._region(tensor)
        region.sentinel = pattern & ((1 << 8 * tensor.element_size()) - 1)
        region.coherent = coherent

    def _region(self, tensor: torch.Tensor) -> Region:
        region = self.memory.find(tensor.data_ptr())
        if region is None:
            raise ValueError(
                "tensor is not registered: make it with empty(), tensor() or symmetric(), or call "
                "register()"
            )
        return region

    def register_argument(self, tensor: torch.Tensor, name: str) -> None:
        """A launch of the current rank has received a tensor."""
        region, new = self.memory.register(tensor, self.current_rank(), name)
        if region is not None:
            self._launch_regions.append(region)
        host = self.scheduler.baton.holder
        if new and region is not None and host is not None and self.race_detector is not None:
            self.race_detector.host_wrote(region, host.rank)

    def note_host_writes(self, rank: int | None) -> None:
        """Account for writes by host code: in-place torch operations bump version counters.

        Args:
            rank: whose host code may have written; None: the owner of each region.
        """
        if self.race_detector is None and self.weak_memory is None:
            return
        for region in self.memory.ordered:
            version = version_of(region.tensor)
            if version == region.version:
                continue
            region.version = version
            region.host_changed()
            if self.race_detector is None:
                continue
            if not any(self.num_launches) and not self.scheduler.hosts:
                self.race_detector.initialised(region)
            else:
                writer = region.rank if rank is None else rank
                self.race_detector.host_wrote(region, writer)

    def check_rank(self, rank: int) -> None:
        """Refuse a rank that does not exist.

        Raises:
            ValueError: it does not.
        """
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank must be in 0..{self.num_ranks - 1}, got {rank}")
