"""Command line: ``python -m kosmos_tpsp check|explore|bench ...``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

import click

from kosmos_tpsp.cli.entry import run_command

COMMANDS = ("check", "explore", "bench")


class Commands(click.Group):
    """Commands that are imported when asked for: one without a module leaves the others whole."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names, in the order in which the help shows them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of a name; None for a name that is no command or has no module."""
        if cmd_name not in COMMANDS:
            return None
        module = f"kosmos_tpsp.cli.{cmd_name}"
        try:
            command = getattr(importlib.import_module(module), cmd_name)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
            return None
        return command if isinstance(command, click.Command) else None


@click.group(cls=Commands, no_args_is_help=False)
def cli() -> None:
    """Fused tensor- and sequence-parallel operations: checks and benchmarks."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments after the program's name; None means those of the process.

    Returns:
        Exit status: the command's, or 2 with one line on standard error for bad arguments.
    """
    return run_command(cli, "kosmos_tpsp", argv)


if __name__ == "__main__":
    sys.exit(main())
