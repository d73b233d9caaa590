"""Checks that stand before every launch.

Each names the argument, what it got, what it wanted and the remedy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from kosmos_core.arguments import (
    ARGUMENT,
    CAP,
    DEVICE,
    DTYPE,
    SHAPE,
    SIZE,
    WORKSPACE,
    Rejected,
    check_cap,
    check_choice,
    check_flag,
    check_int,
    check_tensor,
    dense,
    reject,
)
from kosmos_core.errors import ArgumentError, WorkspaceError

from kosmos_tpsp.ops import mx
from kosmos_tpsp.workspaces import TpSpWorkspace


def check_workspace(workspace: object) -> None:
    """A workspace of this package; there is nobody to tell where it is none.

    Raises:
        ArgumentError: it is something else.
    """
    if not isinstance(workspace, TpSpWorkspace):
        raise ArgumentError(
            f"workspace: got {type(workspace).__name__}, wanted the TpSpWorkspace of the group"
        )


def check_matrix(name: str, t: torch.Tensor, device: torch.device) -> None:
    """A 2-D bf16 matrix on the rank's device."""
    check_tensor(name, t)
    if t.dtype != torch.bfloat16:
        raise reject(DTYPE, f"{name}: got dtype {t.dtype}, wanted torch.bfloat16; cast it first")
    if t.device != device:
        raise reject(DEVICE, f"{name}: got device {t.device}, wanted {device}; move it there")
    if t.dim() != 2:
        raise reject(
            SHAPE,
            f"{name}: got shape {tuple(t.shape)}, wanted a matrix; flatten leading dimensions",
        )


def check_operand(name: str, t: Any, device: torch.device) -> None:
    """As `check_matrix`, or one in MXFP8."""
    if mx.is_mx(t):
        mx.check_mx(name, t, device)
    else:
        check_matrix(name, t, device)


def check_out(
    name: str,
    out: torch.Tensor,
    shape: tuple[int, int],
    workspace: TpSpWorkspace,
    inputs: Mapping[str, Any],
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """A matrix that the kernel may store to while it and its peers still read the inputs."""
    device = workspace.world.device
    check_tensor(name, out)
    if (
        out.shape != shape
        or out.dtype != dtype
        or out.device != device
        or not out.is_contiguous()
        or out.data_ptr() % 16
    ):
        raise reject(
            SHAPE,
            f"{name}: got {out.dtype} {tuple(out.shape)} on {out.device}, strides {out.stride()}, "
            f"wanted a contiguous, 16-byte aligned {dtype} {shape} on {device}",
        )
    if out.requires_grad:
        raise reject(ARGUMENT, f"{name}: got a tensor that requires grad, wanted one that does not")
    if workspace.holds(out):
        # Of a handover peers may still be reading, and know nothing of this call's stores.
        raise reject(
            ARGUMENT,
            f"{name}: got memory of the workspace, which peers may still read, wanted memory of "
            "its own",
        )
    if any(overlap(out, part) for t in inputs.values() for part in mx.parts(t)):
        raise reject(
            ARGUMENT,
            f"{name}: got memory that {' or '.join(inputs)} lies in, wanted memory of its own; "
            "clone the input",
        )


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors share memory; gaps between strided elements count as theirs."""
    (first, last), (other_first, other_last) = _span(a), _span(b)
    return first < other_last and other_first < last


def _span(t: torch.Tensor) -> tuple[int, int]:
    """First address, and the one past the last."""
    if t.numel() == 0:
        return 0, 0
    if t.is_contiguous():
        return t.data_ptr(), t.data_ptr() + t.nbytes
    reach = sum((size - 1) * step for size, step in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + (reach + 1) * t.element_size()


def check_types(options: Any, crew: str) -> None:
    """Choices that ops have in common, and the crew for each peer, are of their types."""
    for name in ("traced", "force"):
        check_flag(name, getattr(options, name))
    for name in (crew, "split_k"):
        check_int(name, getattr(options, name, None))
    check_cap(options.cap)


def check_split_k(split_k: int | None) -> None:
    """Parts that the compile guard covers, or None for the plan's own choice."""
    if split_k not in (None, 1, 2, 4):
        raise reject(ARGUMENT, f"split_k: got {split_k}, wanted 1, 2 or 4")


def check_room(workspace: TpSpWorkspace, m: int, k: int) -> None:
    """The gathered rows fit the workspace."""
    if m > workspace.max_tokens or k > workspace.max_features:
        error = WorkspaceError(
            f"workspace: [{m}, {k}] needs more than its [{workspace.max_tokens}, "
            f"{workspace.max_features}]; create it with a larger max_tokens or max_features on "
            "every rank"
        )
        raise Rejected(WORKSPACE, error)


__all__ = [
    "ARGUMENT",
    "CAP",
    "DEVICE",
    "DTYPE",
    "SHAPE",
    "SIZE",
    "WORKSPACE",
    "Rejected",
    "check_cap",
    "check_choice",
    "check_flag",
    "check_int",
    "check_matrix",
    "check_operand",
    "check_out",
    "check_room",
    "check_split_k",
    "check_tensor",
    "check_types",
    "check_workspace",
    "dense",
    "overlap",
    "reject",
]
