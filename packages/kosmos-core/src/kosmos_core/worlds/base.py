"""What every world offers."""

from __future__ import annotations

import abc
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kosmos_core.errors import WorldError
from kosmos_core.uncopied import Uncopied

MAX_WORLD_SIZE = 8
# Given wherever memory of the host is meant: callers may have set another default device.
HOST = torch.device("cpu")


@dataclass(frozen=True)
class SymmetricBuffer:
    """Memory that every rank has and every rank can address.

    Attributes:
        name: what error messages call it.
        local: this rank's part, 1-D.
        addresses: address of the buffer on every rank, as this rank's kernels see it.
        handle: keeps the mapping of the peers' memory alive.
    """

    name: str
    local: torch.Tensor
    addresses: tuple[int, ...]
    handle: Any = None


class World(Uncopied, abc.ABC):
    """The ranks of one group: size, own rank, memory, launches, and host collectives.

    Attributes:
        size: number of ranks, 1 to 8.
        fused: whether fused kernels run here; False in the reference world.
        why_not_fused: the reason when they do not.
        target: vendor constant of `kosmos_core.device.target`.
        machine: name of the machine model that plans are made for.
        kept: what packages keep for as long as the world lives, each under a key of its own.
    """

    size: int
    fused: bool = True
    why_not_fused: str = ""
    target: int = 0
    machine: str = ""

    def __init__(self, size: int) -> None:
        if not isinstance(size, int) or not 1 <= size <= MAX_WORLD_SIZE:
            raise WorldError(
                f"world size: got {size!r}, wanted 1 to {MAX_WORLD_SIZE}; "
                "use a subgroup of the node"
            )
        self.size = size
        self.kept: dict[Hashable, Any] = {}

    @property
    @abc.abstractmethod
    def rank(self) -> int:
        """This rank within the group (of the calling thread, where ranks are virtual)."""

    @property
    @abc.abstractmethod
    def device(self) -> torch.device:
        """Device of this rank's ordinary tensors."""

    @property
    @abc.abstractmethod
    def num_wgs(self) -> int:
        """Workgroups sure to be resident at once on this rank, reserved SMs taken off."""

    @abc.abstractmethod
    def symmetric(self, name: str, num_elements: int, dtype: torch.dtype) -> SymmetricBuffer:
        """Allocates uninitialised symmetric memory.

        Collective: same order and sizes on every rank.
        """

    @abc.abstractmethod
    def local(self, name: str, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised memory of this rank that kernels use."""

    @abc.abstractmethod
    def host_visible(self, num_words: int) -> torch.Tensor:
        """Zeroed int64 words that kernels write and the host reads without a copy."""

    @abc.abstractmethod
    def launch(
        self,
        kernel: Any,
        num_wgs: int,
        args: Sequence[Any],
        key: Hashable,
        *,
        num_warps: int,
        num_stages: int,
    ) -> None:
        """Launches `num_wgs` workgroups on this rank's current stream.

        Args:
            kernel: a `@triton.jit` function.
            num_wgs: workgroups of the grid.
            args: positional arguments; structs are NamedTuples.
            key: everything that the compiled code depends on besides the kernel; equal keys share
                it.
            num_warps: warps of a workgroup.
            num_stages: depth of the software pipeline.
        """

    def load(
        self, kernel: Any, args: Sequence[Any], key: Hashable, *, num_warps: int, num_stages: int
    ) -> None:
        """Compiles and loads what `launch` with these arguments would run, and runs nothing.

        There is nothing to do where kernels are interpreted.
        """
        return

    @abc.abstractmethod
    def barrier(self) -> None:
        """Host barrier over the group."""

    @abc.abstractmethod
    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order.

        For set-up, never on a hot path.
        """

    @abc.abstractmethod
    def all_gather_tensor(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, ...] of every rank, stacked in rank order: the reference path's collective."""

    def reduce_scatter_tensor(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, ...]: the sum over ranks of what each holds for this one.

        Args:
            x: [ranks * rows, ...] contiguous, rows for each rank in rank order.
        """
        parts = self.all_to_all_tensor(x).float().chunk(self.size)
        return torch.stack(list(parts)).sum(0).to(x.dtype)

    def all_to_all_tensor(self, x: torch.Tensor) -> torch.Tensor:
        """[ranks * rows, ...]: what each rank holds for this one, stacked in rank order.

        Args:
            x: [ranks * rows, ...] contiguous, rows for each rank in rank order.
        """
        parts = [part.chunk(self.size)[self.rank] for part in self.all_gather_object(x)]
        return torch.cat(parts)

    def all_to_all_rows(
        self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> torch.Tensor:
        """[sum of received, ...]: the rows that each rank has for this one, in rank order.

        Args:
            x: [sum of sent, ...], rows for each rank in rank order.
            sent: rows for each rank.
            received: rows from each rank.
        """
        parts = self.all_gather_object(torch.split(x, list(sent)))
        return torch.cat([of_rank[self.rank] for of_rank in parts])

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Waits until everything this rank launched has ended."""

    def release(self, tensor: torch.Tensor) -> None:
        """Tells the world that a tensor that it made is done with."""
        return

    def polled(self, tensor: torch.Tensor, pattern: int) -> None:
        """Tells the world that kernels poll a tensor in its data.

        Args:
            tensor: part of a symmetric buffer.
            pattern: bits of an element that has not arrived yet.
        """
        return

    def order_after(self, stream: Any) -> None:
        """Makes the current stream wait for all that `stream` holds.

        There is nothing to do where launches block.
        """
        return

    def current_stream(self) -> Any:
        """Identifies the stream that the next launch goes to."""
        return 0

    def is_running(self) -> bool:
        """Whether kernels can still be launched."""
        return True

    def is_capturing(self) -> bool:
        """Whether launches are being captured into a graph rather than run."""
        return False

    def spmd(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Runs `fn(rank, *args)` for every virtual rank and returns their results in rank order."""
        raise WorldError(
            f"spmd: {type(self).__name__} has real ranks; "
            "start one process a rank (torchrun) instead"
        )

    def close(self) -> None:
        """Releases what the world holds; idempotent."""
        return

    def __enter__(self) -> World:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def describe(self) -> str:
        """How the command line names this world."""
        return f"{type(self).__name__}({self.size})"
