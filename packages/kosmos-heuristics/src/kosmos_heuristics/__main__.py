"""Command line: ``python -m kosmos_heuristics COMMAND ...``; ``--help`` lists the commands."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from kosmos_heuristics.cli_fit import fit_command
from kosmos_heuristics.cli_plan import plan
from kosmos_heuristics.cli_validate import validate
from kosmos_heuristics.errors import HeuristicsError
from kosmos_heuristics.simulate.cli import COMMANDS


@click.group(no_args_is_help=False)
def cli() -> None:
    """Closed-form plans for fused communication + GEMM kernels."""


cli.add_command(plan)
cli.add_command(validate)
cli.add_command(fit_command)
for command in COMMANDS:
    cli.add_command(command)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments after the program's name; None means those of the process.

    Returns:
        Exit status: 0; 1 when a validation fails; 2 with one line on standard error for bad
        arguments.
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
