"""Runs what `check` is asked for, world by world."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from kosmos_core.testing.schedules import DELAYS, POLICIES, Schedule
from kosmos_core.testing.worlds import open_world, sleeper

from kosmos_tpsp.cli.calls import Call, Ledger
from kosmos_tpsp.cli.cases import sequence, shapes
from kosmos_tpsp.cli.killed import check_killed_rank
from kosmos_tpsp.cli.report import Report, case_of
from kosmos_tpsp.cli.request import Request
from kosmos_tpsp.cli.rig import Rig, Run, run_on_cpu, run_on_devices
from kosmos_tpsp.ops.catalog import DRIVERS, choose

# Workgroups of a rank on the executor, more only where the cap asks for more.
CPU_WGS = 4
# A schedule that repeats an earlier one is drawn again: so many draws for each that is wanted.
MAX_DRAWS = 4
# Bound of every wait on devices: far beyond any delay, and a hang ends the command soon.
TIMEOUT_S = 30.0
# Longest sleep of a rank that is held back, in cycles: a few milliseconds.


def options_of(request: Request) -> Any:
    """The choices of every call. Only where declines are allowed may speed be a reason."""
    names = ("layout", "policy", "order", "transport", "cap")
    chosen = {name: getattr(request, name) for name in names}
    chosen["block_scaled"] = request.block_scaled or None
    return choose(request.op, {**chosen, "force": not request.allow_decline})


def run_request(request: Request) -> tuple[Report, bool]:
    """The report, and whether this process is the one that prints it.

    Raises:
        click.UsageError: the world cannot be made here.
    """
    options = options_of(request)
    if request.kind == "cpu":
        if request.kill_rank is not None:
            return check_killed_rank(request, options, None), True
        return _summary(request, options, _cpu_runs(request, options)), True
    with open_world(request.world) as (world, prints):
        if request.kill_rank is not None:
            return check_killed_rank(request, options, world), prints
        runs = []
        rig = _rig(request, options)
        for _ in range(request.num_schedules):
            rig = replace(
                rig, progress={}, delay=sleeper(world, request.seed) if request.delay else None
            )
            runs.append(run_on_devices(world, rig))
        return _summary(request, options, runs), prints


def _rig(request: Request, options: Any) -> Rig:
    wanted = shapes(DRIVERS[request.op], request.shape, request.size, request.dtype)
    calls = sequence(wanted, request.calls, options, request.dtype)
    # One run's own repetitions; the schedules of the executor are compared with each other, too.
    again = {call for call, count in Counter(calls).items() if count > 1}
    ledger = Ledger(None if request.kind == "cpu" else again)
    return Rig(calls, seed=request.seed, timeout_s=TIMEOUT_S, ledger=ledger)


def _cpu_runs(request: Request, options: Any) -> list[Run]:
    """As many distinct schedules as wanted, each of a seed of its own."""
    rig = _rig(request, options)
    wgs = max(CPU_WGS, request.cap or 0)
    policies = DELAYS if request.delay else POLICIES
    runs: dict[str, Run] = {}
    for i in range(MAX_DRAWS * request.num_schedules):
        schedule = Schedule.draw(request.seed + i, request.size, wgs, policies)
        rig = replace(rig, progress={})
        run = run_on_cpu(request.size, rig, schedule, wgs=wgs)
        run.replay = _replay(request, schedule)
        runs.setdefault(run.schedule_hash, run)
        if len(runs) == request.num_schedules:
            break
    return list(runs.values())


def _replay(request: Request, schedule: Schedule) -> str:
    words = ["python -m kosmos_tpsp check", request.op, f"--world {request.world}"]
    for name in ("m", "n", "k", "dtype", "layout", "policy", "order", "transport", "cap", "calls"):
        value = getattr(request, name)
        words += [] if value is None else [f"--{name} {value}"]
    words += ["--block-scaled"] if request.block_scaled else []
    words += ["--delay"] if request.delay else []
    words += ["--allow-decline"] if request.allow_decline else []
    return " ".join([*words, f"--seed {schedule.seed} --schedules 1"])


def _summary(request: Request, options: Any, runs: list[Run]) -> Report:
    report = Report()
    for shape in shapes(DRIVERS[request.op], request.shape, request.size, request.dtype):
        call = Call(*shape, 0, options, request.dtype)
        report.cases.append(
            case_of(
                call, request.world, request.size, request.calls, runs,
                allow_decline=request.allow_decline,
            )
        )  # fmt: skip
    for run in runs:
        if run.problems:
            again = f"\nagain with: {run.replay}" if run.replay else ""
            report.problems.append("\n".join(run.problems) + again)
    return report
