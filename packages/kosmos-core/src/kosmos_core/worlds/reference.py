"""Any torch.distributed group, gloo included.

No fused kernels: every call takes the reference path.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from kosmos_core.errors import WorldError
from kosmos_core.worlds.base import HOST, SymmetricBuffer, World


def check_member(group: object) -> None:
    """A process group that this process belongs to, or None for the default one.

    Raises:
        WorldError: it is something else.
    """
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise WorldError("group: this process is not a member of it; only members make its world")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise WorldError(
            f"group: got {type(group).__name__}, wanted a process group of torch.distributed"
        )


class ReferenceWorld(World):
    """Plain collectives of a group; also size 1 without torch.distributed.

    Args:
        group: process group, the default group when None; ignored while torch.distributed is not
            initialised.
        reason: why fused kernels do not run here.
    """

    fused = False

    def __init__(
        self, group: dist.ProcessGroup | None = None, reason: str = "reference world"
    ) -> None:
        check_member(group)
        self._distributed = dist.is_initialized()
        self._group = group
        super().__init__(dist.get_world_size(group) if self._distributed else 1)
        self.why_not_fused = reason

    @property
    def rank(self) -> int:
        return dist.get_rank(self._group) if self._distributed else 0

    @property
    def device(self) -> torch.device:
        if self._distributed and dist.get_backend(self._group) == "nccl":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    @property
    def num_wgs(self) -> int:
        return 0

    def symmetric(self, name: str, num_elements: int, dtype: torch.dtype) -> SymmetricBuffer:
        raise WorldError(f"symmetric memory {name!r}: the reference world has none")

    def local(self, name: str, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(num_elements, dtype=dtype, device=self.device)

    def host_visible(self, num_words: int) -> torch.Tensor:
        return torch.zeros(num_words, dtype=torch.int64, device=HOST)

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
        raise WorldError(f"{kernel}: the reference world launches no fused kernel")

    def barrier(self) -> None:
        if self._distributed:
            dist.barrier(self._group)

    def all_gather_object(self, value: Any) -> list[Any]:
        if not self._distributed:
            return [value]
        out: list[Any] = [None] * self.size
        dist.all_gather_object(out, value, group=self._group)
        return out

    def all_gather_tensor(self, x: torch.Tensor) -> torch.Tensor:
        if self.size == 1:
            # A copy as in a larger group: what is gathered is never the caller's own tensor.
            return x.clone(memory_format=torch.contiguous_format)
        parts = [
            torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)
        ]
        dist.all_gather(parts, x.contiguous(), group=self._group)
        return torch.cat(parts)

    def all_to_all_tensor(self, x: torch.Tensor) -> torch.Tensor:
        if self.size == 1:
            return x.clone()
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=self._group)
        return out

    def all_to_all_rows(
        self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> torch.Tensor:
        if self.size == 1:
            return x.clone()
        out = torch.empty((sum(received), *x.shape[1:]), dtype=x.dtype, device=x.device)
        dist.all_to_all_single(out, x, list(received), list(sent), group=self._group)
        return out

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def describe(self) -> str:
        return "reference"
