"""From a plan to a report: in which world the ranks live, and what is left in the folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kosmos_core.testing.bench import environment
from kosmos_core.worlds import World, cpu_world, group_world
from kosmos_tpsp.bench.report import console
from kosmos_tpsp.bench.session import process_group

from integration.training import figure, report, timeline
from integration.training.run import Outcome, Plan, train
from integration.training.show import Screen, closing

# Every access of every workgroup is checked for races, stores wait for their release.
CHECKS: dict[str, Any] = {"race": "raise", "strict": True, "weak": "late"}


def on_virtual_ranks(plan: Plan, size: int, out: Path) -> bool:
    """Trains on virtual ranks of the CPU executor; returns whether all was right."""
    with cpu_world(size, **CHECKS) as world, Screen(console(), plan) as screen:
        outcomes = world.spmd(lambda rank: train(plan, world, screen))
        about = environment(world)
    right = _finish(plan, outcomes[0], size, about, out, screen)
    if plan.timeline:
        from kosmos_core.executor import CostModel

        cost = CostModel(**timeline.COST)
        machine = timeline.executor_machine()
        with cpu_world(size, wgs=timeline.WGS, cost=cost, **CHECKS) as world:
            traced = world.spmd(lambda rank: timeline.trace_step(plan.job, world, machine))
        for text in timeline.show(traced, out, simulated=True):
            screen.say(text)
    return right


def on_group(plan: Plan, out: Path) -> bool:
    """Trains on this process's GPU, or on the CPU by the plain path where there is none."""
    with process_group():
        world = group_world()
        with Screen(console(), plan, drawn=world.rank == 0) as screen:
            outcome = train(plan, world, screen)
        about = environment(world)
        right = _agreed(world, outcome)
        said: list[str] = []
        if world.rank == 0:
            _finish(plan, outcome, world.size, about, out, screen)
        if plan.timeline and world.fused:
            traced = world.all_gather_object(timeline.trace_step(plan.job, world))
            if world.rank == 0:
                said = timeline.show(traced, out, simulated=False)
        elif plan.timeline and world.rank == 0:
            said = [f"no timeline: {world.why_not_fused}, so that no fused kernel runs"]
        for text in said:
            screen.say(text)
    return right


def _agreed(world: World, outcome: Outcome) -> bool:
    mine = all(c.right for c in outcome.comparisons)
    return all(world.all_gather_object(mine))


def _finish(
    plan: Plan, outcome: Outcome, ranks: int, about: dict[str, Any], out: Path, screen: Screen
) -> bool:
    """Writes report and picture, says where they are; whether every compared step was right."""
    path, picture = out / "report.json", out / "loss.png"
    summary = report.save(path, plan, outcome, ranks, about)["summary"]
    for text in closing(summary, ranks, outcome.launches):
        screen.say(text)
    for name, curve in outcome.curves.items():
        apart = report.drift([s.loss for s in outcome.steps], curve)
        screen.say(f"a whole run of {name} differs in its mean losses by at most {apart:.2%}")
    figure.draw(picture, plan, outcome, ranks, summary["fused_launches"])
    screen.say(f"loss curve: {picture.resolve()}")
    screen.say(f"report:     {path.resolve()}")
    return not summary["wrong_steps"]
