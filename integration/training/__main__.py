"""Command line: ``python -m integration.training``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kosmos_tpsp.cli.entry import run_command

from integration.training.cli import MODULE, training


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    return run_command(training, MODULE, argv)


if __name__ == "__main__":
    sys.exit(main())
