"""Makers of worlds."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from kosmos_core.errors import WorldError
from kosmos_core.worlds.base import World
from kosmos_core.worlds.reference import ReferenceWorld, check_member


def group_world(group: dist.ProcessGroup | None = None, *, reserve_sms: int | None = None) -> World:
    """The ranks of a torch.distributed group: fused where they have GPUs, else the reference path.

    Args:
        group: process group, the default group when None.
        reserve_sms: SMs left to other kernels; None takes what NCCL may hold when other groups
            exist by now.

    Raises:
        WorldError: this process is not a member of the group, or it is none.
    """
    check_member(group)
    if not torch.cuda.is_available():
        return ReferenceWorld(group, "no GPU is visible")
    if dist.is_initialized() and dist.get_backend(group) == "gloo":
        return ReferenceWorld(group, "the group's backend is gloo")
    from kosmos_core.worlds.group import GroupWorld

    return GroupWorld(group, reserve_sms)


def gpu_world(size: int, device: int | None = None) -> World:
    """`size` virtual ranks on one GPU, for protocol tests."""
    from kosmos_core.worlds.virtual_gpu import VirtualGpuWorld

    return VirtualGpuWorld(size, device)


def cpu_world(size: int, **options: Any) -> World:
    """`size` virtual ranks on the CPU executor; `options` are `kosmos_core.executor.Executor`'s."""
    from kosmos_core.worlds.virtual_cpu import VirtualCpuWorld

    return VirtualCpuWorld(size, **options)


def reference_world(group: dist.ProcessGroup | None = None) -> World:
    """The plain unfused path of any group."""
    return ReferenceWorld(group)


def parse_world(spec: str, **options: Any) -> World:
    """A world from its name on the command line: `cpu:N`, `gpu:N`, `group` or `reference`.

    Raises:
        WorldError: the name is none of these.
    """
    kind, _, count = spec.partition(":")
    if kind in ("cpu", "gpu"):
        if not count.isdigit() or not 1 <= int(count) <= 8:
            raise WorldError(f"world: got {spec!r}, wanted {kind}:N with N from 1 to 8")
        return cpu_world(int(count), **options) if kind == "cpu" else gpu_world(int(count))
    if spec == "group":
        return group_world()
    if spec == "reference":
        return reference_world()
    raise WorldError(f"world: got {spec!r}, wanted cpu:N, gpu:N, group or reference")
