"""One process a GPU: symmetric memory of torch.distributed, launches on the current stream."""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from kosmos_core.device_info import machine_name, num_sms, vendor_target
from kosmos_core.errors import WorldError
from kosmos_core.launch import LAUNCHER
from kosmos_core.worlds.base import HOST, SymmetricBuffer, World
from kosmos_core.worlds.ordering import LaunchOrder
from kosmos_core.worlds.reference import check_member
from kosmos_core.worlds.shared import GroupMemory

# What NCCL may hold when other groups communicate at the same time: its own upper limit of CTAs
# for one collective.
NCCL_MAX_CTAS = 32
HOST_BACKENDS = ("gloo", "mpi")


_ORDERS: dict[torch.device, LaunchOrder] = {}


def _order_of(device: torch.device) -> LaunchOrder:
    """The order of fused launches on a GPU, of all groups and workspaces of this process."""
    order = _ORDERS.get(device)
    if order is None:
        order = _ORDERS[device] = LaunchOrder(num_sms(device))
    return order


class GroupWorld(World):
    """Ranks of a `torch.distributed` group on one node, a GPU each.

    Args:
        group: process group; the default group when None. Any subgroup of a node will do.
        reserve_sms: SMs left to others; None takes what NCCL may hold when other groups exist by
            now.

    Raises:
        WorldError: torch.distributed is not initialised, or this process is no member of the group;
            when memory is shared: a rank of the group cannot be reached.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, reserve_sms: int | None = None
    ) -> None:
        if not dist.is_initialized():
            raise WorldError(
                "group: torch.distributed is not initialised; call init_process_group first "
                "(start with torchrun)"
            )
        # Typed as optional, but the default group exists once torch.distributed is initialised.
        self._group = group if group is not None else cast(dist.ProcessGroup, dist.group.WORLD)
        check_member(self._group)
        super().__init__(dist.get_world_size(self._group))
        self._rank = dist.get_rank(self._group)
        self._device = torch.device("cuda", torch.cuda.current_device())
        self.target = vendor_target()
        self.machine = machine_name(self._device)
        if reserve_sms is None:
            reserve_sms = self._default_reserve()
        if not isinstance(reserve_sms, int) or reserve_sms < 0:
            raise WorldError(f"reserve_sms: got {reserve_sms!r}, wanted 0 or more")
        self._num_wgs = num_sms(self._device) - reserve_sms
        self._memory = GroupMemory(self._device, self._group, self.all_gather_object)

    def _default_reserve(self) -> int:
        """SMs that NCCL may hold meanwhile, where other groups of several GPUs exist.

        The default group does not count beside another one: it starts and ends a program.
        """
        others = [
            group
            for group in dist.distributed_c10d._world.pg_map
            if group not in (self._group, dist.group.WORLD)
            and dist.get_world_size(group) > 1
            # Named by nobody, the backend of GPUs is NCCL, and of no name.
            and dist.get_backend(group) not in HOST_BACKENDS
        ]
        if not others:
            return 0
        given = os.environ.get("NCCL_MAX_CTAS", str(NCCL_MAX_CTAS))
        if not given.isdecimal():
            raise WorldError(
                f"NCCL_MAX_CTAS: got {given!r} in the environment, wanted a number; correct it or "
                "pass reserve_sms"
            )
        return int(given)

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group."""
        return self._group

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def num_wgs(self) -> int:
        return self._num_wgs

    def symmetric(self, name: str, num_elements: int, dtype: torch.dtype) -> SymmetricBuffer:
        if self.size == 1:
            t = torch.empty(num_elements, dtype=dtype, device=self._device)
            return SymmetricBuffer(name, t, (t.data_ptr(),))
        # Nothing here uses NVLink multicast, which a rendezvous would otherwise set up.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        return self._memory.allocate(name, num_elements, dtype)

    def local(self, name: str, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(num_elements, dtype=dtype, device=self._device)

    def host_visible(self, num_words: int) -> torch.Tensor:
        return torch.zeros(num_words, dtype=torch.int64, device=HOST).pin_memory()

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
        stream = torch._C._cuda_getCurrentRawStream(self._device.index)
        if self.is_capturing():
            if not LAUNCHER.is_loaded(kernel, self._device.index, key):
                raise WorldError(
                    f"launch: the first one of {getattr(kernel, '__name__', kernel)} for this call "
                    "compiles and loads it, which graph capture does not allow; prepare the call, "
                    "or make it once, before the capture"
                )
        else:
            _order_of(self._device).enter(stream, num_wgs, self.order_after)
        LAUNCHER.launch(
            kernel, num_wgs, args, key, self._device.index, stream, num_warps, num_stages
        )

    def load(
        self, kernel: Any, args: Sequence[Any], key: Hashable, *, num_warps: int, num_stages: int
    ) -> None:
        if not self.is_capturing():  # there the launch refuses what is not loaded
            LAUNCHER.load(kernel, args, key, self._device.index, num_warps, num_stages)

    def barrier(self) -> None:
        self.synchronize()
        dist.barrier(self._group, device_ids=[self._device.index])
        torch.cuda.synchronize(self._device)

    def all_gather_object(self, value: Any) -> list[Any]:
        out: list[Any] = [None] * self.size
        dist.all_gather_object(out, value, group=self._group)
        return out

    def all_gather_tensor(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty((x.shape[0] * self.size, *x.shape[1:]), dtype=x.dtype, device=x.device)
        dist.all_gather_into_tensor(out, x.contiguous(), group=self._group)
        return out

    def reduce_scatter_tensor(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty((x.shape[0] // self.size, *x.shape[1:]), dtype=x.dtype, device=x.device)
        dist.reduce_scatter_tensor(out, x, group=self._group)
        return out

    def all_to_all_tensor(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=self._group)
        return out

    def all_to_all_rows(
        self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> torch.Tensor:
        out = torch.empty((sum(received), *x.shape[1:]), dtype=x.dtype, device=x.device)
        dist.all_to_all_single(out, x, list(received), list(sent), group=self._group)
        return out

    def synchronize(self) -> None:
        order = _order_of(self._device)
        # Threads may launch meanwhile.
        launches = order.launches
        torch.cuda.synchronize(self._device)
        order.forget(launches)

    def current_stream(self) -> Any:
        return torch._C._cuda_getCurrentRawStream(self._device.index)

    def order_after(self, stream: Any) -> None:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        outer = torch.cuda.ExternalStream(  # type: ignore[no-untyped-call]
            stream, device=self._device
        )
        event.record(outer)
        torch.cuda.current_stream(self._device).wait_event(event)

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def describe(self) -> str:
        return "group"
