"""`check --plant`: plants a defect and shows how it is caught."""

from __future__ import annotations

import inspect
import json
import os
from dataclasses import asdict, replace
from typing import Any

import click
from kosmos_core.worlds import World, cpu_world

from kosmos_tpsp.cli.calls import Operands
from kosmos_tpsp.cli.plant_list import PLANTS
from kosmos_tpsp.cli.plants import Caught, Plant
from kosmos_tpsp.cli.report import Case
from kosmos_tpsp.cli.request import Request
from kosmos_tpsp.cli.rig import Rig
from kosmos_tpsp.ops.catalog import DRIVERS


def show_plant(name: str, request: Request, as_json: bool) -> int:
    """Lists the planted defects, or plants one.

    Args:
        name: of the defect, or "list".
        request: must not ask for what planted defects cannot do; they have shapes of their own.
        as_json: print one JSON object.

    Returns:
        Exit status: 0 for the list or a defect that was not caught, 1 for one that was.

    Raises:
        click.UsageError: unknown name, or not on the executor.
    """
    if name == "list":
        _list(as_json)
        return 0
    if name not in PLANTS:
        raise click.UsageError(f"plant: got {name!r}, wanted a name that --plant list shows")
    if request.kind != "cpu" or request.kill_rank is not None:
        raise click.UsageError("plant: defects live on the CPU executor: no kill-rank, world cpu:N")
    plant = PLANTS[name]
    if request.dtype == "mxfp8":
        if "mxfp8" not in DRIVERS[plant.op].dtypes:
            raise click.UsageError(f"dtype: got mxfp8, wanted bf16 for a defect of {plant.op}")
        plant = plant.in_mxfp8()
    caught = plant.catch()
    alarms = [] if caught is None else plant.false_alarms(caught.seed)
    if as_json:
        click.echo(json.dumps(_as_object(plant, caught, alarms)))
    else:
        _tell(plant, caught, alarms)
    return 0 if caught is None else 1


def _list(as_json: bool) -> None:
    if as_json:
        names = [{"name": p.name, "rule": p.rule, "what": p.what} for p in PLANTS.values()]
        click.echo(json.dumps({"cases": [], "passed": True, "plants": names}))
        return
    width = max(len(name) for name in PLANTS)
    for plant in PLANTS.values():
        click.echo(f"{plant.name:<{width}}  {plant.rule}: {plant.what}")


def _tell(plant: Plant, caught: Caught | None, alarms: list[str]) -> None:
    click.echo(f"{plant.name} ({plant.rule}): {plant.what}")
    for fn, old, new in plant.edits:
        file = os.path.basename(inspect.getsourcefile(fn.fn) or "")
        click.echo(f"  {file}, {fn.__name__}: {' '.join(old.split())}  ->  {' '.join(new.split())}")
    calls = ", ".join(str(call) for call in plant.calls)
    click.echo(f"  on cpu:{plant.ranks}, in its own configuration: {calls}")
    if caught is None:
        click.echo(f"NOT CAUGHT by schedules of seeds {plant.seeds}")
        return
    click.echo(f"  {plant.schedule(caught.seed)}")
    click.echo(f"CAUGHT after {caught.seconds:.2f} s of processor time, {caught.kind}:")
    click.echo(caught.report)
    if alarms:
        click.echo("FALSE ALARM: the same schedules without the defect report:")
        click.echo("\n".join(alarms))
    else:
        click.echo("The same schedules without the defect pass.")


def _planned_transport(plant: Plant) -> str:
    """What the plan of the first call chooses where the plant leaves it the choice."""
    call = plant.calls[0]

    def host(rank: int, world: World) -> str:
        with Rig(plant.calls).workspace(world) as workspace:
            given = Operands(0, world.size, world.device).given(call, rank)
            return str(call.driver.describe(given, workspace, call.options).plan.transport)

    with cpu_world(plant.ranks, wgs=plant.wgs) as world:
        return str(world.spmd(host, world)[0])


def _as_object(plant: Plant, caught: Caught | None, alarms: list[str]) -> dict[str, Any]:
    call = plant.calls[0]
    options = call.options
    case = Case(
        op=call.op, world=f"cpu:{plant.ranks}", m=call.m, n=call.n, k=call.k, dtype=call.dtype,
        layout=call.layout, policy=options.policy, order=getattr(options, "order", None),
        transport=_planned_transport(plant), cap=options.cap,
        schedules=len(plant.seeds) if caught is None else plant.seeds.index(caught.seed) + 1,
        calls=len(plant.shapes), path="fused", kernel_launches=len(plant.shapes),
        remote_bytes=call.remote_bytes(plant.ranks), max_rel_err=None, bitwise_repeat=None,
        races=int(caught is not None and caught.kind == "DataRace"),
        deadlocks=int(caught is not None and caught.kind == "Deadlock"),
        passed=caught is None,
    )  # fmt: skip
    case = replace(case, kernel_launches=2 if options.policy == "serial" else 1)
    told = None if caught is None else asdict(caught)
    planted = {"name": plant.name, "rule": plant.rule, "what": plant.what}
    return {
        "cases": [case.as_dict()],
        "passed": caught is None,
        "plant": {**planted, "caught": told, "false_alarms": alarms},
    }
