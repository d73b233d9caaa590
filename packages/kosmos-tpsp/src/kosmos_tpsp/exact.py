"""What each operation must give, in FP64, from the operands of all ranks.

One function an operation: (draw, rank, size, options) to its outputs by name. The fused kernels and
the reference path are both judged by it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

# (name, rank): an operand of any rank, bf16; one in MXFP8 dequantised, float64.
Draw = Callable[[str, int], torch.Tensor]


@dataclass(frozen=True)
class Wanted:
    """What a call must give on a rank.

    Attributes:
        values: matrix, float64; of rows that are only moved, those rows.
        size: float64 norm of each row, and of all that is rounded on the way to it together.
        moved: the rows are only moved: equal bit by bit.
    """

    values: torch.Tensor
    size: torch.Tensor
    moved: bool = False

    @classmethod
    def of(cls, values: torch.Tensor) -> Wanted:
        """Of values that are rounded once and for all."""
        return cls(values, values.double().norm(dim=1))

    @classmethod
    def rows(cls, rows: torch.Tensor) -> Wanted:
        """Of rows that are only moved."""
        return cls(rows, rows.double().norm(dim=1), moved=True)

    @classmethod
    def sum(cls, parts: list[torch.Tensor]) -> Wanted:
        """Of a sum whose float64 parts are rounded, too; they may cancel one another."""
        total = torch.stack(parts).sum(0)
        return cls(total, sum((p.norm(dim=1) for p in parts), total.norm(dim=1)))


def gathered(draw: Draw, name: str, size: int) -> torch.Tensor:
    """The rows of all ranks, in rank order."""
    return torch.cat([draw(name, rank) for rank in range(size)])


def ag_gemm(draw: Draw, rank: int, size: int, options: Any) -> dict[str, Wanted]:
    """The product, and the gathered input where it is kept."""
    x, w = gathered(draw, "x", size), draw("w", rank).double()
    product = x.double() @ (w.t() if options.layout == "tn" else w)
    found = {"out": Wanted.of(product)}
    # Values of MXFP8 come in FP64, and are kept only where that is asked for.
    if options.keeps_gathered if x.dtype is torch.bfloat16 else options.keep_gathered:
        found["gathered"] = Wanted.rows(x.to(torch.bfloat16))
    return found


def gemm_rs(draw: Draw, rank: int, size: int, options: Any) -> dict[str, Wanted]:
    """The sum over ranks of the products of this rank's rows."""
    parts = []
    for source in range(size):
        x = draw("x", source)
        own = slice(rank * len(x) // size, (rank + 1) * len(x) // size)
        parts.append(x[own].double() @ draw("w", source).double().t())
    return {"out": Wanted.sum(parts)}


def bulk_ag(draw: Draw, rank: int, size: int, options: Any) -> dict[str, Wanted]:
    """The gathered rows, and the product beside them."""
    product = draw("dy", rank).double() @ draw("w", rank).double()
    rows = gathered(draw, "x", size).to(torch.bfloat16)
    return {"gathered": Wanted.rows(rows), "dx": Wanted.of(product)}


def bulk_rs(draw: Draw, rank: int, size: int, options: Any) -> dict[str, Wanted]:
    """The sum over ranks of the own rows of dx, bit by bit, and the weight gradient."""
    total = draw("dx", 0).chunk(size)[rank].float()
    for source in range(1, size):
        # FP32 in this order is what is promised.
        total = total + draw("dx", source).chunk(size)[rank].float()
    product = draw("dy", rank).double().t() @ draw("x", rank).double()
    return {"dx_shard": Wanted.rows(total.to(torch.bfloat16)), "dw": Wanted.of(product)}


def bulk_column(draw: Draw, rank: int, size: int, options: Any) -> dict[str, Wanted]:
    """The sum over ranks of the own rows of dy times w, each product rounded; and dy.T times x."""
    parts = [
        draw("dy", source).chunk(size)[rank].double() @ draw("w", source).double()
        for source in range(size)
    ]
    product = draw("dy", rank).double().t() @ gathered(draw, "x", size).double()
    return {"dx_shard": Wanted.sum(parts), "dw": Wanted.of(product)}
