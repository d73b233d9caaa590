"""Is a step right? Its loss and gradients beside the plain path's and an unsharded FP32 model's.

All three have the same weights: those of the run that is looked at, before each of its steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from kosmos_core.worlds import World

from integration.training.trainer import Job, Trainer, reference_trainer, unsharded_trainer

# Of a loss, relative: BF16 holds 8 bits, and a mean over all tokens averages most of it out.
LOSS_LIMIT = 2e-3
# Operands in MXFP8 are off by 2.6e-2 each, at random.
MX_LOSS_LIMIT = 1e-2
# Of a weight's gradient, relative to its norm, where the plain BF16 path is itself this far off at
# least; beyond, FACTOR times the plain path's error.
GRADIENT_FLOOR = 1.5e-2
FACTOR = 2.0


@dataclass(frozen=True)
class Comparison:
    """One step, three ways. Errors are norms of differences over norms, against FP32.

    Attributes:
        step: counted from 0.
        losses: of this run, of the plain path, of FP32.
        error: of the gradient of all weights, of this run and of the plain path.
        apart: of this run against the plain path.
        worst: name of the weight that comes closest to its limit, or passes it.
        worst_error: its gradient's error, of this run and of the plain path.
        precision: of this run's GEMMs, and of the plain path's.
    """

    step: int
    losses: tuple[float, float, float]
    error: tuple[float, float]
    apart: float
    worst: str
    worst_error: tuple[float, float]
    precision: str = "bf16"

    @property
    def loss_error(self) -> float:
        """Largest relative difference of this run's loss from the others."""
        mine, *others = self.losses
        return max(abs(mine - other) / abs(other) for other in others)

    @property
    def right(self) -> bool:
        """Whether loss and every weight's gradient are within the precision's tolerance."""
        # Written so that a NaN is wrong.
        mine, plain = self.worst_error
        most = MX_LOSS_LIMIT if self.precision == "mxfp8" else LOSS_LIMIT
        return self.loss_error <= most and mine <= limit(plain)


def limit(plain: float) -> float:
    """How far a gradient may be off where the plain path's is off by `plain`."""
    return max(GRADIENT_FLOOR, FACTOR * plain)


class Witnesses:
    """The plain path and an unsharded FP32 model, given the weights of the run that is looked at.

    Args:
        job: what is trained.
        world: the ranks.
    """

    def __init__(self, job: Job, world: World) -> None:
        self._world = world
        self._precision = job.precision
        self._plain = reference_trainer(job, world)
        self._exact = unsharded_trainer(job, world.device)

    def compare(self, trainer: Trainer, step: int, loss: torch.Tensor) -> Comparison:
        """Compares a step whose gradients are complete and whose weights are not yet changed.

        Collective.
        """
        self._take_weights(trainer)
        plain_loss, _ = self._plain.gradients(step)
        exact_loss, _ = self._exact.gradients(step)
        rank, ranks = self._world.rank, self._world.size
        sums = []
        for weight, mine, plain, exact in zip(
            trainer.optimizer.weights,
            trainer.optimizer.parameters,
            self._plain.optimizer.parameters,
            self._exact.optimizer.parameters,
            strict=True,
        ):
            g = _gradient(mine), _gradient(plain), weight.shard(_gradient(exact), rank, ranks)
            sums.append(
                torch.stack([_square(g[0] - g[2]), _square(g[1] - g[2]), _square(g[0] - g[1]),
                             _square(g[2]), _square(g[1])])
            )  # fmt: skip
        # Replicated weights count once a rank in numerator and denominator alike.
        total = self._world.all_gather_tensor(torch.stack(sums)[None]).sum(0).double().cpu()
        mine_off, plain_off = (total[:, i].div(total[:, 3]).sqrt() for i in (0, 1))
        excess = torch.stack(
            [m / limit(p) for m, p in zip(mine_off, plain_off.tolist(), strict=True)]
        )
        # A NaN is the worst of all.
        worst = int(excess.nan_to_num(torch.inf).argmax())
        whole = total.sum(0)
        return Comparison(
            step,
            (float(loss), float(plain_loss), float(exact_loss)),
            (float((whole[0] / whole[3]).sqrt()), float((whole[1] / whole[3]).sqrt())),
            float((whole[2] / whole[4]).sqrt()),
            trainer.optimizer.weights[worst].name,
            (float(mine_off[worst]), float(plain_off[worst])),
            self._precision,
        )

    @torch.no_grad()
    def _take_weights(self, trainer: Trainer) -> None:
        for weight, mine, plain, exact in zip(
            trainer.optimizer.weights,
            trainer.optimizer.parameters,
            self._plain.optimizer.parameters,
            self._exact.optimizer.parameters,
            strict=True,
        ):
            plain.copy_(mine)
            shards = self._world.all_gather_tensor(mine.detach()[None])
            exact.copy_(weight.whole(list(shards)))


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = parameter.main_grad  # type: ignore[attr-defined]
    return found


def _square(x: torch.Tensor) -> torch.Tensor:
    return x.square().sum()
