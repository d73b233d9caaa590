"""Starting this command line again with one process a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence


def under_torchrun() -> bool:
    """Whether this process is one of a group that torchrun started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def relaunch(arguments: Sequence[str], ranks: int) -> int:
    """Runs `python -m kosmos_tpsp ARGUMENTS` on `ranks` processes; returns the exit status."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *launcher, "-m", "kosmos_tpsp", *arguments]
    # torchrun would set one thread itself, with a warning.
    return subprocess.call(command, env={"OMP_NUM_THREADS": "1", **os.environ})
