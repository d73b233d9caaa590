"""``python -m kosmos_heuristics validate --measured FILE...``: predictions against measurements."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from kosmos_heuristics.validate import (
    MAX_LOSS,
    MAX_MISSED_GAIN,
    Comparison,
    Errors,
    compare_files,
)

MIN_WIDTH = 130


@click.command()
@click.option("--measured", "first", type=Path, help="JSON files of benchmarks; more may follow.")
@click.argument("more", nargs=-1, type=Path, metavar="[FILE]...")
@click.option("--machine", help="Predict for this machine.  [default: the one that a file names]")
@click.option("--json", "as_json", is_flag=True, help="One JSON object and nothing else.")
def validate(first: Path | None, more: tuple[Path, ...], machine: str | None, as_json: bool) -> int:
    """Compare predicted with measured times, and decisions with what they cost.

    Exits with 1 if a shape is accepted that lost more than 1 %, or declined that would have gained
    more than 5 %. Files that are no benchmark of an operation are named and left out.
    """
    paths = ([first] if first else []) + list(more)
    if not paths:
        raise click.UsageError("--measured: missing; pass the JSON files of benchmarks")
    compared, left_out = compare_files(paths, machine)
    faults = [row for row in compared if row.fault]
    if as_json:
        click.echo(json.dumps(_json(compared, left_out)))
    else:
        _print(compared, left_out)
    return 1 if faults else 0


def _json(compared: list[Comparison], left_out: list[str]) -> dict[str, object]:
    rows = [
        {**asdict(row), "error": row.error, "gain": row.gain, "fault": row.fault}
        for row in compared
    ]
    return {
        "rows": rows,
        "fused": asdict(Errors.of(row.error for row in compared)),
        "unfused": asdict(Errors.of(row.unfused_error for row in compared)),
        "left_out": left_out,
        "ok": not any(row.fault for row in compared),
    }


def _print(compared: list[Comparison], left_out: list[str]) -> None:
    table = Table(title="predicted | measured ms")
    for column in ("op", "shape", "machine", "ranks"):
        table.add_column(column, overflow="fold")
    for column in ("fused", "error", "unfused", "error", "gain"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("decision", overflow="fold")
    for row in compared:
        table.add_row(
            row.op,
            row.shape,
            row.machine,
            str(row.ranks),
            f"{row.predicted_ms:.3f} | {row.measured_ms:.3f}",
            f"{100 * row.error:+.1f} %",
            f"{row.unfused_predicted_ms:.3f} | {row.unfused_measured_ms:.3f}",
            f"{100 * row.unfused_error:+.1f} %",
            f"{100 * row.gain:+.1f} %",
            row.fault or ("declined" if row.declined else "accepted"),
        )
    # Wider than a narrow terminal rather than cut.
    width = max(Console().width, MIN_WIDTH)
    console = Console(markup=False, highlight=False, width=width)
    console.print(table)
    for what, errors in (
        ("fused", Errors.of(row.error for row in compared)),
        ("unfused", Errors.of(row.unfused_error for row in compared)),
    ):
        console.print(
            f"{what}: error median {100 * errors.median:.1f} %, mean {100 * errors.mean:+.1f} %, "
            f"worst {100 * errors.worst:.1f} %"
        )
    for line in left_out:
        console.print(f"left out: {line}")
    faults = [row for row in compared if row.fault]
    for row in faults:
        console.print(f"FAULT {row.op} {row.shape} on {row.ranks} ranks: {row.fault}")
    console.print(
        f"{len(compared)} shapes, {len(faults)} faults (accepted and lost more than "
        f"{100 * MAX_LOSS:g} %, or declined and would have gained more than "
        f"{100 * MAX_MISSED_GAIN:g} %)"
    )
