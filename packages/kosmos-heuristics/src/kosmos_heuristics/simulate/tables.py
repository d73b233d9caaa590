"""The paper's tables as data: cases to simulate, and times to compare with.

Only ``reproduce`` and ``calibrate`` read them; what is simulated does not depend on them.
"""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from kosmos_heuristics.errors import MachineError
from kosmos_heuristics.parts import FIX
from kosmos_heuristics.simulate.moe import MoeCase
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


def measured_cells(path: str, fitted: bool) -> list[Cell]:
    """Measured ``ag_gemm`` calls in BF16 at TP 2 of a file of the user's.

    Args:
        path: JSON: ``runs``, each with ``fitted`` and ``rows`` of m, n, k, movers, fused_ms and
            serial_ms.
        fitted: Whether to read the runs marked so, or the others.

    Raises:
        MachineError: The file does not hold such runs.
    """
    try:
        runs = json.loads(Path(path).read_text("utf-8"))["runs"]
        rows = [row for run in runs if run["fitted"] == fitted for row in run["rows"]]
        cells = [
            Cell(
                Case("ag_gemm_tn", row["m"], row["n"], row["k"], world_size=2, crew=row["movers"]),
                f"{row['m']}x{row['n']}x{row['k']}",
                float(row["serial_ms"]),
                float(row["fused_ms"]),
            )
            for row in rows
        ]
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError) as error:
        raise MachineError("measured", path, f"runs of ag_gemm ({error})", FIX) from error
    if not cells:
        raise MachineError("measured", path, f"a run with fitted {fitted}", FIX)
    return cells


# Hidden size, expert width, experts, experts of a token. Hidden x width x top-k is what the printed
# TFLOPS imply; the factors and the number of experts are public configurations.
MOE_MODELS = {
    "DeepSeek-V3": (7168, 2048, 256, 8),
    "Kimi-K2.7-Code": (7168, 2048, 384, 8),
    "Qwen3-235B": (4096, 1536, 128, 8),
    "Qwen3-30B": (2048, 768, 128, 8),
    "Llama 4 Scout": (5120, 8192, 16, 1),
    "Llama 4 Maverick": (5120, 8192, 128, 1),
    "GLM-5.2": (6144, 2048, 256, 8),
    "Qwen3.5-397B": (4096, 1024, 512, 10),
    "DeepSeek-V4-Pro": (7168, 3072, 384, 6),
}
MOE_TOKENS = 8192
# Load of the busiest rank over the mean in the paper's skewed runs, which it does not print: the
# number that fits its 36 skewed cells best.
PAPER_SKEW = 2.3
_DIRECTIONS = {"fwd": "forward", "bwd": "backward"}


def moe_case(model: str, direction: str, dtype: str, routing: str) -> MoeCase:
    """A case of the paper's MoE benchmark: sequence 4096, micro-batch size 2, EP 8."""
    hidden, inter, experts, topk = MOE_MODELS[model]
    skew = PAPER_SKEW if routing == "skewed" else 1.0
    return MoeCase(direction, MOE_TOKENS, hidden, inter, experts, topk, dtype, skew=skew)


@dataclass(frozen=True)
class MoeCell:
    """A measured MoE cell: the call, its row's label and the fused layer's time."""

    case: MoeCase
    group: str
    label: str
    kosmos_ms: float


def moe_cells() -> list[MoeCell]:
    """The 72 MI350X cells of the MoE benchmark."""
    return [
        MoeCell(
            moe_case(row["model"], _DIRECTIONS[row["direction"]], row["dtype"], row["routing"]),
            f"{row['direction']} {row['dtype']} {row['routing']}",
            row["model"],
            float(row["kosmos_ms"]),
        )
        for row in read_table("moe_mi350x")
    ]
