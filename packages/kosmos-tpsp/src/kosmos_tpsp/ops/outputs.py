"""Where a call that also makes a weight gradient puts its results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kosmos_tpsp.ops import validate
from kosmos_tpsp.workspaces import TpSpWorkspace

Shape = tuple[int, int]


def take_outputs(
    out: torch.Tensor | None,
    out_shape: Shape,
    dw: torch.Tensor | None,
    main_grad: torch.Tensor | None,
    gradient_shape: Shape,
    workspace: TpSpWorkspace,
    inputs: Mapping[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, gradient): the caller's memory, or new.

    The gradient is `main_grad`, float32, which the call adds to, or else `dw`.

    Raises:
        Rejected: both are given, one is not as it must be, or it overlaps something else.
    """
    adds = main_grad is not None
    if adds and dw is not None:
        raise validate.reject(
            validate.ARGUMENT, "dw: got together with main_grad, wanted one or the other"
        )
    others = dict(inputs)
    for name, t, shape, dtype in (
        ("out", out, out_shape, torch.bfloat16),
        ("dw", dw, gradient_shape, torch.bfloat16),
        ("main_grad", main_grad, gradient_shape, torch.float32),
    ):
        if t is not None:
            validate.check_out(name, t, shape, workspace, others, dtype)
            others[name] = t
    device = workspace.world.device
    if out is None:
        out = torch.empty(out_shape, dtype=torch.bfloat16, device=device)
    gradient = main_grad if adds else dw
    if gradient is None:
        gradient = torch.empty(gradient_shape, dtype=torch.bfloat16, device=device)
    return out, gradient


def put_gradient(product: torch.Tensor, gradient: torch.Tensor, adds: bool) -> None:
    """What the reference path has made, where `take_outputs` said."""
    if adds:
        gradient.add_(product)
    else:
        gradient.copy_(product)
