"""Command line: ``python -m kosmos_moe check|explore|bench ...``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

import click

COMMANDS = ("check", "explore", "bench")


class Commands(click.Group):
    """Commands that are imported when asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names, in the order in which the help shows them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of a name; None for a name that is no command."""
        if cmd_name not in COMMANDS:
            return None
        command = getattr(importlib.import_module(f"kosmos_moe.cli.{cmd_name}"), cmd_name)
        return command if isinstance(command, click.Command) else None


@click.group(cls=Commands, no_args_is_help=False)
def cli() -> None:
    """MoE layers in one launch: checks, long explorations, benchmarks."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments after the program's name; None means those of the process.

    Returns:
        Exit status: the command's, or 2 with one line on standard error for bad arguments.
    """
    try:
        status = cli.main(
            list(sys.argv[1:] if argv is None else argv),
            prog_name="kosmos_moe",
            standalone_mode=False,
        )
    except click.ClickException as error:
        text = " ".join(error.format_message().split())
        hint = " see --help" if text == "Missing command." else ""
        click.echo(f"error: {text}{hint}", err=True)
        return 2
    except click.Abort:
        return 130
    return status if isinstance(status, int) else 0


if __name__ == "__main__":
    sys.exit(main())
