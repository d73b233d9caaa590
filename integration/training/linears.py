"""Linear layers by backend: unsharded, and the plain path of sequence parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from kosmos_core.worlds import World
from kosmos_tpsp import TpSpWorkspace, reference
from kosmos_tpsp.bench.rivals import RIVALS, Rival
from kosmos_tpsp.functions import LinearCall
from kosmos_tpsp.modules import ColumnParallelLinear, ParallelLinear, RowParallelLinear
from torch import nn


class _Column(torch.autograd.Function):
    """Gathers tokens, then the GEMM; backward as the fused layers: x is gathered again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, world: World) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        ctx.world = world
        return reference.ag_gemm(x, w, world)[0]

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, w = ctx.saved_tensors
        gathered, dx = reference.bulk_ag(x, dy, w, ctx.world)
        return *reference.bulk_rs(dx, dy, gathered, ctx.world), None


class _Row(torch.autograd.Function):
    """The GEMM, then the sum over ranks of each rank's own tokens."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, world: World) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        ctx.world = world
        return reference.gemm_rs(x, w, world)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, w = ctx.saved_tensors
        dx, gathered = reference.ag_gemm(dy, w, ctx.world, layout="nn")
        return dx, gathered.t() @ x, None


class Parallel(nn.Module):
    """A layer of the plain path.

    Args:
        function: forward and backward.
        shape: of this rank's part of the weight.
        world: the ranks.
    """

    def __init__(self, function: Any, shape: tuple[int, int], world: World) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))
        self._function = function
        self._world = world

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As `Linears` says."""
        out: torch.Tensor = self._function.apply(x, self.weight, self._world)
        return out


@dataclass(frozen=True)
class ReferenceLinears:
    """Collectives of the world and PyTorch's GEMM, one after the other."""

    world: World

    def column(self, in_features: int, out_features: int) -> nn.Module:
        """See `Linears`."""
        return Parallel(_Column, (out_features // self.world.size, in_features), self.world)

    def row(self, in_features: int, out_features: int) -> nn.Module:
        """See `Linears`."""
        return Parallel(_Row, (out_features, in_features // self.world.size), self.world)


class UnshardedLinears:
    """`nn.Linear`, for one rank that has everything."""

    def column(self, in_features: int, out_features: int) -> nn.Module:
        """See `Linears`."""
        return nn.Linear(in_features, out_features, bias=False)

    row = column


@dataclass(frozen=True)
class KosmosLinears:
    """The fused layers of kosmos-tpsp.

    Attributes:
        workspace: that all of them share.
        traced: record what workgroups do into its trace buffer.
    """

    workspace: TpSpWorkspace
    traced: bool = False

    def column(self, in_features: int, out_features: int) -> ParallelLinear:
        """See `Linears`."""
        return self._layer(ColumnParallelLinear, in_features, out_features)

    def row(self, in_features: int, out_features: int) -> ParallelLinear:
        """See `Linears`."""
        return self._layer(RowParallelLinear, in_features, out_features)

    def _layer(
        self, kind: type[ParallelLinear], in_features: int, out_features: int
    ) -> ParallelLinear:
        # The weight is given its values later, by the optimizer; a seed keeps this local.
        layer = kind(in_features, out_features, bias=False, workspace=self.workspace, seed=0)
        if self.traced:
            layer.call = LinearCall(self.workspace, traced=True)
        return layer


@dataclass(frozen=True)
class RivalLinears:
    """Layers of another implementation, which benchmarks compare with.

    Attributes:
        own: makes the layers whose weights they take.
        name: of `kosmos_tpsp.bench.rivals`.
        group: the ranks.
    """

    own: KosmosLinears
    name: str
    group: dist.ProcessGroup

    def column(self, in_features: int, out_features: int) -> nn.Module:
        """See `Linears`."""
        return Rival(self.own.column(in_features, out_features), RIVALS[self.name][0], self.group)

    def row(self, in_features: int, out_features: int) -> nn.Module:
        """See `Linears`."""
        return Rival(self.own.row(in_features, out_features), RIVALS[self.name][1], self.group)
