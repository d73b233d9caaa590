"""Starting a command line again with one process a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

import torch


def under_torchrun() -> bool:
    """Whether this process is one of a group that torchrun started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def gpus_to_use() -> int:
    """GPUs for a group of 8, 4 or 2 ranks, as many as there are; 0 if there are fewer than two."""
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return next((n for n in (8, 4, 2) if n <= found), 0)


def relaunch(module: str, arguments: Sequence[str], ranks: int) -> int:
    """Runs `python -m MODULE ARGUMENTS` on `ranks` processes; returns the exit status."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *launcher, "-m", module, *arguments]
    # torchrun would set one thread itself, with a warning.
    return subprocess.call(command, env={"OMP_NUM_THREADS": "1", **os.environ})
