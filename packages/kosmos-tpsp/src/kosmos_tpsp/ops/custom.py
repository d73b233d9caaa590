"""Operators of the dispatcher: what autograd, `torch.compile` and CUDA graphs see.

`torch.ops.kosmos.ag_gemm(x, w, call)`, `ag_gemm_gathered(x, w, call)`, `gemm_rs(x, w, call)`,
`bulk_ag(x, dy, w, call)`, `bulk_rs(dx, dy, x, call)`, `bulk_rs_added(dx, dy, x, main_grad, call)`
and `bulk_column_backward(x, dy, w, call)`; `call` comes from
`kosmos_tpsp.ops.registry.call_handle`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from kosmos_tpsp.ops.ag_gemm import AgGemmOptions, ag_gemm
from kosmos_tpsp.ops.bulk_ag import TENSOR, BulkAgOptions, bulk_ag
from kosmos_tpsp.ops.bulk_column import BulkColumnOptions, bulk_column
from kosmos_tpsp.ops.bulk_rs import BulkRsOptions, bulk_rs
from kosmos_tpsp.ops.gemm_rs import GemmRsOptions, gemm_rs
from kosmos_tpsp.ops.registry import resolve


def _shapes(x: torch.Tensor, w: torch.Tensor, call: int) -> tuple[int, int, int]:
    workspace, options = resolve(call)
    n = w.shape[0] if options.layout == "tn" else w.shape[1]
    return x.shape[0] * workspace.world.size, n, x.shape[1]


@torch.library.custom_op("kosmos::ag_gemm", mutates_args=())
def ag_gemm_op(x: torch.Tensor, w: torch.Tensor, call: int) -> torch.Tensor:
    """`ag_gemm` of a call that does not keep the gathered input: out [m, n]."""
    workspace, options = resolve(call)
    out = ag_gemm(x, w, workspace, options=options)
    assert isinstance(out, torch.Tensor)
    return out


@ag_gemm_op.register_fake
def _ag_gemm_fake(x: torch.Tensor, w: torch.Tensor, call: int) -> torch.Tensor:
    m, n, _ = _shapes(x, w, call)
    return x.new_empty((m, n))


@torch.library.custom_op("kosmos::ag_gemm_gathered", mutates_args=())
def ag_gemm_gathered_op(
    x: torch.Tensor, w: torch.Tensor, call: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ag_gemm` of a call that keeps the gathered input: (out [m, n], gathered [m, k])."""
    workspace, options = resolve(call)
    out = ag_gemm(x, w, workspace, options=options)
    assert isinstance(out, tuple)
    return out


@ag_gemm_gathered_op.register_fake
def _ag_gemm_gathered_fake(
    x: torch.Tensor, w: torch.Tensor, call: int
) -> tuple[torch.Tensor, torch.Tensor]:
    m, n, k = _shapes(x, w, call)
    return x.new_empty((m, n)), x.new_empty((m, k))


@torch.library.custom_op("kosmos::gemm_rs", mutates_args=())
def gemm_rs_op(x: torch.Tensor, w: torch.Tensor, call: int) -> torch.Tensor:
    """`gemm_rs`: out [m / world size, n]."""
    workspace, options = resolve(call)
    return gemm_rs(x, w, workspace, options=options)


@gemm_rs_op.register_fake
def _gemm_rs_fake(x: torch.Tensor, w: torch.Tensor, call: int) -> torch.Tensor:
    workspace, _ = resolve(call)
    return x.new_empty((x.shape[0] // workspace.world.size, w.shape[0]))


@lru_cache(maxsize=64)
def _lasting(options: BulkAgOptions) -> BulkAgOptions:
    """The choices of a call whose dx is a tensor of its own.

    The dispatcher owns what an operator returns: that must not be memory of the workspace.
    """
    return replace(options, dx_to=TENSOR)


@torch.library.custom_op("kosmos::bulk_ag", mutates_args=())
def bulk_ag_op(
    x: torch.Tensor, dy: torch.Tensor, w: torch.Tensor, call: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`bulk_ag`: (gathered [m, n], dx [m, n]), both ordinary tensors whatever `dx_to` says."""
    workspace, options = resolve(call)
    return bulk_ag(x, dy, w, workspace, options=_lasting(options))


@bulk_ag_op.register_fake
def _bulk_ag_fake(
    x: torch.Tensor, dy: torch.Tensor, w: torch.Tensor, call: int
) -> tuple[torch.Tensor, torch.Tensor]:
    workspace, _ = resolve(call)
    m = x.shape[0] * workspace.world.size
    return x.new_empty((m, x.shape[1])), x.new_empty((m, w.shape[1]))


@torch.library.custom_op("kosmos::bulk_rs", mutates_args=())
def bulk_rs_op(
    dx: torch.Tensor, dy: torch.Tensor, x: torch.Tensor, call: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`bulk_rs`: (dx_shard [k / world size, n], dw [m, n])."""
    workspace, options = resolve(call)
    shard, dw = bulk_rs(dx, dy, x, workspace, options=options)
    assert dw is not None
    return shard, dw


@bulk_rs_op.register_fake
def _bulk_rs_fake(
    dx: torch.Tensor, dy: torch.Tensor, x: torch.Tensor, call: int
) -> tuple[torch.Tensor, torch.Tensor]:
    workspace, _ = resolve(call)
    k, n = x.shape
    return x.new_empty((k // workspace.world.size, n)), x.new_empty((dy.shape[1], n))


@torch.library.custom_op("kosmos::bulk_rs_added", mutates_args=("main_grad",))
def bulk_rs_added_op(
    dx: torch.Tensor, dy: torch.Tensor, x: torch.Tensor, main_grad: torch.Tensor, call: int
) -> torch.Tensor:
    """`bulk_rs` that adds the weight gradient to main_grad [m, n] float32: dx_shard."""
    workspace, options = resolve(call)
    return bulk_rs(dx, dy, x, workspace, main_grad=main_grad, options=options)[0]


@bulk_rs_added_op.register_fake
def _bulk_rs_added_fake(
    dx: torch.Tensor, dy: torch.Tensor, x: torch.Tensor, main_grad: torch.Tensor, call: int
) -> torch.Tensor:
    workspace, _ = resolve(call)
    return x.new_empty((x.shape[0] // workspace.world.size, x.shape[1]))


@torch.library.custom_op("kosmos::bulk_column_backward", mutates_args=())
def bulk_column_backward_op(
    x: torch.Tensor, dy: torch.Tensor, w: torch.Tensor, call: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`bulk_column`: (dx_shard [m / world size, n], dw [k, n]).

    Both launches in one operator: what the first hands over is never seen outside.
    """
    workspace, options = resolve(call)
    shard, dw = bulk_column(x, dy, w, workspace, options=options)
    assert dw is not None
    return shard, dw


@bulk_column_backward_op.register_fake
def _bulk_column_backward_fake(
    x: torch.Tensor, dy: torch.Tensor, w: torch.Tensor, call: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), w.new_empty(w.shape)


__all__ = [
    "AgGemmOptions",
    "BulkAgOptions",
    "BulkColumnOptions",
    "BulkRsOptions",
    "GemmRsOptions",
    "ag_gemm_gathered_op",
    "ag_gemm_op",
    "bulk_ag_op",
    "bulk_column_backward_op",
    "bulk_rs_added_op",
    "bulk_rs_op",
    "gemm_rs_op",
]
