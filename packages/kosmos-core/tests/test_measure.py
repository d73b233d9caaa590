"""Measuring: what the kernels move and compute is right, faults are caught, files hold together.

Times come from a clock of the test; everything else is the real thing, on virtual ranks in the executor with race
and strict checks on.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import matplotlib.image
import pytest
import torch
from click.testing import CliRunner
from kosmos_core.__main__ import cli, main
from kosmos_core.errors import PeerTimeoutError
from kosmos_core.executor import Mutation, PriorityRandom
from kosmos_core.kernels.measure import copy_kernel, gemm_kernel, ping_pong_kernel
from kosmos_core.measure import MeasurementError, Timer, measure, to_json
from kosmos_core.measure.budget import FULL, QUICK, Budget, CopyVariant, GemmTile
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
    gemm_rounds=2,
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


def measured(ranks: int) -> dict:
    return on_cpu(ranks, lambda w, _: measure(w, CountingTimer(w), TINY, "NVIDIA H200"))[0]


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
        # Each route reads its neighbour's slot.
        ("unit % num_routes", "(unit + 1) % num_routes"),
        # The last step of each unit is not copied.
        ("copy_run(src_ptr, dst_ptr, UNIT, BLOCK, DEPTH)", "copy_run(src_ptr, dst_ptr, UNIT - BLOCK, BLOCK, DEPTH)"),
        ("* UNIT", "* (UNIT - 16)"),
    ],
)
def test_a_wrong_copy_is_never_timed(old: str, new: str) -> None:
    def body(world: World, _: int) -> None:
        CopyBench(world, TINY).check(Way("pull", 2), VARIANT)

    defect = Mutation(copy_kernel, old, new)
    if "routes" in old:  # still a copy of everything: routes only swap their turns
        on_cpu(3, body, mutations=[defect])
        return
    with pytest.raises(MeasurementError, match=r"elements are wrong after pull, 2 peers"):
        on_cpu(3, body, mutations=[defect], race=None)


def test_gemm_is_right_and_a_wrong_one_is_never_timed() -> None:
    def body(world: World, _: int) -> float:
        return GemmBench(world, TINY).check(3)

    for vendor in ("nvidia", "amd"):
        assert max(on_cpu(2, body, vendor=vendor)) < 3e-3
    for defect in (
        Mutation(gemm_kernel, "row, col, 0, k, TN", "row, col, 0, k - BLOCK_K, TN"),
        Mutation(gemm_kernel, "while index < tiles:", "while index < tiles - 1:"),
    ):
        with pytest.raises(MeasurementError, match=r"rank 0: GEMM by 3 WGs"):
            on_cpu(2, body, mutations=[defect])


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
                with pytest.raises(PeerTimeoutError, match="waited 0.5 s for rank 1"):
                    workspace.synchronize()
            world.barrier()
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
    data = json.loads(to_json(measured(ranks)))
    machine = heuristics.machine_from_measurement(data)
    assert machine.name == "h200"
    assert machine.num_wgs == 4
    assert {str(w): v for w, v in machine.pull.gbps.points} == data["pull_gbps"]
    assert machine.flag_latency_us == data["flag_latency_us"] > 0
    problem = heuristics.AgGemmProblem(8192, 4096, 4096, ranks)
    assert heuristics.plan_ag_gemm(problem, machine).num_movers >= 1
    peers = {curve["peers"] for curve in data["copies"]["curves"]}
    assert peers == {1, ranks - 1}
    assert data["multicast"] == "off"


def test_a_measurement_of_one_gpu_has_no_peers_and_is_refused_as_a_machine() -> None:
    data = json.loads(to_json(measured(1)))
    assert data["pull_gbps"] is None
    assert data["push_gbps"] is None
    assert data["flag_latency_us"] is None
    assert data["latency"]["local_flag_us"] > 0
    assert {curve["direction"] for curve in data["copies"]["curves"]} == {"local"}
    heuristics = pytest.importorskip("kosmos_heuristics")
    with pytest.raises(heuristics.MachineError, match="pull_gbps"):
        heuristics.machine_from_measurement(data)


def test_every_rank_has_the_same_figures() -> None:
    results = on_cpu(2, lambda w, _: measure(w, CountingTimer(w), TINY, "NVIDIA H200"))
    # Host times are each rank's own.
    own = ("seconds", "latency", "start_order", "date", "gemm")
    first, second = ({k: v for k, v in r.items() if k not in own} for r in results)
    assert first == second


def test_the_curve_that_plans_read_is_the_fastest_for_few_movers() -> None:
    def curve(direction: str, warps: int, depth: int, few: float, many: float) -> dict:
        gbps = {"4": few, "32": 2 * few, "132": many}
        return {"direction": direction, "peers": 1, "num_warps": warps, "depth": depth, "gbps": gbps}

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
    with Sampler(lambda: (100.0, 900.0) if time.perf_counter() - begin < 0.1 else (700.0, 1500.0)) as sampler:
        time.sleep(0.4)
    assert sampler.settled() == (700.0, 1500.0)

    def broken() -> tuple[float, float]:
        raise OSError("the sensor is gone")

    with Sampler(broken) as sampler:
        time.sleep(0.05)
    with pytest.raises(RuntimeError, match="the sensor is gone"):
        sampler.settled()


def synthetic(world_size: int) -> dict:
    """A measurement with the shape of a real one: H200-like figures."""
    data = measured(2 if world_size > 1 else 1)
    counts = FULL.counts(FULL.movers, 132)
    curves = []
    for way in ways(world_size):
        for v in FULL.variants:
            slope = {"pull": 24, "push": 42, "local": 60}[way.direction] * (0.55 + 0.15 * v.depth) * v.step_elements / 32768
            top = {"pull": 330, "push": 351, "local": 2100}[way.direction]
            gbps = {str(w): round(min(top, slope * w * v.num_warps / 6) * (1 - w / 4000), 1) for w in counts}
            curves.append(
                {"direction": way.direction, "peers": way.peers, "copy_bytes": 2 * v.step_elements,
                 "depth": v.depth, "num_warps": v.num_warps, "gbps": gbps}
            )  # fmt: skip
    data |= {"num_wgs": 132, "world_size": world_size, "launch_us": 11.3}
    data["copies"] = {"curves": curves, "engine_gbps": 368.0 if world_size > 1 else 2000.0}
    for direction in ("pull", "push"):
        best = best_curve(curves, direction, 1)
        if best is not None:
            data[f"{direction}_gbps"] = best["gbps"]
            data[f"{direction}_copy"] = {k: best[k] for k in ("copy_bytes", "depth", "num_warps")}
            data["copies"] |= {"collective_gbps": 231.0, "collective_us": 21.0}
    caps = FULL.cap_counts(132)
    data["tflops"] = {str(w): round(690 * (w / 132) ** 0.55, 1) for w in caps}
    data["gemm"] |= {"shape": list(FULL.gemm), "fixed_shape_tflops": data["tflops"], "vendor_tflops": 721.0,
                     "vendor_whole_rounds_tflops": 728.0}  # fmt: skip
    data["latency"] |= {"empty_kernel_us": 4.6, "host_launch_us": 8.8, "launch_and_wait_us": 19.0, "local_flag_us": 0.71}
    shuffled = random.Random(1)
    orders = {}
    for name, wgs in (("persistent", 132), ("oversubscribed", 1024)):
        tickets = sorted(range(wgs), key=lambda i: i % 18 * (wgs / 18) + i / 18 + shuffled.random() * wgs / 12)
        tickets = [tickets.index(i) for i in range(wgs)]
        orders[name] = {"wgs": wgs, "num_warps": 8, "uneven_work": wgs > 132, "tickets": tickets,
                        "start_ns": [t * 11 for t in tickets]}  # fmt: skip
    data["start_order"] = orders
    loads = (0, *FULL.counts(FULL.power_wgs, 132))
    data["power"] = {"source": "nvml", "watts": {str(w): 120 + 580 * (w / 132) ** 0.7 for w in loads},
                     "mhz": {str(w): 1980 - max(0, w - 84) * 7 for w in loads}}  # fmt: skip
    return data


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_the_picture_shows_every_part(tmp_path: Path, world_size: int) -> None:
    data = synthetic(world_size)
    whole, changed = tmp_path / "whole.png", tmp_path / "changed.png"
    draw(data, whole)
    image = matplotlib.image.imread(whole)
    height, width = image.shape[:2]
    assert width >= 1600
    assert height >= 1100
    # Each part of the data shows in its own part of the picture.
    halves = {"copies": (0, 0), "tflops": (0, 1), "start_order": (1, 0), "power": (1, 1)}
    for key, (row, column) in halves.items():
        other = json.loads(json.dumps(data))
        if key == "copies":
            for curve in other["copies"]["curves"]:
                curve["gbps"] = {w: 0.6 * v for w, v in curve["gbps"].items()}
        elif key == "tflops":
            other["tflops"] = {w: v * int(w) / 132 for w, v in other["tflops"].items()}
        elif key == "start_order":
            for order in other["start_order"].values():
                order["tickets"] = list(reversed(order["tickets"]))
        else:
            other["power"] = {"note": "not measured: no meter"}
        draw(other, changed)
        difference = abs(matplotlib.image.imread(changed) - image).sum(axis=2)
        part = difference[row * height // 2 :][: height // 2, column * width // 2 :][:, : width // 2]
        assert part.sum() > 0.9 * difference.sum() > 0, key


def test_the_report_names_every_curve() -> None:
    data = synthetic(8)
    console = Console(record=True, width=200, file=open("/dev/null", "w"))
    print_report(data, console)
    text = console.export_text()
    for wanted in (
        "pull 64 KiB x 3, 8 warps", "push to 7 32 KiB x 2, 4 warps", "pull from 7", "whole rounds of tiles",
        "8192x4096x4096", "flag between ranks", "vendor's all-gather", "MHz by active workgroups",
    ):  # fmt: skip
        assert wanted in text


def test_json_is_read_back_as_it_was() -> None:
    data = measured(2)
    text = to_json(data)
    assert json.loads(text) == data
    assert max(len(line) for line in text.splitlines()) < 400


def test_without_a_gpu_it_says_so_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("has a GPU")
    assert main(["measure", "--quick"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "no GPU is visible" in err


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
    command = [*launcher, "-m", "kosmos_core", "measure", "--quick", "--json", str(path), "--png", str(picture)]
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


def test_budgets_differ_only_in_amount() -> None:
    assert replace(QUICK, **{f: getattr(FULL, f) for f in (
        "movers", "variants", "caps", "gemm_orders", "power_wgs", "power_seconds", "repeats")}) == FULL  # fmt: skip
