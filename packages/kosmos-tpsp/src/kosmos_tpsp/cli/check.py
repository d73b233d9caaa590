"""`check`: a fused operation against FP64 on any world, with every check that the world has."""

from __future__ import annotations

from typing import Any

import click

from kosmos_tpsp.cli.checking import run_request
from kosmos_tpsp.cli.request import Request
from kosmos_tpsp.ops.catalog import DRIVERS, LAYOUTS, ORDERS

OPS = tuple(DRIVERS)


def _by_op(name: str) -> str:
    """What each op has of a choice, its default first."""
    found = ((d.name, getattr(d, name)) for d in DRIVERS.values())
    return "; ".join(f"{op}: {', '.join(values)}" for op, values in found if values)


@click.command()
@click.argument("op", metavar="[OP]", type=click.Choice(OPS), default=OPS[0])
@click.option(
    "--world", default="cpu:4", show_default=True, help="cpu:N, gpu:N, or group (under torchrun)."
)
@click.option(
    "--m", default=384, show_default=True, help="Rows of the GEMM's output; the tokens, 0 or more."
)
@click.option("--n", default=200, show_default=True, help="Columns of each rank's output.")
@click.option("--k", default=128, show_default=True, help="Contraction of each rank's GEMM.")
@click.option(
    "--dtype",
    type=click.Choice(("bf16", "mxfp8")),
    default="bf16",
    show_default=True,
    help="Of the operands; mxfp8 needs kosmos-mx.",
)
@click.option(
    "--block-scaled", is_flag=True, help="MXFP8: multiply it as it is, also where that is emulated."
)
@click.option("--layout", type=click.Choice(LAYOUTS), help=f"{_by_op('layouts')}.")
@click.option(
    "--policy",
    type=click.Choice(("one_way", "two_way", "fixed", "serial")),
    default="one_way",
    show_default=True,
)
@click.option("--order", type=click.Choice(ORDERS), help=f"{_by_op('orders')}.")
@click.option("--transport", type=click.Choice(("pull", "push")), help="[default: the plan's]")
@click.option("--cap", type=int, help="Most workgroups a rank, at least 2.  [default: all]")
@click.option("--seed", default=0, show_default=True, help="Of the data and of the schedules.")
@click.option("--schedules", type=int, help="Schedules to run.  [default: 3 on cpu:N, else 1]")
@click.option("--calls", default=2, show_default=True, help="Calls a shape on fresh data.")
@click.option("--delay", is_flag=True, help="Hold ranks or workgroups back at random.")
@click.option("--kill-rank", type=int, help="This rank fails in its host code before a call.")
@click.option(
    "--plant", metavar="NAME", help="Show how a planted defect is caught; 'list' lists them."
)
@click.option("--allow-decline", is_flag=True, help="A call on the reference path passes too.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object and nothing else.")
def check(plant: str | None, as_json: bool, **choices: Any) -> int:
    """Run OP on random data, in changing shapes on one workspace, against FP64.

    Exit status: 0 all passed; 1 a case failed, or the planted defect was caught; 2 bad arguments.
    """
    request = Request(**choices)
    if plant is not None:
        from kosmos_tpsp.cli.show_plant import show_plant

        return show_plant(plant, request, as_json)
    report, prints = run_request(request)
    if prints:
        if as_json:
            click.echo(report.to_json())
        else:
            for case in report.cases:
                click.echo(str(case))
            for remark in report.remarks:
                click.echo(remark)
        for problem in report.problems:
            click.echo(problem, err=True)
    return 0 if report.passed else 1
