"""Parallel linears in MXFP8 against FP64 products of exactly the operands that they promise.

Which copy each product takes is the table "MXFP8 in the layers" of docs/numerics.md, written out
here once more. Nothing of the layers' own path is used: casts are those of `kosmos_mx.reference`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from kosmos_core.worlds import World
from kosmos_mx import reference
from kosmos_mx.formats import E4M3

from kosmos_tpsp.cli.calls import compare
from kosmos_tpsp.exact import Wanted
from kosmos_tpsp.functions import MXFP8
from kosmos_tpsp.modules import ColumnParallelLinear, RowParallelLinear

KINDS = {"column": ColumnParallelLinear, "row": RowParallelLinear}
# Powers of two, up and down, by which rows, and columns, of random operands differ. Rounding to
# E4M3 is the same at every scale but for elements far below the largest of their group: those must
# be many, or copies along either axis, and copies of copies, would hardly differ.
SPREAD = 12
# Power of two by which the tokens of one rank are larger in X, and smaller in dY, than those of the
# rank before: all weigh the same in dW, and would vanish in a group with tokens of another rank.
STEP = 14
# What a result is the rounded sum of, float64; one part if ranks add nothing up.
Parts = list[torch.Tensor]


@dataclass(frozen=True)
class MxCase:
    """One parallel linear in MXFP8.

    Attributes:
        kind: "column" or "row".
        tokens: over all ranks.
        inputs: features of the full input.
        outputs: features of the full output.
        recipe: how operands are quantised.
        main_grad: whether the weight has one.
        frozen: "x" or "w": it requires no gradient.
        options: of the layer.
    """

    kind: str
    tokens: int = 128
    inputs: int = 64
    outputs: int = 128
    recipe: MXFP8 = field(default_factory=MXFP8)
    main_grad: bool = False
    frozen: str = ""
    options: tuple[tuple[str, Any], ...] = ()


def draw(rows: int, features: int, seed: int) -> torch.Tensor:
    """Normal numbers whose rows and columns are of very different sizes, bfloat16.

    So an element that is large in its group along one axis may vanish in that along the other.
    """
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, features, generator=source)
    down, across = (
        torch.exp2(torch.randint(-SPREAD, SPREAD, shape, generator=source).float())
        for shape in ((rows, 1), (1, features))
    )
    return (x * down * across).bfloat16()


def cast(
    x: torch.Tensor, axis: str, recipe: MXFP8, segments: Sequence[int] | None = None
) -> torch.Tensor:
    """X [rows, features] quantised along an axis and back, float64.

    Args:
        x: bfloat16.
        axis: "row" or "col".
        recipe: how.
        segments: rows that share no column-wise group with others; None for one segment.
    """
    if axis == "row":
        return _cast_rows(x, recipe, (x.shape[1],))
    return _cast_rows(x.t(), recipe, segments or (x.shape[0],)).t()


def _cast_rows(x: torch.Tensor, recipe: MXFP8, segments: Sequence[int]) -> torch.Tensor:
    made = reference.quantize_rows(x, E4M3, recipe.scale_rounding, segments)
    return reference.crop_segments(reference.dequantize_rows(*made), segments)


@dataclass(frozen=True)
class _Operands:
    """Of one rank, bfloat16 on the CPU."""

    x: torch.Tensor
    w: torch.Tensor
    dy: torch.Tensor


def _column(case: MxCase, every: list[_Operands], rank: int) -> dict[str, Parts]:
    recipe, mine = case.recipe, every[rank]
    chunk = len(mine.x)
    segments = (chunk,) * len(every)
    own = slice(rank * chunk, (rank + 1) * chunk)
    rows = torch.cat([cast(r.x, "row", recipe) for r in every])
    columns = torch.cat([cast(r.x, "col", recipe) for r in every])
    parts = [cast(r.dy[own], "row", recipe) @ cast(r.w, "col", recipe) for r in every]
    return {
        "y": [rows @ cast(mine.w, "row", recipe).t()],
        "dx": parts,
        "dw": [cast(mine.dy, "col", recipe, segments).t() @ columns],
    }


def _row(case: MxCase, every: list[_Operands], rank: int) -> dict[str, Parts]:
    recipe, mine = case.recipe, every[rank]
    chunk = len(mine.dy)
    segments = (chunk,) * len(every)
    own = slice(rank * chunk, (rank + 1) * chunk)
    rows = torch.cat([cast(r.dy, "row", recipe) for r in every])
    # Not quantised again where the row-wise copy serves.
    derived = recipe.column_dy == "derive"
    columns = rows if derived else torch.cat([cast(r.dy, "col", recipe) for r in every])
    parts = [cast(r.x[own], "row", recipe) @ cast(r.w, "row", recipe).t() for r in every]
    return {
        "y": parts,
        "dx": [rows @ cast(mine.w, "col", recipe)],
        "dw": [columns.t() @ cast(mine.x, "col", recipe, segments)],
    }


def _tokens(
    case: MxCase, world: World, sharded: str, features: int, seed: int, step: int
) -> torch.Tensor:
    """An activation of this rank: its own tokens for layers of kind `sharded`, else all."""
    chunk = case.tokens // world.size
    ranks = [world.rank] if case.kind == sharded else list(range(world.size))
    x = draw(chunk * len(ranks), features, seed + world.rank)
    sizes = torch.tensor([2.0 ** (step * rank) for rank in ranks]).repeat_interleave(chunk)
    return (x * sizes[:, None]).bfloat16().to(world.device)


def problem(out: torch.Tensor, parts: Parts) -> str:
    """What is wrong with a result; every row, and every column, must be right by itself."""
    wrong = compare(out, Wanted.sum(parts))[1]
    columns = compare(out.t(), Wanted.sum([part.t() for part in parts]))[1]
    return wrong or columns.replace("row", "column")


def mx_layer_problems(case: MxCase, world: World, steps: int = 1) -> dict[str, str]:
    """What is wrong with outputs and gradients of this rank, by name; nothing if all is right.

    Collective. Every row and every column is held to one rounding to BF16, of the sum and, where
    ranks add theirs up, of the parts. The weight changes between steps.
    """
    settings: dict[str, Any] = {
        "group": world, "max_tokens": case.tokens, "bias": False, "seed": 3,
        "precision": case.recipe, **dict(case.options),
    }  # fmt: skip
    layer = KINDS[case.kind](case.inputs, case.outputs, **settings)
    weight = layer.weight.requires_grad_("w" not in case.frozen)
    device, rank = world.device, world.rank
    found: dict[str, str] = {}
    for step in range(steps):
        with torch.no_grad():
            weight.copy_(draw(weight.shape[0], weight.shape[1], 100 * step + rank))
        x = _tokens(case, world, "column", weight.shape[1], 100 * step + 30, STEP)
        dy = _tokens(case, world, "row", weight.shape[0], 100 * step + 60, -STEP)
        every = world.all_gather_object(_Operands(x.cpu(), weight.detach().cpu(), dy.cpu()))
        wanted = (_column if case.kind == "column" else _row)(case, every, rank)
        y = layer(x.requires_grad_("x" not in case.frozen))
        weight.grad = None
        if case.main_grad:
            weight.main_grad = torch.zeros(weight.shape, device=device)  # type: ignore[attr-defined]
        y.backward(dy)
        made = {"y": y.detach(), "dx": x.grad, "dw": weight.grad}
        if case.main_grad:
            made["dw"] = weight.main_grad  # type: ignore[attr-defined]
        for name, out in made.items():
            if (out is None) != ("d" + case.frozen == name):
                found[f"step {step} {name}"] = "missing, or there and should not be"
            elif out is not None:
                wrong = problem(out.cpu(), wanted[name])
                if wrong:
                    found[f"step {step} {name}"] = wrong
    return found


__all__ = ["MxCase", "cast", "draw", "mx_layer_problems"]
