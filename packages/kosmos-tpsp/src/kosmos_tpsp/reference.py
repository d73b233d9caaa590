"""The unfused path in plain PyTorch: oracle of every test, and where a declined call goes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from kosmos_core.worlds import World


def plain(x: Any) -> torch.Tensor:
    """A matrix as it is, or the bf16 values of one in MXFP8, padded to whole groups."""
    if isinstance(x, torch.Tensor):
        return x
    # FP64 and FP32 hold every value of MXFP8: this rounds once.
    values: torch.Tensor = x.dequantize(torch.float64, padding=True).to(torch.bfloat16)
    return values


def gather(x: Any, world: World) -> Any:
    """The rows of all ranks, stacked in rank order: a matrix, or one in MXFP8 (`MXTensor`)."""
    if isinstance(x, torch.Tensor):
        return world.all_gather_tensor(x)
    data, scales = (
        world.all_gather_tensor(part.contiguous().view(torch.uint8)).view(part.dtype)
        for part in (x.data, x.scales)
    )
    rows, cols = x.shape
    segments = x.segments if x.axis == "row" else x.segments * world.size
    return replace(x, data=data, scales=scales, shape=(rows * world.size, cols), segments=segments)


def ag_gemm(x: Any, w: Any, world: World, layout: str = "tn") -> tuple[torch.Tensor, torch.Tensor]:
    """All-gather, then one GEMM.

    Args:
        x: [chunk_rows, k], this rank's rows; a matrix, or one in MXFP8 along its rows.
        w: [n, k] (layout "tn") or [k, n] ("nn"), likewise, in MXFP8 along k.
        world: the ranks.
        layout: "tn" multiplies by the transpose of w, "nn" by w itself.

    Returns:
        (out [chunk_rows * world size, n], gathered [chunk_rows * world size, k]) in x's dtype; of
        MXFP8 the bf16 product of the dequantised operands, and the dequantised rows, k padded.

    Communication: one all-gather of x; of MXFP8 one of the elements and one of the scales.
    """
    gathered, w = plain(gather(x, world)), plain(w)
    return gathered @ (w.t() if layout == "tn" else w), gathered


def ag_gemm_pair(
    dy: Any, dy_columns: Any, w: torch.Tensor, x: torch.Tensor, world: World
) -> tuple[torch.Tensor, torch.Tensor]:
    """All-gathers of two copies of one gradient, then a GEMM with each.

    Args:
        dy: [m / world size, k] in MXFP8 along rows.
        dy_columns: the same in MXFP8 along columns.
        w: [k, n].
        x: [m, n].
        world: the ranks.

    Returns:
        (dx [m, n] = dY W, dw [k, n] = dY^T X) in bf16, of the dequantised copies.

    Communication: all-gathers of both copies, elements and scales.
    """
    return plain(gather(dy, world)) @ w, plain(gather(dy_columns, world)).t() @ x


def gemm_rs(x: torch.Tensor, w: torch.Tensor, world: World) -> torch.Tensor:
    """One GEMM, then the sum over ranks of the rows that each rank owns.

    Args:
        x: [m, k], all rows with this rank's part of the contraction.
        w: [n, k].
        world: the ranks.

    Returns:
        [m / world size, n] in x's dtype. The products are rounded to it, their sum, taken in FP32
        with rank 0 first, once more.

    Communication: one all-to-all of the products.
    """
    return _reduce_scatter(x @ w.t(), world)


def bulk_ag(
    x: Any, dy: torch.Tensor, w: torch.Tensor, world: World
) -> tuple[torch.Tensor, torch.Tensor]:
    """All-gather of the input of a column-parallel linear, and the gradient of that input.

    Args:
        x: [m / world size, n], this rank's rows; a matrix, or one in MXFP8 along its columns.
        dy: [m, k], gradient of all rows of this rank's part of the output.
        w: [k, n].
        world: the ranks.

    Returns:
        (gathered [m, n], dx [m, n]) in x's dtype; dx = dy @ w is this rank's part of a sum over
        ranks.

    Communication: one all-gather of x.
    """
    return plain(gather(x, world)), dy @ w


def bulk_rs(
    dx: torch.Tensor, dy: torch.Tensor, x: torch.Tensor, world: World
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum over ranks of the input gradient's rows that each rank owns, and the weight gradient.

    Args:
        dx: [k, n], this rank's part of the gradient of all k tokens.
        dy: [k, m], gradient of this rank's part of the output.
        x: [k, n], the gathered input.
        world: the ranks.

    Returns:
        (dx_shard [k / world size, n], dw [m, n] = dy.T @ x) in x's dtype; the sum is taken in FP32
        with rank 0 first and rounded once.

    Communication: one all-to-all of dx.
    """
    return _reduce_scatter(dx, world), dy.t() @ x


def _reduce_scatter(parts: torch.Tensor, world: World) -> torch.Tensor:
    """Each rank's chunk of the rows, summed over ranks in FP32, rank 0 first, rounded once.

    Args:
        parts: [rows, n].
        world: the ranks.
    """
    rows, n = parts.shape
    chunks = (
        world.all_to_all_tensor(parts.contiguous()).float().view(world.size, rows // world.size, n)
    )
    total = chunks[0]
    for chunk in chunks[1:]:
        total = total + chunk
    return total.to(parts.dtype)
