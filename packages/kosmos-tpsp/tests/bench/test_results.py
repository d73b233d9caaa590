"""Verdicts, geometric means, table and picture, from times that are made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kosmos_core.testing.bench import Timing
from kosmos_tpsp.bench import figure
from kosmos_tpsp.bench import variants as v
from kosmos_tpsp.bench.cases import Case
from kosmos_tpsp.bench.report import console, print_report
from kosmos_tpsp.bench.results import Report, Row


def timing(ms: float) -> Timing:
    return Timing.of([[ms, ms]])


def row(name: str, fused: float, baseline: float, **fields: Any) -> Row:
    case = Case(name, 8192, 1024, 4096)
    timings = {v.FUSED: timing(fused), v.BASELINE: timing(baseline), v.GEMM_VENDOR: timing(0.5)}
    return Row(case, 2, {**timings, **fields.pop("more", {})}, None, **fields)


def test_only_accepted_rows_can_break_the_promise_and_all_rows_count() -> None:
    report = Report(
        (
            row("fast", 1.0, 2.0),
            row("equal", 1.0, 0.995),
            row("slow", 1.0, 0.9),
            row("refused", 1.0, 0.5, decline="would lose"),
        )
    )
    assert report.slower == ["slow"]
    assert [r.loses for r in report.rows] == [False, True, True, True]
    assert report.geomeans["speedup_nccl_cublas"] == pytest.approx((2 * 0.995 * 0.9 * 0.5) ** 0.25)
    assert report.geomeans["speedup_async_tp"] is None


def test_efficiency_takes_the_longer_of_gemm_and_bytes() -> None:
    gemm_bound = row("gemm", 1.0, 1.0, peak_gbps=350.0)
    assert gemm_bound.efficiency == 0.5
    # 4096 rows of 4096 elements of 2 bytes at 40 GB/s.
    bytes_bound = row("bytes", 1.0, 1.0, peak_gbps=40.0)
    assert bytes_bound.efficiency == pytest.approx(4096 * 4096 * 2 / 40e6)


def test_the_table_marks_what_loses_and_says_why_rows_are_declined(
    capsys: pytest.CaptureFixture[str],
) -> None:
    more = {v.ASYNC_TP: timing(1.5), "fixed_8": timing(1.25), v.GEMM_OWN: timing(0.625)}
    rows = (row("slow", 1.0, 0.9, more=more), row("refused", 1.0, 2.0, decline="would lose"))
    report = Report(rows, host_us={"ag_gemm": 31.25}, peak_gbps={"push": 351.4})
    print_report(report, console())
    shown = capsys.readouterr().out
    lines = [line for line in shown.splitlines() if "slow " in line]
    for cell in ("0.90x*", "1.50x", "1.25x (8)", "80.0%"):
        assert cell in lines[0]
    assert "declined refused: would lose" in shown
    assert "push at its best: 351 GB/s" in shown
    assert "ag_gemm: 31.2 us" in shown
    assert "slower than the baseline although accepted: slow" in shown


def test_a_picture_needs_something_to_show(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one"):
        figure.draw(Report(()), tmp_path / "empty.png")
    assert not (tmp_path / "empty.png").exists()
