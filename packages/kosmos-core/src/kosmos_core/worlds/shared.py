"""Memory that the processes of a group share: torch's symmetric memory, or CUDA IPC without it.

Symmetric memory passes file descriptors between processes, which some containers forbid; IPC passes
handles, which nearly all allow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from kosmos_core.errors import WorldError
from kosmos_core.worlds.base import SymmetricBuffer

T = TypeVar("T")


class SharingFailed(Exception):
    """One way of sharing fails on a rank; every rank raises it."""


class GroupMemory:
    """Allocates buffers that all ranks of a group can address, in the same way on all of them.

    Args:
        device: of this rank.
        group: process group.
        gather: every rank's value of an object, in rank order.
    """

    def __init__(
        self,
        device: torch.device,
        group: dist.ProcessGroup,
        gather: Callable[[Any], list[Any]],
    ) -> None:
        self._device = device
        self._group = group
        self._gather = gather
        self._ways = [self._by_rendezvous, self._by_ipc]

    def allocate(self, name: str, num_elements: int, dtype: torch.dtype) -> SymmetricBuffer:
        """An uninitialised buffer on every rank. Collective.

        Raises:
            WorldError: no way of sharing works on every rank; on all of them.
        """
        reasons = []
        for way in tuple(self._ways):
            try:
                buffer = way(name, num_elements, dtype)
            except SharingFailed as error:
                reasons.append(str(error))
                continue
            # What fails here fails for every buffer; all ranks have come to the same.
            self._ways = [way]
            return buffer
        raise WorldError(
            f"symmetric memory {name!r} of {num_elements * dtype.itemsize} bytes: "
            f"{'; '.join(reasons)}; run python -m kosmos_core doctor on this machine"
        )

    def _by_rendezvous(self, name: str, num_elements: int, dtype: torch.dtype) -> SymmetricBuffer:
        def allocated() -> torch.Tensor:
            import torch.distributed._symmetric_memory as symm_mem

            return symm_mem.empty(num_elements, dtype=dtype, device=self._device)

        def met() -> Any:
            import torch.distributed._symmetric_memory as symm_mem

            return symm_mem.rendezvous(t, self._group)

        # In two steps: a rank without memory must not leave the others at a rendezvous.
        t = self._on_all("allocation of symmetric memory", allocated)
        handle = self._on_all("rendezvous", met)
        return SymmetricBuffer(name, t, tuple(int(p) for p in handle.buffer_ptrs), handle)

    def _by_ipc(self, name: str, num_elements: int, dtype: torch.dtype) -> SymmetricBuffer:
        def export() -> tuple[torch.Tensor, Any]:
            t = torch.empty(num_elements, dtype=dtype, device=self._device)
            return t, exported(t)

        t, mine = self._on_all("export of memory by IPC", export)
        rank = dist.get_rank(self._group)
        everybody = self._gather(mine)

        def opened() -> list[torch.UntypedStorage]:
            return [
                t.untyped_storage() if peer == rank else imported(theirs, self._device)
                for peer, theirs in enumerate(everybody)
            ]

        storages = self._on_all("import of memory by IPC", opened)
        return SymmetricBuffer(name, t, tuple(s.data_ptr() for s in storages), storages)

    def _on_all(self, step: str, do: Callable[[], T]) -> T:
        """What `do` gives here, once it has succeeded on every rank.

        Raises:
            SharingFailed: on every rank, with the reasons of those on which it failed.
        """
        done, reason = None, None
        try:
            done = do()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
        failed = {rank: why for rank, why in enumerate(self._gather(reason)) if why is not None}
        if failed:
            first = next(iter(failed))
            raise SharingFailed(f"{step} failed on ranks {list(failed)} ({failed[first]})")
        return done  # type: ignore[return-value]


def exported(t: torch.Tensor) -> tuple[Any, ...]:
    """What another process needs to open a tensor's storage."""
    shared: tuple[Any, ...] = t.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
    return shared


def imported(shared: tuple[Any, ...], device: torch.device) -> torch.UntypedStorage:
    """The storage of another process, mapped for kernels of `device`.

    The first of `shared` is the device on which it lies, whose index differs between processes
    that see different GPUs; the mapping belongs to the device that uses it.
    """
    return torch.UntypedStorage._new_shared_cuda(device.index, *shared[1:])
