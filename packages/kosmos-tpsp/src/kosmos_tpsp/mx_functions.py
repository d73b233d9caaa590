"""Differentiable parallel linears in MXFP8: autograd over `ops/mx_linear_custom.py`.

Imported once a `LinearCall` asks for MXFP8, since kosmos-mx need not be installed.
"""

from __future__ import annotations

from typing import Any

import torch
from kosmos_core.errors import ArgumentError

from kosmos_tpsp.functions import backward_by
from kosmos_tpsp.ops.mx_linear_custom import (
    mx_column_linear_backward_op,
    mx_column_linear_op,
    mx_row_linear_backward_op,
    mx_row_linear_op,
)
from kosmos_tpsp.ops.mx_weights import weights_changed


def column_linear(x: torch.Tensor, w: torch.Tensor, call: int) -> torch.Tensor:
    """[rows, in] -> [rows * ranks, out / ranks], as `column_parallel_linear` says."""
    out: torch.Tensor = mx_column_linear_op(x, w, call, _keeps(w))[0]
    return out


def row_linear(x: torch.Tensor, w: torch.Tensor, call: int) -> torch.Tensor:
    """[rows, in / ranks] -> [rows / ranks, out], as `row_parallel_linear` says."""
    out: torch.Tensor = mx_row_linear_op(x, w, call, _keeps(w))[0]
    return out


def _keeps(w: torch.Tensor) -> bool:
    """Whether a backward may want the weight gradient, for which the input's copy is kept."""
    return torch.is_grad_enabled() and w.requires_grad


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    _, w, call, keep = inputs
    if ctx.needs_input_grad[1] and not keep:
        raise ArgumentError("keep: got False for a weight that requires grad, wanted True")
    _, elements, scales = output
    ctx.save_for_backward(elements, scales, w)
    # Its quantised copies are found by the tensor itself, and checkpointing hands back another one.
    ctx.owner = w
    ctx.call = call


def _column_backward(ctx: Any, dy: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
    return *backward_by(mx_column_linear_backward_op, ctx, dy), None, None


def _row_backward(ctx: Any, dy: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
    return *backward_by(mx_row_linear_backward_op, ctx, dy), None, None


mx_column_linear_op.register_autograd(_column_backward, setup_context=_save)
mx_row_linear_op.register_autograd(_row_backward, setup_context=_save)

__all__ = ["column_linear", "row_linear", "weights_changed"]
