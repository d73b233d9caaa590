"""``python -m integration.training``: the command line."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import click
import torch
from kosmos_core.testing.faults import is_reported
from kosmos_tpsp.cli.relaunch import gpus_to_use, relaunch, under_torchrun

from integration.training.presets import PRESETS, Preset
from integration.training.run import BACKENDS, PLAIN, Plan
from integration.training.session import on_group, on_virtual_ranks
from integration.training.text import Batches
from integration.training.trainer import Job

MODULE = "integration.training"
ON_CPU = "cpu:4"
MAX_RANKS = 8


@click.command()
@click.option(
    "--preset", type=click.Choice(list(PRESETS)), help="[default: tiny on the CPU, small on GPUs]"
)
@click.option(
    "--world",
    help="cpu:N, or group under torchrun.  "
    f"[default: all GPUs if there are two or more, else {ON_CPU}]",
)
@click.option("--backend", type=click.Choice(BACKENDS), default="kosmos", show_default=True)
@click.option(
    "--precision",
    type=click.Choice(list(PLAIN)),
    default="bf16",
    show_default=True,
    help="Of the GEMMs of parallel layers; weights and activations are BF16.",
)
@click.option("--steps", type=click.IntRange(1), help="[default: the preset's]")
@click.option("--layers", type=click.IntRange(1), help="Blocks.  [default: the preset's]")
@click.option(
    "--lr",
    type=click.FloatRange(0, min_open=True),
    help="Highest learning rate.  [default: the preset's]",
)
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True)
@click.option(
    "--verify",
    is_flag=True,
    help="Compare every step with the plain path and an unsharded FP32 model; train these too.",
)
@click.option(
    "--timeline",
    is_flag=True,
    help="Afterwards, trace a step: a picture of what workgroups do, and a file for Perfetto.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("kosmos-training"),
    show_default=True,
    help="Where report, picture and checkpoints go.",
)
@click.option(
    "--checkpoint-every",
    type=click.IntRange(0),
    help="Steps between checkpoints, 0 for none.  [default: the preset's]",
)
@click.option("--fresh", is_flag=True, help="Remove the checkpoints in --out rather than go on.")
def training(
    preset: str | None,
    world: str | None,
    backend: str,
    precision: str,
    steps: int | None,
    layers: int | None,
    lr: float | None,
    seed: int,
    verify: bool,
    timeline: bool,
    out: Path,
    checkpoint_every: int | None,
    fresh: bool,
) -> int:
    """Train a byte-level Llama on the standard library's source, with TP + SP.

    A run that was stopped goes on from its newest checkpoint in --out when it is started again.

    Exit status: 0; 1 if a compared step was wrong or a rank gave up; 2 for bad arguments.
    """
    if world is None:
        ranks = gpus_to_use()
        if ranks and not under_torchrun():
            return relaunch(MODULE, ["--world", "group", *_given()], ranks)
        world = "group" if ranks or under_torchrun() else ON_CPU
    ranks = _ranks(world)
    chosen = PRESETS[preset or _default_preset(world)].changed(layers, lr)
    chosen.sizes.check(ranks)
    plan = _plan(chosen, steps, seed, backend, out, checkpoint_every)
    job = replace(plan.job, precision=precision)
    plan = replace(plan, job=job, verify=verify, timeline=timeline, fresh=fresh)
    _make(plan.folder)
    try:
        right = on_group(plan, out) if world == "group" else on_virtual_ranks(plan, ranks, out)
    except Exception as error:
        if not is_reported(error):
            raise
        click.echo(f"training: {error}", err=True)
        return 1
    return 0 if right else 1


def _plan(
    preset: Preset,
    steps: int | None,
    seed: int,
    backend: str,
    out: Path,
    checkpoint_every: int | None,
) -> Plan:
    sizes = preset.sizes
    job = Job(preset, Batches.of_library(sizes.batch, sizes.seq, seed), steps or preset.steps, seed)
    every = preset.checkpoint_every if checkpoint_every is None else checkpoint_every
    return Plan(job, backend, out / "checkpoints", every, verify=False)


def _given() -> list[str]:
    """This command's arguments as they were given, for another process."""
    context = click.get_current_context()
    arguments: list[str] = []
    for parameter in context.command.params:
        name = str(parameter.name)
        value = context.params[name]
        default = context.get_parameter_source(name) is click.core.ParameterSource.DEFAULT
        if default or name == "world" or value is None:
            continue
        arguments.append(parameter.opts[0])
        if not getattr(parameter, "is_flag", False):
            arguments.append(str(value))
    return arguments


def _default_preset(world: str) -> str:
    return "small" if world == "group" and torch.cuda.is_available() else "tiny"


def _ranks(world: str) -> int:
    """Ranks of a world.

    Raises:
        click.UsageError: the name is no world that can train.
    """
    if world == "group":
        if not under_torchrun():
            raise click.UsageError(
                "world: group needs one process a rank: start with torchrun, or leave --world out"
            )
        return int(os.environ["WORLD_SIZE"])
    found = re.fullmatch(r"cpu:(\d+)", world)
    if found is None or not 1 <= int(found[1]) <= MAX_RANKS:
        # Virtual ranks of a GPU are threads, and autograd has one thread a GPU for all of them.
        raise click.UsageError(
            f"world: got {world!r}, wanted group, or cpu:N with N from 1 to {MAX_RANKS}"
        )
    return int(found[1])


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.UsageError(f"out: {folder}: {error.strerror}; choose another folder") from None
