"""Virtual ranks on the CPU: every workgroup of every rank live at once in the concurrent executor.

Host code runs in one OS thread a rank; a launch blocks its rank's thread while the others go on.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from kosmos_core.device.target import AMD, NVIDIA
from kosmos_core.errors import WorldError
from kosmos_core.executor import Executor
from kosmos_core.worlds.base import SymmetricBuffer, World

VENDORS = {"nvidia": int(NVIDIA.value), "amd": int(AMD.value)}


class VirtualCpuWorld(World):
    """`size` virtual ranks in the executor.

    Only one can be open at a time in a process.

    Args:
        size: number of ranks.
        vendor: whose code path runs, "nvidia" or "amd".
        wgs: workgroups of a rank.
        **options: of `kosmos_core.executor.Executor` (policy, weak, stale, race, strict, slots,
            seed, ...).

    Raises:
        WorldError: unknown vendor or fewer than 2 workgroups; or, where a rank is asked for, the
            world is closed or no rank's code is running.
    """

    machine = "executor"

    def __init__(self, size: int, *, vendor: str = "nvidia", wgs: int = 4, **options: Any) -> None:
        super().__init__(size)
        if vendor not in VENDORS:
            raise WorldError(f"vendor: got {vendor!r}, wanted one of {', '.join(VENDORS)}")
        if not isinstance(wgs, int) or wgs < 2:
            raise WorldError(f"wgs: got {wgs!r}, wanted at least 2 (a mover beside a builder)")
        self.target = VENDORS[vendor]
        self._wgs = wgs
        self._open = False
        self.executor = Executor(size, **options)
        self.executor.__enter__()
        self._open = True

    @property
    def rank(self) -> int:
        if not self._open:
            raise WorldError("world: it is closed; make a new one, and workspaces in it")
        if not self.executor.in_spmd:
            raise WorldError("rank: virtual ranks exist only inside world.spmd(fn)")
        return self.executor.current_rank()

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def num_wgs(self) -> int:
        return self._wgs

    def symmetric(self, name: str, num_elements: int, dtype: torch.dtype) -> SymmetricBuffer:
        t = self.executor.empty(self.rank, num_elements, dtype, name)
        peers = self.executor.host_all_gather(t)
        return SymmetricBuffer(name, t, tuple(p.data_ptr() for p in peers), peers)

    def local(self, name: str, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        return self.executor.empty(self.rank, num_elements, dtype, name)

    def host_visible(self, num_words: int) -> torch.Tensor:
        return self.executor.empty(self.rank, num_words, torch.int64, "status").zero_()

    def release(self, tensor: torch.Tensor) -> None:
        self.executor.memory.release(tensor)

    def polled(self, tensor: torch.Tensor, pattern: int) -> None:
        self.executor.sentinel(tensor, pattern)

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
        kernel[(num_wgs,)](*args, num_warps=num_warps, num_stages=num_stages)

    def barrier(self) -> None:
        self.executor.host_barrier()

    def all_gather_object(self, value: Any) -> list[Any]:
        return self.executor.host_all_gather(value)

    def all_gather_tensor(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.cat(self.executor.host_all_gather(x))
        self.executor.host_barrier()
        return out

    def synchronize(self) -> None:
        self.executor.synchronize()

    def is_running(self) -> bool:
        return self._open and self.executor.scheduler.failure is None

    def spmd(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        return self.executor.spmd(fn, *args)

    def close(self) -> None:
        if self._open:
            self._open = False
            self.executor.__exit__(None, None, None)

    def __exit__(self, *exc: Any) -> None:
        if self._open:
            self._open = False
            self.executor.__exit__(*exc)

    def describe(self) -> str:
        return f"cpu:{self.size}"
