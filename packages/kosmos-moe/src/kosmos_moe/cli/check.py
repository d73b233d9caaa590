"""`check`: the MoE layer against FP64 on any world, with every check that the world has."""

from __future__ import annotations

import json
from typing import Any

import click

from kosmos_moe.cli.checking import run_request
from kosmos_moe.cli.request import Request
from kosmos_moe.ops.options import ORDERS, POLICIES, TRANSPORTS
from kosmos_moe.router import SCORES


@click.command()
@click.option(
    "--world", default="cpu:4", show_default=True, help="cpu:N, gpu:N, or group (under torchrun)."
)
@click.option("--tokens", default="37,0,12,64", show_default=True, help="Of each rank, or of all.")
@click.option("--hidden", default=96, show_default=True, help="Width of a token.")
@click.option("--inter", default=64, show_default=True, help="Width of an expert.")
@click.option("--experts", default=12, show_default=True, help="Over all ranks.")
@click.option("--topk", default=3, show_default=True, help="Experts that a token chooses.")
@click.option("--score", type=click.Choice(SCORES), default="softmax", show_default=True)
@click.option("--after-topk", is_flag=True, help="Score the chosen experts only.")
@click.option("--normalize", is_flag=True, help="Divide a token's weights by their sum.")
@click.option("--scaling", default=1.0, show_default=True, help="Factor of all weights.")
@click.option("--groups", default=1, show_default=True, help="Groups of experts.")
@click.option("--group-topk", default=1, show_default=True, help="Groups that a token may use.")
@click.option("--aux", default=0.01, show_default=True, help="Load-balancing coefficient.")
@click.option("--z", default=0.001, show_default=True, help="z-loss coefficient.")
@click.option("--bias", is_flag=True, help="A bias for the choice of experts.")
@click.option("--padding", is_flag=True, help="Some tokens are padding.")
@click.option("--shared", default=0, show_default=True, help="Shared experts.")
@click.option(
    "--routing",
    default="random",
    show_default=True,
    help="random, uniform, one-expert, ties, zipf:A, or a JSON file of [rank][token][k] experts.",
)
@click.option("--capacity", type=float, help="Of the arena, in balanced loads.  [default: worst]")
@click.option("--switching", type=click.Choice(POLICIES), default="two_way", show_default=True)
@click.option("--serial", "switching", flag_value="serial", help="As --switching serial.")
@click.option("--transport", type=click.Choice(TRANSPORTS), default="push", show_default=True)
@click.option("--push-order", type=click.Choice(ORDERS), default=ORDERS[0], show_default=True)
@click.option("--cap", type=int, help="Most workgroups a rank, at least 2.  [default: all]")
@click.option("--calls", default=2, show_default=True, help="Calls on fresh data.")
@click.option("--delay", is_flag=True, help="Hold ranks or workgroups back at random.")
@click.option("--kill-rank", type=int, help="This rank fails in its host code before a call.")
@click.option("--plant", metavar="NAME", help="Show how a planted defect is caught; 'list' lists.")
@click.option("--seed", default=0, show_default=True, help="Of the data and of the schedules.")
@click.option("--schedules", type=int, help="Schedules to run.  [default: 3 on cpu:N, else 1]")
@click.option(
    "--direction",
    type=click.Choice(("fwd", "bwd", "both")),
    default="both",
    show_default=True,
    help="With its backward or without; a backward needs its forward.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object and nothing else.")
def check(plant: str | None, as_json: bool, **choices: Any) -> int:
    """Run the layer on random data, in changing sizes on one workspace, against FP64.

    Exit status: 0 all passed; 1 something failed, or the planted defect was caught; 2 bad
    arguments.
    """
    if plant is not None:
        from kosmos_moe.cli.show_plant import show_plant

        return show_plant(plant, as_json)
    report, prints = run_request(Request(**choices))
    if prints:
        if as_json:
            click.echo(json.dumps(report.numbers))
        else:
            for line in report.lines:
                click.echo(line)
        for problem in report.problems:
            click.echo(problem, err=True)
    return 0 if report.passed else 1
