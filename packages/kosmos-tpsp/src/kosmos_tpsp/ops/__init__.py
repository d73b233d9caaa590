"""Operations: validate, plan, carve the workspace, launch."""

from kosmos_tpsp.ops.ag_gemm import ag_gemm, prepare_ag_gemm

__all__ = ["ag_gemm", "prepare_ag_gemm"]
