"""Constants and operands of the fused GEMMs, as their device functions see them."""

from typing import NamedTuple

import triton.language as tl
from kosmos_core.device.gemm import store_splits
from kosmos_core.device.target import AMD

PULL = tl.constexpr(0)
PUSH = tl.constexpr(1)

# What is gathered, and what builders multiply.
BF16 = tl.constexpr(0)
UNPACKED = tl.constexpr(1)  # MXFP8 on the link, dequantised on arrival to bf16
SCALED = tl.constexpr(2)  # MXFP8 throughout, multiplied by block-scaled MMA

# Which copies of an MXFP8 matrix are gathered: the one whose groups lie along rows, or columns.
ROWS = tl.constexpr(0)
COLUMNS = tl.constexpr(1)
BOTH = tl.constexpr(2)

FUSED = tl.constexpr(0)
GATHER_ONLY = tl.constexpr(1)
BUILD_ONLY = tl.constexpr(2)
REDUCE_ONLY = tl.constexpr(3)


class AgGemmConfig(NamedTuple):
    """Constants of one compiled variant; every field is a constexpr.

    What they mean: `kosmos_heuristics.AgGemmPlan`.
    FORMAT: BF16, UNPACKED or SCALED.
    COPIES: ROWS; BOTH in `ag_gemm_pair`.
    ROW_SHIFT: k is a multiple of 2 ** ROW_SHIFT, which the compiler is to know.
    """

    FORMAT: tl.constexpr
    COPIES: tl.constexpr
    ROW_SHIFT: tl.constexpr
    TRANSPORT: tl.constexpr
    LAYOUT: tl.constexpr
    ORDER: tl.constexpr
    POLICY: tl.constexpr
    PHASE: tl.constexpr
    KEEP_GATHERED: tl.constexpr
    SCATTERS: tl.constexpr
    SLICES: tl.constexpr
    COPY_ELEMENTS: tl.constexpr
    COPY_DEPTH: tl.constexpr
    TILE_ROW_ROWS: tl.constexpr
    BLOCK_M: tl.constexpr
    BLOCK_N: tl.constexpr
    BLOCK_K: tl.constexpr
    STAGES: tl.constexpr
    GROUP_M: tl.constexpr
    GROUP_ROWS: tl.constexpr
    SPLIT_K: tl.constexpr
    CLAIM_RUN: tl.constexpr
    XCDS: tl.constexpr
    XCD_RUN: tl.constexpr
    STORE_SPLITS: tl.constexpr
    EVEN_K: tl.constexpr
    EVEN_N: tl.constexpr


class Operands(NamedTuple):
    """The matrices of one call.

    Attributes:
        x_ptr: own chunk [chunk_rows, k], bf16 or MXFP8 elements.
        x_scale_ptr: its scales [chunk_rows, k / 32]; in BF16 the same as x_ptr.
        w_ptr: weights [n, k] (TN) or [k, n] (NN), bf16 or, SCALED, MXFP8 elements.
        w_scale_ptr: their scales [n, k / 32] or [k / 32, n], SCALED; else the same as w_ptr.
        out_ptr: output [m, n] bf16.
        gathered_ptr: gathered input [m, k] that builders read: bf16, the own chunk only if it is
            kept or was dequantised; or, SCALED, MXFP8 elements of the others, then their scales.
        keep_ptr: kept gather output [m, k] bf16; the same as gathered_ptr unless pushed.
        partial_ptr: split-K partials [tiles, SPLIT_K, BLOCK_M, BLOCK_N] fp32.
    """

    x_ptr: tl.tensor
    x_scale_ptr: tl.tensor
    w_ptr: tl.tensor
    w_scale_ptr: tl.tensor
    out_ptr: tl.tensor
    gathered_ptr: tl.tensor
    keep_ptr: tl.tensor
    partial_ptr: tl.tensor


class PairOperands(NamedTuple):
    """The matrices of one call of `ag_gemm_pair`; what `Operands` has, too, is as there.

    Attributes:
        column_ptr: elements of the own chunk [chunk_rows, k] with groups along columns.
        column_scale_ptr: their scales [chunk_rows / 32, k].
        left_ptr: [m, k] bf16 where the copy with groups along columns is dequantised.
        right_ptr: [m, n] bf16, the right factor of the weight gradient.
        gradient_ptr: [k, n] bf16, or fp32 with MAIN_GRAD.
    """

    x_ptr: tl.tensor
    x_scale_ptr: tl.tensor
    column_ptr: tl.tensor
    column_scale_ptr: tl.tensor
    w_ptr: tl.tensor
    out_ptr: tl.tensor
    gathered_ptr: tl.tensor
    left_ptr: tl.tensor
    right_ptr: tl.tensor
    gradient_ptr: tl.tensor
    partial_ptr: tl.tensor


class BulkAgConfig(NamedTuple):
    """Constants of one compiled variant of an all-gather beside a GEMM; each is a constexpr.

    FORMAT, COPIES: of what is gathered: BF16 ROWS, or UNPACKED COLUMNS.
    HANDOVER: the product lies in symmetric memory that peers read in later calls.
    """

    FORMAT: tl.constexpr
    COPIES: tl.constexpr
    TRANSPORT: tl.constexpr
    LAYOUT: tl.constexpr
    POLICY: tl.constexpr
    PHASE: tl.constexpr
    HANDOVER: tl.constexpr
    SCATTERS: tl.constexpr
    SLICES: tl.constexpr
    COPY_ELEMENTS: tl.constexpr
    COPY_DEPTH: tl.constexpr
    TILE_ROW_ROWS: tl.constexpr
    BLOCK_M: tl.constexpr
    BLOCK_N: tl.constexpr
    BLOCK_K: tl.constexpr
    STAGES: tl.constexpr
    GROUP_M: tl.constexpr
    SPLIT_K: tl.constexpr
    CLAIM_RUN: tl.constexpr
    XCDS: tl.constexpr
    XCD_RUN: tl.constexpr
    STORE_SPLITS: tl.constexpr
    EVEN_K: tl.constexpr
    EVEN_N: tl.constexpr


class BulkAgOperands(NamedTuple):
    """Matrices of an all-gather beside a GEMM, bf16 and row-major.

    Attributes:
        x_ptr: own chunk [m / world, n] of what is gathered, or its MXFP8 elements.
        x_scale_ptr: their scales [m / world / 32, n]; in BF16 the same as x_ptr.
        dy_ptr: [m, k], multiplied.
        w_ptr: weights [k, n].
        out_ptr: product [m, n].
        gathered_ptr: [m, n] where movers or peers put the rows of the others; where they are
            dequantised, movers, and all rows.
        keep_ptr: gather output [m, n]; the same as gathered_ptr unless pushed.
        partial_ptr: fp32 partial tiles of split tiles.
    """

    x_ptr: tl.tensor
    x_scale_ptr: tl.tensor
    dy_ptr: tl.tensor
    w_ptr: tl.tensor
    out_ptr: tl.tensor
    gathered_ptr: tl.tensor
    keep_ptr: tl.tensor
    partial_ptr: tl.tensor


class GemmRsConfig(NamedTuple):
    """Constants of one compiled variant of a reduce-scattered GEMM; every field is a constexpr."""

    TRANSPORT: tl.constexpr
    LAYOUT: tl.constexpr
    ORDER: tl.constexpr
    POLICY: tl.constexpr
    PHASE: tl.constexpr
    SLICES: tl.constexpr
    REDUCE_ELEMENTS: tl.constexpr
    SOURCE_UNROLL: tl.constexpr
    TILE_ROW_ROWS: tl.constexpr
    BLOCK_M: tl.constexpr
    BLOCK_N: tl.constexpr
    BLOCK_K: tl.constexpr
    STAGES: tl.constexpr
    BAND_ROWS: tl.constexpr
    SPLIT_K: tl.constexpr
    CLAIM_RUN: tl.constexpr
    XCDS: tl.constexpr
    XCD_RUN: tl.constexpr
    STORE_SPLITS: tl.constexpr
    EVEN_K: tl.constexpr
    EVEN_N: tl.constexpr


class ScatterOperands(NamedTuple):
    """Matrices of a reduce-scattered GEMM, row-major.

    Attributes:
        x_ptr: bf16 [m, k], this rank's part of the contraction.
        w_ptr: bf16 [n, k] (TN) or [k, n] (NN).
        out_ptr: bf16 [m / world, n], the sum over ranks of this rank's rows.
        landing_ptr: bf16 [world, m / world, n], what every rank has of this rank's rows.
        partial_ptr: fp32 partial tiles of split tiles.
    """

    x_ptr: tl.tensor
    w_ptr: tl.tensor
    out_ptr: tl.tensor
    landing_ptr: tl.tensor
    partial_ptr: tl.tensor


class BulkRsConfig(NamedTuple):
    """Constants of one compiled variant of `bulk_rs`; every field is a constexpr.

    FORMAT, COPIES: of what is reduced: BF16, ROWS.
    MAIN_GRAD: the product is added to an fp32 matrix instead of being rounded into a bf16 one.
    """

    FORMAT: tl.constexpr
    COPIES: tl.constexpr
    TRANSPORT: tl.constexpr
    POLICY: tl.constexpr
    PHASE: tl.constexpr
    MAIN_GRAD: tl.constexpr
    LAYOUT: tl.constexpr
    SCATTERS: tl.constexpr
    SLICES: tl.constexpr
    COPY_ELEMENTS: tl.constexpr
    COPY_DEPTH: tl.constexpr
    REDUCE_ELEMENTS: tl.constexpr
    TILE_ROW_ROWS: tl.constexpr
    BLOCK_M: tl.constexpr
    BLOCK_N: tl.constexpr
    BLOCK_K: tl.constexpr
    STAGES: tl.constexpr
    GROUP_M: tl.constexpr
    SPLIT_K: tl.constexpr
    CLAIM_RUN: tl.constexpr
    XCDS: tl.constexpr
    XCD_RUN: tl.constexpr
    STORE_SPLITS: tl.constexpr
    EVEN_K: tl.constexpr
    EVEN_M: tl.constexpr
    EVEN_N: tl.constexpr


class GradientConfig(NamedTuple):
    """Constants of the second GEMM of `ag_gemm_pair`, as in `BulkRsConfig`."""

    MAIN_GRAD: tl.constexpr
    LAYOUT: tl.constexpr
    BLOCK_M: tl.constexpr
    BLOCK_N: tl.constexpr
    BLOCK_K: tl.constexpr
    STAGES: tl.constexpr
    GROUP_M: tl.constexpr
    SPLIT_K: tl.constexpr
    CLAIM_RUN: tl.constexpr
    XCDS: tl.constexpr
    XCD_RUN: tl.constexpr
    STORE_SPLITS: tl.constexpr
    EVEN_K: tl.constexpr
    EVEN_M: tl.constexpr
    EVEN_N: tl.constexpr


class GradientOperands(NamedTuple):
    """Matrices of a reduction beside a weight gradient, row-major.

    Attributes:
        x_ptr: bf16 [tokens, n], this rank's part of a sum over ranks: what is reduced.
        out_ptr: bf16 [tokens / world, n], the sum over ranks of this rank's rows.
        landing_ptr: bf16 [world, tokens / world, n], pushed: what every peer has of them.
        left_ptr: bf16 [tokens, m], transposed the left factor of the weight gradient.
        right_ptr: bf16 [tokens, n], the right factor.
        gradient_ptr: [m, n] bf16, or fp32 with MAIN_GRAD.
        partial_ptr: fp32 partial tiles of split tiles.
    """

    x_ptr: tl.tensor
    out_ptr: tl.tensor
    landing_ptr: tl.tensor
    left_ptr: tl.tensor
    right_ptr: tl.tensor
    gradient_ptr: tl.tensor
    partial_ptr: tl.tensor


def gradient_splits(block_n: int, adds: bool, target: int) -> int:
    """Column parts in which `bulk_rs` stores a tile, or adds it to an fp32 matrix.

    AMD has no staging, but no registers for more of a masked tile either.
    """
    return store_splits(block_n, (4 if adds else 2) * (2 if target == AMD.value else 1))
