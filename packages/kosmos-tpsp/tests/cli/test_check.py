"""`check`: what it prints, what it refuses, and that each of its verdicts can be bad."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kosmos_core.executor import Mutation
from kosmos_core.testing.schedules import Schedule
from kosmos_tpsp.__main__ import main
from kosmos_tpsp.cli import checking, killed
from kosmos_tpsp.cli.cases import sequence, shapes
from kosmos_tpsp.cli.rig import Rig, Run, run_on_cpu
from kosmos_tpsp.device import build, gather, gathered
from kosmos_tpsp.kernels.ag_gemm import ag_gemm_kernel
from kosmos_tpsp.ops.ag_gemm import AgGemmOptions
from kosmos_tpsp.ops.catalog import DRIVERS

SMALL = ["--m", "96", "--n", "40", "--k", "64"]
KEYS = [
    "op", "world", "m", "n", "k", "dtype", "layout", "policy", "order", "transport", "cap",
    "schedules", "calls", "path", "kernel_launches", "remote_bytes", "max_rel_err",
    "bitwise_repeat", "races", "deadlocks", "passed",
]  # fmt: skip


def check(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Exit status, JSON object and standard error of `check ag_gemm --json`."""
    status = main(["check", "ag_gemm", *arguments, "--json"])
    out, err = capsys.readouterr()
    return status, json.loads(out), err


def test_json_is_one_object_with_the_wanted_case_first(capsys: pytest.CaptureFixture[str]) -> None:
    status, report, _ = check(capsys, "--world", "cpu:4", *SMALL, "--schedules", "2")
    assert status == 0
    assert report["passed"] is True
    assert set(report) == {"cases", "passed"}
    for case in report["cases"]:
        assert list(case) == KEYS
        assert case["passed"] is True
        assert case["path"] == "fused"
        assert case["bitwise_repeat"] is True
        assert case["remote_bytes"] == 3 * (case["m"] // 4) * case["k"] * 2
        assert 0 < case["max_rel_err"] < 4e-3
        assert (case["schedules"], case["calls"], case["kernel_launches"]) == (2, 2, 1)
        assert (case["races"], case["deadlocks"]) == (0, 0)
    sizes = [(case["m"], case["n"], case["k"]) for case in report["cases"]]
    assert sizes == [(96, 40, 64), (68, 24, 40), (4, 8, 8)]


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--layout", "nn", "--transport", "push"], "nn m=96"),
        (["--policy", "two_way", "--order", "naive"], "two_way naive"),
        (["--policy", "serial", "--transport", "pull"], ": fused, 2 launches,"),
        (["--policy", "fixed", "--order", "chunk_major", "--cap", "2"], "cap=2"),
        (["--delay", "--seed", "5", "--calls", "1"], "calls=1: fused, 1 launch,"),
    ],
)
def test_a_line_for_each_case(
    arguments: list[str], shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["check", "ag_gemm", "--world", "cpu:2", *SMALL, "--schedules", "1", *arguments]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.count("\n") == 3
    assert out.count(": passed\n") == 3
    assert shown in out


def test_no_rows_is_a_call_too(capsys: pytest.CaptureFixture[str]) -> None:
    status, report, _ = check(capsys, "--world", "cpu:3", "--m", "0", "--schedules", "1")
    assert status == 0
    case = report["cases"][0]
    assert (case["m"], case["kernel_launches"], case["remote_bytes"]) == (0, 0, 0)
    assert report["cases"][1]["m"] > 0


def test_a_decline_is_a_failure_unless_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--world", "cpu:2", "--m", "32", "--n", "41", "--k", "16", "--schedules", "1")
    status, report, _ = check(capsys, *arguments)
    assert status == 1
    assert report["passed"] is False
    assert [case["path"] for case in report["cases"]] == ["reference", "fused", "fused"]
    assert [case["passed"] for case in report["cases"]] == [False, True, True]
    status, report, _ = check(capsys, *arguments, "--allow-decline")
    assert status == 0
    assert report["cases"][0]["path"] == "reference"


@pytest.mark.parametrize("allow", [False, True])
def test_a_declined_line_gives_the_reason_and_how_to_accept(
    allow: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--world", "cpu:2", "--m", "32", "--n", "41", "--k", "16", "--schedules", "1"]
    status = main(["check", "ag_gemm", *arguments, *(["--allow-decline"] if allow else [])])
    assert status == (0 if allow else 1)
    first = capsys.readouterr().out.splitlines()[0]
    assert ("passed: declined: " if allow else "FAILED: declined: ") in first
    assert ("--allow-decline accepts it" in first) == (not allow)
    assert "launch" not in first


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--m", "10"], "m: got 10, wanted a multiple of the 4 ranks; pad to 12"),
        (["--m", "-4"], "m: got -4, wanted at least 0"),
        (["--n", "0"], "n: got 0, wanted at least 1"),
        (["--k", "-1"], "k: got -1, wanted at least 1"),
        (["--cap", "1"], "cap: got 1, wanted at least 2"),
        (["--calls", "0"], "calls: got 0"),
        (["--schedules", "0"], "schedules: got 0"),
        (["--seed", "-1"], "seed: got -1"),
        (["--world", "cpu:9"], "world: got 'cpu:9'"),
        (["--world", "cpu"], "world: got 'cpu'"),
        (["--world", "moon:4"], "world: got 'moon:4'"),
        (["--world", "group"], "start with torchrun"),
        (["--kill-rank", "4"], "kill-rank: got 4, wanted 0 to 3"),
        (["--kill-rank", "0", "--world", "cpu:1"], "kill-rank: a group of one"),
        (["--kill-rank", "0", "--m", "0"], "kill-rank: m is 0"),
        (["--policy", "no_way"], "'no_way' is not one of"),
        (["--layout", "tt"], "'tt' is not one of"),
        (["--plant", "nothing"], "plant: got 'nothing'"),
        (["--plant", "no_barrier", "--world", "gpu:8"], "plant: defects live on the CPU"),
        (["gemm_ag"], "'[OP]': 'gemm_ag' is not"),
        (["gemm_rs", "--layout", "nn"], "layout: got nn for gemm_rs, wanted one of tn"),
        (["gemm_rs", "--order", "naive"], "order: got naive for gemm_rs, wanted one of band_major"),
    ],
)
def test_bad_arguments_are_refused_in_a_line(
    arguments: list[str],
    told: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main(["check", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert told in err


def test_a_gpu_world_without_a_gpu_is_a_bad_argument(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["check", "--world", "gpu:2"]) == 2
    assert "no GPU is visible" in capsys.readouterr().err


def plant(monkeypatch: pytest.MonkeyPatch, *mutations: Mutation) -> None:
    """Makes `check` run mutated kernels."""

    def run(*arguments: Any, **options: Any) -> Run:
        return run_on_cpu(*arguments, **options, mutations=mutations)

    monkeypatch.setattr(checking, "run_on_cpu", run)


def test_a_race_fails_the_case_in_which_it_shows_and_says_how_to_repeat_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    early = "standing = await_rows(ops, ctx, call, standing, grid, k, peer, tile_row, CONFIG)"
    plant(monkeypatch, Mutation(gather.keep_rows, early, "pass"))
    arguments = ["--world", "cpu:2", *SMALL, "--layout", "nn", "--transport", "push"]
    status, report, err = check(capsys, *arguments, "--seed", "2", "--schedules", "2")
    assert status == 1
    assert sum(case["races"] for case in report["cases"]) >= 1
    failed = [case for case in report["cases"] if case["races"]]
    assert not any(case["passed"] for case in failed)
    assert "gather.py" in err
    again = err[err.index("again with: ") :].splitlines()[0].split()
    assert main([*again[again.index("check") :], "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["passed"] is False


def test_wrong_values_fail_the_case(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, Mutation(gathered.multiply, "chunk = tile.src_rank * 0", "k_end = k_begin"))
    status, report, err = check(capsys, "--world", "cpu:2", *SMALL, "--schedules", "1")
    assert status == 1
    assert report["cases"][0]["max_rel_err"] > 0.1
    assert "rows wrong" in err


def test_bytes_that_are_moved_twice_fail_the_case(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "sent = sent_rows(ops, chunk, offset, peer, CONFIG)"
    copy = "copy_elements(sent, place, rows * k, CONFIG, ctx.TARGET)"
    plant(monkeypatch, Mutation(gather.transport, source, f"{source}\n            {copy}"))
    status, _, err = check(capsys, "--world", "cpu:2", *SMALL, "--schedules", "1")
    assert status == 1
    assert "bytes moved between ranks instead of" in err


def test_a_result_that_depends_on_the_schedule_is_no_bitwise_repeat(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Which workgroup builds a tile must not matter; here it decides the last bit of a few elements.
    old = "acc = SUM(job, ctx, call, standing, tile, 0, k_end, CONFIG)"
    new = old + " * (1 + tl.program_id(0) * 0.0005)"
    plant(monkeypatch, Mutation(build.build_whole, old, new))
    status, report, _ = check(capsys, "--world", "cpu:2", *SMALL, "--schedules", "3")
    assert status == 1
    assert report["cases"][0]["bitwise_repeat"] is False


def test_a_killed_rank_is_named_and_the_others_revive(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--world", "cpu:4", *SMALL, "--kill-rank", "2", "--schedules", "2"]
    status, report, _ = check(capsys, *arguments)
    assert status == 0
    (case,) = report["cases"]
    assert (case["m"], case["kernel_launches"], case["bitwise_repeat"]) == (96, 1, True)
    assert len(report["errors"]) >= 3
    for text in report["errors"]:
        assert "for rank 2" in text
        assert "ag_gemm tn m=96 n=40 k=64" in text
        assert "start word" in text
        assert "phase" in text


@pytest.mark.parametrize("victim", [0, 1])
def test_no_living_rank_is_blamed(capsys: pytest.CaptureFixture[str], victim: int) -> None:
    # So few tiles that a builder waits for a living peer's rows, which wait for the victim, as
    # early as a mover waits for the victim itself.
    shape = ["--m", "48", "--n", "16", "--k", "32", "--transport", "pull"]
    kill = ["--kill-rank", str(victim), "--schedules", "2"]
    status, report, _ = check(capsys, "--world", "cpu:3", *shape, *kill)
    assert status == 0
    assert {f"for rank {victim}" in text for text in report["errors"]} == {True}


def test_the_text_tells_who_was_killed_and_what_the_others_raised(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--world", "cpu:3", *SMALL, "--kill-rank", "2", "--schedules", "2"]
    assert main(["check", "ag_gemm", *arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    case, killed_line, *raised, end = out.splitlines()
    assert case.endswith(": passed")
    assert "rank 2 killed" in killed_line
    assert [line.split(":")[0].strip() for line in raised] == [
        f"rank {rank} raised PeerTimeoutError" for rank in (0, 1)
    ]
    assert "reset() on all ranks" in end


def test_a_killed_rank_that_is_not_noticed_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*arguments: Any) -> Any:
        # Ranks that never look at start words or arrivals need nobody.
        alone = Mutation(ag_gemm_kernel, "call_leave(ctx, call, standing)", "pass")
        return trouble_on_cpu(*arguments, mutations=(alone,))

    trouble_on_cpu = killed.trouble_on_cpu
    monkeypatch.setattr(killed, "trouble_on_cpu", run)
    arguments = ["--world", "cpu:2", *SMALL, "--kill-rank", "0", "--schedules", "1"]
    status, report, err = check(capsys, *arguments)
    assert status == 1
    assert report["passed"] is False
    assert err


def test_plants_are_listed_one_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--plant", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 20
    assert len({line.split()[0] for line in lines}) == len(lines)
    status, report, _ = check(capsys, "--plant", "list")
    assert status == 0
    assert [plant["name"] for plant in report["plants"]] == [line.split()[0] for line in lines]


def test_a_plant_is_shown_and_its_exit_status_is_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "ag_gemm", *SMALL, "--plant", "no_barrier"]) == 1
    shown = capsys.readouterr().out
    assert "flags.py, publish: tl.debug_barrier()  ->  pass" in shown
    assert "CAUGHT" in shown
    assert "The same schedules without the defect pass." in shown
    status, report, _ = check(capsys, "--plant", "no_barrier")
    assert status == 1
    assert report["passed"] is False
    assert report["cases"][0]["races"] == 1
    assert report["cases"][0]["transport"] in ("push", "pull")
    told = report["plant"]["caught"]
    assert told["wg"].startswith("rank")
    assert told["line"]
    assert report["plant"]["false_alarms"] == []


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("shape", [(384, 200, 128), (0, 8, 8), (24, 16, 24), (8192, 7168, 4096)])
def test_derived_shapes_fit_the_wanted_one_and_are_odd(
    shape: tuple[int, int, int], size: int
) -> None:
    m, n, k = shape
    m -= m % size
    found = shapes(DRIVERS["ag_gemm"], (m, n, k), size)
    assert found[0] == (m, n, k)
    assert len(set(found)) == len(found)
    for rows, columns, width in found[1:]:
        assert rows % size == 0
        assert rows // size % 2 == 1
        assert rows <= max(m, size)
        assert (columns % 16, width % 16) == (8, 8)
        assert (columns <= max(n, 8), width <= max(k, 8)) == (True, True)


def test_every_shape_is_called_on_fresh_data_and_again_on_its_first() -> None:
    wanted = shapes(DRIVERS["ag_gemm"], (384, 200, 128), 4)
    calls = sequence(wanted, 3, AgGemmOptions())
    for shape in wanted:
        assert [call.data for call in calls if call.shape == shape] == [0, 1, 2, 0]
    assert [call.shape for call in calls[:3]] == wanted


def test_equal_requests_run_equal_schedules() -> None:
    rig = Rig(sequence([(32, 16, 16)], 1, AgGemmOptions()), seed=3)
    hashes = {run_on_cpu(2, rig, Schedule.draw(seed, 2, 4)).schedule_hash for seed in (4, 4, 11)}
    assert len(hashes) == 2


@pytest.mark.parametrize("allow", [True, False])
def test_under_torchrun_without_gpus_every_call_is_declined(allow: bool, tmp_path: Path) -> None:
    arguments = ["check", "ag_gemm", "--world", "group", *SMALL, "--json"]
    arguments += ["--allow-decline"] if allow else []
    # The two dashes: torchrun reads options of its own even after the module's name, and finds
    # --m ambiguous.
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    run = subprocess.run(
        [*command, "-m", "kosmos_tpsp", "--", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
    )
    assert (run.returncode == 0) is allow, run.stderr
    report = json.loads(run.stdout)
    assert {case["path"] for case in report["cases"]} == {"reference"}
    assert report["passed"] is allow
