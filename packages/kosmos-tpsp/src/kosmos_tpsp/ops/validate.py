"""Checks that stand before every launch.

Each names the argument, what it got, what it wanted and the remedy.
"""

from __future__ import annotations

import torch
from kosmos_core.errors import ArgumentError, WorkspaceError

from kosmos_tpsp.workspaces import TpSpWorkspace

# Reason codes that travel to the peers (kosmos_core.workspace.FAULT_REASONS).
DTYPE, DEVICE, SHAPE, SIZE, WORKSPACE, CAP, ARGUMENT = range(1, 8)


class Rejected(Exception):
    """A local fault on its way to the caller: the exception to raise and the code for the peers."""

    def __init__(self, code: int, error: Exception) -> None:
        super().__init__(str(error))
        self.code = code
        self.error = error


def reject(code: int, message: str) -> Rejected:
    """A bad argument."""
    return Rejected(code, ArgumentError(message))


def check_matrix(name: str, t: torch.Tensor, device: torch.device) -> None:
    """A 2-D bf16 matrix on the rank's device."""
    if t.dtype != torch.bfloat16:
        raise reject(DTYPE, f"{name}: got dtype {t.dtype}, wanted torch.bfloat16; cast it first")
    if t.device != device:
        raise reject(DEVICE, f"{name}: got device {t.device}, wanted {device}; move it there")
    if t.dim() != 2:
        raise reject(
            SHAPE,
            f"{name}: got shape {tuple(t.shape)}, wanted a matrix; flatten leading dimensions",
        )


def check_choice(name: str, value: str | None, allowed: tuple[str, ...]) -> None:
    """One of a few names, or None for the plan's own choice."""
    if value is not None and value not in allowed:
        raise reject(ARGUMENT, f"{name}: got {value!r}, wanted one of {', '.join(allowed)}")


def check_cap(cap: int | None) -> None:
    """A workgroup cap leaves room for a mover and a builder."""
    if cap is not None and cap < 2:
        raise reject(CAP, f"cap: got {cap}, wanted at least 2 (a mover beside a builder)")


def check_room(workspace: TpSpWorkspace, m: int, k: int) -> None:
    """The gathered rows fit the workspace."""
    if m > workspace.max_tokens or k > workspace.max_features:
        error = WorkspaceError(
            f"workspace: gathering [{m}, {k}] needs more than its [{workspace.max_tokens}, "
            f"{workspace.max_features}]; create it with a larger max_tokens or max_features on "
            "every rank"
        )
        raise Rejected(WORKSPACE, error)


def dense(t: torch.Tensor) -> torch.Tensor:
    """The same values, row-major and 16-byte aligned: other layouts and offsets are copied."""
    if not t.is_contiguous():
        return t.contiguous()
    return t.clone() if t.data_ptr() % 16 else t
