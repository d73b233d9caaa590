"""A model, its optimizer and its data: one training step after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from kosmos_core.worlds import World

from integration.training.linears import ReferenceLinears, UnshardedLinears
from integration.training.model import Linears, Llama
from integration.training.optimizer import Optimizer, Schedule
from integration.training.presets import Preset
from integration.training.text import Batches
from integration.training.weights import weights_of


@dataclass(frozen=True)
class Job:
    """What all ranks train, whatever computes it.

    Attributes:
        preset: sizes and rates.
        batches: the data.
        steps: of the whole run.
        seed: of weights and data.
        precision: of the GEMMs of parallel layers, "bf16" or "mxfp8".
    """

    preset: Preset
    batches: Batches
    steps: int
    seed: int
    precision: str = "bf16"

    @property
    def schedule(self) -> Schedule:
        """Learning rates."""
        return Schedule(self.preset.lr, self.preset.warmup, self.steps)


def initial_weights(job: Job, rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """One rank's part of each weight at the start, by name, fp32 on the CPU."""
    weights = weights_of(job.preset.sizes)
    return {w.name: w.shard(w.initial(job.seed), rank, ranks) for w in weights}


class Trainer:
    """One rank's part of a training run.

    Args:
        job: what to train.
        linears: makes the parallel layers.
        world: the ranks; None for an unsharded model.
        dtype: of the model; masters are fp32.
        device: of the model.
        compiled: fuse what stands between the linear layers with torch.compile.
        initial: weights to start from, as of `initial_weights`, which None calls.
    """

    def __init__(
        self,
        job: Job,
        linears: Linears,
        world: World | None,
        dtype: torch.dtype,
        device: torch.device,
        compiled: bool = False,
        initial: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.job = job
        self.rank, self.ranks = (0, 1) if world is None else (world.rank, world.size)
        self.device = device
        sizes = job.preset.sizes
        self.model = Llama(sizes, self.ranks, linears, dtype, device, compiled)
        start = initial_weights(job, self.rank, self.ranks) if initial is None else initial
        self.optimizer = Optimizer(self.model, weights_of(sizes), start, world)
        self._schedule = job.schedule

    def gradients(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Forward and backward of a step's batch: (loss, gradient norm) of the whole model."""
        tokens, targets = (self._mine(t) for t in self.job.batches(step))
        self.optimizer.zero_grad()
        loss = self.model(tokens, targets)
        loss.backward()
        return self.optimizer.reduce(loss)

    def step(
        self, step: int, look: Callable[[torch.Tensor], None] = lambda loss: None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One optimizer step: (loss before it, gradient norm) of the whole model.

        Args:
            step: counted from 0.
            look: told the loss while the gradients are complete and the weights not yet changed.
        """
        loss, norm = self.gradients(step)
        look(loss)
        self.optimizer.step(self._schedule(step), norm)
        return loss, norm

    def _mine(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's tokens: the chunk that its place in rank order gives it."""
        mine = whole.chunk(self.ranks)[self.rank]
        if self.device.type == "cuda":
            # From pageable memory the copy would wait for all that the stream holds.
            return mine.pin_memory().to(self.device, non_blocking=True)
        return mine


def reference_trainer(job: Job, world: World) -> Trainer:
    """Plain collectives and GEMMs, of operands in the job's precision; the rest is BF16."""
    made = ReferenceLinears(world, job.precision)
    return Trainer(job, made, world, torch.bfloat16, world.device)


def unsharded_trainer(job: Job, device: torch.device) -> Trainer:
    """One rank that has all, in FP32."""
    return Trainer(job, UnshardedLinears(), None, torch.float32, device)
