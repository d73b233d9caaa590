"""`explore`: a slice of the exploration, and that a finding can be repeated as it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kosmos_core.executor import Mutation
from kosmos_core.testing.schedules import POLICIES
from kosmos_tpsp.__main__ import main
from kosmos_tpsp.cli import exploration, scenarios
from kosmos_tpsp.cli.exploration import Exploration
from kosmos_tpsp.cli.rig import Run, run_on_cpu
from kosmos_tpsp.cli.scenarios import DECLINED, EPOCHS, LAYERS, Found, Scenario
from kosmos_tpsp.device import gather

SLICE = 28


def test_a_slice_of_the_exploration_finds_nothing() -> None:
    some = Exploration("ag_gemm", SLICE, seconds=None, seed=0, jobs=1)
    some.run()
    assert [f"{some.replay(f.seed)}\n{f.problem}" for f in some.failures] == []
    summary = some.summary()
    assert summary["schedules"] == SLICE
    counts = summary["counts"]
    assert set(counts["schedule"]) == set(POLICIES)
    assert set(counts["ranks"]) == {"1", "2", "3", "4", "8"}
    assert set(counts["layout"]) == {"tn", "nn"}
    assert set(counts["policy"]) == {"one_way", "two_way", "fixed", "serial"}
    assert set(counts["order"]) == {"local_first", "chunk_major", "naive"}
    assert {"pull", "push"} <= set(counts["transport"])
    assert {"1", "2", "4"} <= set(counts["split k"])
    assert set(counts["vendor"]) == {"nvidia", "amd"}


def test_many_seeds_cover_every_value_of_every_dimension() -> None:
    found = [Scenario.draw(seed) for seed in range(2000)]
    assert {s.ranks for s in found} == {1, 2, 3, 4, 8}
    assert {s.first_epoch for s in found} == set(EPOCHS)
    assert {s.schedule.slots for s in found} == {None, 1, 2, 3, 4}
    assert {s.num_xcds for s in found} == {1, 2, 4}
    assert {s.queued for s in found} == {True, False}
    calls = [call for s in found for call in s.calls]
    assert any(call.m == 0 for call in calls)
    assert any(call.k == DECLINED for call in calls)
    assert any(len(set(s.caps)) > 1 for s in found)
    assert len({str(s) for s in found}) == len(found)


def test_a_scenario_is_the_same_whenever_it_runs() -> None:
    first, again = Scenario.draw(3).run(), Scenario.draw(3).run()
    assert first.schedule_hash == again.schedule_hash != ""
    assert first.schedule_hash != Scenario.draw(10).run().schedule_hash


def test_a_deep_narrow_scenario_buckets_the_tile_queue() -> None:
    seeds = (s for s in range(1000) if Scenario.draw(s).num_xcds > 1)
    scenario = next(s for s in map(Scenario.draw, seeds) if s.ranks == 2)
    assert scenario.run().problem == ""


def plant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes builders in scenarios wait for one slice too many."""
    wrong = Mutation(
        gather.await_rows, "word_ptr, CONFIG.SLICES, src", "word_ptr, CONFIG.SLICES + 1, src"
    )

    def run(*arguments: Any, **options: Any) -> Run:
        return run_on_cpu(*arguments, **options, mutations=(wrong,))

    monkeypatch.setattr(scenarios, "run_on_cpu", run)


def test_a_finding_is_printed_with_the_command_that_repeats_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(monkeypatch)
    file = tmp_path / "found.json"
    arguments = ["explore", "--schedules", "3", "--seed", "1", "--jobs", "1", "--json", str(file)]
    assert main(arguments) == 1
    out, err = capsys.readouterr()
    assert "failures" in out
    summary = json.loads(file.read_text())
    first = summary["failures"][0]
    assert "DEADLOCK" in first["problem"]
    assert first["replay"] in err
    assert {"started", "command", "versions", "seconds", "counts"} <= set(summary)
    assert "/" not in summary["command"]
    again = first["replay"].split()
    assert main(again[again.index("explore") :]) == 1
    capsys.readouterr()
    monkeypatch.undo()
    assert main(again[again.index("explore") :]) == 0


def test_scenarios_of_gemm_rs_mix_both_ops() -> None:
    found = [Scenario.draw(seed, "gemm_rs") for seed in range(300)]
    ops = [call.op for scenario in found for call in scenario.calls]
    assert len(ops) / 2 < ops.count("gemm_rs") < len(ops)
    assert all(scenario.calls[0].op == "gemm_rs" for scenario in found)
    assert [scenario.run().problem for scenario in found[:8]] == [""] * 8


def test_scenarios_of_bulk_ag_mix_the_ops() -> None:
    found = [Scenario.draw(seed, "bulk_ag") for seed in range(300)]
    calls = [call for scenario in found for call in scenario.calls]
    assert len(calls) / 2 < sum(call.op == "bulk_ag" for call in calls) < len(calls)
    assert {call.options.dx_to for call in calls if call.op == "bulk_ag"} == {
        None, "handover", "tensor",
    }  # fmt: skip
    assert [scenario.run().problem for scenario in found[:8]] == [""] * 8


@pytest.mark.parametrize("op", ["bulk_rs", "bulk_column"])
def test_scenarios_of_reductions_beside_a_gemm_mix_the_ops(op: str) -> None:
    found = [Scenario.draw(seed, op) for seed in range(300)]
    calls = [call for scenario in found for call in scenario.calls]
    assert len(calls) / 3 < sum(call.op == op for call in calls) < len(calls)
    ways = {call.options.transport for call in calls if call.op == op}
    assert ways == {None, "pull", "push"}
    if op == "bulk_column":
        # What one call hands over lies between calls of both ops alone.
        assert {"ag_gemm", "bulk_ag", "bulk_rs"} < {call.op for call in calls}
    assert [scenario.run().problem for scenario in found[:8]] == [""] * 8


def test_scenarios_of_layers_are_steps_of_changing_sizes() -> None:
    found = [Scenario.draw(seed, LAYERS) for seed in range(200)]
    for scenario in found:
        ops = [call.op for call in scenario.calls]
        assert ops == ["ag_gemm", "gemm_rs", "ag_gemm", "bulk_column"] * (len(ops) // 4)
    assert {len(s.calls) for s in found} == {4, 8, 12}
    assert any(len({call.tokens for call in s.calls}) == 3 for s in found)
    assert {s.ranks for s in found} == {1, 2, 3, 4, 8}
    assert [scenario.run().problem for scenario in found[:3]] == [""] * 3


def test_time_can_be_limited(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explore", "--seconds", "0", "--jobs", "1"]) == 0
    assert "1 distinct schedules in 1 runs" in capsys.readouterr().out


def test_an_interrupt_keeps_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(seeds: range, op: str, dtype: str) -> list[Found]:
        if 2 in seeds:
            raise KeyboardInterrupt
        return run_batch(seeds, op, dtype)

    run_batch = exploration.run_batch
    monkeypatch.setattr(exploration, "run_batch", interrupted)
    file = tmp_path / "found.json"
    assert main(["explore", "--jobs", "1", "--json", str(file)]) == 130
    assert "2 distinct schedules in 2 runs" in capsys.readouterr().out
    summary = json.loads(file.read_text())
    assert (summary["schedules"], summary["interrupted"]) == (2, True)


def test_several_processes_share_the_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explore", "--schedules", "2", "--jobs", "2", "--seed", "22"]) == 0
    assert "0 failures" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [["--schedules", "0"], ["--jobs", "0"], ["--op", "x"], ["--seconds", "-1"], ["--seed", "-1"]],
)
def test_bad_arguments_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explore", *arguments]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_summary_that_cannot_be_written_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "no" / "folder.json"
    assert main(["explore", "--seconds", "0", "--jobs", "1", "--json", str(path)]) == 2
    assert "cannot write" in capsys.readouterr().err
