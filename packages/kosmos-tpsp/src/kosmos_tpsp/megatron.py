"""Megatron-core's parallel linear layers with the fused forward and backward.

`parallel_linears` subclasses the classes of the installed `megatron.core`: parameters, their
initialisation, checkpoints and signatures stay theirs. Use the two in a layer spec:

    Column, Row = parallel_linears(max_tokens=sequence_length * micro_batch_size)
    attention = spec.submodules.self_attention.submodules
    attention.linear_qkv, attention.linear_proj = Column, Row
    mlp = spec.submodules.mlp.submodules
    mlp.linear_fc1, mlp.linear_fc2 = Column, Row
"""

from __future__ import annotations

import importlib
from inspect import signature
from typing import Any

import torch
from kosmos_core.errors import ArgumentError

from kosmos_tpsp.functions import MXFP8, LinearCall, column_parallel_linear, row_parallel_linear
from kosmos_tpsp.precision import with_scales
from kosmos_tpsp.sharing import shared_workspace, world_of

_LAYERS = "megatron.core.tensor_parallel.layers"


def parallel_linears(
    max_tokens: int, *, cap: int | None = None, precision: str | MXFP8 = "bf16"
) -> tuple[type[Any], type[Any]]:
    """(ColumnParallelLinear, RowParallelLinear) for layer specs.

    With one rank, for which Megatron-core switches sequence parallelism off, they compute as its
    own do in BF16. Weight gradients go into `main_grad` where there is one, whatever
    `gradient_accumulation_fusion` says, which Megatron-core's DDP allows for.

    Args:
        max_tokens: sequence length times micro-batch size, over all ranks.
        cap: most workgroups of a fused call.
        precision: of the GEMMs: "bf16", "mxfp8", or an `MXFP8`.

    Raises:
        ImportError: megatron.core cannot be imported, or is older than its layers' `tp_group`.

    A layer's constructor raises ArgumentError where the configuration has no sequence parallelism,
    another type than bfloat16, or the layer is an expert's.
    """
    try:
        layers = importlib.import_module(_LAYERS)
    except ImportError as error:
        raise ImportError(f"{_LAYERS}: {error}; install megatron-core") from error
    if "tp_group" not in signature(layers.RowParallelLinear.__init__).parameters:
        raise ImportError(
            f"{_LAYERS}: its layers take no tp_group; install megatron-core 0.13 or newer"
        )

    class ColumnParallelLinear(layers.ColumnParallelLinear):  # type: ignore[misc,name-defined]
        """Megatron-core's, with `ag_gemm` forward, `bulk_ag` and `bulk_rs` backward."""

        def __init__(self, input_size: int, output_size: int, **settings: Any) -> None:
            super().__init__(input_size, output_size, **settings)
            self.kosmos_call = _call(self, max_tokens, input_size, cap, precision)

        def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, **rest: Any) -> Any:
            if self.kosmos_call is None:
                return super()._forward_impl(input=input, weight=weight, **rest)
            return column_parallel_linear(input, weight, rest.get("bias"), self.kosmos_call)

    class RowParallelLinear(layers.RowParallelLinear):  # type: ignore[misc,name-defined]
        """Megatron-core's, with `gemm_rs` forward, `ag_gemm` and a GEMM backward."""

        def __init__(self, input_size: int, output_size: int, **settings: Any) -> None:
            super().__init__(input_size, output_size, **settings)
            self.kosmos_call = _call(self, max_tokens, output_size, cap, precision)

        def forward(self, input_: torch.Tensor) -> Any:
            """[sequence, batch, in / ranks] -> ([sequence / ranks, batch, out], bias or None)."""
            if self.kosmos_call is None:
                return super().forward(input_)
            bias = None if self.skip_bias_add else self.bias
            out = row_parallel_linear(input_, self.weight, bias, self.kosmos_call)
            return out, self.bias if self.skip_bias_add else None

    return ColumnParallelLinear, RowParallelLinear


def _call(
    layer: Any, max_tokens: int, width: int, cap: int | None, precision: str | MXFP8
) -> LinearCall | None:
    """Where the calls of a layer run; None for one rank in BF16."""
    world = world_of(layer.tp_group)
    config = layer.config
    if world.size == 1 and precision == "bf16":
        return None
    if layer.is_expert:
        raise ArgumentError(
            "is_expert: got an expert's layer, wanted a dense one; leave it as it is"
        )
    if not config.sequence_parallel and world.size > 1:
        raise ArgumentError(
            "config.sequence_parallel: got False, wanted True; without it there is nothing to fuse"
        )
    if config.params_dtype != torch.bfloat16:
        raise ArgumentError(
            f"config.params_dtype: got {config.params_dtype}, wanted torch.bfloat16"
        )
    if getattr(config, "defer_embedding_wgrad_compute", False):
        raise ArgumentError(
            "config.defer_embedding_wgrad_compute: got True, wanted False; keep Megatron-core's "
            "class for the output layer"
        )
    room = shared_workspace(world, max_tokens, width if precision == "bf16" else with_scales(width))
    return LinearCall(room, cap=cap, precision=precision)


__all__ = ["parallel_linears"]
