"""Command line: ``python -m kosmos_core doctor | measure``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console

from kosmos_core import __version__

PROG = "python -m kosmos_core"


@click.group(no_args_is_help=False)
@click.version_option(__version__, prog_name="kosmos-core")
def cli() -> None:
    """What this machine can run, and how fast its parts are."""


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object and nothing else.")
def doctor(as_json: bool) -> int:
    """Say what runs here: versions, GPUs, worlds, links.

    Exit status 0: something can run. 1: nothing can.
    """
    from kosmos_core.doctor import examine, print_report

    report = examine()
    if as_json:
        click.echo(json.dumps(report.as_dict()))
    else:
        console = Console()
        print_report(report, console if console.is_terminal else Console(width=140))
    return 0 if report.can_run else 1


@cli.command()
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--png", "png_path", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--quick", is_flag=True, help="Fewer points.")
@click.option("--machine", help="Name to record.  [default: the GPU's]")
def measure(json_path: Path | None, png_path: Path | None, quick: bool, machine: str | None) -> int:
    """Measure GB/s by movers, TFLOPS by builders, flags, launches, start order, power.

    With one GPU, start it directly; with N, under torchrun --nproc-per-node N -m kosmos_core --.
    """
    for path in (json_path, png_path):
        if path is not None and not path.absolute().parent.is_dir():
            raise click.BadParameter(f"{path}: the folder does not exist")
    from kosmos_core.measure import FULL, QUICK, measure_here

    measure_here(QUICK if quick else FULL, machine, json_path, png_path)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments after the program's name; None means those of the process.

    Returns:
        Exit status: that of the command; with one line on standard error 2 for bad arguments or
        where the command cannot run, and 1 for a measurement that went wrong.
    """
    from kosmos_core.errors import KosmosError, WorldError

    try:
        status = cli.main(
            list(sys.argv[1:] if argv is None else argv), prog_name=PROG, standalone_mode=False
        )
    except (click.ClickException, KosmosError) as error:
        text = error.format_message() if isinstance(error, click.ClickException) else str(error)
        hint = " see --help" if text == "Missing command." else ""
        click.echo("error: " + " ".join(text.split()) + hint, err=True)
        return 2 if isinstance(error, (click.ClickException, WorldError)) else 1
    except click.Abort:
        return 130
    return status if isinstance(status, int) else 0


if __name__ == "__main__":
    sys.exit(main())
