"""The benchmark, end to end on the CPU with a timer that makes times up, and part by part."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kosmos_core.worlds import World, cpu_world
from kosmos_tpsp.__main__ import main
from kosmos_tpsp.bench import session
from kosmos_tpsp.bench import variants as v
from kosmos_tpsp.bench.cases import Case, parse_cases
from kosmos_tpsp.bench.results import Report
from kosmos_tpsp.bench.runner import Settings
from kosmos_tpsp.bench.unfused import Call, Data, Tensors
from kosmos_tpsp.cli.bench import _command, publish
from kosmos_tpsp.ops.ag_gemm import AgGemmOptions
from kosmos_tpsp.ops.bulk_ag import BulkAgOptions
from kosmos_tpsp.ops.bulk_rs import BulkRsOptions
from kosmos_tpsp.ops.gemm_rs import GemmRsOptions
from kosmos_tpsp.workspaces import TpSpWorkspace

MS = {v.BASELINE: 3.0, v.FUSED: 2.0, v.GEMM_VENDOR: 1.5, v.SERIAL: 4.0, "fixed_16": 1.9}
BRIEF = Settings(rounds=2, warmup=0, calls=2, host_calls=0)


class MadeUp:
    """A timer that runs the call once and takes the time from a table."""

    def time(self, name: str, fn: Callable[[], object], warmup: int, calls: int) -> list[float]:
        fn()
        return [MS.get(name, 2.5)] * calls


def bench_on_cpu(
    cases: list[Case],
    orders: list[Case],
    *,
    sweep: bool,
    ranks: int = 2,
    settings: Settings = BRIEF,
    kind: Any = AgGemmOptions,
    **choices: Any,
) -> list[Report]:
    """Each rank's report of a run on virtual ranks."""

    def on_rank(rank: int, world: World) -> Report:
        with TpSpWorkspace(world, 256, 128) as workspace:
            peaks = {"push": 0.01, "pull": 0.02}
            rig = v.Rig(world, workspace, MadeUp(), kind(**choices), None, peaks)
            described = {"command": "python -m kosmos_tpsp bench ag_gemm"}
            return session.run(rig, cases, orders, settings, sweep=sweep, described=described)

    with cpu_world(ranks) as world:
        return world.spmd(on_rank, world)


def test_a_run_measures_checks_and_reports_every_variant(tmp_path: Path) -> None:
    cases = parse_cases("64,32,64;96,40,64", "tn", 2)
    reports = bench_on_cpu(cases, [], sweep=True)
    report = reports[0]
    assert report.to_dict()["rows"] == reports[1].to_dict()["rows"]
    assert report.wrong == []
    publish(report, tmp_path / "run.json", tmp_path / "run.png")
    data = json.loads((tmp_path / "run.json").read_text())
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    assert data["schema"] == 1
    assert data["settings"]["rounds"] == 2
    assert data["settings"]["command"] == "python -m kosmos_tpsp bench ag_gemm"
    assert data["machine"]["world"] == "cpu:2"
    assert {"torch", "triton"} <= set(data["versions"])
    assert [r["shape"] for r in data["rows"]] == ["64x32x64", "96x40x64"]
    first = data["rows"][0]
    fixed = {f"fixed_{crew}" for crew in v.FIXED_CREWS}
    assert {v.BASELINE, v.FUSED, v.GEMM_VENDOR, v.SERIAL, v.TWO_WAY} | fixed <= set(
        first["variants"]
    ) | set(first["unavailable"])
    measured = first["variants"][v.FUSED]
    assert measured["median_ms"] == measured["p80_ms"] == 2.0
    assert measured["round_ms"] == [2.0, 2.0]
    assert measured["tflops"] == pytest.approx(2 * 64 * 32 * 64 / 2e9)
    assert measured["gbps"] == pytest.approx(32 * 64 * 2 / 2e6)
    assert first["speedup"]["nccl_cublas"] == 1.5
    assert first["best_fixed"] == "fixed_16"
    assert first["speedup"]["best_fixed"] == 0.95
    assert first["plan"]["transport"] == "push"
    assert first["rel_err_fp64"] < 4e-3
    # 32 rows of 64 elements of 2 bytes at 0.01 GB/s take 0.4096 ms, less than the GEMM's 1.5.
    assert first["bytes_ms"] == pytest.approx(0.4096)
    assert first["efficiency"] == 0.75
    assert data["geomean"]["speedup_nccl_cublas"] == pytest.approx(1.5)
    assert data["verdict"] == {
        "correct": True,
        "never_slower": True,
        "slower": [],
        "beaten_by_fixed": ["64x32x64", "96x40x64"],
    }


def test_a_run_in_mxfp8_is_compared_with_bf16_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "HOST_SHAPE", (64, 32, 64))
    cases = [replace(case, dtype="mxfp8") for case in parse_cases("64,32,64;96,40,64", "tn", 2)]
    settings = replace(BRIEF, host_calls=1)
    report = bench_on_cpu(cases, [], sweep=False, settings=settings)[0]
    assert report.wrong == []
    publish(report, tmp_path / "run.json", tmp_path / "run.png")
    first = json.loads((tmp_path / "run.json").read_text())["rows"][0]
    assert first["remote_bytes"] == 32 * 64 * 33 // 32
    assert first["speedup"]["fused_bf16"] == 1.25
    assert first["gather_bound"] is False
    assert "MXFP8" in first["unavailable"]["async_tp"]
    assert report.host_us.keys() == {"ag_gemm"}
    nn = [Case("small", 64, 32, 64, "nn", dtype="mxfp8")]
    assert bench_on_cpu(nn, [], sweep=False)[0].wrong == []


def test_the_order_ablation_compares_the_three_orders() -> None:
    cases = [Case("small", 96, 40, 64, "tn"), Case("small", 96, 40, 64, "nn")]
    report = bench_on_cpu([], cases, sweep=False, ranks=3)[0]
    assert report.wrong == []
    ratios = [(entry["layout"], entry["ratio"]) for entry in report.order_ratios()]
    orders = {"local_first": 1.0, "chunk_major": 1.0, "naive": 1.0}
    assert ratios == [("tn", orders), ("nn", orders)]


def test_a_run_of_gemm_rs_measures_the_sum_and_the_gemm_alone(tmp_path: Path) -> None:
    cases = parse_cases("64,32,64;96,40,64", "tn", 2, "gemm_rs")
    orders = [Case("small", 96, 40, 64, "tn", "gemm_rs")]
    report = bench_on_cpu(cases, orders, sweep=True, kind=GemmRsOptions)[0]
    assert report.wrong == []
    publish(report, tmp_path / "run.json", tmp_path / "run.png")
    data = json.loads((tmp_path / "run.json").read_text())
    assert data["benchmark"] == "gemm_rs"
    first = data["rows"][0]
    assert {v.BASELINE, v.FUSED, v.GEMM_VENDOR, v.SERIAL, v.TWO_WAY} <= set(first["variants"])
    assert first["rel_err_fp64"] < 4e-3
    # 32 rows of 32 elements of 2 bytes.
    assert first["remote_bytes"] == 32 * 32 * 2
    assert report.order_ratios()[0]["ratio"] == {"band_major": 1.0, "row_major": 1.0}


def test_a_run_of_bulk_ag_measures_both_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "HOST_SHAPE", (64, 32, 64))
    monkeypatch.setattr(session, "host_microseconds", lambda fn, world, calls: len(fn()) * 4.5)
    cases = parse_cases("64,32,64;96,40,64", "nn", 2, "bulk_ag")
    settings = replace(BRIEF, host_calls=2)
    report = bench_on_cpu(cases, [], sweep=True, kind=BulkAgOptions, settings=settings)[0]
    assert report.wrong == []
    publish(report, tmp_path / "run.json", tmp_path / "run.png")
    data = json.loads((tmp_path / "run.json").read_text())
    assert data["benchmark"] == "bulk_ag"
    first = data["rows"][0]
    assert {v.BASELINE, v.FUSED, v.GEMM_VENDOR, v.SERIAL, v.TWO_WAY} <= set(first["variants"])
    assert "no async-TP op" in first["unavailable"][v.ASYNC_TP]
    assert first["rel_err_fp64"] < 4e-3
    # 32 rows of 32 elements of 2 bytes: what is gathered is as wide as the product.
    assert first["remote_bytes"] == 32 * 32 * 2
    assert data["host_us"] == {"bulk_ag": 9.0, "kosmos::bulk_ag": 9.0}


def test_a_run_of_bulk_rs_pulls_what_is_handed_over(tmp_path: Path) -> None:
    cases = parse_cases("64,32,64;96,40,64", "nt", 2, "bulk_rs")
    report = bench_on_cpu(cases, [], sweep=True, kind=BulkRsOptions)[0]
    assert report.wrong == []
    publish(report, tmp_path / "run.json", tmp_path / "run.png")
    data = json.loads((tmp_path / "run.json").read_text())
    assert data["benchmark"] == "bulk_rs"
    first = data["rows"][0]
    timed = {v.BASELINE, v.FUSED, v.GEMM_VENDOR, v.SERIAL, v.TWO_WAY}
    assert timed <= set(first["variants"])
    assert first["plan"]["transport"] == "pull"
    assert "no async-TP op" in first["unavailable"][v.ASYNC_TP]
    assert first["rel_err_fp64"] < 4e-3
    # The tokens are k: 32 rows of 32 elements of 2 bytes.
    assert first["remote_bytes"] == 32 * 32 * 2
    pushed = bench_on_cpu(cases, [], sweep=False, kind=BulkRsOptions, transport="push")[0]
    assert pushed.wrong == []
    assert pushed.rows[0].plan.transport == "push"


def test_an_output_of_bulk_rs_that_is_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    right = v.fused_call

    def own_part_only(data: Data, workspace: TpSpWorkspace, options: Any) -> Call:
        call = right(data, workspace, options)

        def wrong() -> Tensors:
            outs = call()
            parts = data.given["dx"].chunk(workspace.world.size)
            return {**outs, "dx_shard": outs["dx_shard"].copy_(parts[workspace.world.rank])}

        return wrong

    monkeypatch.setattr(v, "fused_call", own_part_only)
    case = parse_cases("64,32,64", "nt", 2, "bulk_rs")
    report = bench_on_cpu(case, [], sweep=False, kind=BulkRsOptions)[0]
    assert "dx_shard elements wrong" in report.rows[0].wrong[v.FUSED]


def test_gathered_rows_that_are_stale_are_seen_beside_a_right_product(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = v.fused_call

    def shifted(data: Data, workspace: TpSpWorkspace, options: Any) -> Call:
        call = right(data, workspace, options)

        def wrong() -> Tensors:
            outs = call()
            outs["gathered"][-1] = outs["gathered"][0]
            return outs

        return wrong

    monkeypatch.setattr(v, "fused_call", shifted)
    case = parse_cases("64,32,64", "nn", 2, "bulk_ag")
    report = bench_on_cpu(case, [], sweep=False, kind=BulkAgOptions)[0]
    assert "gathered elements wrong" in report.rows[0].wrong[v.FUSED]


def test_a_part_that_is_missing_from_the_sum_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = v.fused_call

    def own_part_only(data: Data, workspace: TpSpWorkspace, options: Any) -> Call:
        call = right(data, workspace, options)

        def partial() -> Tensors:
            out = call()["out"]
            own = data.given["x"].chunk(workspace.world.size)[workspace.world.rank]
            return {"out": out.copy_(own @ data.given["w"].t())}

        return partial

    monkeypatch.setattr(v, "fused_call", own_part_only)
    case = parse_cases("64,32,64", "tn", 2, "gemm_rs")
    report = bench_on_cpu(case, [], sweep=False, kind=GemmRsOptions)[0]
    assert any("fused" in wrong and "elements wrong" in wrong for wrong in report.wrong)


def test_the_command_on_record_names_no_folder_of_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = ["bench", "ag_gemm", "--shapes", "8,8,8;llama3", "--json", "/some/where/x.json"]
    monkeypatch.setattr(sys, "argv", ["/some/python/file.py", *arguments, "--png=/else/x.png"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert _command() == (
        "torchrun --nproc-per-node 2 -m kosmos_tpsp -- bench ag_gemm --shapes '8,8,8;llama3' "
        "--json x.json --png=x.png"
    )


def test_host_cost_is_that_of_the_slowest_rank_at_both_entries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outputs: dict[int, list[torch.Tensor]] = {0: [], 1: []}

    def made_up(fn: Callable[[], Any], world: World, *, calls: int) -> float:
        outputs[world.rank].append(fn())
        return calls + len(outputs[world.rank]) + 0.5 * world.rank

    monkeypatch.setattr(session, "host_microseconds", made_up)
    monkeypatch.setattr(session, "HOST_SHAPE", (64, 32, 64))
    settings = replace(BRIEF, host_calls=7)
    reports = bench_on_cpu([], [], sweep=False, settings=settings)
    assert reports[0].host_us == reports[1].host_us == {"ag_gemm": 8.5, "kosmos::ag_gemm": 9.5}
    for raw, custom in outputs.values():
        assert raw.shape == (64, 32)
        assert torch.equal(raw, custom)


def test_a_wrong_variant_is_named_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    vendor = v.vendor_gemm

    def one_element_off(data: Data) -> v.Variant:
        right = vendor(data)

        def wrong() -> Tensors:
            outputs = right.call()
            outputs["out"][-1, -1] += 16
            return outputs

        return replace(right, call=wrong)

    monkeypatch.setattr(v, "vendor_gemm", one_element_off)
    report = bench_on_cpu([Case("small", 64, 32, 64)], [], sweep=False)[1]
    assert v.GEMM_VENDOR not in report.rows[0].timings
    assert v.FUSED in report.rows[0].timings
    [text] = report.wrong
    assert text.startswith("small: gemm_cublas: 1 of 2048 elements wrong before timing on rank 0")


def test_a_variant_that_goes_wrong_while_it_is_timed_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vendor = v.vendor_gemm

    def nan_in_the_end(data: Data) -> v.Variant:
        right = vendor(data)
        calls = iter(range(10))

        def wrong() -> Tensors:
            outputs = right.call()
            # One check before, two rounds: the fourth call is the check after.
            if next(calls) == 3:
                outputs["out"][0, 0] = float("nan")
            return outputs

        return replace(right, call=wrong)

    monkeypatch.setattr(v, "vendor_gemm", nan_in_the_end)
    report = bench_on_cpu([Case("small", 64, 32, 64)], [], sweep=False)[0]
    assert "1 of 2048 elements wrong after timing" in report.wrong[0]
    assert v.GEMM_VENDOR not in report.rows[0].timings


def test_a_wrong_baseline_is_found_by_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    baseline = v.baseline

    def halved(data: Data) -> v.Variant:
        right = baseline(data)

        def wrong() -> Tensors:
            outputs = right.call()
            outputs["out"].mul_(0.99)
            return outputs

        return replace(right, call=wrong)

    monkeypatch.setattr(v, "baseline", halved)
    report = bench_on_cpu([Case("small", 64, 32, 64)], [], sweep=False)[0]
    assert "nccl_cublas: relative error 1.0e-02 against FP64" in report.wrong[0]


def test_a_kept_gather_is_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = v.fused_call

    def stale_row(data: Data, workspace: TpSpWorkspace, options: AgGemmOptions) -> Call:
        call = fused(data, workspace, options)

        def wrong() -> Tensors:
            outputs = call()
            outputs["gathered"][-1] = 0
            return outputs

        return wrong

    monkeypatch.setattr(v, "fused_call", stale_row)
    report = bench_on_cpu([Case("small", 64, 32, 64, "nn")], [], sweep=False)[0]
    assert "gathered elements wrong" in report.rows[0].wrong[v.FUSED]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["gemm_ag"], "gemm_ag"),
        (["gemm_rs", "--layout", "nn"], "layout: got 'nn' for gemm_rs"),
        (["gemm_rs", "--order", "naive"], "order: got naive for gemm_rs"),
        (["bulk_ag", "--order", "naive"], "order: got naive for bulk_ag, wanted none"),
        (["bulk_column"], "bulk_column"),
        (["bulk_ag", "--order-ablation"], "order-ablation: bulk_ag has no queue orders"),
        (["ag_gemm", "--shapes", "1,2"], "wanted llama3"),
        (["ag_gemm", "--policy", "greedy"], "greedy"),
        (["ag_gemm", "--rounds", "0"], "rounds"),
        (["ag_gemm", "--json", "nowhere/x.json"], "its folder does not exist"),
    ],
)
def test_bad_arguments_end_with_status_2_and_one_line(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    [line] = captured.err.splitlines()
    assert says in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "ag_gemm"]) == 2
    assert "no GPU is visible" in capsys.readouterr().err


@pytest.mark.parametrize("given", [None, "1"])
def test_nccl_runs_without_multicast_unless_asked(
    given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Reached(Exception):
        pass

    def stop(device: int) -> None:
        raise Reached

    monkeypatch.setenv("NCCL_NVLS_ENABLE", "")
    if given is None:
        monkeypatch.delenv("NCCL_NVLS_ENABLE")
    else:
        monkeypatch.setenv("NCCL_NVLS_ENABLE", given)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", stop)
    with pytest.raises(Reached), session.process_group():
        pass
    assert os.environ["NCCL_NVLS_ENABLE"] == (given or "0")


def run_bench(tmp_path: Path, *launcher: str) -> dict[str, Any]:
    """JSON of a short run in a process of its own."""
    out = tmp_path / "run.json"
    shapes = "1024,512,1024;2048,256,512"
    command = [sys.executable, *launcher, "-m", "kosmos_tpsp", "bench", "ag_gemm", "--quick"]
    command += ["--sweep", "--shapes", shapes, "--json", str(out), "--png", str(tmp_path / "x.png")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    data: dict[str, Any] = json.loads(out.read_text())
    return data


@pytest.mark.gpu
def test_one_gpu_without_torchrun(tmp_path: Path) -> None:
    data = run_bench(tmp_path)
    assert data["verdict"]["correct"]
    assert data["machine"]["ranks"] == 1
    assert data["rows"][0]["variants"][v.GEMM_OWN]["median_ms"] > 0


@pytest.mark.multi_gpu(2)
def test_two_gpus_under_torchrun(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    data = run_bench(tmp_path, *launcher)
    assert data["verdict"]["correct"]
    assert data["machine"]["ranks"] == 2
    assert min(data["peak_gbps"].values()) > 10
    assert all(r["variants"][v.FUSED]["median_ms"] > 0 for r in data["rows"])
