"""Calls that the checks make: shapes, random operands, what they must give, and verdicts."""

from __future__ import annotations

import zlib
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch

from kosmos_tpsp.ops.ag_gemm import AgGemmOptions
from kosmos_tpsp.ops.catalog import Driver, driver_of, layout_of

# Unit roundoff of bf16 is 2**-8 = 3.9e-3: one rounding of an exact sum stays below it, element by
# element and so in every norm. FP32 accumulation adds less than 1e-5 of a row's norm.
TOLERANCE = 4e-3


@dataclass(frozen=True)
class Call:
    """One collective call.

    Attributes:
        m: rows over all ranks.
        n: columns of the output.
        k: contraction.
        data: which random operands; equal numbers give equal operands.
        options: choices of the call, the same on all ranks but for the cap; their type says which
            op it is.
    """

    m: int
    n: int
    k: int
    data: int = 0
    options: Any = field(default_factory=AgGemmOptions)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(m, n, k)."""
        return self.m, self.n, self.k

    @property
    def driver(self) -> Driver:
        """How its op is called."""
        return driver_of(self.options)

    @property
    def op(self) -> str:
        """Its op."""
        return self.driver.name

    def out_shape(self, size: int) -> tuple[int, int]:
        """Shape of the output on each of `size` ranks."""
        return self.driver.out_rows(self.m, size), self.n

    def remote_bytes(self, size: int) -> int:
        """Bytes that cross ranks, into and out of each one."""
        return self.driver.remote_bytes(self.shape, size)

    def __str__(self) -> str:
        o = self.options
        shape = f"m={self.m} n={self.n} k={self.k}"
        return f"{self.op} {layout_of(o)} {shape} {o.policy} {o.order}"


@dataclass(frozen=True)
class Verdict:
    """What one call gave on one rank.

    Attributes:
        call: the call.
        rank: the rank.
        path: "fused" or "reference".
        transport: what the plan chose.
        launches: kernels launched.
        rel_err: ||out - reference|| / ||reference||, reference in FP64.
        repeated: whether an earlier call on the same operands gave the same bits; None: no such.
        problem: what is wrong, "" if nothing is.
        decline: why the fused path was not taken, "" if it was.
    """

    call: Call
    rank: int
    path: str
    transport: str
    launches: int
    rel_err: float
    repeated: bool | None
    problem: str
    decline: str = ""


@dataclass(frozen=True)
class Wanted:
    """What a call must give on a rank.

    Attributes:
        values: float64 matrix.
        size: float64 norm of each row, and of all that is rounded on the way to it together.
    """

    values: torch.Tensor
    size: torch.Tensor

    @classmethod
    def of(cls, values: torch.Tensor) -> Wanted:
        """Of values that are rounded once and for all."""
        return cls(values, values.double().norm(dim=1))


class Operands:
    """Random operands by seed: every rank can make every rank's, so no exchange is needed.

    Args:
        seed: of all operands.
        size: number of ranks.
        device: where they live; equal devices draw equal numbers.
        keep: products that are kept.
    """

    def __init__(self, seed: int, size: int, device: torch.device, keep: int = 0) -> None:
        self.size = size
        self._keep = keep
        self._products: dict[tuple[Call, int], Wanted] = {}
        self._seed = seed
        self._device = device

    def _draw(self, shape: tuple[int, int], *name: object) -> torch.Tensor:
        generator = torch.Generator(self._device)
        generator.manual_seed(zlib.crc32(repr((self._seed, *name, shape)).encode()))
        drawn = torch.randn(shape, generator=generator, device=self._device)
        return drawn.to(torch.bfloat16)

    def x(self, call: Call, rank: int) -> torch.Tensor:
        """[rows, k] bf16 of `rank`: a chunk of the rows, or all of them."""
        rows = call.driver.x_rows(call.m, self.size)
        return self._draw((rows, call.k), "x", call.data, rank)

    def w(self, call: Call, rank: int) -> torch.Tensor:
        """[n, k] (layout "tn") or [k, n] ("nn") bf16."""
        tn = layout_of(call.options) == "tn"
        shape = (call.n, call.k) if tn else (call.k, call.n)
        return self._draw(shape, "w", call.data, rank)

    def gathered(self, call: Call) -> torch.Tensor:
        """[m, k] bf16."""
        return torch.cat([self.x(call, rank) for rank in range(self.size)])

    def product(self, call: Call, rank: int) -> Wanted:
        """What `rank` must compute."""
        product = self._products.get((call, rank))
        if product is None:
            product = self._multiply(call, rank)
            if len(self._products) < self._keep:
                self._products[call, rank] = product
        return product

    def _multiply(self, call: Call, rank: int) -> Wanted:
        if call.op == "ag_gemm":
            w = self.w(call, rank).double()
            tn = layout_of(call.options) == "tn"
            return Wanted.of(self.gathered(call).double() @ (w.t() if tn else w))
        total = torch.zeros(call.out_shape(self.size), dtype=torch.float64, device=self._device)
        size = total.new_zeros(len(total))
        own = slice(rank * len(total), (rank + 1) * len(total))
        for source in range(self.size):
            part = self.x(call, source)[own].double() @ self.w(call, source).double().t()
            total += part
            size += part.norm(dim=1)
        # The parts are rounded too, and may cancel one another.
        return Wanted(total, size + total.norm(dim=1))


def compare(out: torch.Tensor, wanted: Wanted) -> tuple[float, str]:
    """Relative error in the Frobenius norm, and what is wrong with the worst row ("" if nothing).

    Args:
        out: bf16 matrix.
        wanted: what it must be.
    """
    if out.shape != wanted.values.shape:
        return float("inf"), f"shape {tuple(out.shape)} instead of {tuple(wanted.values.shape)}"
    if wanted.values.numel() == 0:
        return 0.0, ""
    difference = out.double() - wanted.values
    tiny = torch.finfo(torch.float64).tiny
    rows = difference.norm(dim=1) / wanted.size.clamp_min(tiny)
    # A row with a NaN must count as the worst.
    infinite = float("inf")
    rows = rows.nan_to_num(nan=infinite, posinf=infinite)
    row = int(rows.argmax())
    worst = float(rows[row])
    total = difference.norm() / wanted.values.norm().clamp_min(tiny)
    total = float(total.nan_to_num(nan=infinite, posinf=infinite))
    if worst > TOLERANCE:
        count = int((rows > TOLERANCE).sum())
        return total, f"{count} of {len(rows)} rows wrong, row {row} by {worst:.3g}"
    return total, ""


class Ledger:
    """First output of each key, to compare later ones with bit by bit.

    Args:
        only: calls whose outputs are kept; None keeps all.
    """

    def __init__(self, only: Collection[Call] | None = None) -> None:
        self._only = only
        self._first: dict[tuple[Call, int], torch.Tensor] = {}

    def repeats(self, call: Call, rank: int, out: torch.Tensor) -> bool | None:
        """Whether `out` has the bits of the first output of the call; None for the first one."""
        first = self._first.get((call, rank))
        if first is not None:
            return same_bits(first, out)
        if self._only is None or call in self._only:
            self._first[call, rank] = out.clone()
        return None


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two bf16 tensors are equal bit by bit (NaN included)."""
    return a.shape == b.shape and torch.equal(a.view(torch.int16), b.view(torch.int16))
