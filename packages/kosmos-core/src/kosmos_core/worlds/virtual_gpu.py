"""Several ranks on one GPU, a thread, a stream and a share of the SMs each: for protocol tests.

Loading a module while another rank's kernel spins on the same GPU blocks until that kernel gives
up. All ranks make the same calls, so the first of them to reach a call loads it before any rank
runs it, once the calls that it has made before are over; ranks that make different calls on purpose
must `prepare()` them beforehand.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from kosmos_core.device_info import machine_name, num_sms, vendor_target
from kosmos_core.errors import WorldError
from kosmos_core.launch import LAUNCHER
from kosmos_core.worlds.base import HOST, SymmetricBuffer, World

# Longer than any compilation that a rank may be busy with.
MEET_TIMEOUT_S = 600.0


class VirtualGpuWorld(World):
    """`size` virtual ranks on one GPU.

    Args:
        size: number of ranks.
        device: GPU index; the current one when None.
    """

    def __init__(self, size: int, device: int | None = None) -> None:
        super().__init__(size)
        if not torch.cuda.is_available():
            raise WorldError("gpu world: no GPU is visible; use cpu:N, which runs anywhere")
        index = torch.cuda.current_device() if device is None else device
        self._device = torch.device("cuda", index)
        self.target = vendor_target()
        self.machine = machine_name(self._device)
        self._share = num_sms(self._device) // size
        self._local = threading.local()
        self._gate = threading.Barrier(size, timeout=MEET_TIMEOUT_S)
        self._lock = threading.Lock()
        self._slots: list[Any] = [None] * size
        self._streams = [
            torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            for _ in range(size)
        ]

    @property
    def rank(self) -> int:
        rank = getattr(self._local, "rank", None)
        if rank is None:
            raise WorldError("rank: virtual ranks exist only inside world.spmd(fn)")
        return int(rank)

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def num_wgs(self) -> int:
        return self._share

    def symmetric(self, name: str, num_elements: int, dtype: torch.dtype) -> SymmetricBuffer:
        t = torch.empty(num_elements, dtype=dtype, device=self._device)
        peers = self.all_gather_object(t)
        return SymmetricBuffer(name, t, tuple(p.data_ptr() for p in peers), peers)

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
        self.load(kernel, args, key, num_warps=num_warps, num_stages=num_stages)
        stream = torch._C._cuda_getCurrentRawStream(self._device.index)
        with self._lock:
            LAUNCHER.launch(
                kernel, num_wgs, args, key, self._device.index, stream, num_warps, num_stages
            )

    def load(
        self, kernel: Any, args: Sequence[Any], key: Hashable, *, num_warps: int, num_stages: int
    ) -> None:
        if LAUNCHER.is_loaded(kernel, self._device.index, key):
            return
        # An earlier call of this rank may spin until its peers launch theirs, which the lock would
        # keep them from. Once it is over, all that still runs ends without another launch.
        self.synchronize()
        with self._lock:
            LAUNCHER.load(kernel, args, key, self._device.index, num_warps, num_stages)

    def barrier(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()
        self._gate.wait()

    def all_gather_object(self, value: Any) -> list[Any]:
        torch.cuda.current_stream(self._device).synchronize()
        self._slots[self.rank] = value
        self._gate.wait()
        out = list(self._slots)
        self._gate.wait()
        return out

    def all_gather_tensor(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.cat(self.all_gather_object(x))
        self.barrier()
        return out

    def synchronize(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()

    def spmd(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        def body(rank: int) -> Any:
            self._local.rank = rank
            torch.cuda.set_device(self._device)
            with torch.cuda.stream(self._streams[rank]):
                try:
                    return fn(rank, *args)
                except BaseException:
                    # The others must not wait at a host barrier for a rank that is gone.
                    self._gate.abort()
                    raise

        self._gate.reset()
        torch.cuda.synchronize(self._device)
        with ThreadPoolExecutor(self.size) as pool:
            futures = [pool.submit(body, r) for r in range(self.size)]
            errors = [f.exception() for f in futures]
        torch.cuda.synchronize(self._device)
        for error in errors:
            if error is not None and not isinstance(error, threading.BrokenBarrierError):
                raise error
        if any(errors):
            missed = [rank for rank, error in enumerate(errors) if error is None]
            raise WorldError(
                f"spmd: ranks {missed} did not come to a meeting of the others within "
                f"{MEET_TIMEOUT_S:g} s; every rank makes the same collective calls"
            )
        return [f.result() for f in futures]

    def current_stream(self) -> Any:
        return torch._C._cuda_getCurrentRawStream(self._device.index)

    def order_after(self, stream: Any) -> None:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        outer = torch.cuda.ExternalStream(  # type: ignore[no-untyped-call]
            stream, device=self._device
        )
        event.record(outer)
        torch.cuda.current_stream(self._device).wait_event(event)

    def describe(self) -> str:
        return f"gpu:{self.size}"
