"""Other implementations of the parallel linears, which layers are timed against.

`plain`: NCCL and cuBLAS one after the other. `overlapped`: the same, but the two collectives of the
column-parallel backward run beside its GEMMs, as Megatron-core has them. `async_tp`: torch's fused
ops of symmetric memory where there is one.

All of them add weight gradients into an FP32 `main_grad` of the weight within the GEMM where there
is one, as the layers do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from kosmos_tpsp.modules import ParallelLinear
from kosmos_tpsp.ops.linear import weight_grad

Linear = Callable[[torch.Tensor, torch.Tensor, dist.ProcessGroup], torch.Tensor]


def gathered(x: torch.Tensor, group: dist.ProcessGroup, wait: bool = True) -> Any:
    """All ranks' rows, and what to wait for unless it is done here."""
    out = x.new_empty((x.shape[0] * group.size(), x.shape[1]))
    work = dist.all_gather_into_tensor(out, x.contiguous(), group=group, async_op=not wait)
    return out if wait else (out, work)


def scattered(x: torch.Tensor, group: dist.ProcessGroup, wait: bool = True) -> Any:
    """The sum of this rank's rows over ranks, and what to wait for unless it is done here."""
    out = x.new_empty((x.shape[0] // group.size(), x.shape[1]))
    work = dist.reduce_scatter_tensor(out, x, group=group, async_op=not wait)
    return out if wait else (out, work)


def _weight_grad(dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """dY^T X, or a stand-in where it went into main_grad."""
    return weight_grad(dy, x, w, getattr(w, "main_grad", None))


class _PlainColumn(torch.autograd.Function):
    """Gathers, then multiplies."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        ctx.group = group
        return gathered(x, group) @ w.t()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        every = gathered(x, ctx.group)
        dx = scattered(dy @ w, ctx.group)
        return dx, _weight_grad(dy, every, w), None


class _PlainRow(torch.autograd.Function):
    """Multiplies, then reduces."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        ctx.group = group
        return scattered(x @ w.t(), group)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        every = gathered(dy, ctx.group)
        return every @ w, _weight_grad(every, x, w), None


class _OverlappedColumn(_PlainColumn):
    """The backward's gather beside dgrad, its reduction beside wgrad."""

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        every, gather = gathered(x, ctx.group, wait=False)
        dx = dy @ w
        gather.wait()
        shard, scatter = scattered(dx, ctx.group, wait=False)
        dw = _weight_grad(dy, every, w)
        scatter.wait()
        return shard, dw, None


class _AsyncColumn(torch.autograd.Function):
    """Torch's gathering GEMM; backward, its reducing GEMM and a gather beside it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        ctx.group = group
        return _gather_matmul(x, w.t(), group)[1]

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        every, gather = gathered(x, ctx.group, wait=False)
        dx = _matmul_scatter(dy.contiguous(), w, ctx.group)
        gather.wait()
        return dx, _weight_grad(dy, every, w), None


class _AsyncRow(torch.autograd.Function):
    """Torch's reducing GEMM; backward, its gathering one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        ctx.group = group
        return _matmul_scatter(x.contiguous(), w.t(), group)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        every, dx = _gather_matmul(dy, w, ctx.group)
        return dx, _weight_grad(every, x, w), None


def _gather_matmul(
    x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    # With the gathered input dropped it may choose multicast loads, which are left off here.
    every, products = torch.ops.symm_mem.fused_all_gather_matmul(
        x.contiguous(), [w], 0, group.group_name, return_A=True
    )
    return every, products[0]


def _matmul_scatter(x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    out: torch.Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(
        x, w, "sum", 0, group.group_name
    )
    return out


# (column, row) of each.
RIVALS: dict[str, tuple[Linear, Linear]] = {
    "plain": (_PlainColumn.apply, _PlainRow.apply),
    "overlapped": (_OverlappedColumn.apply, _PlainRow.apply),
    "async_tp": (_AsyncColumn.apply, _AsyncRow.apply),
}


class Rival(nn.Module):
    """A parallel linear with another's weight.

    Args:
        layer: whose weight it shares; without a bias.
        linear: (x [rows, in], weight, group) to the output.
        group: the ranks.
    """

    def __init__(self, layer: ParallelLinear, linear: Linear, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.weight = layer.weight
        self.linear = linear
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As the layer whose weight it has."""
        out = self.linear(x.reshape(-1, x.shape[-1]), self.weight, self.group)
        return out.view(-1, *x.shape[1:-1], out.shape[-1])


def with_rivals(layer: nn.Module, name: str, group: dist.ProcessGroup) -> nn.Module:
    """Replaces, in place, the parallel linears of a layer by those of a rival."""
    column, row = RIVALS[name]
    for child, module in list(layer.named_children()):
        if isinstance(module, ParallelLinear):
            linear = column if module.sharded_dim == 0 else row
            setattr(layer, child, Rival(module, linear, group))
    return layer
