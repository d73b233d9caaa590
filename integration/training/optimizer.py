"""AdamW on FP32 masters, and the gradients that ranks must add up before it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from kosmos_core.worlds import World
from torch import nn

from integration.training.weights import REPLICATED, Weight

ALIGNMENT = 64  # elements: a weight's part of a flat buffer starts at a multiple of 256 bytes
MAX_GRAD_NORM = 1.0
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
FINAL_LR = 0.1  # of the highest


@dataclass(frozen=True)
class Schedule:
    """Learning rate by step: linear warm-up, then a cosine down to a tenth.

    Attributes:
        lr: highest rate.
        warmup: steps until it is reached.
        steps: of the whole run.
    """

    lr: float
    warmup: int
    steps: int

    def __call__(self, step: int) -> float:
        """Rate of a step, counted from 0."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        done = min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        return self.lr * (FINAL_LR + (1 - FINAL_LR) * 0.5 * (1 + math.cos(math.pi * done)))


class Optimizer:
    """AdamW over flat FP32 buffers: masters, gradients, moments.

    Each parameter gets `main_grad`, a view of the flat gradient, which a layer may add into by
    itself (it then sets `grad_added_to_main_grad`); otherwise what autograd leaves in `grad` is
    added when it is complete.

    Args:
        model: its parameters are those of `weights`; they are given the masters' values.
        weights: in the order of the buffers: replicated vectors, replicated matrices, shared ones.
        initial: this rank's part of each weight by name, fp32.
        world: the ranks; None for a model that is not shared.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: Sequence[Weight],
        initial: Mapping[str, torch.Tensor],
        world: World | None,
    ) -> None:
        named = dict(model.named_parameters())
        self.weights = tuple(weights)
        self.parameters: list[torch.Tensor] = [named[w.name] for w in weights]
        self._world = world
        starts, end = [], 0
        for parameter in self.parameters:
            starts.append(end)
            end += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
        device = self.parameters[0].device
        self.master = torch.zeros(end, device=device)
        self.grad = torch.zeros(end, device=device)
        ends = [*starts[1:], end]
        self._undecayed = max((e for w, e in zip(weights, ends, strict=True) if not w.decays))
        self._replicated = max(
            e for w, e in zip(weights, ends, strict=True) if w.kind == REPLICATED
        )
        self.masters = [
            _view(self.master, s, p) for s, p in zip(starts, self.parameters, strict=True)
        ]
        for weight, start, parameter, master in zip(
            weights, starts, self.parameters, self.masters, strict=True
        ):
            master.copy_(initial[weight.name])
            main_grad = _view(self.grad, start, parameter)
            parameter.main_grad = main_grad  # type: ignore[attr-defined]
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                _add_to_main_grad
            )
        self._copy_back()
        at = self._undecayed
        groups = [
            {"params": [nn.Parameter(self.master[:at])], "weight_decay": 0.0},
            {"params": [nn.Parameter(self.master[at:])], "weight_decay": WEIGHT_DECAY},
        ]
        for group, grad in zip(groups, (self.grad[:at], self.grad[at:]), strict=True):
            group["params"][0].grad = grad  # type: ignore[index]
        self._adam = torch.optim.AdamW(groups, lr=0.0, betas=BETAS, fused=device.type == "cuda")

    def zero_grad(self) -> None:
        """Before the first backward of a step."""
        self.grad.zero_()
        for parameter in self.parameters:
            parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]

    def reduce(self, loss: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds up over ranks what each has for its own tokens, in one collective.

        A shared weight's gradient is complete, since its layer saw all tokens. Of replicated
        weights (embedding, norms, head) every rank has its own tokens' part; so of the loss.

        Args:
            loss: this rank's part of it.

        Returns:
            (loss, norm of the gradient of the whole model), equal on all ranks.
        """
        head, rest = self.grad[: self._replicated], self.grad[self._replicated :]
        # Not the sum of squares, which would take as much memory again.
        own = torch.linalg.vector_norm(rest).square()
        scalars = torch.stack((loss.detach().float(), own))
        if self._world is not None:
            bucket = torch.cat((head, scalars))[None]
            # Added in rank order on every rank: equal bits everywhere.
            total = self._world.all_gather_tensor(bucket).sum(0)
            head.copy_(total[:-2])
            scalars = total[-2:]
        return scalars[0], (scalars[1] + head.square().sum()).sqrt()

    def step(self, lr: float, norm: torch.Tensor) -> None:
        """Clips the gradient, moves the masters, rounds them into the parameters.

        Args:
            lr: learning rate.
            norm: of the gradient of the whole model.
        """
        self.grad.mul_((MAX_GRAD_NORM / (norm + 1e-6)).clamp(max=1.0))
        for group in self._adam.param_groups:
            group["lr"] = lr
        self._adam.step()
        self._copy_back()

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""
        return {"master": self.master, "adam": self._adam.state_dict()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint."""
        self.master.copy_(state["master"])
        self._adam.load_state_dict(state["adam"])
        self._copy_back()

    def _copy_back(self) -> None:
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.masters)


def _view(flat: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
    return flat[start : start + like.numel()].view(like.shape)


def _add_to_main_grad(parameter: torch.Tensor) -> None:
    if not parameter.grad_added_to_main_grad:  # type: ignore[attr-defined]
        parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
    parameter.grad = None
