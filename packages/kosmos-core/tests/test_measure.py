"""Measuring: what the kernels move and compute is right, faults are caught, files hold together.

Times come from a clock of the test; everything else is the real thing, on virtual ranks in the
executor with race and strict checks on.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from kosmos_core.__main__ import cli, main
from kosmos_core.errors import PeerTimeoutError
from kosmos_core.executor import Mutation, PriorityRandom
from kosmos_core.kernels.beside import beside_kernel, sum_kernel, sum_unit
from kosmos_core.kernels.measure import build_claimed, copy_kernel, ping_pong_kernel
from kosmos_core.measure import MeasurementError, Timer, measure, power, run, timing, to_json
from kosmos_core.measure.beside import BesideBench, SumBench, sums
from kosmos_core.measure.budget import FULL, QUICK, Budget, CopyVariant, GemmTile, SumVariant
from kosmos_core.measure.cases import compile_cases
from kosmos_core.measure.copies import CopyBench, Way, best_curve, pattern, ways
from kosmos_core.measure.figure import draw
from kosmos_core.measure.gemm import GemmBench
from kosmos_core.measure.latency import partner_of, start_order
from kosmos_core.measure.power import Sampler, open_meter
from kosmos_core.measure.report import print_report
from kosmos_core.testing.compile_guard import run_cases
from kosmos_core.workspace import Workspace
from kosmos_core.worlds import World, cpu_world
from rich.console import Console

VARIANT = CopyVariant(16, 8, 1)
TINY = Budget(
    movers=(1, 2),
    variants=(VARIANT, CopyVariant(32, 8, 2), CopyVariant(16, 4, 1)),
    unit_elements=64,
    copy_elements=(256, 512),
    caps=(2, 3),
    gemm=(64, 32, 32),
    sum_variants=(SumVariant(32, 8), SumVariant(64, 8)),
    beside_step=16,
    beside_units=20,
    beside_movers=(1, 2),
    contractions=(16, 64),
    call_tiles=(4,),
    gemm_rounds=2,
    gemm_batch=2,
    gemm_orders=2,
    tile=GemmTile(16, 16, 16, 4, 2),
    power_wgs=(2,),
    power_seconds=0.01,
    flag_rounds=3,
    oversubscribed_wgs=9,
    warmup=1,
    repeats=2,
)
CHECKED = {"race": "raise", "strict": True, "weak": "random", "stale": True}


class CountingTimer(Timer):
    """Makes the calls and says that each took as many picoseconds as there have been calls."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.calls = 0

    def times(self, call, before=None, *, warmup, repeats):
        out = []
        for _ in range(warmup + repeats):
            if before is not None:
                before()
            self.world.barrier()
            call()
            self.world.synchronize()
            self.calls += 1
            out.append(self.calls * 1e-9)
        return out[warmup:]


def on_cpu(ranks: int, body, **options):
    with cpu_world(ranks, **{**CHECKED, **options}) as world:
        return world.spmd(lambda rank: body(world, rank))


@functools.cache
def measured_by_all(ranks: int) -> list[dict]:
    return on_cpu(ranks, lambda w, _: measure(w, CountingTimer(w), TINY, "NVIDIA H200"))


def measured(ranks: int) -> dict:
    return json.loads(to_json(measured_by_all(ranks)[0]))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("seed", [0, 1])
def test_copies_are_right(ranks: int, seed: int) -> None:
    def body(world: World, _: int) -> int:
        bench = CopyBench(world, TINY)
        for way in ways(world.size):
            for variant in TINY.variants:
                bench.check(way, variant)
        return len(ways(world.size))

    options = {"policy": PriorityRandom(seed), "start": "random", "seed": seed}
    assert on_cpu(ranks, body, **options) == [{1: 1, 2: 2, 4: 4}[ranks]] * ranks


def test_a_pull_brings_the_peers_elements_and_a_push_lands_at_the_peer() -> None:
    def body(world: World, rank: int) -> tuple[bool, bool]:
        bench = CopyBench(world, TINY)
        found = []
        for direction, source in (("pull", rank + 1), ("push", rank - 1)):
            world.barrier()
            bench.target.local.zero_()
            world.barrier()
            bench.reset()
            bench.copy(Way(direction, 1), VARIANT, 3, 8)
            world.synchronize()
            world.barrier()
            wanted = pattern(512, source % 3, world.device)
            found.append(torch.equal(bench.target.local.view(torch.int16), wanted))
        return tuple(found)

    assert on_cpu(3, body) == [(True, True)] * 3


def test_the_pattern_tells_ranks_and_places_apart() -> None:
    first, second = (pattern(4096, rank, torch.device("cpu")) for rank in (0, 1))
    assert not torch.equal(first, second)
    assert not torch.equal(first[:64], first[64:128])
    assert torch.isfinite(first.view(torch.bfloat16)).all()
    assert int(first.min()) >= 0  # the poison is negative


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "UNIT, BLOCK, DEPTH)",
            "UNIT - BLOCK, BLOCK, DEPTH)",
        ),  # the last step of each unit is missing
        ("* UNIT", "* (UNIT - 16)"),  # units overlap
        ("SOURCE, route,", "SOURCE, 0,"),  # every route reads the same peer
        ("while unit < units:", "while unit < units - 1:"),
    ],
)
def test_a_wrong_copy_is_never_timed(old: str, new: str) -> None:
    def body(world: World, _: int) -> None:
        CopyBench(world, TINY).check(Way("pull", 2), VARIANT)

    with pytest.raises(MeasurementError, match="elements are wrong after pull, 2 peers"):
        on_cpu(3, body, mutations=[Mutation(copy_kernel, old, new)], race=None)


def test_gemm_is_right_and_a_wrong_one_is_never_timed() -> None:
    def body(world: World, _: int) -> float:
        return GemmBench(world, TINY).check(3)

    for vendor in ("nvidia", "amd"):
        assert max(on_cpu(2, body, vendor=vendor)) < 3e-3
    for defect in (
        Mutation(build_claimed, "row, col, 0, k, 0.0, TN", "row, col, 0, k - BLOCK_K, 0.0, TN"),
        Mutation(build_claimed, "while index < tiles:", "while index < tiles - 1:"),
    ):
        with pytest.raises(MeasurementError, match=r"rank 0: GEMM by 3 WGs"):
            on_cpu(2, body, mutations=[defect])


@pytest.mark.parametrize(("ranks", "seed"), [(1, 0), (2, 1), (3, 2)])
def test_sums_and_what_movers_and_builders_do_beside_each_other_are_right(
    ranks: int, seed: int
) -> None:
    def body(world: World, _: int) -> list[int]:
        added = SumBench(CopyBench(world, TINY))
        for kind in sums(world.size):
            for variant in TINY.sum_variants:
                added.check(kind, variant)
        bench = BesideBench(added, GemmBench(world, TINY))
        moved = []
        for kind in bench.kinds():
            bench.check(kind)
            moved.append(int(bench.moved.sum()))
        return moved

    options = {"policy": PriorityRandom(seed), "start": "random", "seed": seed}
    moved = on_cpu(ranks, body, **options)
    assert [len(counts) for counts in moved] == [{1: 1, 2: 3, 3: 3}[ranks]] * ranks
    assert max(max(counts) for counts in moved) > 0


@pytest.mark.parametrize(
    ("kernel", "old", "new", "message"),
    [
        (sum_unit, "zero + source", "zero + source // 2", "sums are wrong after reduce of 3"),
        (sum_kernel, "while unit < units:", "while unit < units - 1:", "sums are wrong"),
        (beside_kernel, "heads.tiles_ptr, m, n", "heads.tickets_ptr, m, n", "GEMM beside pull"),
        (beside_kernel, "SOURCE, ticket * 0,", "TARGET_ROW, ticket * 0,", "wrong after pull"),
    ],
)
def test_what_is_wrong_beside_builders_is_never_timed(kernel, old, new, message) -> None:
    def body(world: World, _: int) -> None:
        added = SumBench(CopyBench(world, TINY))
        for kind in sums(world.size):
            added.check(kind, TINY.sum_variants[1])
        bench = BesideBench(added, GemmBench(world, TINY))
        for kind in bench.kinds():
            bench.check(kind)

    with pytest.raises(MeasurementError, match=message):
        on_cpu(3, body, mutations=[Mutation(kernel, old, new)], race=None)


def test_whole_rounds_give_every_workgroup_the_same_tiles() -> None:
    def body(world: World, _: int) -> list[int]:
        bench = GemmBench(world, TINY)
        return [bench.whole_rounds_m(w) // 16 * bench.columns for w in (1, 2, 3, 4)]

    assert on_cpu(1, body) == [[2, 4, 6, 8]]


@pytest.mark.parametrize("seed", range(3))
def test_flags_go_there_and_back_under_any_schedule(seed: int) -> None:
    options = {"policy": PriorityRandom(seed), "start": "random", "seed": seed, "trace": False}

    def body(world: World, rank: int) -> int:
        with Workspace(world, (), 1) as workspace:
            elapsed = world.local("elapsed", 1, torch.int64)
            elapsed.fill_(-1)
            args = (workspace.context(), elapsed, partner_of(rank, 3), 5, 1)
            for _ in range(3):
                world.launch(ping_pong_kernel, 1, args, "p", num_warps=8, num_stages=1)
            workspace.synchronize()
            return int(elapsed)

    first, second, alone = on_cpu(3, body, **options)
    assert first > 0
    assert second > 0
    assert alone == -1


def test_a_partner_that_stays_away_is_named() -> None:
    def body(world: World, rank: int) -> str:
        with Workspace(world, (), 1, timeout_s=0.5) as workspace:
            elapsed = world.local("elapsed", 1, torch.int64)
            if rank == 0:
                args = (workspace.context(), elapsed, 1, 5, 1)
                world.launch(ping_pong_kernel, 1, args, "p", num_warps=8, num_stages=1)
                with pytest.raises(PeerTimeoutError, match=r"waited 0\.5 s for rank 1"):
                    workspace.synchronize()
            world.barrier()
            if rank == 1:
                # The one that stayed away hears of it when it leaves, at the latest.
                with pytest.raises(PeerTimeoutError, match=r"rank 0 waited 0\.5 s for rank 1"):
                    workspace.destroy()
        return "ended"

    assert on_cpu(2, body) == ["ended", "ended"]


def test_start_order_is_an_order() -> None:
    options = {"start": "random", "seed": 3}
    (order,) = on_cpu(1, lambda w, _: start_order(w, 9, 8, 8), **options)
    assert sorted(order["tickets"]) == list(range(9))
    assert order["tickets"] != list(range(9))
    assert min(order["start_ns"]) == 0
    by_ticket = [t for _, t in sorted(zip(order["tickets"], order["start_ns"], strict=True))]
    assert by_ticket == sorted(by_ticket)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_measurement_of_several_gpus_is_a_machine(ranks: int) -> None:
    heuristics = pytest.importorskip("kosmos_heuristics")
    data = measured(ranks)
    machine = heuristics.machine_from_measurement(data)
    assert machine.name == "h200"
    assert machine.num_wgs == 4
    assert {str(w): v for w, v in machine.pull.gbps.points} == data["pull_gbps"]
    assert machine.flag_latency_us == data["flag_latency_us"] > 0
    peers = {curve["peers"] for curve in data["copies"]["curves"]}
    assert peers == {1, ranks - 1}
    assert data["multicast"] == "off"


def test_what_was_measured_can_be_printed_and_drawn(tmp_path: Path) -> None:
    data = measured(3)
    draw(data, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 50_000
    with open(os.devnull, "w") as nowhere:
        print_report(data, Console(file=nowhere))


class WallClockEvent:
    """Stands in for a CUDA event: launches in the executor are over when they return."""

    def record(self) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, end: WallClockEvent) -> float:
        return (end.seconds - self.seconds) * 1e3

    def synchronize(self) -> None:
        pass


def test_the_command_from_set_up_to_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loads = []

    def meter(device: torch.device):
        return (lambda: (500.0 + len(loads), 1700.0)), "a meter"

    monkeypatch.setattr(timing, "new_event", WallClockEvent)
    monkeypatch.setattr(power, "new_event", WallClockEvent)
    monkeypatch.setattr(power, "open_meter", meter)
    monkeypatch.setattr(torch.cuda, "_sleep", loads.append)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")

    def body(world: World, _: int) -> dict:
        monkeypatch.setattr(run, "measuring_world", lambda: contextlib.nullcontext(world))
        return run.measure_here(TINY, None, tmp_path / "a.json", tmp_path / "a.png")

    first, second = on_cpu(2, body)
    data = json.loads((tmp_path / "a.json").read_text())
    assert data == first
    assert data["machine"] == "NVIDIA H200"
    assert data["pull_gbps"] == second["pull_gbps"]
    assert set(data["power"]["watts"]) == {"0", "2", "4"}
    assert set(data["power"]["tflops"]) == {"2", "4"}
    assert (tmp_path / "a.png").stat().st_size > 50_000
    out = capsys.readouterr().out
    # One of the two ranks reports.
    assert out.count("GB/s by movers") == 1
    assert "a.json and" in out


def test_a_measurement_of_one_gpu_has_no_peers_and_is_refused_as_a_machine() -> None:
    data = measured(1)
    assert data["pull_gbps"] is None
    assert data["push_gbps"] is None
    assert data["flag_latency_us"] is None
    assert data["latency"]["local_flag_us"] > 0
    assert {curve["direction"] for curve in data["copies"]["curves"]} == {"local"}
    heuristics = pytest.importorskip("kosmos_heuristics")
    with pytest.raises(heuristics.MachineError, match="pull_gbps"):
        heuristics.machine_from_measurement(data)


def test_every_rank_has_the_same_figures() -> None:
    results = measured_by_all(2)
    # Host times are each rank's own.
    own = ("seconds", "latency", "start_order", "date", "gemm")
    first, second = ({k: v for k, v in r.items() if k not in own} for r in results)
    assert first == second


def test_the_curve_that_plans_read_is_the_fastest_for_few_movers() -> None:
    def curve(direction: str, warps: int, depth: int, few: float, many: float) -> dict:
        gbps = {"4": few, "32": 2 * few, "132": many}
        return {
            "direction": direction,
            "peers": 1,
            "num_warps": warps,
            "depth": depth,
            "gbps": gbps,
        }

    curves = [
        curve("pull", 8, 1, 95, 400),
        curve("pull", 8, 2, 159, 330),
        curve("pull", 4, 2, 170, 330),  # fused kernels do not run with 4 warps
        curve("push", 8, 1, 200, 351),
    ]
    assert best_curve(curves, "pull", 1) is curves[1]
    assert best_curve(curves, "push", 1) is curves[3]
    assert best_curve(curves, "push", 7) is None


def test_counts_fit_the_machine() -> None:
    assert FULL.cap_counts(132) == [32, 64, 84, 96, 100, 112, 116, 124, 132]
    assert {160, 192, 224, 240, 256} <= set(FULL.cap_counts(256))
    assert FULL.counts(FULL.movers, 132) == [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 132]
    assert QUICK.counts(QUICK.movers, 8) == [2, 4, 8]
    for variant in FULL.variants:
        assert FULL.unit_elements % variant.step_elements == 0


def test_without_a_meter_the_reason_is_recorded() -> None:
    read, why = open_meter(torch.device("cpu"))
    assert read is None
    for name in ("nvml", "torch", "nvidia-smi"):
        assert name in why
    assert measured(1)["power"]["note"].startswith("not measured: nvml")


def test_the_later_readings_of_a_load_count() -> None:
    begin = time.perf_counter()
    with Sampler(
        lambda: (100.0, 900.0) if time.perf_counter() - begin < 0.1 else (700.0, 1500.0)
    ) as sampler:
        time.sleep(0.4)
    assert sampler.settled() == (700.0, 1500.0)

    def broken() -> tuple[float, float]:
        raise OSError("the sensor is gone")

    with Sampler(broken) as sampler:
        time.sleep(0.05)
    with pytest.raises(RuntimeError, match="the sensor is gone"):
        sampler.settled()


def test_without_a_gpu_it_says_so_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("has a GPU")
    assert main(["measure", "--quick"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "no GPU is visible" in err


def test_a_wrong_copy_ends_the_command_with_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*arguments: object) -> None:
        raise MeasurementError("rank 1: 3 of 512 elements are wrong")

    monkeypatch.setattr("kosmos_core.measure.measure_here", fails)
    assert main(["measure"]) == 1
    assert capsys.readouterr().err == "error: rank 1: 3 of 512 elements are wrong\n"


def test_a_folder_that_is_missing_is_found_before_anything_is_measured(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["measure", "--json", str(tmp_path / "no" / "a.json")])
    assert done.exit_code == 2
    assert "the folder does not exist" in done.output


@pytest.mark.compile
def test_kernels_compile_without_spills_and_with_their_order() -> None:
    result = run_cases(compile_cases())
    assert {report.target for report in result.reports} == {"sm_90", "gfx950"}
    assert [reason for report in result.reports for reason in report.reasons] == []


def run_quick(tmp_path: Path, *launcher: str) -> dict:
    path, picture = tmp_path / "m.json", tmp_path / "m.png"
    command = [
        *launcher,
        "-m",
        "kosmos_core",
        "measure",
        "--quick",
        "--json",
        str(path),
        "--png",
        str(picture),
    ]
    subprocess.run(command, check=True, timeout=240)
    assert picture.stat().st_size > 10_000
    return json.loads(path.read_text())


@pytest.mark.gpu
def test_one_gpu(tmp_path: Path) -> None:
    data = run_quick(tmp_path, sys.executable)
    assert data["pull_gbps"] is None
    assert max(data["tflops"].values()) > 1
    assert sorted(data["start_order"]["persistent"]["tickets"]) == list(range(data["num_wgs"]))


@pytest.mark.multi_gpu(2)
def test_two_gpus(tmp_path: Path) -> None:
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    data = run_quick(tmp_path, *launcher)
    heuristics = pytest.importorskip("kosmos_heuristics")
    machine = heuristics.machine_from_measurement(replace_name(data))
    assert machine.pull.gbps.peak > 1
    assert 0.05 < machine.flag_latency_us < 100


def replace_name(data: dict) -> dict:
    """The same figures under a name that a packaged machine has, whatever GPU ran."""
    return {**data, "machine": "h200"}
