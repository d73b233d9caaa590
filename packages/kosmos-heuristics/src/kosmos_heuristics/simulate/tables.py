"""The paper's tables as data: cases to simulate, and times to compare with.

Only ``reproduce`` and ``calibrate`` read them; what is simulated does not depend on them.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from importlib import resources

from kosmos_heuristics.simulate.tpsp import Case

PAPER_KERNELS = {
    "ag_gemm_fprop": "ag_gemm_tn",
    "ag_gemm_dgrad": "ag_gemm_nn",
    "gemm_rs_fprop": "gemm_rs",
    "bulk_ag_dgrad": "bulk_ag",
    "bulk_rs_wgrad": "bulk_rs",
}


@dataclass(frozen=True)
class Cell:
    """A measured TP+SP cell.

    Args:
        case: The call.
        label: Model, layer and micro-batch size.
        base_ms: RCCL, then hipBLASLt (BF16) or HipKittens (MXFP8).
        kosmos_ms: The fused kernel.
    """

    case: Case
    label: str
    base_ms: float
    kosmos_ms: float


def read_table(name: str) -> list[dict[str, str]]:
    """Rows of ``data/paper/NAME.csv``."""
    path = resources.files("kosmos_heuristics") / "data" / "paper" / f"{name}.csv"
    return list(csv.DictReader(path.read_text("utf-8").splitlines()))


def tpsp_cells() -> list[Cell]:
    """The 240 cells of Tables C.3 to C.11."""
    cells = []
    for row in read_table("tpsp_mi350x"):
        m, n, k = (int(row[name]) for name in ("m", "n", "k"))
        case = Case(PAPER_KERNELS[row["kernel"]], m, n, k, row["dtype"])
        label = f"{row['model']}-{row['layer']}-MBS{row['mbs']}"
        cells.append(Cell(case, label, float(row["base_ms"]), float(row["kosmos_ms"])))
    return cells
