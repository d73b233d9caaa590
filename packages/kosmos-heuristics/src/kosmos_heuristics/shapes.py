"""The Llama 3 shapes of the paper's tables, with the times printed there."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources

from kosmos_heuristics.checks import check_choice
from kosmos_heuristics.errors import ProblemError
from kosmos_heuristics.problems import LAYOUTS

# Layouts that an operation has a table of.
LLAMA3_OPS = {
    "ag_gemm": LAYOUTS,
    "gemm_rs": ("tn",),
    "bulk_ag": ("nn",),
    "bulk_rs": ("nt",),
}


@dataclass(frozen=True)
class LlamaShape:
    """One shape of a table: sizes of one rank's GEMM at TP 8, times on MI350X in BF16.

    Args:
        model: ``8B``, ``70B`` or ``405B``.
        layer: Layer, such as ``FC1`` or ``OProj``.
        mbs: Microbatch size; the sequence length is 8192.
        m: Rows of the GEMM's output (tokens; of ``bulk_rs`` the local width).
        n: Columns of the local output.
        k: Contraction (of ``bulk_rs`` the tokens).
        base_ms: The paper's time of collective and GEMM in sequence.
        kosmos_ms: The paper's time of its fused kernel.
        speedup: As printed, ``base_ms / kosmos_ms`` up to rounding.
    """

    model: str
    layer: str
    mbs: int
    m: int
    n: int
    k: int
    base_ms: float
    kosmos_ms: float
    speedup: float

    @property
    def name(self) -> str:
        """Name as the paper writes it, ``70B-FC1-MBS8``."""
        return f"{self.model}-{self.layer}-MBS{self.mbs}"


def llama3(op: str, layout: str = "tn") -> tuple[LlamaShape, ...]:
    """The 24 Llama 3 shapes of an operation, in the table's order.

    Args:
        op: ``ag_gemm``, ``gemm_rs``, ``bulk_ag`` or ``bulk_rs``.
        layout: ``tn`` (Tables C.3 and C.5) or, of ``ag_gemm``, ``nn`` (Table C.7); ``nn`` of
            ``bulk_ag`` (Table C.9), ``nt`` of ``bulk_rs`` (Table C.11).

    Raises:
        ProblemError: No table of that operation or layout.
    """
    check_choice(ProblemError, "op", op, tuple(LLAMA3_OPS), "use an operation with a table")
    check_choice(ProblemError, "layout", layout, LLAMA3_OPS[op], "use a layout with a table")
    path = resources.files("kosmos_heuristics") / "data" / "llama3_shapes.json"
    rows = json.loads(path.read_text("utf-8"))[op][layout]
    return tuple(LlamaShape(**row) for row in rows)
