"""Linear layers by backend: unsharded, and the plain path of sequence parallelism."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from kosmos_core.worlds import World
from kosmos_mx import quantize
from kosmos_tpsp import TpSpWorkspace, reference
from kosmos_tpsp.bench.rivals import RIVALS, Rival
from kosmos_tpsp.functions import LinearCall
from kosmos_tpsp.modules import ColumnParallelLinear, ParallelLinear, RowParallelLinear
from torch import nn

# (matrix, axis, rows that share no column-wise group with others) to the values that a GEMM takes,
# where "row" contracts over the columns and "col" over the rows.
Cast = Callable[[torch.Tensor, str, int], torch.Tensor]


def as_is(t: torch.Tensor, axis: str, segment: int) -> torch.Tensor:
    """BF16 operands."""
    return t


def in_mxfp8(t: torch.Tensor, axis: str, segment: int) -> torch.Tensor:
    """Quantised to MXFP8 and back."""
    values: torch.Tensor = quantize(t.contiguous(), axis, segments=segment).dequantize()
    return values


CASTS: dict[str, Cast] = {"bf16": as_is, "mxfp8": in_mxfp8}


class _Column(torch.autograd.Function):
    """Gathers tokens, then the GEMM; backward as the fused layers: x is gathered again."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, w: torch.Tensor, world: World, cast: Cast
    ) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        ctx.world, ctx.cast = world, cast
        return reference.ag_gemm(cast(x, "row", len(x)), cast(w, "row", len(w)), world)[0]

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        x, w = ctx.saved_tensors
        cast, chunk = ctx.cast, len(x)
        gathered, dx = reference.bulk_ag(
            cast(x, "col", chunk), cast(dy, "row", chunk), cast(w, "col", len(w)), ctx.world
        )
        return *reference.bulk_rs(dx, cast(dy, "col", chunk), gathered, ctx.world), None, None


class _Row(torch.autograd.Function):
    """The GEMM, then the sum over ranks of each rank's own tokens."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, w: torch.Tensor, world: World, cast: Cast
    ) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        ctx.world, ctx.cast = world, cast
        return reference.gemm_rs(cast(x, "row", len(x)), cast(w, "row", len(w)), world)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        x, w = ctx.saved_tensors
        cast, chunk, world = ctx.cast, len(dy), ctx.world
        dx, gathered = reference.ag_gemm(
            cast(dy, "row", chunk), cast(w, "col", len(w)), world, layout="nn"
        )
        if cast is not as_is:
            gathered = world.all_gather_tensor(cast(dy, "col", chunk))
        return dx, gathered.t() @ cast(x, "col", chunk), None, None


class Parallel(nn.Module):
    """A layer of the plain path.

    Args:
        function: forward and backward.
        shape: of this rank's part of the weight.
        world: the ranks.
        cast: what operands go through before each GEMM.
    """

    def __init__(self, function: Any, shape: tuple[int, int], world: World, cast: Cast) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))
        self._function = function
        self._world = world
        self._cast = cast

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As `Linears` says."""
        out: torch.Tensor = self._function.apply(x, self.weight, self._world, self._cast)
        return out


@dataclass(frozen=True)
class ReferenceLinears:
    """Collectives of the world and PyTorch's GEMM, one after the other.

    Attributes:
        world: the ranks.
        precision: "bf16" or "mxfp8".
    """

    world: World
    precision: str = "bf16"

    def column(self, in_features: int, out_features: int) -> nn.Module:
        """See `Linears`."""
        return self._layer(_Column, (out_features // self.world.size, in_features))

    def row(self, in_features: int, out_features: int) -> nn.Module:
        """See `Linears`."""
        return self._layer(_Row, (out_features, in_features // self.world.size))

    def _layer(self, function: Any, shape: tuple[int, int]) -> nn.Module:
        return Parallel(function, shape, self.world, CASTS[self.precision])


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
        precision: of their GEMMs, "bf16" or "mxfp8".
        traced: record what workgroups do into its trace buffer.
    """

    workspace: TpSpWorkspace
    precision: str = "bf16"
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
        layer = kind(
            in_features, out_features, bias=False, workspace=self.workspace, seed=0,
            precision=self.precision,
        )  # fmt: skip
        if self.traced:
            layer.call = LinearCall(self.workspace, traced=True, precision=self.precision)
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
