"""Differentiable parallel linears in MXFP8: autograd over `ops/mx_linear_custom.py`.

Imported once a `LinearCall` asks for MXFP8, since kosmos-mx need not be installed.
"""

from __future__ import annotations

from typing import Any

import torch
from kosmos_core.errors import ArgumentError

from kosmos_tpsp.linear_autograd import Kernel, differentiable
from kosmos_tpsp.ops import mx_linear_custom as custom
from kosmos_tpsp.ops.mx_weights import weights_changed


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


_column_linear = differentiable(
    Kernel(custom.mx_column_linear, custom.mx_column_linear_op),
    Kernel(custom.mx_column_linear_backward, custom.mx_column_linear_backward_op),
    _save,
    constants=2,
)
_row_linear = differentiable(
    Kernel(custom.mx_row_linear, custom.mx_row_linear_op),
    Kernel(custom.mx_row_linear_backward, custom.mx_row_linear_backward_op),
    _save,
    constants=2,
)


def column_linear(x: torch.Tensor, w: torch.Tensor, call: int) -> torch.Tensor:
    """[rows, in] -> [rows * ranks, out / ranks], as `column_parallel_linear` says."""
    out: torch.Tensor = _column_linear(x, w, call, _keeps(w))[0]
    return out


def row_linear(x: torch.Tensor, w: torch.Tensor, call: int) -> torch.Tensor:
    """[rows, in / ranks] -> [rows / ranks, out], as `row_parallel_linear` says."""
    out: torch.Tensor = _row_linear(x, w, call, _keeps(w))[0]
    return out


__all__ = ["column_linear", "row_linear", "weights_changed"]
