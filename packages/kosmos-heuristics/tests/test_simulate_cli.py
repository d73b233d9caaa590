"""Commands of the simulator, and that what they simulate does not come from the tables."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import kosmos_heuristics
import pytest
from kosmos_heuristics.__main__ import main
from kosmos_heuristics.simulate.model import sim_machine
from kosmos_heuristics.simulate.reproduce import reproduce, summarise

CALLS = (
    ["simulate", "ag_gemm", "--m", "8192", "--n", "2304", "--k", "16384", "--json"],
    ["simulate", "gemm_rs", "--m", "8192", "--n", "4096", "--k", "512", "--dtype", "mxfp8"],
    [
        *("simulate", "moe_forward", "--tokens", "512", "--hidden", "512", "--inter", "256"),
        *("--experts", "16", "--topk", "2", "--skew", "2"),
    ],
)


def outputs(root: Path) -> list[str]:
    env = {**os.environ, "PYTHONPATH": str(root)}
    return [
        subprocess.run(
            [sys.executable, "-m", "kosmos_heuristics", *call],
            env=env,
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for call in CALLS
    ]


def test_without_the_papers_tables_the_same_times_are_simulated(tmp_path: Path) -> None:
    package = Path(kosmos_heuristics.__file__).parent
    shutil.copytree(package, tmp_path / "kosmos_heuristics")
    shutil.rmtree(tmp_path / "kosmos_heuristics" / "data" / "paper")
    assert outputs(tmp_path) == outputs(package.parent)


def test_json_trace_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, picture = tmp_path / "trace.json", tmp_path / "picture.png"
    assert main([*CALLS[0], "--trace", str(trace), "--png", str(picture)]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["time_ms"] > data["bound_ms"] > 0
    events = json.loads(trace.read_text())["traceEvents"]
    last = max(event["ts"] + event["dur"] for event in events)
    launch = sim_machine("mi350x").launch_us
    assert last == pytest.approx(data["time_ms"] * 1e3 - launch)
    assert {event["name"].split()[0] for event in events} == {"build", "move", "wait"}
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "gemm_rs", "--m", "8192", "--n", "4096"]) == 2
    assert capsys.readouterr().err == ("error: k: got None, wanted a positive size; pass --k\n")
    assert main([*CALLS[0], "--machine", "none"]) == 2
    assert "machine: got 'none'" in capsys.readouterr().err


def test_the_orders_of_the_paper_come_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "orders.csv"
    assert main(["reproduce", "--table", "orders", "--csv", str(path)]) == 0
    rows = list(csv.DictReader(path.open()))
    assert len(rows) == 14
    gathers = [abs(float(row["error"])) for row in rows if row["label"].startswith("ag_gemm")]
    assert len(gathers) == 8
    assert max(gathers) < 0.05
    assert "worst error" in capsys.readouterr().out


@pytest.mark.slow
def test_the_paper_s_tables_are_reproduced_as_far_as_the_documentation_says() -> None:
    machines = {dtype: sim_machine("mi350x", dtype) for dtype in ("bf16", "mxfp8")}
    whole = summarise(reproduce("tpsp", machines))[-1]
    assert whole.cells == 240
    assert whole.median_error < 0.05
    assert whole.worst_error < 0.20
    whole = summarise(reproduce("moe", machines))[-1]
    assert whole.cells == 72
    assert whole.median_error < 0.12
