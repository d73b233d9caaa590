"""The command line of the training: what it writes and says, and what it refuses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kosmos_core.trace import Span
from kosmos_tpsp.cli import relaunch

from integration.training import session
from integration.training.__main__ import main
from integration.training.presets import PRESETS, Sizes
from integration.training.run import EXACT, PLAIN
from integration.training.show import milliseconds, number
from integration.training.text import library_text
from integration.training.timeline import _from_zero

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def no_gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's path, whatever machine the tests run on."""
    if not any(request.node.iter_markers("multi_gpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.delenv("RANK", raising=False)


def test_a_run_says_and_writes_what_it_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "folder"
    arguments = ["--world", "cpu:2", "--layers", "1", "--steps", "5", "--verify", "--out", str(out)]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    report = json.loads((out / "report.json").read_text())
    summary = report["summary"]
    assert summary["steps"] == summary["compared_steps"] == len(report["steps"]) == 5
    assert summary["wrong_steps"] == []
    assert "5 steps compared: losses and gradients within BF16 tolerance" in shown
    assert len(re.findall(r"^ +\d+: \d\.\d{4} \d\.\d{4} \d\.\d{4} \| ", shown, re.MULTILINE)) == 5
    assert report["preset"]["layers"] == 1
    assert report["machine"]["world"] == "cpu:2"
    # Of attention and of the MLP: ag_gemm forward in the column layer and backward in the row
    # layer, gemm_rs forward in the row layer, bulk_ag and bulk_rs backward in the column layer.
    a_step = {"ag_gemm": 4, "gemm_rs": 2, "bulk_ag": 2, "bulk_rs": 2}
    assert report["launches"] == {name: 5 * count for name, count in a_step.items()}
    assert summary["fused_launches"] == 50
    assert summary["fused_launches_per_step"] == 10
    assert f"fused launches of a rank: {summary['fused_launches']}" in shown
    assert summary["tokens_per_s"] == pytest.approx(256 / summary["step_ms"] * 1e3)
    assert set(map(len, report["curves"].values())) == {5}
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert str(out / "loss.png") in shown
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == [
        "step-000004",
        "step-000005",
    ]


def test_a_run_in_mxfp8_is_shown_beside_bf16(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--world", "cpu:1", "--layers", "1", "--steps", "2", "--precision", "mxfp8"]
    assert main([*arguments, "--verify", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "backend kosmos, MXFP8" in shown
    assert "2 steps compared: losses and gradients within MXFP8 tolerance" in shown
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["summary"]["precision"] == "mxfp8"
    assert set(report["curves"]) == {*PLAIN.values(), EXACT}
    # A checkpoint of another precision is of another run.
    assert main(["--world", "cpu:1", "--layers", "1", "--steps", "2", "--out", str(tmp_path)]) == 2


def test_a_wrong_step_ends_with_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("integration.training.comparison.LOSS_LIMIT", -1.0)
    arguments = ["--world", "cpu:1", "--layers", "1", "--steps", "2", "--backend", "reference"]
    assert main([*arguments, "--verify", "--out", str(tmp_path)]) == 1
    assert "WRONG at steps [0, 1]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--world", "cpu:9"], "N from 1 to 8"),
        (["--world", "gpu:2"], "wanted group, or cpu:N"),
        (["--world", "group"], "start with torchrun"),
        (["--world", "cpu:3"], "8 heads do not divide over 3 ranks"),
        (["--world", "cpu:8"], "4 key and value heads do not divide over 8 ranks"),
        (["--preset", "huge"], "huge"),
        (["--backend", "nccl"], "nccl"),
        (["--precision", "fp8"], "fp8"),
        (["--steps", "0"], "steps"),
        (["--seed", "-1"], "seed"),
        (["--out", __file__], "is a file"),
        (["--out", __file__ + "/x"], "Not a directory"),
        (["extra"], "extra"),
    ],
)
def test_bad_arguments_end_with_status_2_and_one_line(
    arguments: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    [line] = captured.err.splitlines()
    assert says in line
    assert list(tmp_path.iterdir()) == []


def test_other_arguments_do_not_fit_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--world", "cpu:1", "--layers", "1", "--backend", "reference"]
    assert main([*arguments, "--steps", "2", "--out", str(tmp_path)]) == 0
    assert main([*arguments, "--steps", "3", "--out", str(tmp_path)]) == 2
    assert "of a run with steps 2, this one has 3" in capsys.readouterr().err


@pytest.mark.parametrize(("gpus", "ranks"), [(2, 2), (3, 2), (8, 8)])
def test_with_gpus_it_starts_itself_under_torchrun(
    gpus: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []

    def call(command: list[str], env: dict[str, str]) -> int:
        started.append(command)
        return 5

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(relaunch.subprocess, "call", call)
    assert main(["--verify", "--steps", "7"]) == 5
    [command] = started
    assert command[:4] == [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    assert command[command.index("--nproc-per-node") + 1] == str(ranks)
    given = ["--world", "group", "--steps", "7", "--verify"]
    assert command[-len(given) - 2 :] == ["-m", "integration.training", *given]


def test_processes_without_gpus_train_by_the_plain_path(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    run = ["--nproc-per-node", "2", "-m", "integration.training"]
    options = ["--world", "group", "--layers", "1", "--steps", "3", "--verify", "--timeline"]
    command = [*launcher, *run, "--", *options, "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    report = json.loads((tmp_path / "report.json").read_text())
    assert done.stdout.count("no timeline: no GPU is visible") == 1
    assert report["machine"]["ranks"] == 2
    assert report["summary"]["compared_steps"] == 3
    assert report["launches"] == {}


@pytest.mark.multi_gpu(2)
def test_two_gpus_train_the_fused_layers(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "integration.training", "--out", str(tmp_path)]
    options = ["--preset", "8b-layer", "--layers", "1", "--steps", "4", "--verify"]
    done = subprocess.run(
        [*command, *options], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    launches = json.loads((tmp_path / "report.json").read_text())["launches"]
    assert launches["gemm_rs"] == 2 * 4


def test_the_demonstration_is_what_the_tests_check() -> None:
    assert PRESETS["tiny"].steps >= 20
    assert PRESETS["8b-layer"].sizes == Sizes(4096, 14336, 4, 32, 8, 8192, 1)
    assert session.CHECKS["race"] == "raise"


def test_flops_are_those_of_the_products() -> None:
    # One block of one head: q, k, v and out of 8 x 8, an MLP of 8 x 16 three times, a head of
    # 256 x 8; 4 tokens that see 2.5 others on average, 4 by the usual count halved to 2.
    sizes = Sizes(8, 16, 1, 1, 1, 4, 1)
    weights = 4 * 64 + 3 * 128 + 256 * 8
    assert sizes.flops == 6 * 4 * (weights + 4 * 8)


def test_numbers_are_short() -> None:
    assert [milliseconds(v) for v in (1.2345, 45.678, 4940.4)] == ["1.23 ms", "45.7 ms", "4,940 ms"]
    assert [number(v) for v in (0.123456, 12.3456, 4567.0, 2.5e9, 7e14)] == [
        "0.123", "12.3", "4.57 k", "2.5 G", "700 T",
    ]  # fmt: skip


def test_a_traced_step_shows_every_launch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--world", "cpu:2", "--layers", "1", "--steps", "1", "--backend", "reference"]
    assert main([*arguments, "--timeline", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    trace, picture = tmp_path / "trace.json", tmp_path / "timeline.png"
    assert str(trace) in shown
    assert str(picture) in shown
    assert picture.read_bytes().startswith(b"\x89PNG")
    found = re.search(r"(\d+) launches a rank; (\d+) of 16 workgroups changed", shown)
    assert found is not None
    assert int(found[1]) == 10
    assert int(found[2]) > 0
    error = re.search(r"against FP32: (\S+) fused, (\S+) plain\n", shown)
    assert error is not None
    assert 0 < float(error[1]) < 2 * float(error[2])
    row = r"^(\w+) .*\bm=\d+ .* (\d+) +(\d+) +([\d.]+) KiB +(\d+) of (\d+)$"
    rows = re.findall(row, shown, re.MULTILINE)
    assert {row[0] for row in rows} == {"ag_gemm", "gemm_rs", "bulk_ag", "bulk_rs"}
    assert sum(int(row[1]) for row in rows) == int(found[1])
    for _, launches, tiles, kib, switched, wgs in rows:
        assert int(wgs) == 16 * int(launches) >= int(switched)
        assert int(tiles) > 0
        assert float(kib) > 0
    # Reducers of `gemm_rs` have built before.
    for op in ("ag_gemm", "gemm_rs"):
        assert any(int(switched) for name, *_, switched, _ in rows if name == op)
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
    calls = [e for e in events if (e["name"], e["pid"], e["tid"]) == ("call", 0, 0)]
    assert len(calls) == int(found[1])
    assert {e["pid"] for e in events} == {0, 1}
    assert {"move", "build", "wait", "reduce"} <= {e["name"] for e in events}


def test_clocks_of_gpus_are_counted_from_their_first_span() -> None:
    spans = (Span(1, 0, "move", 0, 700, 900), Span(1, 1, "build", 0, 500, 600))
    assert [(s.begin_ns, s.end_ns) for s in _from_zero(spans)] == [(200, 400), (0, 100)]


def test_text_is_the_source_of_the_standard_library() -> None:
    text = library_text(5000)
    assert len(text) == 5000
    first = min(path for path in Path(os.__file__).parent.glob("*.py") if path.stat().st_size)
    assert text.startswith(first.read_bytes()[:1000])
