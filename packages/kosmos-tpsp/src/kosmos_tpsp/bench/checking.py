"""Whether an output is right: in full against the unfused result, on sampled rows against FP64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from kosmos_core.worlds import World

# Two correct results differ by rounding alone: one unit of bf16's 8 bits of an element, and near
# zero, where terms cancel, a little of the output's own size. One contraction step left out is
# several times that.
UNIT = 2.0**-7
FLOOR = 0.02
# Rounding once to bf16 costs up to 2^-9 of an element, 1.7e-3 of the norm on average.
FP64_LIMIT = 4e-3
_ROWS = 4096


@dataclass(frozen=True)
class Difference:
    """How an output differs from what it should be.

    Attributes:
        wrong: elements outside the tolerance, NaN included.
        rel_err: Frobenius norm of the difference over that of the reference.
    """

    wrong: int
    rel_err: float


def compare(got: torch.Tensor, wanted: torch.Tensor) -> Difference:
    """Every element of `got` [m, n] against `wanted` [m, n], both bf16."""
    size = wanted.float().square().mean().sqrt() if wanted.numel() else torch.zeros(())
    wrong = torch.zeros((), dtype=torch.int64, device=got.device)
    error = torch.zeros((), dtype=torch.float64, device=got.device)
    norm = torch.zeros((), dtype=torch.float64, device=got.device)
    for first in range(0, wanted.shape[0], _ROWS):
        rows = slice(first, first + _ROWS)
        a, b = got[rows].float(), wanted[rows].float()
        difference = (a - b).abs()
        # Not `difference > limit`: that is false for NaN.
        wrong += (~(difference <= UNIT * b.abs() + FLOOR * size)).sum()
        error += difference.square().sum(dtype=torch.float64)
        norm += b.square().sum(dtype=torch.float64)
    return Difference(int(wrong), float((error / norm).sqrt()) if float(norm) else float(error))


def fp64_error(
    got: torch.Tensor, gathered: torch.Tensor, w: torch.Tensor, layout: str, samples: int = 64
) -> float:
    """Relative error against FP64 of evenly spread rows, the first and the last among them.

    Args:
        got: [m, n] bfloat16.
        gathered: [m, k] bfloat16.
        w: [n, k] ("tn") or [k, n] ("nn") bfloat16.
        layout: of w.
        samples: rows to compare.
    """
    m = gathered.shape[0]
    rows = torch.linspace(0, m - 1, min(samples, m), device=got.device).round().long()
    exact = gathered[rows].double() @ (w.double().t() if layout == "tn" else w.double())
    return float((got[rows].double() - exact).norm() / exact.norm())


def fp64_error_of_sum(
    got: torch.Tensor, x: torch.Tensor, w: torch.Tensor, world: World, samples: int = 64
) -> float:
    """As `fp64_error`, of rows that are summed over ranks. Collective.

    Args:
        got: [m / ranks, n] bfloat16, this rank's rows.
        x: [m, k] bfloat16.
        w: [n, k] bfloat16.
        world: the ranks.
        samples: rows of each rank to compare.
    """
    return _error_of_sum(got, lambda every: x[every].double() @ w.double().t(), world, samples)


def fp64_error_of_rows(
    got: torch.Tensor, parts: torch.Tensor, world: World, samples: int = 64
) -> float:
    """As `fp64_error_of_sum`, of rows that are there already. Collective.

    Args:
        got: [k / ranks, n] bfloat16, this rank's rows.
        parts: [k, n] bfloat16, what this rank has of the sum.
        world: the ranks.
        samples: rows of each rank to compare.
    """
    return _error_of_sum(got, lambda every: parts[every].double(), world, samples)


def _error_of_sum(
    got: torch.Tensor, parts_of: Callable[[torch.Tensor], torch.Tensor], world: World, samples: int
) -> float:
    own = got.shape[0]
    rows = torch.linspace(0, own - 1, min(samples, own), device=got.device).round().long()
    every = torch.cat([rows + owner * own for owner in range(world.size)])
    parts = world.all_gather_tensor(parts_of(every))
    exact = parts.view(world.size, world.size, len(rows), -1)[:, world.rank].sum(0)
    return float((got[rows].double() - exact).norm() / exact.norm())
