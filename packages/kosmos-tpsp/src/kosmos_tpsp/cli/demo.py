"""``python -m kosmos_tpsp demo``: a fused kernel at work, with or without GPUs."""

from __future__ import annotations

import os
import re
from pathlib import Path

import click
import torch
import torch.distributed as dist
from kosmos_core.errors import WorldError
from kosmos_core.worlds import World, group_world, parse_world
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kosmos_tpsp.bench.report import console
from kosmos_tpsp.bench.session import process_group
from kosmos_tpsp.cli import demo_run
from kosmos_tpsp.cli.demo_layer import library_text, real_layer, small_layer
from kosmos_tpsp.cli.demo_run import Outcome
from kosmos_tpsp.cli.demo_show import introduce, show
from kosmos_tpsp.cli.faults import is_reported
from kosmos_tpsp.cli.relaunch import relaunch, under_torchrun

ON_CPU = "cpu:4"
# What errors about worlds begin with; the option's name says it already.
WORLD_PREFIX = re.compile(r"^(\w+ )?world: ")


@click.command()
@click.option(
    "--out",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("kosmos-demo"),
    show_default=True,
    help="Where the trace and the picture go.",
)
@click.option(
    "--world",
    help="cpu:N, gpu:N, or group under torchrun.  "
    f"[default: all GPUs if there are two or more, else {ON_CPU}]",
)
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0))
def demo(folder: Path, world: str | None, seed: int) -> int:
    """Compute a Llama MLP's column projection in one fused kernel, and show its workgroups.

    Exit status: 0; 1 if the fused result was wrong or a rank gave up; 2 for bad arguments.
    """
    if world is None:
        ranks = _gpus_to_use()
        if ranks and not under_torchrun():
            arguments = ["demo", "--world", "group", "--out", str(folder), "--seed", str(seed)]
            return relaunch(arguments, ranks)
        world = "group" if ranks else ON_CPU
    try:
        if world == "group":
            return _on_group(folder, seed)
        return _on_virtual_ranks(world, folder, seed)
    except Exception as error:
        if not is_reported(error):
            raise
        click.echo(f"demo: {error}", err=True)
        return 1


def _gpus_to_use() -> int:
    """GPUs of a group that the tokens can be shared among; 0 if there are fewer than two."""
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return next((n for n in (8, 4, 2) if n <= found), 0)


def _on_virtual_ranks(spec: str, folder: Path, seed: int) -> int:
    on_cpu = spec.startswith("cpu:")
    screen = console()
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=screen
    )
    task = bar.add_task("units moved, tiles built", total=None)
    counted = demo_run.Progress(
        lambda done, total: bar.update(task, completed=done, total=total or None)
    )
    world = _virtual_world(spec, seed, counted)
    layer = small_layer(world.size, seed) if on_cpu else real_layer(seed)
    machine = demo_run.executor_machine() if on_cpu else None
    text = library_text(layer.tokens)

    def on_rank(rank: int) -> Outcome:
        return demo_run.run_rank(world, layer, text, machine, counted.watch)

    with world:
        _make(folder)
        introduce(screen, layer, spec, world.size)
        with bar:
            outcomes = world.spmd(on_rank)
            bar.update(task, total=1, completed=1)
    right = show(screen, outcomes, layer, folder, simulated=on_cpu)
    return 0 if right else 1


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.UsageError(
            f"--out: {folder}: {error.strerror}; choose another folder"
        ) from None


def _virtual_world(spec: str, seed: int, counted: demo_run.Progress) -> World:
    kind, _, count = spec.partition(":")
    if kind not in ("cpu", "gpu"):
        raise click.UsageError(f"--world: got {spec!r}, wanted cpu:N, gpu:N or group")
    try:
        if kind == "cpu" and count.isdigit() and 1 <= int(count) <= 8:
            return demo_run.executor_world(int(count), seed, counted)
        return parse_world(spec)
    except WorldError as error:
        raise click.UsageError(f"--world: {WORLD_PREFIX.sub('', str(error))}") from None


def _on_group(folder: Path, seed: int) -> int:
    if not under_torchrun():
        raise click.UsageError(
            "--world: group needs torchrun; leave --world out to have this done for you"
        )
    if not torch.cuda.is_available():
        raise click.UsageError(f"--world: group needs GPUs, and none is visible; use {ON_CPU}")
    layer = real_layer(seed)
    ranks = int(os.environ["WORLD_SIZE"])
    if layer.tokens % ranks:
        raise click.UsageError(f"--world: {layer.tokens} tokens do not divide over {ranks} ranks")
    _make(folder)
    with process_group():
        world = group_world()
        if dist.get_rank() == 0:
            introduce(console(), layer, f"{ranks} x {torch.cuda.get_device_name()}", ranks)
        outcome = demo_run.run_rank(world, layer, library_text(layer.tokens))
        outcomes = world.all_gather_object(outcome)
    right = all(o.right for o in outcomes)
    if outcome.rank == 0:
        show(console(), outcomes, layer, folder, simulated=False)
    return 0 if right else 1
