"""What `bench` measures: shapes by name or size, and those of the queue-order ablation."""

from __future__ import annotations

from dataclasses import dataclass

from kosmos_heuristics.shapes import LLAMA3_OPS, llama3

from kosmos_tpsp.ops.catalog import DRIVERS, Shape

# Paper, Tables A.2 and A.3.
ORDER_ABLATION = {
    "ag_gemm": {
        "tn": ("70B-FC1-MBS8", "405B-QKV-MBS8"),
        "nn": ("70B-Down-MBS8", "405B-OProj-MBS8"),
    },
    "gemm_rs": {"tn": ("8B-OProj-MBS8", "70B-Down-MBS8")},
}


@dataclass(frozen=True)
class Case:
    """One shape to measure.

    Attributes:
        name: as the tables and pictures show it.
        m: rows of the GEMM's output, over all ranks where they are the tokens.
        n: its columns.
        k: its contraction.
        layout: "tn" or "nn".
        op: the operation.
        dtype: of the operands.
    """

    name: str
    m: int
    n: int
    k: int
    layout: str = "tn"
    op: str = "ag_gemm"
    dtype: str = "bf16"

    @property
    def flops(self) -> int:
        """Floating-point operations of one rank's GEMM."""
        return 2 * self.m * self.n * self.k

    @property
    def shape(self) -> Shape:
        """(m, n, k)."""
        return self.m, self.n, self.k

    def remote_bytes(self, world_size: int) -> int:
        """Bytes that each rank receives from its peers."""
        return DRIVERS[self.op].remote_bytes(self.shape, world_size, self.dtype)

    @property
    def tokens(self) -> int:
        """Tokens over all ranks."""
        return DRIVERS[self.op].num_tokens(self.shape)

    @property
    def width(self) -> int:
        """Features of the workspace that it takes."""
        return DRIVERS[self.op].room(self.shape, self.dtype)


def parse_cases(spec: str, layout: str, world_size: int, op: str = "ag_gemm") -> list[Case]:
    """Cases from `llama3`, names of its shapes, or sizes `m,n,k`, with semicolons between them.

    Raises:
        ValueError: a part is none of these, or its rows cannot be divided over the ranks.
    """
    layouts = LLAMA3_OPS[op]
    if layout not in layouts:
        raise ValueError(f"layout: got {layout!r} for {op}, wanted one of {', '.join(layouts)}")
    cases: list[Case] = []
    for part in filter(None, (text.strip() for text in spec.split(";"))):
        cases += _table(op, layout) if part == "llama3" else [_case(part, op, layout)]
    if not cases:
        raise ValueError(f"shapes: got {spec!r}, wanted at least one shape")
    for case in cases:
        if case.tokens % world_size:
            what = DRIVERS[op].tokens
            raise ValueError(
                f"shapes: {what} = {case.tokens} of {case.name} does not divide over {world_size} "
                f"ranks; use a multiple of {world_size}"
            )
    return cases


def order_cases(op: str = "ag_gemm") -> list[Case]:
    """The shapes of the queue-order ablation, in all layouts."""
    return [
        case
        for layout, names in ORDER_ABLATION[op].items()
        for case in _table(op, layout)
        if case.name in names
    ]


def _table(op: str, layout: str) -> list[Case]:
    return [Case(s.name, s.m, s.n, s.k, layout, op) for s in llama3(op, layout)]


def _case(part: str, op: str, layout: str) -> Case:
    for known in _table(op, layout):
        if known.name.lower() == part.lower():
            return known
    sizes = part.split(",")
    if len(sizes) != 3 or not all(s.strip().isdigit() and int(s) > 0 for s in sizes):
        raise ValueError(
            f"shapes: got {part!r}, wanted llama3, a shape's name (8B-FC1-MBS1) or m,n,k as three "
            "positive integers"
        )
    m, n, k = map(int, sizes)
    return Case(f"{m}x{n}x{k}", m, n, k, layout, op)
