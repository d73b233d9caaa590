"""The ways to compute one case that a benchmark compares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from kosmos_core.testing.bench import Timer
from kosmos_core.worlds import World
from kosmos_core.worlds.group import GroupWorld
from kosmos_heuristics import can_fuse

from kosmos_tpsp import reference
from kosmos_tpsp.bench.cases import Case
from kosmos_tpsp.ops.ag_gemm import AgGemmOptions
from kosmos_tpsp.ops.catalog import DRIVERS, driver_of, outputs
from kosmos_tpsp.workspaces import TpSpWorkspace

BASELINE = "nccl_cublas"
FUSED = "fused"
ASYNC_TP = "async_tp"
SERIAL = "serial"
GEMM_VENDOR = "gemm_cublas"
GEMM_OWN = "gemm_own"
TWO_WAY = "two_way"
FIXED_PREFIX = "fixed_"
ORDER_PREFIX = "order_"
FIXED_CREWS = (4, 8, 12, 16, 24, 32)

Call = Callable[[], tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class Rig:
    """What every case is measured with.

    Attributes:
        world: the ranks.
        workspace: large enough for every case.
        timer: measures.
        choices: policy, order and transport of the fused variant.
        solo: workspace of this rank alone, for the own GEMM without a gather; None leaves it out.
        peak_gbps: GB/s into a rank at each transport's best, measured in this run.
    """

    world: World
    workspace: TpSpWorkspace
    timer: Timer
    choices: Any
    solo: TpSpWorkspace | None = None
    peak_gbps: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Data:
    """Operands of one case on one rank.

    Attributes:
        x: bfloat16, own rows [m / ranks, k] of what is gathered, or all rows [m, k] of what is
            reduced.
        w: [n, k] ("tn") or [k, n] ("nn") bfloat16.
        gathered: [m, k] bfloat16, what the GEMM alone multiplies: written by the baseline, or x.
        out: bfloat16, written by every variant that takes an output: [m, n], or the rank's rows of
            it where they are reduced.
        product: [m, n] bfloat16, what the GEMM alone writes; `out` where nothing is reduced.
    """

    x: torch.Tensor
    w: torch.Tensor
    gathered: torch.Tensor
    out: torch.Tensor
    product: torch.Tensor

    @classmethod
    def random(cls, case: Case, world: World, seed: int) -> Data:
        """Normally distributed operands, different on every rank, outputs NaN."""
        device = world.device
        source = torch.Generator(device).manual_seed(seed * 8 + world.rank)

        def normal(rows: int, columns: int) -> torch.Tensor:
            t = torch.empty(rows, columns, dtype=torch.bfloat16, device=device)
            return t.normal_(generator=source)

        def poison(rows: int, columns: int) -> torch.Tensor:
            return torch.full((rows, columns), float("nan"), dtype=torch.bfloat16, device=device)

        driver = DRIVERS[case.op]
        w = normal(case.n, case.k) if case.layout == "tn" else normal(case.k, case.n)
        x = normal(driver.x_rows(case.m, world.size), case.k)
        out = poison(driver.out_rows(case.m, world.size), case.n)
        reduces = case.op == "gemm_rs"
        gathered = x if reduces else poison(case.m, case.k)
        return cls(x, w, gathered, out, poison(case.m, case.n) if reduces else out)


@dataclass(frozen=True)
class Variant:
    """One way to compute a case.

    Attributes:
        name: key in results.
        call: computes it; returns the output [m, n] and, where that is one too, the gathered input
            [m, k].
        plan: of a fused kernel.
        alone: it gives this rank's own product, whatever the op does with those of all ranks.
    """

    name: str
    call: Call
    plan: Any = None
    alone: bool = False


@dataclass
class Lineup:
    """The variants of a case that run here, why others do not, and the plan's own verdict.

    Attributes:
        variants: name to variant; the baseline first.
        unavailable: name to reason.
        decline: why an ordinary call would take the reference path; None if it would run fused.
    """

    variants: dict[str, Variant]
    unavailable: dict[str, str]
    decline: str | None

    def fused(self, rig: Rig, case: Case, data: Data, name: str, **changes: Any) -> None:
        """Adds a fused variant with other choices, unless one with the same plan is there."""
        options = replace(rig.choices, force=True, **changes)
        prepared = driver_of(options).describe(data.x, data.w, rig.workspace, options)
        if prepared.decline is not None:
            self.unavailable[name] = prepared.decline
            return
        for other in self.variants.values():
            if other.plan == prepared.plan:
                self.unavailable[name] = f"its plan is that of {other.name}"
                return
        call = fused_call(data, rig.workspace, options)
        self.variants[name] = Variant(name, call, prepared.plan)


def line_up(rig: Rig, case: Case, data: Data, *, sweep: bool) -> Lineup:
    """The variants of a table row."""
    driver = driver_of(rig.choices)
    gemm = Variant(GEMM_VENDOR, _vendor_gemm(case, data), alone=True)
    lineup = Lineup({BASELINE: baseline(rig, case, data), GEMM_VENDOR: gemm}, {}, None)
    lineup.fused(rig, case, data, FUSED)
    lineup.decline = _verdict(rig, data)
    lineup.fused(rig, case, data, SERIAL, policy="serial")
    if rig.solo is not None:
        options = driver.options(force=True)
        if isinstance(options, AgGemmOptions):
            options = replace(options, layout=case.layout, keep_gathered=False)
        own = replace(data, x=data.gathered, out=data.product)
        call = fused_call(own, rig.solo, options)
        lineup.variants[GEMM_OWN] = Variant(GEMM_OWN, call, alone=True)
    async_tp = _async_tp(rig, case, data)
    if isinstance(async_tp, str):
        lineup.unavailable[ASYNC_TP] = async_tp
    else:
        lineup.variants[ASYNC_TP] = async_tp
    if sweep:
        if TWO_WAY in driver.policies:
            lineup.fused(rig, case, data, TWO_WAY, policy="two_way")
        else:
            lineup.unavailable[TWO_WAY] = f"{driver.name} has no such policy"
        for crew in FIXED_CREWS:
            name = f"{FIXED_PREFIX}{crew}"
            lineup.fused(rig, case, data, name, policy="fixed", **{driver.crew: crew})
    return lineup


def line_up_orders(rig: Rig, case: Case, data: Data) -> Lineup:
    """The variants of the queue-order ablation."""
    lineup = Lineup({BASELINE: baseline(rig, case, data)}, {}, None)
    for order in driver_of(rig.choices).orders:
        lineup.fused(rig, case, data, f"{ORDER_PREFIX}{order}", order=order)
    lineup.decline = _verdict(rig, data)
    return lineup


def _verdict(rig: Rig, data: Data) -> str | None:
    options = replace(rig.choices, force=True)
    forced = driver_of(options).describe(data.x, data.w, rig.workspace, options)
    if forced.decline is not None:
        return forced.decline
    declined = can_fuse(forced.problem, rig.workspace.machine, forced.plan)
    return None if declined is None else declined.reason


def fused_call(data: Data, workspace: TpSpWorkspace, options: Any) -> Call:
    """The op with these choices, into `data.out`."""
    call_op = driver_of(options).call

    def call() -> tuple[torch.Tensor, ...]:
        out, gathered = outputs(call_op(data.x, data.w, workspace, out=data.out, options=options))
        return (out,) if gathered is None else (out, gathered)

    return call


def _weights(case: Case, data: Data) -> torch.Tensor:
    return data.w.t() if case.layout == "tn" else data.w


def _vendor_gemm(case: Case, data: Data) -> Call:
    weights = _weights(case, data)
    return lambda: (torch.mm(data.gathered, weights, out=data.product),)


def baseline(rig: Rig, case: Case, data: Data) -> Variant:
    """The unfused path: collective and the vendor's GEMM in sequence, on one stream."""
    world, weights = rig.world, _weights(case, data)

    # Into buffers that are there already, so that the allocator costs the baseline nothing.
    def gather_first() -> tuple[torch.Tensor, ...]:
        if isinstance(world, GroupWorld):
            dist.all_gather_into_tensor(data.gathered, data.x, group=world.group)
        else:
            data.gathered.copy_(world.all_gather_tensor(data.x))
        return (torch.mm(data.gathered, weights, out=data.out),)

    def reduce_last() -> tuple[torch.Tensor, ...]:
        torch.mm(data.x, weights, out=data.product)
        if isinstance(world, GroupWorld):
            dist.reduce_scatter_tensor(data.out, data.product, group=world.group)
        else:
            data.out.copy_(reference.gemm_rs(data.x, data.w, world))
        return (data.out,)

    return Variant(BASELINE, reduce_last if case.op == "gemm_rs" else gather_first)


def _async_tp(rig: Rig, case: Case, data: Data) -> Variant | str:
    """Torch's own overlapped op, or why it cannot be had. Collective."""
    world = rig.world
    if not isinstance(world, GroupWorld) or world.size == 1:
        return "torch's async-TP op needs a process group of two or more GPUs"
    import torch.distributed._symmetric_memory

    weights, group = _weights(case, data), world.group.group_name

    def gather_first() -> tuple[torch.Tensor, ...]:
        # With the gathered input dropped it may choose multicast loads, which are left off here.
        gathered, products = torch.ops.symm_mem.fused_all_gather_matmul(
            data.x, [weights], 0, group, return_A=True
        )
        return products[0], gathered

    def reduce_last() -> tuple[torch.Tensor, ...]:
        out = torch.ops.symm_mem.fused_matmul_reduce_scatter(data.x, weights, "sum", 0, group)
        return (out,)

    call = reduce_last if case.op == "gemm_rs" else gather_first
    try:
        call()
        world.synchronize()
        problem = ""
    except Exception as error:
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
    problems = [p for p in world.all_gather_object(problem) if p]
    return problems[0] if problems else Variant(ASYNC_TP, call)
