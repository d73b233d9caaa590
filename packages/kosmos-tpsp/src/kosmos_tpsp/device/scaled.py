"""Tiles of MXFP8 operands by block-scaled MMA, where the matrix units take scales."""

from typing import NamedTuple

import triton
import triton.language as tl
from kosmos_core.device.gemm import TN

from kosmos_tpsp.device.mx import E4M3, GROUP, scaled_tile


class ScaledView(NamedTuple):
    """A stack of matrices in MXFP8.

    Attributes:
        ptr: elements of the first.
        scale_ptr: scales of the first; those of a stack lie together.
        rows: rows of each, over which nothing is summed.
        cols: the contraction.
    """

    ptr: tl.tensor
    scale_ptr: tl.tensor
    rows: tl.tensor
    cols: tl.tensor


@triton.jit
def scaled_sum(a_view, weights, chunk, standing, tile, k_begin, k_end, CONFIG):
    """The fp32 tile over part of the contraction, of rows of chunk `chunk` of A.

    The weights are [n, k] (TN) or [k, n] (NN). Once the call is aborted nothing is read and the
    tile is NaN.
    """
    begin_with = 0.0
    if standing.ok == 0:
        k_end = k_begin
        begin_with = float("nan")
    offset = chunk.to(tl.int64) * a_view.rows * a_view.cols
    return scaled_tile(
        a_view.ptr + offset, a_view.scale_ptr + offset // GROUP, weights.ptr, weights.scale_ptr,
        tile.row_block * CONFIG.BLOCK_M, tile.column * CONFIG.BLOCK_N,
        a_view.rows, weights.rows, weights.cols, k_begin, k_end, begin_with,
        E4M3, E4M3, True, CONFIG.LAYOUT == TN,
        CONFIG.BLOCK_M, CONFIG.BLOCK_N, CONFIG.BLOCK_K, CONFIG.STAGES, CONFIG.EVEN_K,
    )  # fmt: skip
