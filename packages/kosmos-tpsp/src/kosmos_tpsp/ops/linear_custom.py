"""Operators of the parallel linear layers, differentiable through `kosmos_tpsp.functions`.

`torch.ops.kosmos.column_linear(x, w, call)`, `row_linear(x, w, call)` and their `_backward`s;
`call` comes from `kosmos_tpsp.ops.registry.call_handle`. A backward adds to `w.main_grad` behind
the dispatcher's back, which is safe while nothing in the same graph reads it. Of each operator the
plain function stands here too: what it costs to come through the dispatcher shows in short calls.
"""

from __future__ import annotations

import torch

from kosmos_tpsp.ops import linear
from kosmos_tpsp.ops.ag_gemm import ag_gemm
from kosmos_tpsp.ops.gemm_rs import gemm_rs
from kosmos_tpsp.ops.registry import resolve, world_of_call


def column_linear(x: torch.Tensor, w: torch.Tensor, call: int) -> torch.Tensor:
    """Forward of the column-parallel linear: x [m / world size, k], w [n, k] -> [m, n]."""
    workspace, options = resolve(call)
    out = ag_gemm(x, w, workspace, options=options.gather)
    assert isinstance(out, torch.Tensor)
    return out


column_linear_op = torch.library.custom_op("kosmos::column_linear", column_linear, mutates_args=())


@column_linear_op.register_fake
def _column_linear_fake(x: torch.Tensor, w: torch.Tensor, call: int) -> torch.Tensor:
    return x.new_empty((x.shape[0] * world_of_call(call).size, w.shape[0]))


def row_linear(x: torch.Tensor, w: torch.Tensor, call: int) -> torch.Tensor:
    """Forward of the row-parallel linear: x [m, k], w [n, k] -> [m / world size, n]."""
    workspace, options = resolve(call)
    return gemm_rs(x, w, workspace, options=options.scatter)


row_linear_op = torch.library.custom_op("kosmos::row_linear", row_linear, mutates_args=())


@row_linear_op.register_fake
def _row_linear_fake(x: torch.Tensor, w: torch.Tensor, call: int) -> torch.Tensor:
    return x.new_empty((x.shape[0] // world_of_call(call).size, w.shape[0]))


def column_linear_backward(
    x: torch.Tensor, dy: torch.Tensor, w: torch.Tensor, call: int, needs_dx: bool, needs_dw: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dx, dw) of `column_linear`, without elements where not wanted."""
    workspace, options = resolve(call)
    return made(w, linear.column_backward(x, dy, w, workspace, options, (needs_dx, needs_dw)))


def row_linear_backward(
    x: torch.Tensor, dy: torch.Tensor, w: torch.Tensor, call: int, needs_dx: bool, needs_dw: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dx, dw) of `row_linear`, without elements where not wanted."""
    workspace, options = resolve(call)
    return made(w, linear.row_backward(x, dy, w, workspace, options, (needs_dx, needs_dw)))


column_linear_backward_op = torch.library.custom_op(
    "kosmos::column_linear_backward", column_linear_backward, mutates_args=()
)
row_linear_backward_op = torch.library.custom_op(
    "kosmos::row_linear_backward", row_linear_backward, mutates_args=()
)


@column_linear_backward_op.register_fake
def _column_backward_fake(
    x: torch.Tensor, dy: torch.Tensor, w: torch.Tensor, call: int, needs_dx: bool, needs_dw: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = dy.shape[0] // world_of_call(call).size
    return backward_shapes(rows, w, needs_dx, needs_dw)


@row_linear_backward_op.register_fake
def _row_backward_fake(
    x: torch.Tensor, dy: torch.Tensor, w: torch.Tensor, call: int, needs_dx: bool, needs_dw: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = dy.shape[0] * world_of_call(call).size
    return backward_shapes(rows, w, needs_dx, needs_dw)


def backward_shapes(
    rows: int, w: torch.Tensor, needs_dx: bool, needs_dw: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stand-ins for the (dx, dw) of a backward whose dx has so many rows."""
    return (
        w.new_empty((rows, w.shape[1]) if needs_dx else (0,)),
        w.new_empty(w.shape if needs_dw else (0,)),
    )


def made(
    w: torch.Tensor, grads: tuple[torch.Tensor | None, torch.Tensor | None]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients as an operator returns them, which cannot be None."""
    dx, dw = grads
    return w.new_empty(0) if dx is None else dx, w.new_empty(0) if dw is None else dw
