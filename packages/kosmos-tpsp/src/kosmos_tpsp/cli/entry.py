"""Running a command line from a program: exit statuses, and errors in one line."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click


def run_command(command: click.Command, name: str, argv: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
        command: what to run.
        name: the program's.
        argv: arguments after the program's name; None means those of the process.

    Returns:
        Exit status: the command's, or 2 with one line on standard error for bad arguments.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        status = command.main(arguments, prog_name=name, standalone_mode=False)
    except click.ClickException as error:
        text = " ".join(error.format_message().split())
        hint = " see --help" if text == "Missing command." else ""
        click.echo(f"error: {text}{hint}", err=True)
        return 2
    except click.Abort:
        return 130
    return status if isinstance(status, int) else 0
