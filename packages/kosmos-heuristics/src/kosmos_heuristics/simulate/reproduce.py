"""The paper's tables, simulated cell by cell, with the errors against what was printed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kosmos_heuristics.simulate.model import SimMachine
from kosmos_heuristics.simulate.simulate import baseline_ms, simulate, simulate_moe
from kosmos_heuristics.simulate.tables import (
    MOE_MODELS,
    moe_case,
    moe_cells,
    read_table,
    tpsp_cells,
)
from kosmos_heuristics.simulate.tpsp import Case

TABLES = ("tpsp", "moe", "policy", "orders")
Machines = dict[str, SimMachine]
Tick = Callable[[int, int], None]


@dataclass(frozen=True)
class Row:
    """One simulated figure beside the printed one.

    Args:
        group: What statistics are taken over.
        label: The cell.
        simulated: Simulated figure: milliseconds, or a ratio of times.
        printed: The paper's; None for a machine whose table is not printed.
        simulated_speedup: Simulated baseline over simulated time, where there is a baseline.
        printed_speedup: The paper's.
    """

    group: str
    label: str
    simulated: float
    printed: float | None
    simulated_speedup: float | None = None
    printed_speedup: float | None = None

    @property
    def error(self) -> float | None:
        """Relative error of the simulated figure."""
        return None if self.printed is None else self.simulated / self.printed - 1.0


@dataclass(frozen=True)
class Summary:
    """Errors of a group: of its figures, and of the geometric mean of its speed-ups."""

    group: str
    cells: int
    median_error: float | None
    worst_error: float | None
    simulated_geomean: float | None
    printed_geomean: float | None


def geomean(values: Sequence[float]) -> float:
    """Geometric mean."""
    return math.exp(statistics.fmean(math.log(value) for value in values))


def reproduce(table: str, machines: Machines, tick: Tick = lambda done, total: None) -> list[Row]:
    """Simulate a table.

    Args:
        table: ``tpsp`` (Tables C.3 to C.11), ``moe`` (the 72 MoE cells), ``policy`` (Table 2) or
            ``orders`` (Tables A.2, A.3 and A.5).
        machines: The machine by dtype. Times are printed for the MI350X only, Table 2 also for the
            MI355X.
        tick: Called with cells done and cells in all.
    """
    rows = {"tpsp": _tpsp, "moe": _moe, "policy": _policy, "orders": _orders}[table](machines, tick)
    if table == "policy" or machines["bf16"].name == "mi350x":
        return rows
    return [replace(row, printed=None, printed_speedup=None) for row in rows]


def summarise(rows: Sequence[Row]) -> list[Summary]:
    """One summary a group, and one over all of them."""
    groups = list(dict.fromkeys(row.group for row in rows))
    parts = [(group, [row for row in rows if row.group == group]) for group in groups]
    if len(groups) > 1:
        parts.append(("all", list(rows)))
    return [_summary(group, part) for group, part in parts]


def _summary(group: str, rows: Sequence[Row]) -> Summary:
    errors = [abs(row.error) for row in rows if row.error is not None]
    simulated = [row.simulated_speedup for row in rows if row.simulated_speedup is not None]
    printed = [row.printed_speedup for row in rows if row.printed_speedup is not None]
    return Summary(
        group,
        len(rows),
        statistics.median(errors) if errors else None,
        max(errors) if errors else None,
        geomean(simulated) if simulated else None,
        geomean(printed) if printed else None,
    )


def _tpsp(machines: Machines, tick: Tick) -> list[Row]:
    rows, cells = [], tpsp_cells()
    for index, cell in enumerate(cells):
        outcome = simulate(cell.case, machines[cell.case.dtype])
        rows.append(
            Row(
                f"{cell.case.kernel} {cell.case.dtype}",
                cell.label,
                outcome.time_ms,
                cell.kosmos_ms,
                baseline_ms(cell.case, machines[cell.case.dtype]) / outcome.time_ms,
                cell.base_ms / cell.kosmos_ms,
            )
        )
        tick(index + 1, len(cells))
    return rows


_POLICY_KERNELS = {"AG+TN": "ag_gemm_tn", "TN+RS": "gemm_rs", "AG+NN": "ag_gemm_nn"}


def policy_cases(kernel: str) -> list[Case]:
    """The 24 BF16 shapes of a kernel: Llama 3 8B, 70B and 405B, micro-batch sizes 1 to 8."""
    shapes = {
        "ag_gemm_tn": ((13312, 16384), (2304, 16384), (7168, 8192), (1280, 8192), (3584, 4096),
                       (768, 4096)),
        "gemm_rs": ((16384, 6656), (16384, 2048), (8192, 3584), (8192, 1024), (4096, 1792),
                    (4096, 512)),
        "ag_gemm_nn": ((6656, 16384), (2048, 16384), (3584, 8192), (1024, 8192), (1792, 4096),
                       (512, 4096)),
    }  # fmt: skip
    return [Case(kernel, 8192 * b, n, k) for b in (1, 2, 4, 8) for n, k in shapes[kernel]]


def _moe(machines: Machines, tick: Tick) -> list[Row]:
    rows, cells = [], moe_cells()
    for index, cell in enumerate(cells):
        time = simulate_moe(cell.case, machines[cell.case.dtype]).time_ms
        rows.append(Row(cell.group, cell.label, time, cell.kosmos_ms))
        tick(index + 1, len(cells))
    return rows


def _policy(machines: Machines, tick: Tick) -> list[Row]:
    gpu = machines["bf16"].name.upper()
    wanted = [
        row for row in read_table("policy") if row["gpu"] == gpu and row["speedup_over_fixed"]
    ]
    rows = []
    for index, row in enumerate(wanted):
        if row["scope"] == "tpsp":
            kernel = _POLICY_KERNELS[row["case"]]
            ratios = policy_ratios(kernel, row["policy"], machines["bf16"])
        else:
            ratios = moe_policy_ratios(row["case"], row["policy"], machines["bf16"])
        label = f"{row['case']} {row['policy']}"
        scope = {"tpsp": "TP+SP", "moe": "MoE"}[row["scope"]]
        rows.append(Row(scope, label, geomean(ratios), float(row["speedup_over_fixed"])))
        tick(index + 1, len(wanted))
    return rows


def moe_policy_ratios(which: str, policy: str, machine: SimMachine) -> list[float]:
    """Time of the fixed crew over that of a policy, by model: ``fwd balanced`` and so on."""
    direction, routing = which.split()
    ratios = []
    for model in MOE_MODELS:
        case = moe_case(model, {"fwd": "forward", "bwd": "backward"}[direction], "bf16", routing)
        case = replace(case, crew=saturating_crew(machine))
        fixed = simulate_moe(replace(case, policy="fixed"), machine).time_ms
        ratios.append(fixed / simulate_moe(replace(case, policy=policy), machine).time_ms)
    return ratios


def saturating_crew(machine: SimMachine, peers: int = 7) -> int:
    """A crew close to the push bandwidth, as the fixed one of the paper's Figure A.4."""
    limit = machine.link_gbps * (peers if machine.topology == "mesh" else 1)
    return machine.saturating_crew(machine.push_gbps, limit, 8)


def policy_ratios(kernel: str, policy: str, machine: SimMachine) -> list[float]:
    """Time of the fixed crew of 8 per peer over that of a policy with the rules' crew, by shape."""
    ratios = []
    for case in policy_cases(kernel):
        fixed = simulate(replace(case, policy="fixed", crew=8), machine).time_ms
        ratios.append(fixed / simulate(replace(case, policy=policy), machine).time_ms)
    return ratios


# Shape, kernel and sizes, alternative order, the table's text for it.
_ORDERS = (
    ("70B-FC1-MBS8", "ag_gemm_tn", (65536, 7168, 8192)),
    ("405B-QKV-MBS8", "ag_gemm_tn", (65536, 2304, 16384)),
    ("70B-Down-MBS8", "ag_gemm_nn", (65536, 3584, 8192)),
    ("405B-OProj-MBS8", "ag_gemm_nn", (65536, 2048, 16384)),
    ("8B-OProj-MBS8", "gemm_rs", (65536, 4096, 512)),
    ("70B-Down-MBS8", "gemm_rs", (65536, 8192, 3584)),
)
_VARIANTS = {"chunk-major": "chunk_major", "naive": "naive", "row-major": "row_major"}


def _orders(machines: Machines, tick: Tick) -> list[Row]:
    printed = [
        (row["shape"], row["op"] == "TN+RS", row["variant"].split()[0], float(row["ratio_printed"]))
        for row in read_table("ablations")
        if row["table"] in ("A.2", "A.3") and row["ratio_printed"]
    ]
    rows = []
    for index, (shape, reduces, variant, ratio) in enumerate(printed):
        kernel, sizes = next(
            (kernel, sizes)
            for name, kernel, sizes in _ORDERS
            if name == shape and (kernel == "gemm_rs") == reduces
        )
        case = Case(kernel, *sizes)
        other = replace(case, order=_VARIANTS[variant])
        machine = machines["bf16"]
        simulated = simulate(other, machine).time_ms / simulate(case, machine).time_ms
        rows.append(Row("order", f"{kernel} {shape} {variant}", simulated, ratio))
        tick(index + 1, len(printed))
    return rows + _push_orders(machines["bf16"])


def _push_orders(machine: SimMachine) -> list[Row]:
    rows = []
    for row in read_table("ablations"):
        if row["table"] == "A.5" and row["ratio_printed"]:
            case = moe_case("DeepSeek-V3", row["phase"], "bf16", row["routing"])
            major = replace(case, push_order="destination_major")
            ratio = simulate_moe(major, machine).time_ms / simulate_moe(case, machine).time_ms
            label = f"moe_{row['phase']} {row['routing']} destination-major"
            rows.append(Row("push order", label, ratio, float(row["ratio_printed"])))
    return rows
