"""The benchmark's table and closing lines."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from kosmos_tpsp.bench import variants as v
from kosmos_tpsp.bench.results import Report, Row
from kosmos_tpsp.ops.catalog import DRIVERS

# Without a terminal rich assumes 80 columns; the table needs more.
FILE_WIDTH = 150
# Tables A.2 and A.3.
PAPER_ORDERS = {
    "ag_gemm": "chunk_major 1.06 to 1.36, naive 1.17 to 1.40",
    "gemm_rs": "row_major 1.41 to 1.45",
}


def console(*, stderr: bool = False) -> Console:
    """A console that does not squeeze tables into files."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else FILE_WIDTH, highlight=False)


def print_report(report: Report, to: Console) -> None:
    """Tables, geometric means, verdict."""
    if report.rows:
        to.print(_table(report))
    if report.orders:
        to.print(_orders(report))
    for line in closing_lines(report):
        to.print(line, markup=False, soft_wrap=True)


def summary(row: Row) -> str:
    """One line about a case that has just been measured."""
    times = ", ".join(f"{name} {t.median_ms:.3f}" for name, t in row.timings.items())
    wrong = "".join(f"; WRONG {name}: {how}" for name, how in row.wrong.items())
    return f"{row.case.name} {row.case.layout} ms: {times}{wrong}"


def closing_lines(report: Report) -> Iterator[str]:
    """What stands below the tables."""
    for row in report.rows:
        if row.decline is not None:
            yield f"declined {row.case.name}: {row.decline}"
    for name, reason in _unavailable(report).items():
        yield f"not measured: {name}: {reason}"
    for transport, gbps in report.peak_gbps.items():
        yield f"{transport} at its best: {gbps:.0f} GB/s into a rank"
    for entry, us in report.host_us.items():
        yield f"host time of a warm call, {entry}: {us:.1f} us"
    for wrong in report.wrong:
        yield f"WRONG {wrong}"
    if report.beaten_by_fixed:
        yield "a fixed split was faster on: " + ", ".join(report.beaten_by_fixed)
    if report.rows:
        slower = ", ".join(report.slower)
        yield f"slower than the baseline although accepted: {slower or 'none'}"


def _unavailable(report: Report) -> dict[str, str]:
    """Reasons that hold for all rows, once each; repeated plans are no news."""
    found: dict[str, str] = {}
    for row in report.rows:
        for name, reason in row.unavailable.items():
            if name in (v.ASYNC_TP, v.FUSED, v.SERIAL):
                found.setdefault(name, reason)
    return found


def _number(value: float | None, digits: int = 2, suffix: str = "") -> str:
    return "-" if value is None else f"{value:.{digits}f}{suffix}"


def _times(value: float | None) -> str:
    return _number(value, 2, "x")


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _table(report: Report) -> Table:
    first = report.rows[0]
    table = Table(
        title=(
            f"{report.op} {first.case.layout}, {first.case.dtype}, {first.world_size} ranks: "
            "fused and unfused"
        ),
        caption="speed-ups are rival / fused; * loses; declined rows are timed fused too",
    )
    for heading in ("shape", "plan"):
        table.add_column(heading, no_wrap=True)
    for heading in (
        "NCCL+cuBLAS ms", "fused ms", "spread", "TFLOPS", "speed-up", "async TP", "serial",
        *(["fused bf16"] if first.case.dtype == "mxfp8" else []),
        "best fixed", "GEMM/cuBLAS", "efficiency",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    for row in report.rows:
        table.add_row(*_cells(row), style="red" if row.loses else "")
    means = report.geomeans
    table.add_section()
    table.add_row(
        "geomean", "", "", "", "", "", _times(means["speedup_nccl_cublas"]),
        _times(means["speedup_async_tp"]), _times(means["speedup_serial"]),
        *([_times(means["speedup_fused_bf16"])] if first.case.dtype == "mxfp8" else []),
        _times(means["speedup_best_fixed"]), _share(means["gemm_ratio"]),
        _share(means["efficiency"]), style="bold",
    )  # fmt: skip
    return table


def _cells(row: Row) -> list[str]:
    plan = "-" if row.plan is None else f"{row.plan.transport} {row.plan.num_movers}"
    if not row.accepted:
        plan += " declined"
    fused = row.timings.get(v.FUSED)
    best = row.best_fixed
    split = "" if best is None else f" ({best.removeprefix(v.FIXED_PREFIX)})"
    speedups = row.speedups
    return [
        row.case.name,
        plan,
        _number(row.ms(v.BASELINE), 3),
        _number(row.ms(v.FUSED), 3),
        _share(None if fused is None else fused.spread),
        _number(None if fused is None else row.case.flops / (fused.median_ms * 1e9), 0),
        _times(speedups["nccl_cublas"]) + ("*" if row.loses else ""),
        _times(speedups["async_tp"]),
        _times(speedups["serial"]),
        *([_times(speedups["fused_bf16"])] if row.case.dtype == "mxfp8" else []),
        _times(speedups["best_fixed"]) + split,
        _share(row.gemm_ratio),
        _share(row.efficiency),
    ]


def _orders(report: Report) -> Table:
    table = Table(
        title=f"queue order: time over that of {DRIVERS[report.op].orders[0]}",
        caption=f"the paper, on MI350X: {PAPER_ORDERS[report.op]}",
    )
    table.add_column("shape")
    table.add_column("layout")
    found = report.order_ratios()
    orders = list(dict.fromkeys(order for entry in found for order in entry["ratio"]))
    for order in orders:
        table.add_column(order, justify="right")
    for entry in found:
        ratios = [_times(entry["ratio"].get(order)) for order in orders]
        table.add_row(entry["shape"], entry["layout"], *ratios)
    return table
