"""Which part of a full weight a rank holds: drawing it, cutting it out, putting it together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from kosmos_core.errors import ArgumentError
from kosmos_core.worlds import World

# Fills [rows, in] of a full weight in place from a generator.
Init = Callable[[torch.Tensor, torch.Generator], object]
# Rows that are drawn at once: the full weight is never in memory.
DRAWN_ROWS = 1024


def linear_init(in_features: int) -> Init:
    """`nn.Linear`'s own: uniform within 1 / sqrt(in_features) of zero, weight and bias alike."""
    bound = 1 / math.sqrt(in_features)
    return lambda part, generator: part.uniform_(-bound, bound, generator=generator)


def part_of(wholes: Sequence[torch.Tensor], dim: int, world: World) -> torch.Tensor:
    """The rank's part of full weights or biases, each sharded for itself along `dim`."""
    return torch.cat([whole.chunk(world.size, dim)[world.rank] for whole in wholes], dim)


def whole_of(part: torch.Tensor, dim: int, sizes: Sequence[int], world: World) -> torch.Tensor:
    """Full weights or biases behind one another, from all ranks' parts. Collective.

    Args:
        part: this rank's.
        dim: the sharded dimension.
        sizes: of the full ones along it.
        world: the ranks.
    """
    parts = world.all_gather_tensor(part.detach()[None].contiguous())
    by_rank = [ranked.split([size // world.size for size in sizes], dim) for ranked in parts]
    return torch.cat([torch.cat(ranks, dim) for ranks in zip(*by_rank, strict=True)], dim)


def draw(
    out: torch.Tensor,
    features: int,
    dim: int | None,
    splits: Sequence[int],
    world: World,
    init: Init,
    generator: torch.Generator,
) -> None:
    """Fills a rank's part of a weight as if the full one had been drawn and cut.

    The full weight depends on the generator alone, not on the number of ranks.

    Args:
        out: this rank's part, a matrix.
        features: columns of the full weight.
        dim: the sharded dimension; None where every rank holds it whole.
        splits: row numbers of the full weight's logical matrices.
        world: the ranks.
        init: fills rows of the full weight, in FP32.
        generator: on `out`'s device, in the same state on every rank.
    """
    filled = 0
    for size in splits:
        share = size // world.size
        first = world.rank * share
        for start in range(0, size, DRAWN_ROWS):
            rows = min(DRAWN_ROWS, size - start)
            block = torch.empty(rows, features, dtype=torch.float32, device=out.device)
            init(block, generator)
            if dim == 0:
                lower = max(first - start, 0)
                block = block[lower : max(first + share - start, lower)]
            elif dim == 1:
                block = block.chunk(world.size, 1)[world.rank]
            out[filled : filled + len(block)].copy_(block)
            filled += len(block)


def check_splits(splits: Sequence[int] | None, out_features: int, ranks: int) -> tuple[int, ...]:
    """Sizes that add up to the features and that the ranks divide.

    Raises:
        ArgumentError: they do not.
    """
    if splits is None:
        check_divides("out_features", out_features, ranks)
        return (out_features,)
    for size in splits:
        check_features("splits", size)
        check_divides("splits", size, ranks)
    if sum(splits) != out_features:
        raise ArgumentError(
            f"splits: got {tuple(splits)}, wanted sizes that add up to out_features {out_features}"
        )
    return tuple(splits)


def check_features(name: str, features: object) -> None:
    """A positive number.

    Raises:
        ArgumentError: it is not.
    """
    if not isinstance(features, int) or isinstance(features, bool) or features < 1:
        raise ArgumentError(f"{name}: got {features!r}, wanted a positive integer")


def check_divides(name: str, features: int, ranks: int) -> None:
    """A number that the ranks divide.

    Raises:
        ArgumentError: it is not.
    """
    if features % ranks:
        raise ArgumentError(
            f"{name}: got {features}, wanted a multiple of the {ranks} ranks; pad the weight or "
            "use fewer ranks"
        )
