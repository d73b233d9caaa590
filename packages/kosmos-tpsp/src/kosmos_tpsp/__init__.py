"""Tensor- and sequence-parallel operations that run their collective inside the GEMM kernel."""

from importlib.metadata import PackageNotFoundError, version

from kosmos_tpsp.functions import (
    MXFP8,
    LinearCall,
    column_parallel_linear,
    reduce_replicated_grads,
    row_parallel_linear,
)
from kosmos_tpsp.modules import (
    ColumnParallelLinear,
    ParallelAttention,
    ParallelMLP,
    RowParallelLinear,
)
from kosmos_tpsp.ops.ag_gemm import AgGemmOptions, ag_gemm, prepare_ag_gemm
from kosmos_tpsp.ops.bulk_ag import BulkAgOptions, bulk_ag, prepare_bulk_ag
from kosmos_tpsp.ops.bulk_column import BulkColumnOptions, bulk_column
from kosmos_tpsp.ops.bulk_rs import BulkRsOptions, bulk_rs, prepare_bulk_rs
from kosmos_tpsp.ops.gemm_rs import GemmRsOptions, gemm_rs, prepare_gemm_rs
from kosmos_tpsp.sharing import destroy_workspaces
from kosmos_tpsp.workspaces import TpSpWorkspace

__all__ = [
    "MXFP8",
    "AgGemmOptions",
    "BulkAgOptions",
    "BulkColumnOptions",
    "BulkRsOptions",
    "ColumnParallelLinear",
    "GemmRsOptions",
    "LinearCall",
    "ParallelAttention",
    "ParallelMLP",
    "RowParallelLinear",
    "TpSpWorkspace",
    "__version__",
    "ag_gemm",
    "bulk_ag",
    "bulk_column",
    "bulk_rs",
    "column_parallel_linear",
    "destroy_workspaces",
    "gemm_rs",
    "prepare_ag_gemm",
    "prepare_bulk_ag",
    "prepare_bulk_rs",
    "prepare_gemm_rs",
    "reduce_replicated_grads",
    "row_parallel_linear",
]

try:
    __version__ = version("kosmos-tpsp")
except PackageNotFoundError:  # run from a source tree that is on the path but not installed
    __version__ = "0+source"
