"""GPU launches with little host time.

A compiled kernel is looked up by key instead of being specialised anew.
"""

from __future__ import annotations

import contextvars
import functools
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl


@functools.cache
def _scratch_on(device: int) -> Callable[[int, int, int | None], torch.Tensor]:
    """What gives launches on a device the memory for tensor descriptors that kernels build.

    Kernels of one stream come one after the other and share it. A captured graph may be replayed
    on any stream: what it launches has memory of its own.
    """
    held: dict[int | None, torch.Tensor] = {}
    place = torch.device("cuda", device)

    def scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            return torch.empty(size, dtype=torch.int8, device=place)
        memory = held.get(stream)
        if memory is None or memory.numel() < size:
            # What is replaced goes back in stream order, after the kernels that use it.
            memory = held[stream] = torch.empty(size, dtype=torch.int8, device=place)
        return memory

    return scratch


_INTERNED: dict[Hashable, int] = {}
_INTERNING = threading.Lock()


def intern_key(key: Hashable) -> int:
    """A small integer for a launch key, equal for equal keys and for no others.

    Hashing a whole plan at every call would cost more. Threads may call it at the same time:
    autograd plans in threads of its own.
    """
    number = _INTERNED.get(key)
    if number is None:
        with _INTERNING:
            number = _INTERNED.setdefault(key, len(_INTERNED))
    return number


class Launcher:
    """Compiled kernels of one process, by (kernel, device, key)."""

    def __init__(self) -> None:
        # By the kernel's id, since its hash takes microseconds; beside it, so that it lives on.
        self._compiled: dict[tuple[int, int, Hashable], tuple[Any, Any]] = {}

    def is_loaded(self, kernel: Any, device: int, key: Hashable) -> bool:
        """Whether a launch with this key neither compiles nor loads a module."""
        return (id(kernel), device, key) in self._compiled

    def load(
        self,
        kernel: Any,
        args: Sequence[Any],
        key: Hashable,
        device: int,
        num_warps: int,
        num_stages: int,
    ) -> Any:
        """Compiles and loads what a launch with this key runs, and runs nothing.

        Loading may wait until the GPU is idle: it must not come while a kernel that is running
        waits for this launch.
        """
        full = (id(kernel), device, key)
        found = self._compiled.get(full)
        if found is None:
            compiled = kernel.run(
                *args, grid=(1,), warmup=True, num_warps=num_warps, num_stages=num_stages
            )
            assert compiled.run  # the property loads the module
            found = self._compiled[full] = (compiled, kernel)
        return found[0]

    def launch(
        self,
        kernel: Any,
        num_wgs: int,
        args: Sequence[Any],
        key: Hashable,
        device: int,
        stream: int,
        num_warps: int,
        num_stages: int,
    ) -> None:
        """Launches on `stream`; compiles and loads on the first use of a key."""
        found = self._compiled.get((id(kernel), device, key))
        if found is None:
            compiled = self.load(kernel, args, key, device, num_warps, num_stages)
        else:
            compiled = found[0]
        # Triton's allocator is a context variable, and the caller's own kernels may need theirs:
        # it is set in a copy of the context, which ends with the launch.
        contextvars.copy_context().run(_run, compiled, num_wgs, args, device, stream)


def _run(compiled: Any, num_wgs: int, args: Sequence[Any], device: int, stream: int) -> None:
    triton.set_allocator(_scratch_on(device))
    compiled.run(
        num_wgs,
        1,
        1,
        stream,
        compiled.function,
        compiled.packed_metadata,
        None,
        None,
        None,
        *map(_addresses, args),
    )


def _addresses(value: Any) -> Any:
    """An argument, or a struct of them, with the addresses of its tensors.

    Of a tensor the launcher would ask the driver whether the GPU can reach it, each time.
    """
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if isinstance(value, tuple) and not isinstance(value[0], tl.constexpr):
        return tuple([v.data_ptr() if isinstance(v, torch.Tensor) else v for v in value])
    return value


LAUNCHER = Launcher()
