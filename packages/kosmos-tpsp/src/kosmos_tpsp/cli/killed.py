"""`check --kill-rank`: one rank's host code fails before a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kosmos_core.testing.faults import is_reported
from kosmos_core.testing.schedules import Schedule
from kosmos_core.worlds import World, cpu_world

from kosmos_tpsp.cli.calls import Call
from kosmos_tpsp.cli.cases import shapes
from kosmos_tpsp.cli.report import Report, case_of
from kosmos_tpsp.cli.request import Request
from kosmos_tpsp.cli.rig import Meter, Run, on_all_ranks
from kosmos_tpsp.cli.trouble import KINDS, Trouble, Witness
from kosmos_tpsp.ops.catalog import DRIVERS

if TYPE_CHECKING:
    from kosmos_core.executor import Mutation

CPU_WGS = 4


def check_killed_rank(request: Request, options: Any, world: World | None) -> Report:
    """Report of one case, the wanted shape with a rank that fails; no `world`: the executor."""
    found_shapes = shapes(DRIVERS[request.op], request.shape, request.size, request.dtype)
    calls = [Call(*shape, 0, options, request.dtype) for shape in (found_shapes * 2)[:2]]
    trouble = Trouble(calls, request.kill_rank or 0, "killed", request.seed)
    runs: list[Run] = []
    witnesses: list[Witness] = []
    for i in range(request.num_schedules):
        if world is None:
            schedule = Schedule.draw(request.seed + i, request.size, CPU_WGS)
            run, seen = trouble_on_cpu(trouble, request.size, schedule)
        else:
            run, seen = Run([]), _on_devices(trouble, world)
        runs.append(run)
        witnesses += seen
    report = Report()
    case = case_of(calls[0], request.world, request.size, len(calls), runs, allow_decline=False)
    case.kernel_launches = max((w.launches for w in witnesses), default=0) // len(calls)
    case.transport = witnesses[0].transport if witnesses else options.transport
    case.bitwise_repeat = all(w.repeated for w in witnesses) if witnesses else None
    case.max_rel_err = max((w.error for w in witnesses), default=None)
    report.problems += [str(run.failure) for run in runs if run.failure is not None]
    report.problems += [f"rank {w.rank}: {text}" for w in witnesses for text in w.problems]
    case.passed = not report.problems
    report.cases.append(case)
    report.remarks = _story(trouble, witnesses[: request.size], case.passed)
    report.extra["errors"] = sorted({w.told for w in witnesses if w.told})
    return report


def _story(trouble: Trouble, seen: Sequence[Witness], passed: bool) -> list[str]:
    """What happened in one schedule, a line each."""
    raised = KINDS[trouble.kind].__name__
    lines = [f"  first schedule: rank {trouble.victim} killed in its host code before call 3"]
    lines += [f"  rank {w.rank} raised {raised}: {w.told}" for w in seen if w.told]
    if passed:
        lines.append("  then reset() on all ranks, and calls 1 and 2 gave the same bits again")
    return lines


def _on_devices(trouble: Trouble, world: World) -> list[Witness]:
    meter = Meter(world)
    return on_all_ranks(world, lambda rank: trouble.host(rank, world, meter))


def trouble_on_cpu(
    trouble: Trouble,
    size: int,
    schedule: Schedule,
    *,
    wgs: int = CPU_WGS,
    vendor: str = "nvidia",
    mutations: Sequence[Mutation] = (),
    **options: Any,
) -> tuple[Run, list[Witness]]:
    """Runs trouble on virtual ranks of the executor.

    Args:
        trouble: what goes wrong.
        size: ranks.
        schedule: who runs when.
        wgs: workgroups of a rank.
        vendor: whose code path runs.
        mutations: defects planted in the kernels.
        **options: of the executor, in place of those of the schedule.
    """
    # Only a killed rank needs the bound of a wait; else a wait that nobody ends is a deadlock.
    settings = {"jump_clock": trouble.kind == "killed", **schedule.options(), **options}
    failure: Exception | None = None
    seen: list[Witness] = []
    with cpu_world(size, wgs=wgs, vendor=vendor, mutations=mutations, **settings) as world:
        try:
            seen = world.spmd(trouble.host, world, Meter(world))
        except Exception as error:
            if not is_reported(error):
                raise
            failure = error
        schedule_hash = world.executor.schedule_hash  # type: ignore[attr-defined]
    return Run([], failure, schedule_hash), seen
