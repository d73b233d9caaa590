"""Operators of the dispatcher: what `torch.compile` and CUDA graphs see.

`torch.ops.kosmos.mx_quantize`, `mx_dequantize` and `mx_gemm` take and return plain tensors: the
elements and scales of an `MXTensor` as they lie in memory, contiguous, padded to whole groups.
`axis` says along what the groups of such a matrix lie.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kosmos_mx.formats import FORMATS, SCALE_DTYPE, format_of, num_groups, padded
from kosmos_mx.ops.dequantize import dequantize
from kosmos_mx.ops.gemm import mx_gemm
from kosmos_mx.ops.quantize import quantize
from kosmos_mx.tensor import MXTensor


@torch.library.custom_op("kosmos::mx_quantize", mutates_args=())
def mx_quantize_op(
    x: torch.Tensor,
    axis: str,
    scale_rounding: str,
    format: str,
    segments: Sequence[int],
    transposed: bool,
) -> list[torch.Tensor]:
    """`quantize`: [elements, scales] of each copy; `segments` are the rows of each segment."""
    made = quantize(
        x,
        axis,
        scale_rounding,
        dtype=FORMATS[format].dtype,
        segments=segments,
        transposed=transposed,
    )
    copies = made if isinstance(made, tuple) else (made,)
    stored = [copy.t() if copy.is_transposed else copy for copy in copies]
    return [part for copy in stored for part in (copy.data, copy.scales)]


@mx_quantize_op.register_fake
def _mx_quantize_fake(
    x: torch.Tensor,
    axis: str,
    scale_rounding: str,
    format: str,
    segments: Sequence[int],
    transposed: bool,
) -> list[torch.Tensor]:
    rows, cols = x.shape
    dtype = FORMATS[format].dtype
    made = []
    if axis != "col":
        made.append(x.new_empty((rows, padded(cols)), dtype=dtype))
        made.append(x.new_empty((rows, num_groups(cols)), dtype=SCALE_DTYPE))
    if axis != "row":
        groups = sum(map(num_groups, segments))
        for height, kind in ((padded(1) * groups, dtype), (groups, SCALE_DTYPE)):
            shape = (cols, height) if transposed else (height, cols)
            made.append(x.new_empty(shape, dtype=kind))
    return made


def _whole(elements: torch.Tensor, scales: torch.Tensor, axis: str) -> MXTensor:
    """A matrix of one segment, its padding included."""
    rows, cols = elements.shape
    return MXTensor(elements, scales, axis, (rows, cols), (cols if axis == "row" else rows,))


@torch.library.custom_op("kosmos::mx_dequantize", mutates_args=())
def mx_dequantize_op(
    elements: torch.Tensor, scales: torch.Tensor, axis: str, dtype: torch.dtype
) -> torch.Tensor:
    """`dequantize`, the padding included."""
    return dequantize(_whole(elements, scales, axis), dtype)


@mx_dequantize_op.register_fake
def _mx_dequantize_fake(
    elements: torch.Tensor, scales: torch.Tensor, axis: str, dtype: torch.dtype
) -> torch.Tensor:
    format_of(elements.dtype)
    return elements.new_empty(elements.shape, dtype=dtype)


@torch.library.custom_op("kosmos::mx_gemm", mutates_args=())
def mx_gemm_op(
    a: torch.Tensor,
    a_scales: torch.Tensor,
    a_axis: str,
    b: torch.Tensor,
    b_scales: torch.Tensor,
    b_axis: str,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """`mx_gemm`: [m, n] of a, [m, k] row-wise or [k, m] column-wise, and b, likewise with n."""
    left, right = _whole(a, a_scales, a_axis), _whole(b, b_scales, b_axis)
    left = left if a_axis == "row" else left.t()
    right = right if b_axis == "row" else right.t()
    return mx_gemm(left, right, "tn", out_dtype=out_dtype)


@mx_gemm_op.register_fake
def _mx_gemm_fake(
    a: torch.Tensor,
    a_scales: torch.Tensor,
    a_axis: str,
    b: torch.Tensor,
    b_scales: torch.Tensor,
    b_axis: str,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    m = a.shape[0 if a_axis == "row" else 1]
    n = b.shape[0 if b_axis == "row" else 1]
    return a.new_empty((m, n), dtype=out_dtype)


__all__ = ["mx_dequantize_op", "mx_gemm_op", "mx_quantize_op"]
