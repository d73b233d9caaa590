"""A training run on one rank: set up, resume, step, checkpoint, compare."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from kosmos_core.worlds import World
from kosmos_heuristics import Machine, load_machine
from kosmos_tpsp import TpSpWorkspace
from kosmos_tpsp.precision import with_scales

from integration.training import checkpoint
from integration.training.comparison import Comparison, Witnesses
from integration.training.linears import KosmosLinears
from integration.training.trainer import Job, Trainer, reference_trainer, unsharded_trainer

BACKENDS = ("kosmos", "reference")
PLAIN = {"bf16": "plain collectives, BF16", "mxfp8": "plain collectives, MXFP8"}
EXACT = "unsharded, FP32"


@dataclass(frozen=True)
class Plan:
    """What a run does besides training.

    Attributes:
        job: what is trained.
        backend: "kosmos" or "reference".
        folder: of the checkpoints.
        checkpoint_every: steps between them; 0 writes none.
        verify: compare every step with the plain path and with FP32, and train these too.
        timeline: afterwards, trace a step.
        fresh: remove the checkpoints of earlier runs first.
    """

    job: Job
    backend: str
    folder: Path
    checkpoint_every: int
    verify: bool
    timeline: bool = False
    fresh: bool = False

    def identity(self, ranks: int) -> dict[str, Any]:
        """What must be equal for a checkpoint to fit."""
        job = self.job
        return {
            **job.preset.identity(), "ranks": ranks, "steps": job.steps, "seed": job.seed,
            "text": job.batches.fingerprint, "precision": job.precision, "backend": self.backend,
        }  # fmt: skip


@dataclass(frozen=True)
class Step:
    """One step as reports have it.

    Attributes:
        step: counted from 0.
        loss: mean cross entropy of the step's tokens before it, nats a byte.
        grad_norm: of the whole model's gradient before clipping.
        ms: wall time of the step, without checkpoint and comparison.
    """

    step: int
    loss: float
    grad_norm: float
    ms: float


@dataclass
class Outcome:
    """One rank's part of a run.

    Attributes:
        steps: all of the run, those before a resumption too.
        resumed_at: steps that a checkpoint brought.
        launches: fused launches by kernel since then.
        comparisons: one a step, if asked for.
        curves: losses of runs by the plain path, in BF16 too, and in FP32, each with its own
            weights.
    """

    steps: list[Step] = field(default_factory=list)
    resumed_at: int = 0
    launches: dict[str, int] = field(default_factory=dict)
    comparisons: list[Comparison] = field(default_factory=list)
    curves: dict[str, list[float]] = field(default_factory=dict)


class Watcher(Protocol):
    """Is told how a run goes; on rank 0 only."""

    def started(self, task: str, done: int, total: int) -> None:
        """A task of `total` steps begins, `done` of them done already."""

    def stepped(self, step: Step, comparison: Comparison | None) -> None:
        """A step is done."""


class NoWatcher:
    """Of all ranks but the first."""

    def started(self, task: str, done: int, total: int) -> None:
        """See `Watcher`."""

    def stepped(self, step: Step, comparison: Comparison | None) -> None:
        """See `Watcher`."""


def executor_machine() -> Machine:
    """The executor's machine model with larger tiles: it is paid by the operation, not the flop."""
    machine = load_machine("executor")
    tile = replace(machine.tiles[0], block_m=64, block_n=64, block_k=64)
    return replace(machine, tiles=(tile,), tile_row_rows=64)


@contextmanager
def make_trainer(job: Job, backend: str, world: World) -> Iterator[tuple[Trainer, dict[str, int]]]:
    """A trainer of a backend and its counts of fused launches by kernel. Collective."""
    if backend == "reference":
        yield reference_trainer(job, world), {}
        return
    sizes = job.preset.sizes
    machine = executor_machine() if world.machine == "executor" else None
    hidden = sizes.hidden if job.precision == "bf16" else with_scales(sizes.hidden)
    with TpSpWorkspace(world, sizes.tokens, hidden, machine=machine) as workspace:
        linears = KosmosLinears(workspace, job.precision)
        trainer = Trainer(job, linears, world, torch.bfloat16, world.device)
        yield trainer, workspace.launches


def train(plan: Plan, world: World, watcher: Watcher) -> Outcome:
    """Trains from the newest checkpoint, or from the start, to the last step. Collective.

    Raises:
        click.UsageError: the checkpoint is of another run.
    """
    watcher = watcher if world.rank == 0 else NoWatcher()
    job, outcome = plan.job, Outcome()
    identity = plan.identity(world.size)
    if plan.fresh and world.rank == 0:
        checkpoint.remove_all(plan.folder)
    world.barrier()
    if plan.verify:
        outcome.curves = _curves(job, world, watcher)
    with make_trainer(job, plan.backend, world) as (trainer, launches):
        found = checkpoint.latest(plan.folder)
        if found is not None:
            state = checkpoint.load(found, identity, world)
            trainer.optimizer.load(state["optimizer"])
            outcome.steps = [Step(**step) for step in state["steps"]]
            outcome.resumed_at = len(outcome.steps)
        # All ranks have read it before one of them removes old ones.
        world.barrier()
        witnesses = Witnesses(job, world) if plan.verify else None
        watcher.started("training", outcome.resumed_at, job.steps)
        for number in range(outcome.resumed_at, job.steps):
            compared: list[Comparison] = []
            apart = 0.0

            def look(loss: torch.Tensor) -> None:
                nonlocal apart
                if witnesses is not None:
                    begin = time.perf_counter()
                    compared.append(witnesses.compare(trainer, number, loss))  # noqa: B023
                    apart = time.perf_counter() - begin

            begin = time.perf_counter()
            loss, norm = trainer.step(number, look)
            step = Step(number, float(loss), float(norm), 0.0)
            ms = (time.perf_counter() - begin - apart) * 1e3
            outcome.steps.append(Step(number, step.loss, step.grad_norm, ms))
            outcome.comparisons += compared
            if plan.checkpoint_every and (number + 1) % plan.checkpoint_every == 0:
                state = {
                    "identity": identity,
                    "steps": [asdict(s) for s in outcome.steps],
                    "optimizer": trainer.optimizer.state(),
                }
                checkpoint.save(plan.folder, number + 1, state, world)
            watcher.stepped(outcome.steps[-1], compared[0] if compared else None)
        outcome.launches = dict(launches)
    return outcome


def _curves(job: Job, world: World, watcher: Watcher) -> dict[str, list[float]]:
    """Losses of whole runs of the plain path, in BF16 too, and of an unsharded FP32 model."""
    precisions = dict.fromkeys((job.precision, "bf16"))
    makers: dict[str, Callable[[], Trainer]] = {
        PLAIN[p]: partial(reference_trainer, replace(job, precision=p), world) for p in precisions
    }
    makers[EXACT] = lambda: unsharded_trainer(job, world.device)
    curves = {}
    for name, make in makers.items():
        watcher.started(name, 0, job.steps)
        trainer, losses = make(), []
        for number in range(job.steps):
            begin = time.perf_counter()
            loss, norm = (float(x) for x in trainer.step(number))
            losses.append(loss)
            watcher.stepped(Step(number, loss, norm, (time.perf_counter() - begin) * 1e3), None)
        curves[name] = losses
    return curves
