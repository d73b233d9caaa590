"""`check --plant`: how a planted defect is caught."""

from __future__ import annotations

import json

import click

from kosmos_moe.cli.plant_list import PLANTS


def show_plant(name: str, as_json: bool) -> int:
    """Lists the defects, or plants one and shows what the executor reports.

    Returns:
        Exit status: 0 for the list, 1 for a defect that was caught.

    Raises:
        click.UsageError: no such defect.
        click.ClickException: the defect was not caught, or its schedule fails without it, too.
    """
    if name == "list":
        for plant in PLANTS.values():
            click.echo(f"{plant.name:28} {plant.rule:14} {plant.what}")
        return 0
    if name not in PLANTS:
        raise click.UsageError(f"plant: got {name!r}, wanted list, or one of {', '.join(PLANTS)}")
    plant = PLANTS[name]
    caught = plant.catch()
    if caught is None:
        raise click.ClickException(f"plant: {name} was not caught")
    alarms = plant.false_alarms(caught.seed)
    if alarms:
        raise click.ClickException(f"plant: the schedule fails without {name}, too: {alarms[0]}")
    if as_json:
        members = {"plant": name, "kind": caught.kind, "seed": caught.seed, "passed": False}
        click.echo(json.dumps({**members, "report": caught.report}))
        return 1
    click.echo(f"{plant.what}\n")
    for function, old, new in plant.edits:
        click.echo(f"in {function.fn.__name__}:\n- {old}\n+ {new}\n")
    click.echo(f"caught with seed {caught.seed}: {caught.kind}\n{caught.report}\n")
    click.echo("the same schedule passes without the defect")
    return 1
