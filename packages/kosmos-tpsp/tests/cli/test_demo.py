"""The demonstration: on the CPU end to end, its parts, and how it starts itself on GPUs."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kosmos_core.trace import Span
from kosmos_tpsp.__main__ import main
from kosmos_tpsp.cli import demo_run, relaunch
from kosmos_tpsp.cli.demo_layer import Layer, library_text, real_layer, small_layer
from kosmos_tpsp.cli.demo_run import Outcome
from kosmos_tpsp.cli.demo_show import _bytes, _from_zero, _switches, _table
from rich.console import Console


@pytest.fixture(autouse=True)
def no_gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's path, whatever machine the tests run on."""
    if not any(request.node.iter_markers("multi_gpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.delenv("RANK", raising=False)


def small(world_size: int) -> tuple[list[Outcome], list[tuple[int, int]], Layer]:
    """Outcomes and reported progress of a run that is shorter than the demonstration's."""
    layer = Layer(96 * world_size, 64, 48, "small")
    text = library_text(layer.tokens)
    reports: list[tuple[int, int]] = []
    progress = demo_run.Progress(lambda *counts: reports.append(counts))
    with demo_run.executor_world(world_size, 0, progress) as world:
        machine = demo_run.executor_machine()
        outcomes = world.spmd(
            lambda rank: demo_run.run_rank(world, layer, text, machine, progress.watch)
        )
    return outcomes, reports, layer


def test_the_command_shows_a_right_result_and_writes_trace_and_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--world", "cpu:2", "--out", str(tmp_path / "new" / "folder")]) == 0
    shown = capsys.readouterr().out
    assert "the fused result is right" in shown
    trace, picture = tmp_path / "new/folder/trace.json", tmp_path / "new/folder/timeline.png"
    assert str(trace) in shown
    assert str(picture) in shown
    assert "https://ui.perfetto.dev" in shown
    # 512 tokens in tiles of 16, 352 columns in tiles of 32; 16 units of 16 tokens.
    assert re.search(r"^ +1 .* 0 +352 +16 +64 KiB +\d of 8 ", shown, re.MULTILINE)
    events = json.loads(trace.read_text())["traceEvents"]
    assert {e["pid"] for e in events} == {0, 1}
    assert {"move", "build", "call"} <= {e["name"] for e in events}
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_counts_of_the_trace_are_those_of_the_work() -> None:
    outcomes, reports, layer = small(3)
    for o in outcomes:
        assert o.right
        assert o.rel_err < 3e-3
        assert o.rel_err_reference < 3e-3
        assert o.lost_spans == 0
        # 288 rows in tiles of 16, 48 columns in tiles of 32.
        assert o.count("build") == 18 * 2
        assert o.count("move") * o.unit_bytes == 2 * 96 * layer.hidden * 2
        assert o.count("call") == demo_run.WGS == len(o.switches)
        assert sum(o.switches) == o.plan.num_movers
        assert max(o.switches) == 1
        assert 0 < o.share("move") < 1
        assert 0 < o.share("build") < 1
        assert o.share("move") + o.share("build") + o.share("wait") < 1
    done, total = zip(*reports, strict=True)
    assert max(total) == sum(o.count("build") + o.count("move") for o in outcomes)
    assert list(done) == sorted(done)
    assert 0 < max(done) <= max(total)
    # It moves on while tiles are built, which no trace shows before the end.
    moved = sum(o.count("move") for o in outcomes)
    assert len({count for count in done if moved < count < max(total)}) >= 4


def test_the_table_fits_80_columns() -> None:
    outcomes, _, _ = small(2)
    # As many workgroups as a GPU has, as many bytes as the real layer moves.
    outcomes = [replace(o, spans=o.spans * 30, unit_bytes=1 << 20) for o in outcomes]
    outcomes[0] = replace(
        outcomes[0], spans=tuple(replace(s, wg=i) for i, s in enumerate(outcomes[0].spans))
    )
    screen = Console(width=80, record=True, file=io.StringIO())
    screen.print(_table(outcomes))
    shown = screen.export_text()
    assert "\u2026" not in shown
    assert len(shown.splitlines()) == 2 + len(outcomes)
    for o in outcomes:
        assert f"{o.rel_err:.2e}" in shown
    assert _bytes(196_608) == "192 KiB"
    assert _bytes(58_720_256) == "56.0 MiB"


def test_simulated_time_lets_gather_and_gemm_overlap() -> None:
    outcomes, _, _ = small(2)
    for o in outcomes:
        moves = [s for s in o.spans if s.kind == "move"]
        builds = [s for s in o.spans if s.kind == "build"]
        # Builders work from the start; movers end before the builders do.
        assert min(s.begin_ns for s in builds) < min(s.end_ns for s in moves)
        assert max(s.end_ns for s in moves) < max(s.end_ns for s in builds)
        by_wg: dict[int, int] = {}
        for s in o.spans:
            if s.kind != "call":
                assert s.begin_ns >= by_wg.get(s.wg, 0)
                assert s.end_ns > s.begin_ns or s.kind == "wait"
                by_wg[s.wg] = s.end_ns


def test_a_wrong_result_ends_with_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fused = demo_run.ag_gemm

    def one_row_lost(*args: Any, out: torch.Tensor, **kwargs: Any) -> Any:
        result = fused(*args, out=out, **kwargs)
        out[-1] = 0
        return result

    monkeypatch.setattr(demo_run, "ag_gemm", one_row_lost)
    assert main(["demo", "--world", "cpu:1", "--out", str(tmp_path)]) == 1
    assert "THE FUSED RESULT IS WRONG" in capsys.readouterr().out


def test_text_is_the_source_of_the_standard_library() -> None:
    text = library_text(5000)
    assert len(text) == 5000
    first = min(path for path in Path(os.__file__).parent.glob("*.py") if path.stat().st_size)
    assert text.startswith(first.read_bytes()[:1000])


def test_ranks_hold_consecutive_parts_of_one_embedded_text() -> None:
    layer, text = Layer(64, 32, 48, "small", seed=3), library_text(64)
    cpu = torch.device("cpu")
    whole = layer.chunk(text, 0, 1, cpu)
    parts = [layer.chunk(text, rank, 4, cpu) for rank in range(4)]
    assert torch.equal(torch.cat(parts), whole)
    assert torch.allclose(whole.float().square().mean(-1), torch.ones(64), atol=0.02)
    same = [i for i in range(64) if text[i] == text[0]]
    assert all(torch.equal(whole[i], whole[0]) for i in same)
    assert len({tuple(row.tolist()) for row in whole}) == len(set(text))
    assert not torch.equal(layer.weights(0, cpu), layer.weights(1, cpu))


@pytest.mark.parametrize("world_size", range(1, 9))
def test_the_small_layer_can_be_fused_at_any_group_size(world_size: int) -> None:
    layer = small_layer(world_size)
    assert layer.tokens % world_size == 0
    assert layer.local_width % 8 == 0
    assert layer.local_width * world_size >= 2 * int(128 * 8 / 3)


def test_the_real_layer_is_the_tables() -> None:
    layer = real_layer()
    assert (layer.tokens, layer.local_width, layer.hidden) == (8192, 3584, 4096)


def test_many_workgroups_are_summed_up() -> None:
    assert _switches([1, 1, 0]) == "2 of 3"
    assert _switches([1] * 8 + [0] * 124) == "8 of 132"


def test_clocks_of_gpus_are_counted_from_their_first_span() -> None:
    spans = (Span(1, 0, "move", 0, 700, 900), Span(1, 1, "build", 0, 500, 600))
    assert [(s.begin_ns, s.end_ns) for s in _from_zero(spans)] == [(200, 400), (0, 100)]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--world", "cpu:9"], "N from 1 to 8"),
        (["--world", "cpu:two"], "N from 1 to 8"),
        (["--world", "gpu:2"], "no GPU is visible"),
        (["--world", "group"], "needs torchrun"),
        (["--world", "moon"], "wanted cpu:N"),
        (["--seed", "-1"], "seed"),
        (["--out", __file__], "is a file"),
        (["--world", "cpu:1", "--out", __file__ + "/x"], "Not a directory"),
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
    assert main(["demo", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    [line] = captured.err.splitlines()
    assert says in line
    assert line.count("world:") <= 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("gpus", "ranks"), [(2, 2), (3, 2), (4, 4), (8, 8), (16, 8)])
def test_with_gpus_it_starts_itself_under_torchrun(
    gpus: int, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []

    def call(command: list[str], env: dict[str, str]) -> int:
        started.append(command)
        return 5

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(relaunch.subprocess, "call", call)
    assert main(["demo", "--out", str(tmp_path), "--seed", "4"]) == 5
    [command] = started
    assert command[:4] == [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    assert command[command.index("--nproc-per-node") + 1] == str(ranks)
    demo = ["demo", "--world", "group", "--out", str(tmp_path), "--seed", "4"]
    assert command[-len(demo) - 2 :] == ["-m", "kosmos_tpsp", *demo]


@pytest.mark.multi_gpu(2)
def test_two_gpus_run_the_real_layer(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kosmos_tpsp", "demo", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert "the fused result is right" in done.stdout
    assert re.search(r"speed-up \d\.\d\dx", done.stdout)
    assert (tmp_path / "timeline.png").stat().st_size > 10_000
