"""``python -m kosmos_core.testing.compile_guard PACKAGE.MODULE:FUNCTION [--target T]``."""

from __future__ import annotations

import fnmatch
import json
import os
import sys
from pathlib import Path

import click
import triton
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kosmos_core.testing.compile_guard.cases import CompileReport
from kosmos_core.testing.compile_guard.runner import (
    DEFAULT_JOBS,
    DEFAULT_TIMEOUT_S,
    GuardResult,
    load_cases,
    run_cases,
)
from kosmos_core.testing.compile_guard.targets import TARGETS


@click.command()
@click.argument("registries", nargs=-1, required=True, metavar="MODULE[:FUNCTION]...")
@click.option("--target", "targets", multiple=True, type=click.Choice(list(TARGETS)))
@click.option("--case", "pattern", default="*", help="Only cases whose name matches this glob.")
@click.option("--jobs", default=DEFAULT_JOBS, show_default=True, type=click.IntRange(min=1))
@click.option("--timeout", "timeout_s", default=DEFAULT_TIMEOUT_S, show_default=True, type=float)
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path))
def main(
    registries: tuple[str, ...],
    targets: tuple[str, ...],
    pattern: str,
    jobs: int,
    timeout_s: float,
    json_path: Path | None,
) -> None:
    """Compiles kernels for GPUs that are not there, and checks their machine code.

    Each MODULE:FUNCTION returns a list of CompileCase; FUNCTION is compile_cases if left out.
    Exit status 1: a case failed. 2: bad arguments.
    """
    # Modules of the current folder can be named, as with python -m.
    sys.path.insert(0, os.getcwd())
    try:
        cases = load_cases(registries)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    cases = [case for case in cases if not targets or case.target in targets]
    cases = [case for case in cases if fnmatch.fnmatch(case.name, pattern)]
    if not cases:
        raise click.UsageError("no case matches --target and --case")
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    # Without a refresh thread: the run forks, and a fork copies no thread but this one.
    with Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        auto_refresh=False,
        transient=True,
    ) as bar:
        task = bar.add_task("compiling", total=len(cases))

        def advance(report: CompileReport) -> None:
            bar.update(task, advance=1, description=escape(report.label))
            bar.refresh()

        try:
            result = run_cases(cases, jobs, timeout_s, advance)
        except ValueError as error:
            raise click.UsageError(str(error)) from error
    _print(console, result)
    if json_path is not None:
        json_path.write_text(json.dumps(as_json(result), indent=1) + "\n")
    if not result.passed:
        sys.exit(1)


def as_json(result: GuardResult) -> dict[str, object]:
    """The run as one JSON object."""
    return {
        "triton": triton.__version__,
        "wall_seconds": round(result.wall_seconds, 2),
        "passed": result.passed,
        "cases": [report.as_dict() for report in result.reports],
    }


def _print(console: Console, result: GuardResult) -> None:
    table = Table(title=f"compile guard, triton {triton.__version__}", title_justify="left")
    for name in ("case", "target"):
        table.add_column(name)
    for name in ("registers", "spills B", "shared B", "WG a CU/SM", "seconds"):
        table.add_column(name, justify="right")
    table.add_column("")
    for report in result.reports:
        table.add_row(
            escape(report.name),
            report.target,
            str(report.registers),
            str(report.spills),
            str(report.shared_bytes),
            str(report.occupancy),
            f"{report.compile_seconds:.1f}",
            "[green]ok[/]" if report.passed else "[red]FAILED[/]",
        )
    console.print(table)
    for report in result.reports:
        for reason in report.reasons:
            console.print(f"[red]FAILED[/] {escape(f'{report.label}: {reason}')}", soft_wrap=True)
        for note in report.notes:
            console.print(f"note   {escape(f'{report.label}: {note}')}", soft_wrap=True)
    passed = sum(report.passed for report in result.reports)
    console.print(
        f"{passed} passed, {len(result.reports) - passed} failed in {result.wall_seconds:.1f} s"
    )


if __name__ == "__main__":
    main()
