"""GEMMs of MXFP8 matrices, in the three layouts of a linear layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from kosmos_core.errors import ArgumentError

from kosmos_mx.formats import padded
from kosmos_mx.kernels.gemm import GemmConfig, GemmOperands, gemm_kernel
from kosmos_mx.ops.launching import (
    as_bytes,
    constants,
    has_block_scaled_mma,
    launch,
    runs_kernels,
)
from kosmos_mx.tensor import MXTensor

OUTPUTS = (torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Layout:
    """How the operands of a GEMM are stored.

    Attributes:
        a_axis, b_axis: the axis of each operand that is contracted, as in `MXTensor.axis`.
        shapes: of both, for error messages.
    """

    a_axis: str
    b_axis: str
    shapes: str


LAYOUTS = {
    "tn": Layout("row", "row", "a [m, k] and b [n, k]"),
    "nn": Layout("row", "col", "a [m, k] and b [k, n]"),
    "nt": Layout("col", "col", "a [k, m] and b [k, n]"),
}


@dataclass(frozen=True)
class Tile:
    """Tile and launch of the kernel."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


# On sm_100 a block-scaled instruction takes 128 rows and 128 elements of the contraction.
SCALED_TILE = Tile(128, 128, 128, 8, 2)
# Bytes whose contraction does not lie together are turned in registers, which a larger tile spills.
TURNED_TILE = Tile(128, 64, 64, 8, 2)
BF16_TILE = Tile(128, 128, 64, 8, 3)
GROUP_M = 8


def tile_of(scaled: bool, a_k_major: bool, b_k_major: bool) -> Tile:
    """The tile of a GEMM whose operands are stored so."""
    if not scaled:
        return BF16_TILE
    return SCALED_TILE if a_k_major or b_k_major else TURNED_TILE


def mx_gemm(
    a: MXTensor,
    b: MXTensor,
    layout: str = "tn",
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    block_scaled: bool | None = None,
) -> torch.Tensor:
    """The product of two MXFP8 matrices, accumulated in FP32.

    Args:
        a: "tn" (forward), "nn" (dgrad): [m, k], row-wise; "nt" (wgrad): [k, m], column-wise.
        b: "tn": [n, k], row-wise; "nn", "nt": [k, n], column-wise.
        layout: "tn", "nn" or "nt".
        out_dtype: bfloat16 (one rounding) or float32.
        block_scaled: whether the matrix units apply the scales, or the operands are dequantised to
            BF16 first, exactly for E4M3 with scale codes 3 to 246. [what the device has]

    Returns:
        [m, n].

    Raises:
        ArgumentError: operands that do not fit together.

    Segments of the contraction must be the same in both operands: their padding is zeros in both.
    """
    if layout not in LAYOUTS:
        raise ArgumentError(f"layout: got {layout!r}, wanted one of {', '.join(LAYOUTS)}")
    if out_dtype not in OUTPUTS:
        raise ArgumentError(f"out_dtype: got {out_dtype}, wanted bfloat16 or float32")
    kind = LAYOUTS[layout]
    if (a.axis, b.axis) != (kind.a_axis, kind.b_axis) or a.segments != b.segments:
        raise ArgumentError(
            f"a, b: got {a.shape} {a.axis}-wise in {a.segments} and {b.shape} {b.axis}-wise in "
            f"{b.segments} for layout {layout!r}, wanted {kind.shapes}, {kind.a_axis}-wise and "
            f"{kind.b_axis}-wise, contracted over equal segments"
        )
    if a.device != b.device:
        raise ArgumentError(f"b: got one on {b.device}, wanted {a.device} as a")
    upright_a = a if a.axis == "row" else a.t()  # [m, k]
    upright_b = b if b.axis == "row" else b.t()  # [n, k]
    if not runs_kernels(a.device):
        wide = (t.dequantize(torch.float64) for t in (upright_a, upright_b))
        left, right = wide
        return (left @ right.t()).to(out_dtype)
    scaled = has_block_scaled_mma(a.device) if block_scaled is None else block_scaled
    return _launch(upright_a, upright_b, out_dtype, scaled)


def _launch(a: MXTensor, b: MXTensor, out_dtype: torch.dtype, scaled: bool) -> torch.Tensor:
    m, n, k = a.shape[0], b.shape[0], sum(map(padded, a.segments))
    out = torch.empty(m, n, dtype=out_dtype, device=a.device)
    tile = tile_of(scaled, a.is_k_major, b.is_k_major)
    operands: list[Any] = []
    for operand in (a, b):
        stored = operand if operand.is_k_major else operand.t()
        if scaled:
            operands.append((as_bytes(stored.data), as_bytes(stored.scales)))
        else:
            values = stored.dequantize(torch.bfloat16, padding=True)
            operands.append((values, values))
    config = constants(
        GemmConfig,
        SCALED=int(scaled),
        A_FORMAT=a.format.constant,
        B_FORMAT=b.format.constant,
        A_K_MAJOR=int(a.is_k_major),
        B_K_MAJOR=int(b.is_k_major),
        EVEN_K=int(k % tile.block_k == 0),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        GROUP_M=GROUP_M,
        STAGES=tile.num_stages,
    )
    (a_values, a_scales), (b_values, b_scales) = operands
    ops = GemmOperands(a_values, b_values, a_scales, b_scales, out)
    num_wgs = -(-m // tile.block_m) * -(-n // tile.block_n)
    launch(
        gemm_kernel,
        num_wgs,
        (ops, m, n, k, config),
        a.device,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out
