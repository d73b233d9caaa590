"""Checkpoints: a folder a step, a file a rank, made whole by one rename.

A run that is killed at any moment leaves the last folder that was renamed, and perhaps a partial
one that is not read.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import torch
from kosmos_core.worlds import World

NAME = re.compile(r"step-(\d{6,})")
PARTIAL = ".partial"
KEPT = 2


def save(folder: Path, step: int, state: Mapping[str, Any], world: World) -> Path:
    """Writes a checkpoint after `step` steps and removes all but the newest two.

    Collective.

    Args:
        folder: of all checkpoints of the run.
        step: steps that are done.
        state: this rank's; only tensors, numbers, strings, and lists and dicts of these.
        world: the ranks.

    Returns:
        The checkpoint's folder.
    """
    final = folder / f"step-{step:06d}"
    partial = final.with_name(final.name + PARTIAL)
    if world.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    world.barrier()
    with (partial / f"rank-{world.rank}.pt").open("wb") as file:
        torch.save(dict(state), file)
        file.flush()
        os.fsync(file.fileno())
    world.barrier()
    if world.rank == 0:
        os.rename(partial, final)
        _sync(folder)
        for old in _steps(folder)[:-KEPT]:
            shutil.rmtree(_path(folder, old))
    return final


def latest(folder: Path) -> Path | None:
    """The newest whole checkpoint; None without one."""
    steps = _steps(folder)
    return _path(folder, steps[-1]) if steps else None


def load(checkpoint: Path, identity: Mapping[str, Any], world: World) -> dict[str, Any]:
    """This rank's state, if it is of this run.

    Args:
        checkpoint: from `latest`.
        identity: what the run is.
        world: the ranks.

    Raises:
        click.UsageError: the checkpoint is of another run.
    """
    found = len(list(checkpoint.glob("rank-*.pt")))
    if found != world.size:
        raise _other_run(checkpoint, "ranks", found, world.size)
    path = checkpoint / f"rank-{world.rank}.pt"
    state: dict[str, Any] = torch.load(path, map_location=world.device, weights_only=True)
    for name, value in identity.items():
        if state["identity"].get(name) != value:
            raise _other_run(checkpoint, name, state["identity"].get(name), value)
    return state


def remove_all(folder: Path) -> None:
    """Removes the checkpoints of earlier runs, partial ones too, and nothing else."""
    for path in folder.glob("step-*"):
        if NAME.fullmatch(path.name.removesuffix(PARTIAL)):
            shutil.rmtree(path)


def _path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}"


def _steps(folder: Path) -> list[int]:
    found = (NAME.fullmatch(path.name) for path in folder.glob("step-*"))
    return sorted(int(match[1]) for match in found if match)


def _sync(folder: Path) -> None:
    """Makes a rename last: the folder that holds the name is written out too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _other_run(checkpoint: Path, name: str, found: object, wanted: object) -> click.UsageError:
    return click.UsageError(
        f"out: {checkpoint} is of a run with {name} {found}, this one has {wanted}; repeat those "
        "arguments to go on, or pass --fresh to remove it"
    )
