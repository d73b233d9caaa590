"""Measures a case: operands, checks before, shuffled rounds, checks after."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from kosmos_core.testing.bench import TIMED_CALLS, WARMUP_CALLS, Timing, time_rounds

from kosmos_tpsp.bench import checking
from kosmos_tpsp.bench import variants as v
from kosmos_tpsp.bench.cases import Case
from kosmos_tpsp.bench.results import Row
from kosmos_tpsp.bench.unfused import UNFUSED, Data, Tensors
from kosmos_tpsp.bench.variants import Lineup, Rig, Variant


@dataclass(frozen=True)
class Settings:
    """How long to measure.

    Attributes:
        rounds: rounds with the order of variants shuffled.
        warmup: calls before the clock starts, in every round.
        calls: timed calls of a round.
        seed: of data and order.
        host_calls: calls over which host time is averaged; 0 leaves it out.
    """

    rounds: int = 3
    warmup: int = WARMUP_CALLS
    calls: int = TIMED_CALLS
    seed: int = 0
    host_calls: int = 200


Advance = Callable[[str], None]


def measure(rig: Rig, case: Case, settings: Settings, *, sweep: bool, advance: Advance) -> Row:
    """Times and checks every variant of a case. Collective."""
    rig = _for_case(rig, case)
    data = Data.random(case, rig.world, settings.seed)
    return _measure(rig, data, v.line_up(rig, data, sweep=sweep), settings, advance)


def measure_orders(rig: Rig, case: Case, settings: Settings, *, advance: Advance) -> Row:
    """Times and checks all queue orders on a case. Collective."""
    rig = _for_case(rig, case)
    data = Data.random(case, rig.world, settings.seed)
    return _measure(rig, data, v.line_up_orders(rig, data), settings, advance)


def _for_case(rig: Rig, case: Case) -> Rig:
    if not hasattr(rig.choices, "layout"):
        return rig
    return replace(rig, choices=replace(rig.choices, layout=case.layout))


def _measure(rig: Rig, data: Data, lineup: Lineup, settings: Settings, advance: Advance) -> Row:
    # What the GEMM alone reads may be what the baseline has gathered.
    wanted = {n: t.clone() for n, t in lineup.variants[v.BASELINE].call().items()}
    case = data.case
    error = _exact_error(rig, data, wanted, wanted)
    if not error <= checking.FP64_LIMIT:
        # Nothing can be compared with a baseline that is wrong itself.
        how = f"relative error {error:.1e} against FP64 before timing"
        return Row(case, rig.world.size, {}, None, lineup.decline, wrong={v.BASELINE: how})
    wrong = _check(rig, data, lineup, wanted, "before timing")
    timings = _time(rig, lineup, wrong, settings, advance)
    for name, how in _check(rig, data, lineup, wanted, "after timing").items():
        wrong.setdefault(name, how)
    fused = lineup.variants.get(v.FUSED)
    return Row(
        case=case,
        world_size=rig.world.size,
        timings={name: timing for name, timing in timings.items() if name not in wrong},
        plan=None if fused is None else fused.plan,
        decline=lineup.decline,
        unavailable=lineup.unavailable,
        wrong=wrong,
        rel_err=None if fused is None else _exact_error(rig, data, fused.call(), wanted),
        peak_gbps=_peak(rig, lineup),
    )


def _exact_error(rig: Rig, data: Data, outs: Tensors, wanted: Tensors) -> float:
    """Largest relative error of any rank against FP64 on sampled rows, NaN if one has NaN."""
    mine = UNFUSED[data.case.op].error(data, outs, wanted)
    # max() would drop a NaN that does not come first.
    return float(torch.tensor(rig.world.all_gather_object(mine)).max())


def _peak(rig: Rig, lineup: Lineup) -> float:
    for variant in lineup.variants.values():
        if variant.plan is not None:
            return rig.peak_gbps.get(variant.plan.transport, 0.0)
    return 0.0


def _time(
    rig: Rig, lineup: Lineup, wrong: dict[str, str], settings: Settings, advance: Advance
) -> dict[str, Timing]:
    return time_rounds(
        {name: variant.call for name, variant in lineup.variants.items() if name not in wrong},
        rig.timer,
        rounds=settings.rounds,
        warmup=settings.warmup,
        calls=settings.calls,
        seed=settings.seed,
        advance=advance,
    )


def _check(rig: Rig, data: Data, lineup: Lineup, wanted: Tensors, when: str) -> dict[str, str]:
    """Variants whose output differs on some rank, with how. Collective."""
    mine = {}
    for name, variant in lineup.variants.items():
        for label, got in _poisoned(rig, data, variant, wanted).items():
            right = wanted[label]
            difference = checking.compare(got, right)
            if difference.wrong:
                # The first output is the one that is meant where none is named.
                which = "" if label in ("out", "product") else f"{label} "
                mine[name] = (
                    f"{difference.wrong} of {right.numel()} {which}elements wrong {when} on rank "
                    f"{rig.world.rank} (relative error {difference.rel_err:.1e})"
                )
    found: dict[str, str] = {}
    for theirs in rig.world.all_gather_object(mine):
        for name, how in theirs.items():
            found.setdefault(name, how)
    return found


def _poisoned(rig: Rig, data: Data, variant: Variant, wanted: Tensors) -> Tensors:
    """Outputs of a call into buffers that hold NaN."""
    data.poison()
    for name in UNFUSED[data.case.op].reads if variant.name in v.PARTS else ():
        data.written()[name].copy_(wanted[name])
    outs = variant.call()
    rig.workspace.synchronize()
    return outs
