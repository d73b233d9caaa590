"""Crews of the kernels by the paper's Table B.3, and its split-K, for any TP size and cap.

Rows 1 to 5, 11 and 12. A gather's crew is per remote peer; the readings of what the table leaves
open are those of docs/decisions/0002-heuristics-readings.md.
"""

from __future__ import annotations

from kosmos_heuristics.checks import cdiv

FIXED_PER_PEER = 8
_WORKSPACE_TILES = 256


def per_peer(kernel: str, dtype: str, m: int, n: int, k: int, cap: int) -> int:
    """Movers or reducers per remote peer by Table B.3.

    Args:
        kernel: ``ag_gemm_tn``, ``ag_gemm_nn``, ``gemm_rs``, ``bulk_ag`` or ``bulk_rs``.
        dtype: ``bf16`` or ``mxfp8``.
        m: Rows of the GEMM.
        n: Columns of the GEMM.
        k: Its contraction.
        cap: Workgroups in the grid.
    """
    bf16 = dtype == "bf16"
    if kernel == "ag_gemm_tn":
        return 6 if bf16 and n >= 3584 else 8
    if kernel == "ag_gemm_nn":
        return 6 if bf16 and n >= 4608 else 8
    if kernel == "bulk_ag":
        steps = ((7168, 2), (3584, 4), (2304, 6)) if bf16 else ((3584, 2), (1792, 4))
        return next((crew for least, crew in steps if k >= least), 8)
    if kernel == "bulk_rs":
        # The table's output width is the column-parallel layer's local one, m of this GEMM.
        if bf16:
            return 2 if m >= 8192 else 4 if m >= 3584 else 8
        # Printed: 8 for 5120 to 8191, else 4. Below 5120 Table C.12's whole calls are shorter than
        # Table A.4's reduction with 4, so 8 it must have been.
        return 8 if m <= 8191 else 4
    waves = cdiv(m, 256) * cdiv(n, 256) / cap
    if k >= 4096:
        return 4 if bf16 else 5
    if k >= 3072:
        return 6 if bf16 else (8 if waves >= 16 else 7)
    if k <= 768:
        return 14 if waves >= 16 else 10 if waves >= 8 else 8
    return 10 if not bf16 and waves >= 16 else 8


def split_k(kernel: str, dtype: str, tiles: int) -> int:
    """Contraction splits of every tile by Table B.3 rows 11 and 12."""
    if dtype != "bf16" or kernel in ("ag_gemm_tn", "gemm_rs"):
        return 1
    if kernel == "bulk_rs":
        return 4 if tiles <= 64 else 1
    return next((s for s in (4, 2) if s * tiles <= _WORKSPACE_TILES), 1)


def _crew(wgs: float, least: int, most: int) -> int:
    return min(max(cdiv(int(-(-wgs // 1)), 8) * 8, least), most)


def moe_forward_crews(dtype: str, inter: int, column_wise: bool, cap: int) -> tuple[int, int]:
    """Dispatch and combine crews of the forward, Table B.3 rows 6 and 7.

    Args:
        dtype: ``bf16`` or ``mxfp8``.
        inter: Width of an expert.
        column_wise: Whether the column-wise copy of the input is sent too.
        cap: Workgroups in the grid.
    """
    if dtype == "bf16":
        dispatch = 32 if inter < 1024 else 24 if inter < 3072 else 16
    else:
        dispatch = min(max(round(24576 / inter / 8) * 8, 16), 48) * (2 if column_wise else 1)
    return min(dispatch, cap // 2), _beside_builders(128, cap)


def _beside_builders(crew: int, cap: int) -> int:
    """At most half of the grid, in eights where it has as many (reading A12)."""
    half = min(crew, cap // 2)
    return half // 8 * 8 if half >= 8 else half


def moe_backward_crews(dtype: str, push_ms: float, gemm_ms: float, cap: int) -> tuple[int, int]:
    """Dispatch and combine crews of the backward, Table B.3 rows 8 and 9.

    Args:
        dtype: ``bf16`` or ``mxfp8``.
        push_ms: Time of one direction's bytes at the transport's limit.
        gemm_ms: Time of all GEMMs at the machine's throughput.
        cap: Workgroups in the grid.
    """
    dispatch = _crew(256 * push_ms / (push_ms + gemm_ms), 32, 64)
    combine = _crew(256 * push_ms / gemm_ms, 24 if dtype == "bf16" else 32, 128)
    return min(dispatch, cap // 2), _beside_builders(combine, cap)
