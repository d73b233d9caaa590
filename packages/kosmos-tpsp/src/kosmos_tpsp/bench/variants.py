"""The ways to compute one case that a benchmark compares."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from kosmos_core.testing.bench import Timer
from kosmos_core.worlds import World
from kosmos_core.worlds.group import GroupWorld
from kosmos_heuristics import can_fuse

from kosmos_tpsp.bench.unfused import UNFUSED, Call, Data
from kosmos_tpsp.ops.catalog import driver_of
from kosmos_tpsp.workspaces import TpSpWorkspace

BASELINE = "nccl_cublas"
FUSED = "fused"
ASYNC_TP = "async_tp"
SERIAL = "serial"
# MXFP8: the own fused kernel on the bf16 values of the operands.
FUSED_BF16 = "fused_bf16"
GEMM_VENDOR = "gemm_cublas"
GEMM_OWN = "gemm_own"
# They compute a part of the op, on what the baseline has left.
PARTS = (GEMM_VENDOR, GEMM_OWN)
TWO_WAY = "two_way"
FIXED_PREFIX = "fixed_"
ORDER_PREFIX = "order_"
FIXED_CREWS = (4, 8, 12, 16, 24, 32)


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
class Variant:
    """One way to compute a case.

    Attributes:
        name: key in results.
        call: computes it, or a part; returns what it has written, by name.
        plan: of a fused kernel.
    """

    name: str
    call: Call
    plan: Any = None


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

    def fused(self, rig: Rig, data: Data, name: str, **changes: Any) -> None:
        """Adds a fused variant with other choices, unless one with the same plan is there."""
        options = replace(rig.choices, force=True, **changes)
        prepared = driver_of(options).describe(data.given, rig.workspace, options)
        if prepared.decline is not None:
            self.unavailable[name] = prepared.decline
            return
        for other in self.variants.values():
            if other.plan == prepared.plan:
                self.unavailable[name] = f"its plan is that of {other.name}"
                return
        call = fused_call(data, rig.workspace, options)
        self.variants[name] = Variant(name, call, prepared.plan)


def line_up(rig: Rig, data: Data, *, sweep: bool) -> Lineup:
    """The variants of a table row."""
    driver = driver_of(rig.choices)
    lineup = Lineup({BASELINE: baseline(data), GEMM_VENDOR: vendor_gemm(data)}, {}, None)
    lineup.fused(rig, data, FUSED)
    lineup.decline = _verdict(rig, data)
    lineup.fused(rig, data, SERIAL, policy="serial")
    if rig.solo is not None:
        own = partial(UNFUSED[driver.name].own_gemm, data, rig.solo)
        lineup.variants[GEMM_OWN] = Variant(GEMM_OWN, own)
    async_tp = _async_tp(data)
    if isinstance(async_tp, str):
        lineup.unavailable[ASYNC_TP] = async_tp
    else:
        lineup.variants[ASYNC_TP] = async_tp
    if data.values:
        lineup.variants[FUSED_BF16] = _fused_bf16(rig, data)
    if sweep:
        lineup.fused(rig, data, TWO_WAY, policy="two_way")
        for crew in FIXED_CREWS:
            name = f"{FIXED_PREFIX}{crew}"
            lineup.fused(rig, data, name, policy="fixed", **{driver.crew: crew})
    return lineup


def line_up_orders(rig: Rig, data: Data) -> Lineup:
    """The variants of the queue-order ablation."""
    lineup = Lineup({BASELINE: baseline(data)}, {}, None)
    for order in driver_of(rig.choices).orders:
        lineup.fused(rig, data, f"{ORDER_PREFIX}{order}", order=order)
    lineup.decline = _verdict(rig, data)
    return lineup


def _fused_bf16(rig: Rig, data: Data) -> Variant:
    options = replace(rig.choices, force=True, keep_gathered=False)
    driver = driver_of(options)
    plan = driver.describe(data.values, rig.workspace, options).plan
    call = partial(driver.call, data.values, rig.workspace, data.outs, options)
    return Variant(FUSED_BF16, call, plan)


def _verdict(rig: Rig, data: Data) -> str | None:
    options = replace(rig.choices, force=True)
    forced = driver_of(options).describe(data.given, rig.workspace, options)
    if forced.decline is not None:
        return forced.decline
    declined = can_fuse(forced.problem, rig.workspace.machine, forced.plan)
    return None if declined is None else declined.reason


def fused_call(data: Data, workspace: TpSpWorkspace, options: Any) -> Call:
    """The op with these choices, into the buffers of `data` where it takes any."""
    driver = driver_of(options)
    # Once, and not in every timed call: what comes before leaves the operands there.
    given = driver.place(data.given, workspace, options, True)
    return partial(driver.call, given, workspace, data.outs, options)


def vendor_gemm(data: Data) -> Variant:
    """The vendor's GEMM alone."""
    return Variant(GEMM_VENDOR, partial(UNFUSED[data.case.op].gemm, data))


def baseline(data: Data) -> Variant:
    """The unfused path: collective and the vendor's GEMM in sequence, on one stream."""
    return Variant(BASELINE, partial(UNFUSED[data.case.op].sequence, data))


def _async_tp(data: Data) -> Variant | str:
    """Torch's own overlapped op, or why it cannot be had. Collective."""
    if data.values:
        return "torch's async-TP op gathers no MXFP8"
    world, overlapped = data.world, UNFUSED[data.case.op].async_tp
    if overlapped is None:
        return f"torch has no async-TP op like {data.case.op}"
    if not isinstance(world, GroupWorld) or world.size == 1:
        return "torch's async-TP op needs a process group of two or more GPUs"

    call = partial(overlapped, data, world.group.group_name)
    try:
        call()
        world.synchronize()
        problem = ""
    except Exception as error:
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
    problems = [p for p in world.all_gather_object(problem) if p]
    return problems[0] if problems else Variant(ASYNC_TP, call)
