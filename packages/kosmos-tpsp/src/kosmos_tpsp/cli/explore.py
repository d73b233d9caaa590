"""`explore`: as many distinct schedules as wanted, all checks on, spread over every dimension."""

from __future__ import annotations

from pathlib import Path

import click

from kosmos_tpsp.cli.exploration import Exploration
from kosmos_tpsp.cli.scenarios import LAYERS
from kosmos_tpsp.ops.catalog import DRIVERS
from kosmos_tpsp.ops.mx import INSTALL, has_mx

OPS = (*DRIVERS, LAYERS)


@click.command()
@click.option("--op", type=click.Choice(OPS), default=OPS[0], show_default=True)
@click.option(
    "--dtype",
    type=click.Choice(("bf16", "mxfp8")),
    default="bf16",
    show_default=True,
    help="mxfp8: most calls that can have such operands have them.",
)
@click.option(
    "--schedules",
    type=click.IntRange(min=1),
    default=10_000,
    show_default=True,
    help="Distinct schedules to run; the default takes hours, 20 about a minute.",
)
@click.option(
    "--seconds", type=click.FloatRange(min=0), help="Stop after so long.  [default: never]"
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Of the first scenario.",
)
@click.option("--jobs", type=click.IntRange(min=1), default=2, show_default=True, help="Processes.")
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write a summary."
)
def explore(
    op: str,
    dtype: str,
    schedules: int,
    seconds: float | None,
    seed: int,
    jobs: int,
    json_file: Path | None,
) -> int:
    """Run random calls of OP under random schedules on virtual ranks of the CPU executor.

    OP "layers": the calls of training steps of a column- and a row-parallel layer.

    Exit status: 0 nothing was found, 1 something was (each with a command that repeats it), 2 bad
    arguments.
    """
    if dtype == "mxfp8" and not has_mx():
        raise click.UsageError(f"dtype: got mxfp8, which needs kosmos-mx; {INSTALL}")
    if op in DRIVERS and dtype not in DRIVERS[op].dtypes:
        raise click.UsageError(f"dtype: got {dtype} for {op}, wanted {DRIVERS[op].dtypes[0]}")
    exploration = Exploration(op, schedules, seconds, seed, jobs, dtype)
    exploration.run()
    click.echo(exploration.summary_line())
    if json_file is not None:
        exploration.write(json_file)
    if exploration.failures:
        return 1
    return 130 if exploration.interrupted else 0
