"""The commands themselves: what they accept, refuse and print."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kosmos_moe.__main__ import main

SMALL = ["--hidden", "40", "--inter", "24", "--experts", "6", "--topk", "2", "--calls", "1"]


def test_check_passes_and_prints_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["check", "--world", "cpu:3", "--tokens", "9,0,5", *SMALL, "--schedules", "2"]
    assert main([*arguments, "--shared", "1", "--bias", "--padding", "--delay", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passed"]
    assert found["bitwise_repeat"]
    assert found["schedules"] == 2
    assert 0 < found["max_rel_err"] < 4e-3


def test_check_names_a_killed_rank(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["check", "--world", "cpu:2", "--tokens", "9", *SMALL, "--kill-rank", "1"]
    assert main(arguments) == 0
    assert "rank 0 raised PeerFaultError" in capsys.readouterr().out


def test_check_follows_a_routing_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "routing.json"
    path.write_text(json.dumps([[[0, 1], [5, 2]], [[3, 2]]]))
    arguments = ["check", "--world", "cpu:2", "--tokens", "2,1", *SMALL, "--schedules", "1"]
    assert main([*arguments, "--routing", str(path)]) == 0


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (["--world", "cpu:9"], "world: got 'cpu:9'"),
        (["--tokens", "1,2"], "tokens: got 1,2"),
        (["--tokens", "-1"], "tokens: got -1"),
        (["--experts", "7"], "experts: got 7"),
        (["--topk", "17"], "topk: got 17"),
        (["--routing", "nowhere.json"], "routing: got nowhere.json"),
        (["--routing", "zipf:steep"], "routing: got zipf:steep"),
        (["--cap", "1"], "cap: got 1"),
        (["--kill-rank", "5"], "kill-rank: got 5"),
        (["--hidden", "0"], "hidden: got 0"),
    ],
)
def test_bad_arguments_are_one_line(
    change: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "--world", "cpu:3", *SMALL, "--tokens", "9", *change]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert len(error.splitlines()) == 1


def test_explore_finds_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "explored.json"
    # Small ones: 2 to 4 ranks, both vendors, three directions of switching, with backwards.
    assert main(["explore", "--schedules", "4", "--seed", "234", "--json", str(path)]) == 0
    assert "4 distinct schedules" in capsys.readouterr().out
    assert json.loads(path.read_text())["failures"] == []


def test_bench_wants_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--models", "Qwen9"]) == 2
    assert "models: got 'Qwen9'" in capsys.readouterr().err
