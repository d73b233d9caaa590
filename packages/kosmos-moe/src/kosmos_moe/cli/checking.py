"""Runs what `check` is asked for, world by world."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from kosmos_core.errors import KosmosError, PeerFaultError
from kosmos_core.testing.schedules import DELAYS, POLICIES, Schedule
from kosmos_core.testing.worlds import open_world, sleeper
from kosmos_core.worlds import World

from kosmos_moe.cli.request import Request
from kosmos_moe.cli.rig import Rig, Run, run_on_cpu, run_on_devices

# Workgroups of a rank on the executor, more only where the cap asks for more.
CPU_WGS = 4
# A schedule that repeats an earlier one is drawn again: so many draws for each that is wanted.
MAX_DRAWS = 4
# Bound of every wait on devices: far beyond any delay, and a hang ends the command soon.
TIMEOUT_S = 30.0
# Longest sleep of a rank that is held back, in cycles: a few milliseconds.


@dataclass
class Report:
    """What a command found.

    Attributes:
        lines: what was run, a line each.
        problems: what is wrong, a text each.
        numbers: members of the JSON object.
    """

    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def run_request(request: Request) -> tuple[Report, bool]:
    """The report, and whether this process is the one that prints it.

    Raises:
        click.UsageError: the world cannot be made here.
    """
    rig = Rig(request.sequence(), request.seed, request.capacity, timeout_s=TIMEOUT_S)
    if request.kind == "cpu":
        if request.kill_rank is not None:
            return _killed(request, rig, None), True
        return _summary(request, _cpu_runs(request, rig)), True
    with open_world(request.world) as (world, prints):
        if request.kill_rank is not None:
            return _killed(request, rig, world), prints
        runs = []
        for _ in range(request.num_schedules):
            delay = sleeper(world, request.seed) if request.delay else None
            runs.append(run_on_devices(world, replace(rig, delay=delay)))
        return _summary(request, runs), prints


def _cpu_runs(request: Request, rig: Rig) -> list[Run]:
    """As many distinct schedules as wanted, each of a seed of its own."""
    wgs = max(CPU_WGS, request.cap or 0)
    policies = DELAYS if request.delay else POLICIES
    runs: dict[str, Run] = {}
    for i in range(MAX_DRAWS * request.num_schedules):
        schedule = Schedule.draw(request.seed + i, request.size, wgs, policies)
        if request.switching != "two_way":
            # A crew that does nothing else needs all workgroups to be resident.
            schedule = replace(schedule, slots=None)
        run = run_on_cpu(request.size, rig, schedule, wgs=wgs)
        runs.setdefault(run.schedule_hash, run)
        if len(runs) == request.num_schedules:
            break
    return list(runs.values())


def _summary(request: Request, runs: list[Run]) -> Report:
    report = Report()
    verdicts = [v for run in runs for v in run.verdicts]
    errors = [v.rel_err for v in verdicts]
    repeats = [v.repeated for v in verdicts if v.repeated is not None]
    for call in dict.fromkeys(replace(c, data=0) for c in request.sequence()):
        report.lines.append(f"{request.world} {call}")
    for run in runs:
        if run.problems:
            where = "" if run.schedule is None else f"{run.schedule}\n"
            report.problems.append(where + "\n".join(run.problems))
    report.numbers = {
        "world": request.world,
        "schedules": len({run.schedule_hash for run in runs}),
        "calls": len(verdicts),
        "max_rel_err": max(errors, default=None),
        "bitwise_repeat": all(repeats) if repeats else None,
        "races": sum(type(run.failure).__name__ == "DataRace" for run in runs),
        "deadlocks": sum(type(run.failure).__name__ == "Deadlock" for run in runs),
        "passed": report.passed,
    }
    error = "none" if not errors else f"{max(errors):.2e}"
    verdict = "passed" if report.passed else "FAILED"
    report.lines.append(
        f"{report.numbers['schedules']} schedules, {len(verdicts)} calls by rank, error {error}, "
        f"bitwise repeat {report.numbers['bitwise_repeat']}: {verdict}"
    )
    return report


def _killed(request: Request, rig: Rig, world: World | None) -> Report:
    """One rank fails in its host code; the others must raise, and soon."""
    rig = replace(rig, victim=request.kill_rank)
    report = Report()
    told: list[str] = []

    def host(rank: int, where: World) -> tuple[str, str]:
        try:
            rig.host(rank, where)
        except KosmosError as error:
            return type(error).__name__, str(error)
        except RuntimeError as error:
            return "killed", str(error)
        return "nothing", ""

    if world is None:
        from kosmos_core.worlds import cpu_world

        schedule = Schedule.draw(request.seed, request.size, CPU_WGS)
        with cpu_world(request.size, wgs=CPU_WGS, **schedule.options()) as made:
            found = made.spmd(host, made)
    elif world.describe() == "group":
        found = world.all_gather_object(host(world.rank, world))
    else:
        found = world.spmd(host, world)
    for rank, (kind, text) in enumerate(found):
        wanted = "killed" if rank == request.kill_rank else PeerFaultError.__name__
        told.append(f"  rank {rank} raised {kind}: {text}")
        if kind != wanted:
            report.problems.append(f"rank {rank} raised {kind} instead of {wanted}: {text}")
    report.lines = [f"{request.world}: rank {request.kill_rank} fails before call 3", *told]
    report.numbers = {"world": request.world, "errors": told, "passed": report.passed}
    return report
