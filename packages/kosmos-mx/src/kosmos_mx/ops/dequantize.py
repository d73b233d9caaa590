"""From MXFP8 back to a matrix of ordinary numbers."""

from __future__ import annotations

from typing import Protocol

import torch
from kosmos_core.errors import ArgumentError

from kosmos_mx import reference
from kosmos_mx.formats import Format, num_groups
from kosmos_mx.kernels.dequantize import DequantizeConfig, dequantize_kernel
from kosmos_mx.ops.launching import (
    BLOCK_COLS,
    as_bytes,
    constants,
    launch,
    runs_kernels,
    target_of,
)

DTYPES = (torch.bfloat16, torch.float32, torch.float64)


class Quantised(Protocol):
    """What is asked of an `MXTensor` here: it calls this module, which cannot know it."""

    @property
    def data(self) -> torch.Tensor:
        """Elements."""

    @property
    def scales(self) -> torch.Tensor:
        """Of their groups."""

    @property
    def axis(self) -> str:
        """Along which groups lie."""

    @property
    def shape(self) -> tuple[int, int]:
        """Without padding."""

    @property
    def segments(self) -> tuple[int, ...]:
        """Lengths that share no group."""

    @property
    def format(self) -> Format:
        """Of the elements."""

    @property
    def device(self) -> torch.device:
        """Where the parts are."""

    @property
    def is_transposed(self) -> bool:
        """Whether columns lie together in memory."""

    def t(self) -> Quantised:
        """The transpose."""


def dequantize(
    x: Quantised,
    dtype: torch.dtype = torch.bfloat16,
    *,
    padding: bool = False,
    target: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """[rows, cols] of `x`; see `MXTensor.dequantize`.

    Args:
        x: the matrix.
        dtype: bfloat16, float32 or float64.
        padding: keep the padding to whole groups.
        target: vendor constant of the device functions, to run another vendor's code path. [this
            device's]
        out: contiguous memory for the matrix as it is stored, with its padding; allocated when
            None.

    Raises:
        ArgumentError: another dtype, or an `out` that does not fit.
    """
    if dtype not in DTYPES:
        raise ArgumentError(f"dtype: got {dtype}, wanted one of {', '.join(map(str, DTYPES))}")
    # As it lies in memory, a matrix is upright.
    stored = x.t() if x.is_transposed else x
    shape = tuple(stored.data.shape)
    if out is not None and (
        tuple(out.shape) != shape or out.dtype is not dtype or not out.is_contiguous()
    ):
        raise ArgumentError(
            f"out: got {out.dtype} {tuple(out.shape)}, strides {out.stride()}, wanted a contiguous "
            f"{dtype} matrix {shape}, as the elements are stored"
        )
    if dtype is not torch.float64 and runs_kernels(x.device):
        values = _launch(stored, dtype, target_of(x.device) if target is None else target, out)
    else:
        values = _by_reference(stored, dtype)
        values = values if out is None else out.copy_(values)
    if not padding:
        values = _cropped(values, stored)
    return values.t() if x.is_transposed else values


def _cropped(values: torch.Tensor, stored: Quantised) -> torch.Tensor:
    if tuple(values.shape) == stored.shape:
        return values
    if stored.axis == "row":
        return reference.crop_segments(values, stored.segments)
    return reference.crop_segments(values.t(), stored.segments).t().contiguous()


def _by_reference(stored: Quantised, dtype: torch.dtype) -> torch.Tensor:
    if stored.axis == "row":
        return reference.dequantize_rows(stored.data, stored.scales).to(dtype)
    upright = reference.dequantize_rows(stored.data.t(), stored.scales.t())
    return upright.to(dtype).t().contiguous()


def _launch(
    stored: Quantised, dtype: torch.dtype, target: int, out: torch.Tensor | None
) -> torch.Tensor:
    rows, cols = stored.data.shape
    if out is None:
        out = torch.empty(rows, cols, dtype=dtype, device=stored.device)
    config = constants(
        DequantizeConfig,
        COLUMNS=int(stored.axis == "col"),
        FORMAT=stored.format.constant,
        BLOCK_COLS=BLOCK_COLS,
        TARGET=target,
    )
    data, scales = as_bytes(stored.data), as_bytes(stored.scales)
    num_wgs = num_groups(rows) * -(-cols // BLOCK_COLS)
    launch(dequantize_kernel, num_wgs, (data, scales, out, rows, cols, config), stored.device)
    return out
