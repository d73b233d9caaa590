"""Command line: ``python -m kosmos_mx check | bench | vectors``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import click
from kosmos_core.errors import KosmosError

from kosmos_mx import __version__
from kosmos_mx.cli.bench import bench
from kosmos_mx.cli.check import check
from kosmos_mx.cli.vectors import make

PROG = "python -m kosmos_mx"


@click.group(no_args_is_help=False)
@click.version_option(__version__, prog_name="kosmos-mx")
def cli() -> None:
    """MXFP8 casts and GEMMs: checks and benchmarks."""


cli.add_command(check)
cli.add_command(bench)


@cli.command()
def vectors() -> int:
    """Print the digests of what torchao makes of the corpus: the contents of data/torchao.json."""
    click.echo(json.dumps(make(), indent=1))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments after the program's name; None means those of the process.

    Returns:
        Exit status: that of the command, or 2 with one line on standard error for bad arguments.
    """
    try:
        status = cli.main(
            list(sys.argv[1:] if argv is None else argv), prog_name=PROG, standalone_mode=False
        )
    except (click.ClickException, KosmosError) as error:
        text = error.format_message() if isinstance(error, click.ClickException) else str(error)
        hint = " see --help" if text == "Missing command." else ""
        click.echo("error: " + " ".join(text.split()) + hint, err=True)
        return 2
    except click.Abort:
        return 130
    return status if isinstance(status, int) else 0


if __name__ == "__main__":
    sys.exit(main())
