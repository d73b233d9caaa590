"""How each op is computed without fusing: by collective and vendor's GEMM, in part or in sequence.

Everything is written into buffers that are there already, so that the allocator costs a baseline
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from kosmos_core.worlds import World
from kosmos_core.worlds.group import GroupWorld

from kosmos_tpsp.bench import checking
from kosmos_tpsp.bench.cases import Case
from kosmos_tpsp.ops import mx
from kosmos_tpsp.ops.ag_gemm import ag_gemm
from kosmos_tpsp.ops.bulk_rs import bulk_rs
from kosmos_tpsp.ops.catalog import DRIVERS, Sizes
from kosmos_tpsp.ops.gemm_rs import gemm_rs
from kosmos_tpsp.workspaces import TpSpWorkspace

Tensors = dict[str, torch.Tensor]
# Computes something; returns what it has written, by name.
Call = Callable[[], Tensors]


@dataclass(frozen=True)
class Data:
    """Operands and buffers of one case on one rank, bfloat16 or, of MXFP8, operands in it, by name.

    Attributes:
        case: the case.
        world: the ranks.
        given: operands as the fused op takes them; of MXFP8 local ones come as values where it
            dequantises on arrival.
        values: of MXFP8 the bf16 values of all operands; empty for bf16.
        outs: outputs of the op.
        scratch: what only the unfused path writes.
    """

    case: Case
    world: World
    given: dict[str, Any]
    values: Tensors
    outs: Tensors
    scratch: Tensors

    @classmethod
    def random(cls, case: Case, world: World, seed: int) -> Data:
        """Normally distributed operands, different on every rank, buffers NaN."""
        device = world.device
        source = torch.Generator(device).manual_seed(seed * 8 + world.rank)

        def normal(shape: tuple[int, int]) -> torch.Tensor:
            t = torch.empty(shape, dtype=torch.bfloat16, device=device)
            return t.normal_(generator=source)

        def poison(shape: tuple[int, int]) -> torch.Tensor:
            return torch.full(shape, float("nan"), dtype=torch.bfloat16, device=device)

        driver, sizes = DRIVERS[case.op], Sizes(*case.shape, world.size, case.layout)
        given: dict[str, Any] = {name: normal(of(sizes)) for name, of in driver.operands.items()}
        values: Tensors = {}
        if case.dtype == "mxfp8":
            axes = driver.quantised(driver.options(layout=case.layout))
            given = {name: mx.quantized(t, axes[name]) for name, t in given.items()}
            values = {name: mx.as_operand(t, scaled=False) for name, t in given.items()}
            if not mx.takes_scales(device):
                first = next(iter(given))
                given = {**values, first: given[first]}
        return cls(
            case,
            world,
            given,
            values,
            {name: poison(of(sizes)) for name, of in driver.outputs.items()},
            {name: poison(of(sizes)) for name, of in UNFUSED[case.op].scratch.items()},
        )

    def plain(self, name: str) -> torch.Tensor:
        """A bf16 operand, or the values of one in MXFP8."""
        return self.values[name] if self.values else self.given[name]

    def poison(self) -> None:
        """Fills every buffer with NaN."""
        for t in (*self.outs.values(), *self.scratch.values()):
            t.fill_(float("nan"))

    def written(self) -> Tensors:
        """What the unfused path writes."""
        return {**self.outs, **self.scratch}


@dataclass(frozen=True)
class Unfused:
    """One op without fusing.

    Attributes:
        scratch: what is written on the way besides the outputs.
        reads: what the GEMM alone reads of what the sequence writes.
        sequence: collective and GEMM, one after the other.
        gemm: the vendor's GEMM alone, on what the sequence has left.
        own_gemm: this package's GEMM alone, on a workspace of one rank.
        async_tp: torch's own overlapped op; None where it has none.
        error: (data, outputs, what the sequence has written) relative error of outputs against FP64
            on sampled rows. Collective.
    """

    scratch: dict[str, Callable[[Sizes], tuple[int, int]]]
    reads: tuple[str, ...]
    sequence: Callable[[Data], Tensors]
    gemm: Callable[[Data], Tensors]
    own_gemm: Callable[[Data, TpSpWorkspace], Tensors]
    async_tp: Callable[[Data, str], Tensors] | None
    error: Callable[[Data, Tensors, Tensors], float]


def all_gather(out: torch.Tensor, x: torch.Tensor, world: World) -> None:
    """Gathers the rows of all ranks."""
    if isinstance(world, GroupWorld):
        dist.all_gather_into_tensor(out, x, group=world.group)
    else:
        out.copy_(world.all_gather_tensor(x))


def gather_values(out: torch.Tensor, x: Any, data: Data) -> None:
    """Gathers the rows of all ranks; of MXFP8 elements and scales, which are then dequantised."""
    if not data.values:
        all_gather(out, x, data.world)
        return
    size = data.world.size
    elements, scales = (t.new_empty((t.shape[0] * size, t.shape[1])) for t in mx.as_stored(x))
    for gathered, own in zip((elements, scales), mx.as_stored(x), strict=True):
        all_gather(gathered, own, data.world)
    mx.dequantized(mx.of_bytes(elements, scales, x.axis), out)


def reduce_scatter(out: torch.Tensor, x: torch.Tensor, world: World) -> None:
    """Sums the rows that this rank owns over all ranks."""
    if isinstance(world, GroupWorld):
        dist.reduce_scatter_tensor(out, x, group=world.group)
    else:
        parts = world.all_to_all_tensor(x).float().chunk(world.size)
        out.copy_(torch.stack(list(parts)).sum(0))


def _weights(data: Data) -> torch.Tensor:
    w = data.plain("w")
    return w.t() if data.case.layout == "tn" else w


def _ag_gemm_sequence(data: Data) -> Tensors:
    gather_values(data.outs["gathered"], data.given["x"], data)
    return {**_ag_gemm_gemm(data), "gathered": data.outs["gathered"]}


def _ag_gemm_gemm(data: Data) -> Tensors:
    return {"out": torch.mm(data.outs["gathered"], _weights(data), out=data.outs["out"])}


def _ag_gemm_own(data: Data, solo: TpSpWorkspace) -> Tensors:
    x, out, layout = data.outs["gathered"], data.outs["out"], data.case.layout
    ag_gemm(x, data.plain("w"), solo, out=out, layout=layout, keep_gathered=False, force=True)
    return {"out": out}


def _ag_gemm_async(data: Data, group: str) -> Tensors:
    # With the gathered input dropped it may choose multicast loads, which are left off here.
    gathered, products = torch.ops.symm_mem.fused_all_gather_matmul(
        data.given["x"], [_weights(data)], 0, group, return_A=True
    )
    return {"out": products[0], "gathered": gathered}


def _ag_gemm_error(data: Data, outs: Tensors, written: Tensors) -> float:
    w, layout = data.plain("w"), data.case.layout
    return checking.fp64_error(outs["out"], written["gathered"], w, layout)


def _gemm_rs_sequence(data: Data) -> Tensors:
    written = _gemm_rs_gemm(data)
    reduce_scatter(data.outs["out"], data.scratch["product"], data.world)
    return {**written, "out": data.outs["out"]}


def _gemm_rs_gemm(data: Data) -> Tensors:
    product = data.scratch["product"]
    return {"product": torch.mm(data.given["x"], _weights(data), out=product)}


def _gemm_rs_own(data: Data, solo: TpSpWorkspace) -> Tensors:
    product = data.scratch["product"]
    return {"product": gemm_rs(data.given["x"], data.given["w"], solo, out=product, force=True)}


def _gemm_rs_async(data: Data, group: str) -> Tensors:
    out = torch.ops.symm_mem.fused_matmul_reduce_scatter(
        data.given["x"], _weights(data), "sum", 0, group
    )
    return {"out": out}


def _gemm_rs_error(data: Data, outs: Tensors, written: Tensors) -> float:
    return checking.fp64_error_of_sum(outs["out"], data.given["x"], data.given["w"], data.world)


def _bulk_ag_sequence(data: Data) -> Tensors:
    all_gather(data.outs["gathered"], data.given["x"], data.world)
    return {**_bulk_ag_gemm(data), "gathered": data.outs["gathered"]}


def _bulk_ag_gemm(data: Data) -> Tensors:
    return {"dx": torch.mm(data.given["dy"], data.given["w"], out=data.outs["dx"])}


def _bulk_ag_own(data: Data, solo: TpSpWorkspace) -> Tensors:
    # The op itself would also copy x where there are no peers.
    dy, w, dx = data.given["dy"], data.given["w"], data.outs["dx"]
    ag_gemm(dy, w, solo, out=dx, layout="nn", keep_gathered=False, force=True)
    return {"dx": dx}


def _bulk_ag_error(data: Data, outs: Tensors, written: Tensors) -> float:
    return checking.fp64_error(outs["dx"], data.given["dy"], data.given["w"], "nn")


def _bulk_rs_sequence(data: Data) -> Tensors:
    reduce_scatter(data.outs["dx_shard"], data.given["dx"], data.world)
    return {"dx_shard": data.outs["dx_shard"], **_bulk_rs_gemm(data)}


def _bulk_rs_gemm(data: Data) -> Tensors:
    dy, x = data.given["dy"], data.given["x"]
    return {"dw": torch.mm(dy.t(), x, out=data.outs["dw"])}


def _bulk_rs_own(data: Data, solo: TpSpWorkspace) -> Tensors:
    # It has no call that multiplies and nothing else: alone it copies the rows, here those of x.
    dy, x, dw = data.given["dy"], data.given["x"], data.outs["dw"]
    bulk_rs(x, dy, x, solo, dw=dw, force=True)
    return {"dw": dw}


def _bulk_rs_error(data: Data, outs: Tensors, written: Tensors) -> float:
    given = data.given
    gradient = checking.fp64_error(outs["dw"], given["dy"].t(), given["x"], "nt")
    if "dx_shard" not in outs:
        return gradient
    return max(gradient, checking.fp64_error_of_rows(outs["dx_shard"], given["dx"], data.world))


UNFUSED = {
    "ag_gemm": Unfused(
        {}, ("gathered",),
        _ag_gemm_sequence, _ag_gemm_gemm, _ag_gemm_own, _ag_gemm_async, _ag_gemm_error,
    ),
    "gemm_rs": Unfused(
        {"product": lambda s: (s.m, s.n)}, (),
        _gemm_rs_sequence, _gemm_rs_gemm, _gemm_rs_own, _gemm_rs_async, _gemm_rs_error,
    ),
    "bulk_ag": Unfused(
        {}, (), _bulk_ag_sequence, _bulk_ag_gemm, _bulk_ag_own, None, _bulk_ag_error,
    ),
    "bulk_rs": Unfused(
        {}, (), _bulk_rs_sequence, _bulk_rs_gemm, _bulk_rs_own, None, _bulk_rs_error,
    ),
}  # fmt: skip
