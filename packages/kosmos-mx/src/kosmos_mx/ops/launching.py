"""Where kernels of this package run: on a GPU, or in the CPU executor while one is active."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import triton.language as tl
from kosmos_core.device.target import AMD, NVIDIA
from kosmos_core.device_info import vendor_target
from kosmos_core.executor import is_active
from kosmos_core.launch import LAUNCHER

# Columns of a tile of 32 rows: 64 elements a thread of four warps.
BLOCK_COLS = 256
NUM_WARPS = 4
# Columns, warps, steps and width of a workgroup that quantises, as `QuantizeConfig` has them: the
# fastest on an H200 of those that `bench --sweep` tries. The executor pays by the workgroup.
QUANTIZE_TILE = (64, 1, 1, 8)
EXECUTOR_TILE = (256, 4, 1, 8)


def runs_kernels(device: torch.device) -> bool:
    """Whether kernels can run on tensors of `device`; elsewhere the reference path computes."""
    return device.type == "cuda" or is_active()


def target_of(device: torch.device) -> int:
    """Vendor constant of the device functions; on the CPU the executor runs NVIDIA's path."""
    return vendor_target() if device.type == "cuda" else int(NVIDIA.value)


def has_block_scaled_mma(device: torch.device) -> bool:
    """Whether the matrix units of `device` take E8M0 scales: gfx950 and sm_100."""
    if device.type != "cuda":
        return False
    if vendor_target() == int(AMD.value):
        name = torch.cuda.get_device_properties(device).gcnArchName
        return str(name).startswith("gfx950")
    return torch.cuda.get_device_capability(device)[0] == 10


def constants(kind: Any, **values: Any) -> Any:
    """A config struct of constexprs."""
    return kind(**{name: tl.constexpr(value) for name, value in values.items()})


def launch(
    kernel: Any,
    num_wgs: int,
    args: tuple[Any, ...],
    device: torch.device,
    *,
    num_warps: int = NUM_WARPS,
    num_stages: int = 1,
) -> None:
    """Launches `num_wgs` workgroups on the current stream of `device`; none for 0."""
    if num_wgs == 0:
        return
    if device.type != "cuda":
        kernel[(num_wgs,)](*args, num_warps=num_warps, num_stages=num_stages)
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    key = (*map(specialised, args), num_warps, num_stages)
    with torch.cuda.device(index):
        stream = torch._C._cuda_getCurrentRawStream(index)
        LAUNCHER.launch(kernel, num_wgs, args, key, index, stream, num_warps, num_stages)


def specialised(value: Any) -> Hashable:
    """What the compiled code depends on in an argument, or in a struct of them.

    Triton compiles for the number 1, for multiples of 16, for 32 or 64 bits, for aligned pointers,
    and on AMD for storage below 2 GiB.
    """
    if isinstance(value, tuple):
        return tuple([specialised(part) for part in value])
    if isinstance(value, torch.Tensor):
        is_small = value.untyped_storage().nbytes() < 1 << 31
        return value.dtype, value.data_ptr() % 16 == 0, is_small
    if isinstance(value, tl.constexpr):
        constant: Hashable = value.value
        return constant
    return value == 1, value % 16 == 0, -(1 << 31) <= value < 1 << 31


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as uint8, which is how kernels see elements and scales."""
    return tensor.view(torch.uint8)
