"""GPU launches with little host time.

A compiled kernel is looked up by key instead of being specialised anew.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
import triton


def _scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    """Memory for tensor descriptors that kernels build.

    It is stream-ordered, so that a captured graph may replay it.
    """
    return torch.empty(size, dtype=torch.int8, device="cuda")


_INTERNED: dict[Hashable, int] = {}


def intern_key(key: Hashable) -> int:
    """A small integer for a launch key, equal for equal keys.

    Hashing a whole plan at every call would cost more.
    """
    return _INTERNED.setdefault(key, len(_INTERNED))


class Launcher:
    """Compiled kernels of one process, by (kernel, device, key)."""

    def __init__(self) -> None:
        self._compiled: dict[Hashable, Any] = {}

    def is_loaded(self, kernel: Any, device: int, key: Hashable) -> bool:
        """Whether a launch with this key neither compiles nor loads a module."""
        return (kernel, device, key) in self._compiled

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
        triton.set_allocator(_scratch)
        full = (kernel, device, key)
        compiled = self._compiled.get(full)
        if compiled is None:
            self._compiled[full] = kernel[(num_wgs,)](
                *args, num_warps=num_warps, num_stages=num_stages
            )
            return
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
            *args,
        )


LAUNCHER = Launcher()
