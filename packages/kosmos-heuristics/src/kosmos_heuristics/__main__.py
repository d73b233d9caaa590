"""Command line: ``python -m kosmos_heuristics plan OP --machine NAME|FILE --tp N ...``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

import click
from rich.console import Console
from rich.table import Table

from kosmos_heuristics.ag_gemm import plan_ag_gemm
from kosmos_heuristics.errors import HeuristicsError
from kosmos_heuristics.estimate import Decline, Estimate, can_fuse, estimate
from kosmos_heuristics.load import load_machine
from kosmos_heuristics.machine import TRANSPORTS, Machine
from kosmos_heuristics.plans import ORDERS, POLICIES, AgGemmPlan
from kosmos_heuristics.problems import DTYPES, LAYOUTS, AgGemmProblem
from kosmos_heuristics.simulate.cli import COMMANDS

OPS = ("ag_gemm",)


@click.group(no_args_is_help=False)
def cli() -> None:
    """Closed-form plans for fused communication + GEMM kernels."""


@cli.command()
@click.argument("op", metavar="OP", type=click.Choice(OPS))
@click.option("--machine", required=True, help="h200, mi350x, mi355x, executor or a JSON file.")
@click.option("--tp", required=True, type=int, help="Ranks in the group.")
@click.option("--m", required=True, type=int, help="Rows (tokens) over all ranks.")
@click.option("--n", required=True, type=int, help="Columns of the local output.")
@click.option("--k", required=True, type=int, help="Contraction.")
@click.option("--layout", default="tn", show_default=True, type=click.Choice(LAYOUTS))
@click.option("--dtype", default="bf16", show_default=True, type=click.Choice(DTYPES))
@click.option("--cap", type=int, help="Most WGs in the grid.  [default: all resident]")
@click.option("--transport", type=click.Choice(TRANSPORTS), help="[default: by the rules]")
@click.option("--policy", default="one_way", show_default=True, type=click.Choice(POLICIES))
@click.option("--order", default="local_first", show_default=True, type=click.Choice(ORDERS))
@click.option("--movers-per-peer", type=int, help="[default: by the rules]")
@click.option("--split-k", type=int, help="[default: by the rules]")
@click.option(
    "--keep-gathered/--drop-gathered",
    default=None,
    help="Whether the gathered operand is an output.  [default: kept for nn]",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object and nothing else.")
@click.option("--explain", is_flag=True, help="Rule and source of every field.")
def plan(
    op: str,
    machine: str,
    tp: int,
    m: int,
    n: int,
    k: int,
    layout: str,
    dtype: str,
    cap: int | None,
    transport: str | None,
    policy: str,
    order: str,
    movers_per_peer: int | None,
    split_k: int | None,
    keep_gathered: bool | None,
    as_json: bool,
    explain: bool,
) -> None:
    """Print the plan of OP (ag_gemm), its predicted time, and whether it would be fused."""
    problem = AgGemmProblem(m, n, k, tp, layout, dtype, keep_gathered)
    described = load_machine(machine)
    chosen = plan_ag_gemm(
        problem,
        described,
        cap=cap,
        transport=transport,
        policy=policy,
        order=order,
        movers_per_peer=movers_per_peer,
        split_k=split_k,
    )
    predicted = estimate(problem, described, chosen)
    declined = can_fuse(problem, described, chosen)
    if as_json:
        data = _json(op, problem, described, chosen, predicted, declined, explain)
        click.echo(json.dumps(data))
        return
    click.echo(str(chosen))
    click.echo(
        f"{described.name}: {predicted.time_ms:.3f} ms predicted, {predicted.baseline_ms:.3f} ms "
        f"unfused, efficiency {predicted.efficiency:.2f}"
    )
    click.echo(f"declined: {declined}" if declined else "fused")
    if explain:
        _print_reasons(chosen)


for command in COMMANDS:
    cli.add_command(command)


def _json(
    op: str,
    problem: AgGemmProblem,
    machine: Machine,
    plan: AgGemmPlan,
    predicted: Estimate,
    declined: Decline | None,
    explain: bool,
) -> dict[str, object]:
    data: dict[str, object] = {"op": op, "machine": machine.name}
    data["problem"] = {**asdict(problem), "keep_gathered": problem.keeps_gathered}
    data.update(plan.to_dict())
    data["estimate"] = asdict(predicted)
    data["decline"] = declined.reason if declined else None
    if explain:
        data["explain"] = {
            reason.field: {"rule": reason.rule, "source": reason.source} for reason in plan.reasons
        }
    return data


def _print_reasons(plan: AgGemmPlan) -> None:
    table = Table(title=None)
    for column in ("field", "value", "rule", "source"):
        table.add_column(column)
    values = plan.to_dict()
    for reason in plan.reasons:
        table.add_row(reason.field, str(values[reason.field]), reason.rule, reason.source)
    Console().print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments after the program's name; None means those of the process.

    Returns:
        Exit status: 0, or 2 with one line on standard error for bad arguments.
    """
    try:
        status = cli.main(
            list(sys.argv[1:] if argv is None else argv),
            prog_name="kosmos_heuristics",
            standalone_mode=False,
        )
    except HeuristicsError as error:
        click.echo(f"error: {error}", err=True)
        return 2
    except click.ClickException as error:
        click.echo("error: " + " ".join(error.format_message().split()), err=True)
        return 2
    except click.Abort:
        return 130
    return status if isinstance(status, int) else 0


if __name__ == "__main__":
    sys.exit(main())
