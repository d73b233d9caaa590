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
from kosmos_tpsp.bench.variants import Data, Lineup, Rig, Variant
from kosmos_tpsp.ops.ag_gemm import AgGemmOptions


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


@dataclass(frozen=True)
class Wanted:
    """What the variants of a case must give, by the baseline.

    Attributes:
        out: of the op.
        product: of the GEMM alone.
    """

    out: torch.Tensor
    product: torch.Tensor


Advance = Callable[[str], None]


def measure(rig: Rig, case: Case, settings: Settings, *, sweep: bool, advance: Advance) -> Row:
    """Times and checks every variant of a case. Collective."""
    rig = _for_case(rig, case)
    data = Data.random(case, rig.world, settings.seed)
    return _measure(rig, case, data, v.line_up(rig, case, data, sweep=sweep), settings, advance)


def measure_orders(rig: Rig, case: Case, settings: Settings, *, advance: Advance) -> Row:
    """Times and checks all queue orders on a case. Collective."""
    rig = _for_case(rig, case)
    data = Data.random(case, rig.world, settings.seed)
    return _measure(rig, case, data, v.line_up_orders(rig, case, data), settings, advance)


def _for_case(rig: Rig, case: Case) -> Rig:
    if not isinstance(rig.choices, AgGemmOptions):
        return rig
    return replace(rig, choices=replace(rig.choices, layout=case.layout))


def _measure(
    rig: Rig, case: Case, data: Data, lineup: Lineup, settings: Settings, advance: Advance
) -> Row:
    # Gathers too: the GEMMs without a gather read what the baseline gathered.
    wanted = Wanted(lineup.variants[v.BASELINE].call()[0].clone(), data.product.clone())
    error = _exact_error(rig, case, data, wanted.out)
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
        rel_err=None if fused is None else _exact_error(rig, case, data, fused.call()[0]),
        peak_gbps=_peak(rig, lineup),
    )


def _exact_error(rig: Rig, case: Case, data: Data, out: torch.Tensor) -> float:
    """Largest relative error of any rank against FP64 on sampled rows, NaN if one has NaN."""
    if case.op == "gemm_rs":
        mine = checking.fp64_error_of_sum(out, data.x, data.w, rig.world)
    else:
        mine = checking.fp64_error(out, data.gathered, data.w, case.layout)
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


def _check(rig: Rig, data: Data, lineup: Lineup, wanted: Wanted, when: str) -> dict[str, str]:
    """Variants whose output differs on some rank, with how. Collective."""
    mine = {}
    for name, variant in lineup.variants.items():
        outputs = _poisoned(rig, data, variant)
        right_out = wanted.product if variant.alone else wanted.out
        for label, got, right in zip(
            ("", "gathered "), outputs, (right_out, data.gathered), strict=False
        ):
            difference = checking.compare(got, right)
            if difference.wrong:
                mine[name] = (
                    f"{difference.wrong} of {right.numel()} {label}elements wrong {when} on rank "
                    f"{rig.world.rank} (relative error {difference.rel_err:.1e})"
                )
    found: dict[str, str] = {}
    for theirs in rig.world.all_gather_object(mine):
        for name, how in theirs.items():
            found.setdefault(name, how)
    return found


def _poisoned(rig: Rig, data: Data, variant: Variant) -> tuple[torch.Tensor, ...]:
    """Outputs of a call into buffers that hold NaN."""
    data.out.fill_(float("nan"))
    data.product.fill_(float("nan"))
    if variant.name == v.BASELINE and data.gathered is not data.x:
        data.gathered.fill_(float("nan"))
    outputs = variant.call()
    rig.workspace.synchronize()
    return outputs
