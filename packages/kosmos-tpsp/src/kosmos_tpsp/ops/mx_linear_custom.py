"""Operators of the parallel linears in MXFP8, differentiable through `kosmos_tpsp.mx_functions`.

`torch.ops.kosmos.mx_column_linear(x, w, call, keep)`, `mx_row_linear(...)` and their `_backward`s;
as those of `linear_custom`, and besides the output they return elements and scales of the input's
column-wise copy as bytes, none unless `keep`. Of each operator the plain function stands here too.
"""

from __future__ import annotations

import torch

from kosmos_tpsp.ops import mx_linear
from kosmos_tpsp.ops.linear_custom import backward_shapes, made
from kosmos_tpsp.ops.registry import resolve, world_of_call

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Two = tuple[torch.Tensor, torch.Tensor]


def mx_column_linear(x: torch.Tensor, w: torch.Tensor, call: int, keep: bool) -> Three:
    """Forward of the column-parallel linear: x [m / world size, k], w [n, k] -> [m, n]."""
    workspace, options = resolve(call)
    out, kept = mx_linear.column_forward(x, w, workspace, options, keep)
    return out, *kept


mx_column_linear_op = torch.library.custom_op(
    "kosmos::mx_column_linear", mx_column_linear, mutates_args=()
)


def mx_row_linear(x: torch.Tensor, w: torch.Tensor, call: int, keep: bool) -> Three:
    """Forward of the row-parallel linear: x [m, k], w [n, k] -> [m / world size, n]."""
    workspace, options = resolve(call)
    out, kept = mx_linear.row_forward(x, w, workspace, options, keep)
    return out, *kept


mx_row_linear_op = torch.library.custom_op("kosmos::mx_row_linear", mx_row_linear, mutates_args=())


@mx_column_linear_op.register_fake
def _column_fake(x: torch.Tensor, w: torch.Tensor, call: int, keep: bool) -> Three:
    out = x.new_empty((x.shape[0] * world_of_call(call).size, w.shape[0]))
    return out, *_kept_fake(x, 1, keep)


@mx_row_linear_op.register_fake
def _row_fake(x: torch.Tensor, w: torch.Tensor, call: int, keep: bool) -> Three:
    size = world_of_call(call).size
    return x.new_empty((x.shape[0] // size, w.shape[0])), *_kept_fake(x, size, keep)


def _kept_fake(x: torch.Tensor, chunks: int, keep: bool) -> Two:
    elements, scales = mx_linear.kept_shapes(x.shape[0], x.shape[1], chunks, keep)
    return x.new_empty(elements, dtype=torch.uint8), x.new_empty(scales, dtype=torch.uint8)


def mx_column_linear_backward(
    elements: torch.Tensor,
    scales: torch.Tensor,
    dy: torch.Tensor,
    w: torch.Tensor,
    call: int,
    needs_dx: bool,
    needs_dw: bool,
) -> Two:
    """(dx, dw) of `mx_column_linear`, without elements where not wanted."""
    workspace, options = resolve(call)
    needs = needs_dx, needs_dw
    kept = elements, scales
    return made(w, mx_linear.column_backward(kept, dy, w, workspace, options, needs))


mx_column_linear_backward_op = torch.library.custom_op(
    "kosmos::mx_column_linear_backward", mx_column_linear_backward, mutates_args=()
)


def mx_row_linear_backward(
    elements: torch.Tensor,
    scales: torch.Tensor,
    dy: torch.Tensor,
    w: torch.Tensor,
    call: int,
    needs_dx: bool,
    needs_dw: bool,
) -> Two:
    """(dx, dw) of `mx_row_linear`, without elements where not wanted."""
    workspace, options = resolve(call)
    needs = needs_dx, needs_dw
    kept = elements, scales
    return made(w, mx_linear.row_backward(kept, dy, w, workspace, options, needs))


mx_row_linear_backward_op = torch.library.custom_op(
    "kosmos::mx_row_linear_backward", mx_row_linear_backward, mutates_args=()
)


@mx_column_linear_backward_op.register_fake
def _column_backward_fake(
    elements: torch.Tensor,
    scales: torch.Tensor,
    dy: torch.Tensor,
    w: torch.Tensor,
    call: int,
    needs_dx: bool,
    needs_dw: bool,
) -> Two:
    return backward_shapes(dy.shape[0] // world_of_call(call).size, w, needs_dx, needs_dw)


@mx_row_linear_backward_op.register_fake
def _row_backward_fake(
    elements: torch.Tensor,
    scales: torch.Tensor,
    dy: torch.Tensor,
    w: torch.Tensor,
    call: int,
    needs_dx: bool,
    needs_dw: bool,
) -> Two:
    return backward_shapes(dy.shape[0] * world_of_call(call).size, w, needs_dx, needs_dw)
