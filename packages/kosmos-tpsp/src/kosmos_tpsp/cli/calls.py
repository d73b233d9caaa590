"""Calls that the checks make: shapes, random operands, what they must give, and verdicts."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from kosmos_tpsp.exact import Wanted
from kosmos_tpsp.ops import mx
from kosmos_tpsp.ops.ag_gemm import AgGemmOptions
from kosmos_tpsp.ops.catalog import Driver, driver_of
from kosmos_tpsp.workspaces import TpSpWorkspace

# Unit roundoff of bf16 is 2**-8 = 3.9e-3: one rounding of an exact sum stays below it, element by
# element and so in every norm. FP32 accumulation adds less than 1e-5 of a row's norm.
TOLERANCE = 4e-3


@dataclass(frozen=True)
class Call:
    """One collective call.

    Attributes:
        m: rows of the GEMM's output, over all ranks where they are the tokens.
        n: its columns.
        k: its contraction.
        data: which random operands; equal numbers give equal operands.
        options: choices of the call, the same on all ranks but for the cap; their type says which
            op it is.
        dtype: of the operands, "bf16" or "mxfp8".
    """

    m: int
    n: int
    k: int
    data: int = 0
    options: Any = field(default_factory=AgGemmOptions)
    dtype: str = "bf16"

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

    @property
    def tokens(self) -> int:
        """Tokens over all ranks."""
        return self.driver.num_tokens(self.shape)

    @property
    def layout(self) -> str:
        """Layout of its GEMM."""
        return self.driver.layout_of(self.options)

    def remote_bytes(self, size: int) -> int:
        """Bytes that cross ranks, into and out of each one."""
        return self.driver.remote_bytes(self.shape, size, self.dtype)

    @property
    def room(self) -> int:
        """Features of the workspace that it takes."""
        return self.driver.room(self.shape, self.dtype)

    def in_mxfp8(self, ranks: int) -> Call:
        """The call with operands in MXFP8, on whole groups of tokens where they must be."""
        whole = self.driver.granule("mxfp8") * ranks
        tokens = -(-self.tokens // whole) * whole
        m, n, k = self.driver.shape_of(tokens, self.n, self.driver.other_of(self.shape))
        return replace(self, m=m, n=n, k=k, dtype="mxfp8")

    def __str__(self) -> str:
        shape = f"m={self.m} n={self.n} k={self.k}"
        shape += "" if self.dtype == "bf16" else f" {self.dtype}"
        order = getattr(self.options, "order", "")
        return f"{self.op} {self.layout} {shape} {self.options.policy} {order}".rstrip()


@dataclass(frozen=True)
class Verdict:
    """What one call gave on one rank.

    Attributes:
        call: the call.
        rank: the rank.
        path: "fused" or "reference".
        transport: what the plan chose.
        launches: kernels launched.
        rel_err: ||out - reference|| / ||reference||, reference in FP64, of the worst output.
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


class Operands:
    """Random operands by seed: every rank can make every rank's, so no exchange is needed.

    Args:
        seed: of all operands.
        size: number of ranks.
        device: where they live; equal devices draw equal numbers.
        keep: calls of which is kept what they must give.
    """

    def __init__(self, seed: int, size: int, device: torch.device, keep: int = 0) -> None:
        self.size = size
        self._keep = keep
        self._wanted: dict[tuple[Call, int], dict[str, Wanted]] = {}
        self._seed = seed
        self._device = device

    def _draw(self, shape: tuple[int, int], *name: object) -> torch.Tensor:
        generator = torch.Generator(self._device)
        generator.manual_seed(zlib.crc32(repr((self._seed, *name, shape)).encode()))
        drawn = torch.randn(shape, generator=generator, device=self._device)
        return drawn.to(torch.bfloat16)

    def one(self, call: Call, name: str, rank: int) -> torch.Tensor:
        """An operand of `rank`, bf16; the values of one in MXFP8, float64."""
        drawn = self._one(call, name, rank)
        values: torch.Tensor = drawn.dequantize(torch.float64) if mx.is_mx(drawn) else drawn
        return values

    def _one(self, call: Call, name: str, rank: int) -> Any:
        shape = call.driver.operand_shapes(call.shape, self.size, call.options)[name]
        drawn = self._draw(shape, name, call.data, rank)
        if call.dtype == "bf16":
            return drawn
        axis = call.driver.quantised(call.options).get(name)
        return drawn if axis is None else mx.quantized(drawn, axis)

    def given(self, call: Call, rank: int) -> dict[str, Any]:
        """The operands of `rank` by name, bf16 or MXFP8.

        On data of odd numbers a local operand comes as values, where an op takes those.
        """
        drawn = {name: self._one(call, name, rank) for name in call.driver.operands}
        scaled = getattr(call.options, "block_scaled", None)
        if call.data % 2 and call.dtype == "mxfp8" and not scaled:
            for name in drawn.keys() - {call.driver.carries}:
                # Beside one that crosses ranks they are padded as that is.
                padding = bool(call.driver.carries)
                drawn[name] = mx.as_operand(drawn[name], False, padding)
        return drawn

    def memory(self, call: Call, fill: float = float("nan")) -> dict[str, torch.Tensor]:
        """Memory for every output that a call may be given any for, bf16, filled with a number."""
        shapes = call.driver.output_shapes(call.shape, self.size, call.options)
        return {
            name: torch.full(shapes[name], fill, dtype=torch.bfloat16, device=self._device)
            for name in call.driver.into(call.options)
        }

    def wanted(self, call: Call, rank: int) -> dict[str, Wanted]:
        """What `rank` must be given, by name of the output."""
        wanted = self._wanted.get((call, rank))
        if wanted is None:
            draw = partial(self.one, call)
            wanted = call.driver.wanted(draw, rank, self.size, call.options)
            if len(self._wanted) < self._keep:
                self._wanted[call, rank] = wanted
        return wanted


def lasting(outs: dict[str, torch.Tensor], workspace: TpSpWorkspace) -> dict[str, torch.Tensor]:
    """Outputs that a later call leaves alone: what lies in the workspace is copied.

    That waits for the call, whose memory the host reads, except where copies are queued as calls
    are.
    """
    if not any(workspace.holds(t) for t in outs.values()):
        return outs
    if workspace.world.device.type != "cuda":
        workspace.world.synchronize()
    return {name: t.clone() if workspace.holds(t) else t for name, t in outs.items()}


def owned(outs: dict[str, torch.Tensor], workspace: TpSpWorkspace) -> dict[str, torch.Tensor]:
    """The outputs of an aborted call that are the caller's: the rest may be of an earlier call."""
    return {name: t for name, t in outs.items() if not workspace.holds(t)}


def compare_all(
    outs: Mapping[str, torch.Tensor], wanted: Mapping[str, Wanted]
) -> tuple[float, str]:
    """Largest relative error of the outputs, and what is wrong with one of them ("" if nothing)."""
    worst, problem = 0.0, ""
    for name, right in wanted.items():
        if name not in outs:
            return float("inf"), f"{name}: missing"
        error, wrong = compare(outs[name], right)
        worst = max(worst, error)
        if wrong and not problem:
            problem = f"{name}: {wrong}" if len(wanted) > 1 else wrong
    return worst, problem


def known(
    outs: Mapping[str, torch.Tensor], wanted: Mapping[str, Wanted]
) -> dict[str, torch.Tensor]:
    """The outputs of an aborted call with the right values where they are NaN."""
    return {
        name: torch.where(outs[name].isnan(), right.values.to(torch.bfloat16), outs[name])
        for name, right in wanted.items()
        if name in outs
    }


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
    if wanted.moved:
        return (0.0, "") if same_bits(out, wanted.values) else _other_rows(out, wanted.values)
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


def _other_rows(out: torch.Tensor, rows: torch.Tensor) -> tuple[float, str]:
    other = (out.view(torch.int16) != rows.view(torch.int16)).any(dim=1)
    first = int(other.int().argmax())
    return float("inf"), f"{int(other.sum())} of {len(rows)} rows differ, the first is row {first}"


class Ledger:
    """First outputs of each key, to compare later ones with bit by bit.

    Args:
        only: calls whose outputs are kept; None keeps all.
    """

    def __init__(self, only: Collection[Call] | None = None) -> None:
        self._only = only
        self._first: dict[tuple[Call, int], dict[str, torch.Tensor]] = {}

    def repeats(self, call: Call, rank: int, outs: Mapping[str, torch.Tensor]) -> bool | None:
        """Whether the outputs have the bits of the first ones of the call; None for those."""
        first = self._first.get((call, rank))
        if first is not None:
            return first.keys() == outs.keys() and all(same_bits(first[n], outs[n]) for n in outs)
        if self._only is None or call in self._only:
            self._first[call, rank] = {name: out.clone() for name, out in outs.items()}
        return None


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two bf16 tensors are equal bit by bit (NaN included)."""
    return a.shape == b.shape and torch.equal(a.view(torch.int16), b.view(torch.int16))
