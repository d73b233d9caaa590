"""What `bench ag_gemm` measures: shapes by name or size, and those of the queue-order ablation."""

from __future__ import annotations

from dataclasses import dataclass

from kosmos_heuristics.problems import LAYOUTS
from kosmos_heuristics.shapes import llama3

# Paper, Table A.2.
ORDER_ABLATION = {
    "tn": ("70B-FC1-MBS8", "405B-QKV-MBS8"),
    "nn": ("70B-Down-MBS8", "405B-OProj-MBS8"),
}


@dataclass(frozen=True)
class Case:
    """One shape to measure.

    Attributes:
        name: as the tables and pictures show it.
        m: gathered rows, over all ranks.
        n: columns of the local output.
        k: contraction.
        layout: "tn" or "nn".
    """

    name: str
    m: int
    n: int
    k: int
    layout: str = "tn"

    @property
    def flops(self) -> int:
        """Floating-point operations of one rank's GEMM."""
        return 2 * self.m * self.n * self.k

    def remote_bytes(self, world_size: int) -> int:
        """Bytes that each rank receives from its peers."""
        return (world_size - 1) * (self.m // world_size) * self.k * 2


def parse_cases(spec: str, layout: str, world_size: int) -> list[Case]:
    """Cases from `llama3`, names of its shapes, or sizes `m,n,k`, with semicolons between them.

    Raises:
        ValueError: a part is none of these, or its rows cannot be divided over the ranks.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout: got {layout!r}, wanted one of {', '.join(LAYOUTS)}")
    cases: list[Case] = []
    for part in filter(None, (text.strip() for text in spec.split(";"))):
        cases += _table(layout) if part == "llama3" else [_case(part, layout)]
    if not cases:
        raise ValueError(f"shapes: got {spec!r}, wanted at least one shape")
    for case in cases:
        if case.m % world_size:
            raise ValueError(
                f"shapes: m = {case.m} of {case.name} does not divide over {world_size} ranks; "
                f"use a multiple of {world_size}"
            )
    return cases


def order_cases() -> list[Case]:
    """The shapes of the queue-order ablation, both layouts."""
    return [
        c for layout, names in ORDER_ABLATION.items() for c in _table(layout) if c.name in names
    ]


def _table(layout: str) -> list[Case]:
    return [Case(s.name, s.m, s.n, s.k, layout) for s in llama3("ag_gemm", layout)]


def _case(part: str, layout: str) -> Case:
    for known in _table(layout):
        if known.name.lower() == part.lower():
            return known
    sizes = part.split(",")
    if len(sizes) != 3 or not all(s.strip().isdigit() and int(s) > 0 for s in sizes):
        raise ValueError(
            f"shapes: got {part!r}, wanted llama3, a shape's name (8B-FC1-MBS1) or m,n,k as three "
            "positive integers"
        )
    m, n, k = map(int, sizes)
    return Case(f"{m}x{n}x{k}", m, n, k, layout)
