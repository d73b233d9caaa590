"""The worlds that `check` commands name: `cpu:N`, `gpu:N`, and `group` under torchrun."""

from __future__ import annotations

import contextlib
import os
import random
import re
from collections.abc import Callable, Iterator

import click
import torch
import torch.distributed as dist

from kosmos_core.errors import WorldError
from kosmos_core.worlds import World, gpu_world, group_world

MAX_RANKS = 8
MAX_SLEEP = 1 << 23


def world_size(name: str) -> int:
    """Ranks of a world by its name.

    Raises:
        click.UsageError: the name is none, or `group` without torchrun.
    """
    if name == "group":
        if "WORLD_SIZE" not in os.environ:
            raise click.UsageError("world: group needs one process a rank; start with torchrun")
        return int(os.environ["WORLD_SIZE"])
    found = re.fullmatch(r"(cpu|gpu):(\d+)", name)
    if found is None or not 1 <= int(found[2]) <= MAX_RANKS:
        raise click.UsageError(
            f"world: got {name!r}, wanted group, or cpu:N or gpu:N with N from 1 to {MAX_RANKS}"
        )
    return int(found[2])


@contextlib.contextmanager
def open_world(name: str) -> Iterator[tuple[World, bool]]:
    """The world `group` or `gpu:N`, and whether this process prints.

    Raises:
        click.UsageError: there is no such world here.
    """
    with contextlib.ExitStack() as stack:
        try:
            if name == "group":
                cuda = torch.cuda.is_available()
                if cuda:
                    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
                dist.init_process_group("nccl" if cuda else "gloo")
                stack.callback(dist.destroy_process_group)
                world = stack.enter_context(group_world())
                prints = world.rank == 0
            else:
                world = stack.enter_context(gpu_world(world_size(name)))
                prints = True
        except WorldError as error:
            raise click.UsageError(str(error)) from error
        yield world, prints


def sleeper(world: World, seed: int) -> Callable[[int, int], None] | None:
    """Before each call one rank's stream sleeps for a while; None where there are no streams."""
    if world.device.type != "cuda":
        return None
    # Its module is loaded now, not while a peer waits.
    torch.cuda._sleep(1)  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()

    def sleep(rank: int, index: int) -> None:
        rng = random.Random(f"delay {seed} {index}")
        if rng.randrange(world.size) == rank:
            torch.cuda._sleep(rng.randrange(MAX_SLEEP))  # type: ignore[no-untyped-call]

    return sleep
