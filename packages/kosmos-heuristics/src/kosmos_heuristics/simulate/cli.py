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

from kosmos_heuristics.errors import ProblemError
from kosmos_heuristics.simulate import calibrate as fitting
from kosmos_heuristics.simulate import predict as predicting
from kosmos_heuristics.simulate.model import DTYPES, SimMachine, sim_machine
from kosmos_heuristics.simulate.moe import POLICIES as MOE_POLICIES
from kosmos_heuristics.simulate.moe import PUSH_ORDERS, MoeCase
from kosmos_heuristics.simulate.native import CORES
from kosmos_heuristics.simulate.picture import write_png, write_trace
from kosmos_heuristics.simulate.reproduce import TABLES, Row, reproduce, saturating_crew, summarise
from kosmos_heuristics.simulate.simulate import Outcome, simulate, simulate_moe
from kosmos_heuristics.simulate.tables import measured_cells, tpsp_cells
from kosmos_heuristics.simulate.tpsp import AG_ORDERS, POLICIES, RS_ORDERS, Case

TPSP_OPS = ("ag_gemm", "gemm_rs", "bulk_ag", "bulk_rs")
MOE_OPS = ("moe_forward", "moe_backward")
OPS = TPSP_OPS + MOE_OPS
LAYOUTS = ("tn", "nn")
MACHINE_HELP = "h200, mi350x, mi355x or a JSON file like theirs."


@click.command("simulate")
@click.argument("op", metavar="OP", type=click.Choice(OPS))
@click.option("--machine", default="mi350x", show_default=True, help=MACHINE_HELP)
@click.option("--tp", default=8, show_default=True, type=int, help="Ranks in the group.")
@click.option("--m", type=int, help="Rows of the GEMM.")
@click.option("--n", type=int, help="Columns of the GEMM.")
@click.option("--k", type=int, help="Contraction (bulk_rs: the tokens).")
@click.option("--ep", default=8, show_default=True, type=int, help="MoE: ranks in the group.")
@click.option("--tokens", type=int, help="MoE: tokens of a rank.")
@click.option("--hidden", type=int, help="MoE: width of the model.")
@click.option("--inter", type=int, help="MoE: width of an expert.")
@click.option("--experts", type=int, help="MoE: experts over all ranks.")
@click.option("--topk", type=int, help="MoE: experts of a token.")
@click.option("--skew", default=1.0, show_default=True, help="MoE: the busiest rank's load / mean.")
@click.option("--layout", default="tn", show_default=True, type=click.Choice(LAYOUTS))
@click.option("--dtype", default="bf16", show_default=True, type=click.Choice(DTYPES))
@click.option(
    "--policy",
    type=click.Choice(tuple(dict.fromkeys(POLICIES + MOE_POLICIES))),
    help="[default: one_way; MoE: two_way]",
)
@click.option("--order", default="", help=f"{', '.join(AG_ORDERS + RS_ORDERS + PUSH_ORDERS)}.")
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
    m: int | None,
    n: int | None,
    k: int | None,
    ep: int,
    tokens: int | None,
    hidden: int | None,
    inter: int | None,
    experts: int | None,
    topk: int | None,
    skew: float,
    layout: str,
    dtype: str,
    policy: str | None,
    order: str,
    crew: int | None,
    cap: int | None,
    core: str,
    as_json: bool,
    trace: str | None,
    png: str | None,
) -> None:
    """Play one call of OP tile by tile and print its time and what its WGs did."""
    described = sim_machine(machine, dtype)
    keep = trace is not None or png is not None
    case: Case | MoeCase
    if op in MOE_OPS:
        sizes = {"tokens": tokens, "hidden": hidden, "inter": inter, "experts": experts}
        numbers = _needed({**sizes, "topk": topk})
        case = MoeCase(
            op.removeprefix("moe_"),
            **numbers,
            dtype=dtype,
            world_size=ep,
            skew=skew,
            policy=policy or "two_way",
            push_order=order or "destination_minor",
            crew=crew or saturating_crew(described, max(1, ep - 1)),
        )
        outcome = simulate_moe(case, described, trace=keep, core=core)
    else:
        kernel = f"ag_gemm_{layout}" if op == "ag_gemm" else op
        numbers = _needed({"m": m, "n": n, "k": k})
        case = Case(
            kernel,
            **numbers,
            dtype=dtype,
            world_size=tp,
            policy=policy or "one_way",
            order=order,
            crew=crew,
            cap=cap,
        )
        outcome = simulate(case, described, trace=keep, core=core)
    if trace is not None:
        write_trace(outcome.played.spans, trace)
    if png is not None:
        write_png(outcome.played.spans, png)
    if as_json:
        click.echo(json.dumps({"machine": machine, "case": asdict(case), **_numbers(outcome)}))
        return
    unfused = "" if outcome.baseline_ms is None else f", {outcome.baseline_ms:.3f} ms unfused"
    click.echo(
        f"{machine}: {outcome.time_ms:.3f} ms{unfused}, bound {outcome.bound_ms:.3f} ms; "
        f"{outcome.num_movers} WGs start as movers, "
        f"{outcome.remote_bytes / 1e6:.1f} MB in per rank"
    )
    click.echo(
        f"WG-ms: building {outcome.build_ms:.1f} (waiting {outcome.build_wait_ms:.1f}), moving "
        f"{outcome.move_ms:.1f} (waiting {outcome.move_wait_ms:.1f}), idle {outcome.idle_ms:.1f}"
    )


def _needed(sizes: dict[str, int | None]) -> dict[str, int]:
    """The sizes, all of them given.

    Raises:
        ProblemError: One is missing.
    """
    for name, size in sizes.items():
        if size is None:
            raise ProblemError(name, None, "a positive size", f"pass --{name}")
    return {name: size for name, size in sizes.items() if size is not None}


def _numbers(outcome: Outcome) -> dict[str, object]:
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
    if table in ("policy", "orders"):
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
        printed = "" if row.printed is None else f"{row.printed:.3f}"
        error = "" if row.error is None else f"{row.error * 100:+.1f} %"
        table.add_row(row.label, f"{row.simulated:.3f}", printed, error)
    Console().print(table)


def _print_summary(rows: Sequence[Row]) -> None:
    table = Table("group", "cells", "median error", "worst error", "speed-up", "paper's")
    for part in summarise(rows):
        means = (part.simulated_geomean, part.printed_geomean)
        shown = ["" if mean is None else f"{mean:.3f}" for mean in means]
        errors = (part.median_error, part.worst_error)
        percent = ["" if error is None else f"{error * 100:.1f} %" for error in errors]
        table.add_row(part.group, str(part.cells), *percent, *shown)
    Console().print(table)


@click.command("calibrate")
@click.option("--machine", default="mi350x", show_default=True, help="Where the fit starts.")
@click.option("--measured", type=click.Path(dir_okay=False), help="Times of ag_gemm on 2 GPUs.")
@click.option("--rounds", default=6, show_default=True, type=click.IntRange(1, 100))
@click.option("--output", required=True, type=click.Path(dir_okay=False), help="JSON to write.")
def calibrate_command(machine: str, measured: str | None, rounds: int, output: str) -> None:
    """Fit a simulated machine: to the paper's TP+SP tables, or to measured times (BF16)."""
    if measured is None:
        machines, cells = _machines(machine), tpsp_cells()
        machines = fitting.fit(machines, cells, fitting.fused_errors, rounds, report=click.echo)
        machines = fitting.fit(machines, cells, fitting.vendor_errors, 30)
    else:
        machines, cells = {"bf16": sim_machine(machine)}, measured_cells(measured, fitted=True)
        machines = fitting.fit(
            machines,
            cells,
            fitting.fused_errors,
            rounds,
            fields=({}, fitting.BESIDE),
            report=click.echo,
        )
        machines = fitting.fit(
            machines, cells, fitting.vendor_errors, 20, fields=({}, fitting.VENDOR_BESIDE)
        )
    with open(output, "w", encoding="utf-8") as file:
        json.dump(fitting.to_data(machines), file, indent=2)
        file.write("\n")


@click.command("predict")
@click.option("--machine", default="h200", show_default=True, help="A packaged machine.")
@click.option("--ranks", default=8, show_default=True, type=click.IntRange(2, 8))
@click.option("--json", "path", required=True, type=click.Path(dir_okay=False), help="To write.")
def predict_command(machine: str, ranks: int, path: str) -> None:
    """Predict all TP+SP shapes and expert layers (BF16) in a group of so many ranks."""
    described = sim_machine(machine)
    rows = predicting.predict_tp(predicting.tp_cases(ranks, machine), described)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("expert layers", total=None)
        rows += predicting.predict_ep(
            predicting.ep_cases(ranks),
            described,
            lambda done, total: progress.update(task, completed=done, total=total),
        )
    head = {
        "schema": predicting.SCHEMA,
        "prediction": f"simulated, not measured: {ranks} x {machine}",
        "command": f"python -m kosmos_heuristics predict --machine {machine} --ranks {ranks}",
        "machine": asdict(described),
    }
    lines = ",\n".join("    " + json.dumps(row) for row in rows)
    with open(path, "w", encoding="utf-8") as file:
        file.write(json.dumps(head, indent=2)[:-2] + f',\n  "rows": [\n{lines}\n  ]\n}}\n')
    click.echo(f"{len(rows)} predictions written: {path}")


COMMANDS = (simulate_command, reproduce_command, calibrate_command, predict_command)
