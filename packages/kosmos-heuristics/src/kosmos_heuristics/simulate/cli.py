"""Commands ``simulate``, ``reproduce`` and ``calibrate``."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kosmos_heuristics.simulate import calibrate as fitting
from kosmos_heuristics.simulate.model import DTYPES, SimMachine, sim_machine
from kosmos_heuristics.simulate.native import CORES
from kosmos_heuristics.simulate.picture import write_png, write_trace
from kosmos_heuristics.simulate.reproduce import TABLES, Row, reproduce, summarise
from kosmos_heuristics.simulate.simulate import Outcome, simulate
from kosmos_heuristics.simulate.tables import tpsp_cells
from kosmos_heuristics.simulate.tpsp import AG_ORDERS, POLICIES, RS_ORDERS, Case

OPS = ("ag_gemm", "gemm_rs", "bulk_ag", "bulk_rs")
LAYOUTS = ("tn", "nn")
MACHINE_HELP = "mi350x or a JSON file of simulated machines."


@click.command("simulate")
@click.argument("op", metavar="OP", type=click.Choice(OPS))
@click.option("--machine", default="mi350x", show_default=True, help=MACHINE_HELP)
@click.option("--tp", default=8, show_default=True, type=int, help="Ranks in the group.")
@click.option("--m", required=True, type=int, help="Rows of the GEMM.")
@click.option("--n", required=True, type=int, help="Columns of the GEMM.")
@click.option("--k", required=True, type=int, help="Contraction (bulk_rs: the tokens).")
@click.option("--layout", default="tn", show_default=True, type=click.Choice(LAYOUTS))
@click.option("--dtype", default="bf16", show_default=True, type=click.Choice(DTYPES))
@click.option("--policy", default="one_way", show_default=True, type=click.Choice(POLICIES))
@click.option("--order", default="", help=f"{', '.join(AG_ORDERS + RS_ORDERS)}.")
@click.option("--crew", type=int, help="Movers per peer.  [default: by the rules]")
@click.option("--cap", type=int, help="Most WGs in the grid.  [default: all resident]")
@click.option("--core", default="auto", show_default=True, type=click.Choice(CORES))
@click.option("--json", "as_json", is_flag=True, help="One JSON object and nothing else.")
@click.option("--trace", type=click.Path(dir_okay=False), help="Perfetto trace to write.")
@click.option("--png", type=click.Path(dir_okay=False), help="Picture to write.")
def simulate_command(
    op: str,
    machine: str,
    tp: int,
    m: int,
    n: int,
    k: int,
    layout: str,
    dtype: str,
    policy: str,
    order: str,
    crew: int | None,
    cap: int | None,
    core: str,
    as_json: bool,
    trace: str | None,
    png: str | None,
) -> None:
    """Play one call of OP tile by tile and print its time and what its WGs did."""
    kernel = f"ag_gemm_{layout}" if op == "ag_gemm" else op
    case = Case(kernel, m, n, k, dtype, tp, policy, order, crew, cap)
    keep = trace is not None or png is not None
    outcome = simulate(case, sim_machine(machine, dtype), trace=keep, core=core)
    if trace is not None:
        write_trace(outcome.played.spans, trace)
    if png is not None:
        write_png(outcome.played.spans, png)
    if as_json:
        click.echo(json.dumps({"machine": machine, "case": asdict(case), **_numbers(outcome)}))
        return
    click.echo(
        f"{machine}: {outcome.time_ms:.3f} ms, {outcome.baseline_ms:.3f} ms unfused, bound "
        f"{outcome.bound_ms:.3f} ms; {outcome.num_movers} WGs start as movers, "
        f"{outcome.remote_bytes / 1e6:.1f} MB in per rank"
    )
    click.echo(
        f"WG-ms: building {outcome.build_ms:.1f} (waiting {outcome.build_wait_ms:.1f}), moving "
        f"{outcome.move_ms:.1f} (waiting {outcome.move_wait_ms:.1f}), idle {outcome.idle_ms:.1f}"
    )


def _numbers(outcome: Outcome) -> dict[str, float]:
    names = [name for name in vars(outcome) if name != "played"]
    return {name: getattr(outcome, name) for name in names}


@click.command("reproduce")
@click.option("--table", required=True, type=click.Choice(TABLES))
@click.option("--machine", default="mi350x", show_default=True, help=MACHINE_HELP)
@click.option("--csv", "path", type=click.Path(dir_okay=False), help="Every cell, as CSV.")
def reproduce_command(table: str, machine: str, path: str | None) -> None:
    """Simulate a table of the paper and print how far the simulated figures are from it."""
    machines = _machines(machine)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(table, total=None)
        rows = reproduce(
            table, machines, lambda done, total: progress.update(task, completed=done, total=total)
        )
    if path is not None:
        _write_csv(rows, path)
    if table != "tpsp":
        _print_rows(rows)
    _print_summary(rows)


def _machines(name: str) -> dict[str, SimMachine]:
    return {dtype: sim_machine(name, dtype) for dtype in DTYPES}


def _write_csv(rows: Sequence[Row], path: str) -> None:
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [*vars(rows[0]), "error"])
        writer.writeheader()
        for row in rows:
            writer.writerow({**vars(row), "error": row.error})


def _print_rows(rows: Sequence[Row]) -> None:
    table = Table("cell", "simulated", "paper", "error")
    for row in rows:
        table.add_row(
            row.label, f"{row.simulated:.3f}", f"{row.printed:.3f}", f"{row.error * 100:+.1f} %"
        )
    Console().print(table)


def _print_summary(rows: Sequence[Row]) -> None:
    table = Table("group", "cells", "median error", "worst error", "speed-up", "paper's")
    for part in summarise(rows):
        means = (part.simulated_geomean, part.printed_geomean)
        shown = ["" if mean is None else f"{mean:.3f}" for mean in means]
        median, worst = f"{part.median_error * 100:.1f} %", f"{part.worst_error * 100:.1f} %"
        table.add_row(part.group, str(part.cells), median, worst, *shown)
    Console().print(table)


@click.command("calibrate")
@click.option("--machine", default="mi350x", show_default=True, help="Where the fit starts.")
@click.option("--rounds", default=6, show_default=True, type=click.IntRange(1, 100))
@click.option("--output", required=True, type=click.Path(dir_okay=False), help="JSON to write.")
def calibrate_command(machine: str, rounds: int, output: str) -> None:
    """Fit a simulated machine to the paper's TP+SP tables."""
    cells = tpsp_cells()
    machines = _machines(machine)
    machines = fitting.fit(machines, cells, fitting.fused_errors, rounds, click.echo)
    machines = fitting.fit(machines, cells, fitting.vendor_errors, 30)
    with open(output, "w", encoding="utf-8") as file:
        json.dump(fitting.to_data(machines), file, indent=2)
        file.write("\n")


COMMANDS = (simulate_command, reproduce_command, calibrate_command)
