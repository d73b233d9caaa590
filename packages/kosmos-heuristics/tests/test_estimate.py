"""Estimates: bounds, agreement with the paper's tables, and declined calls."""

import dataclasses
import random
import statistics
from pathlib import Path

import pytest
from kosmos_heuristics import (
    AgGemmProblem,
    can_fuse,
    estimate,
    load_machine,
    plan_ag_gemm,
)
from kosmos_heuristics.parts import Curve
from kosmos_heuristics.shapes import llama3

MI350X = load_machine("mi350x")
# Rules from curves are tested on a machine of their own: the packaged figures change with every
# new measurement.
H200 = load_machine(Path(__file__).parent / "data" / "switched.json")


def predict(problem, machine, **arguments):
    return estimate(problem, machine, plan_ag_gemm(problem, machine, **arguments))


def paper_cells():
    for layout in ("tn", "nn"):
        for shape in llama3("ag_gemm", layout):
            yield shape, AgGemmProblem(shape.m, shape.n, shape.k, 8, layout)


def test_paper_times_on_mi350x():
    fused, unfused = [], []
    for shape, problem in paper_cells():
        predicted = predict(problem, MI350X)
        fused.append(abs(predicted.time_ms / shape.kosmos_ms - 1))
        unfused.append(abs(predicted.baseline_ms / shape.base_ms - 1))
    assert statistics.median(fused) < 0.05
    assert max(fused) < 0.15
    assert statistics.median(unfused) < 0.07
    assert max(unfused) < 0.22


@pytest.mark.parametrize("name", ["mi350x", "mi355x"])
def test_no_shape_that_gained_in_the_paper_is_declined(name):
    machine = load_machine(name)
    for shape, problem in paper_cells():
        assert shape.speedup > 1
        assert can_fuse(problem, machine, plan_ag_gemm(problem, machine)) is None


@pytest.mark.parametrize("policy", ["one_way", "two_way", "fixed", "serial"])
@pytest.mark.parametrize("name", ["h200", "mi350x"])
def test_nothing_is_faster_than_its_bytes_or_its_flops(name, policy):
    machine = load_machine(name)
    rng = random.Random()
    for _ in range(200):
        problem = AgGemmProblem(
            m=8 * rng.randint(1, 8192),
            n=8 * rng.randint(1, 1600),
            k=8 * rng.randint(1, 2000),
            world_size=rng.choice([1, 2, 4, 8]),
            layout=rng.choice(["tn", "nn"]),
        )
        predicted = predict(problem, machine, policy=policy, cap=rng.choice([None, 40]))
        best = max(tile.efficiency for tile in machine.tiles) * machine.tflops.peak
        assert predicted.time_ms >= predicted.bytes_ms
        assert predicted.time_ms >= problem.flops / (best * 1e9) * (1 - 1e-9)
        assert predicted.baseline_ms >= predicted.gemm_ms > 0


def test_nothing_is_faster_than_a_read_of_its_operands():
    slow = dataclasses.replace(H200, hbm_gbps=50.0)
    rng = random.Random()
    for _ in range(50):
        m, n, k = 8 * rng.randint(1, 64), 8 * rng.randint(1, 1600), 8 * rng.randint(1, 2000)
        predicted = predict(AgGemmProblem(m, n, k, rng.choice([1, 2, 8])), slow)
        operand_bytes = 2 * (m * k + n * k + m * n)
        assert predicted.time_ms > operand_bytes / 50e6
        assert predicted.gemm_ms >= operand_bytes / 50e6


@pytest.mark.parametrize(
    ("tiles", "split", "halves"),
    [
        *((66, 0, 2), (66, 66, 1), (132, 0, 2), (133, 0, 4), (264, 0, 4)),
        # The tail in halves: 67 whole tiles and 132 halves of which 65 WGs take two each meanwhile.
        *((133, 66, 3), (100, 66, 2), (198, 66, 3), (211, 66, 4)),
    ],
)
def test_tiles_of_one_rank_are_built_in_waves(tiles, split, halves):
    # Without costs beside the tensor cores', in units of half a tile of a full grid.
    bare = dataclasses.replace(
        H200, tile_us=0.0, launch_us=0.0, hbm_gbps=1e6, tflops=Curve(((132, 700.0),))
    )
    problem = AgGemmProblem(128 * tiles, 256, 65536, 1)
    parts = {"split_k": 2, "split_tiles": split} if split else {"split_k": 1}
    plan = plan_ag_gemm(problem, bare, block_n=256, **parts)
    half_ms = 128 * 256 * 65536 / (700e9 / 132)
    time_ms = estimate(problem, bare, plan).time_ms
    assert time_ms == pytest.approx(halves * half_ms, rel=0.02)


def test_policies_rank_as_measured():
    for _, problem in paper_cells():
        one_way = predict(problem, MI350X)
        assert one_way.time_ms <= predict(problem, MI350X, policy="serial").time_ms
        crew = plan_ag_gemm(problem, MI350X).movers_per_peer
        fixed = predict(problem, MI350X, policy="fixed", movers_per_peer=crew)
        assert one_way.time_ms <= fixed.time_ms


def test_more_link_or_more_tflops_never_slows_a_call():
    def times(curve, factor):
        return Curve(tuple((wgs, factor * value) for wgs, value in curve.points))

    for machine in (H200, MI350X):
        faster_link = dataclasses.replace(
            machine,
            pull=dataclasses.replace(machine.pull, gbps=times(machine.pull.gbps, 1.5)),
            push=dataclasses.replace(machine.push, gbps=times(machine.push.gbps, 1.5)),
        )
        faster_gemm = dataclasses.replace(machine, tflops=times(machine.tflops, 1.5))
        for _, problem in paper_cells():
            plan = plan_ag_gemm(problem, machine)
            now = estimate(problem, machine, plan).time_ms
            assert estimate(problem, faster_link, plan).time_ms <= now
            assert estimate(problem, faster_gemm, plan).time_ms <= now


def test_no_rows_take_no_time():
    problem = AgGemmProblem(0, 768, 4096, 2)
    predicted = predict(problem, H200)
    assert (predicted.time_ms, predicted.baseline_ms, predicted.efficiency) == (0, 0, 1)
    assert can_fuse(problem, H200, plan_ag_gemm(problem, H200)) is None


@pytest.mark.parametrize(
    ("n", "k", "named"), [(768, 4100, "k = 4100"), (772, 4096, "n = 772"), (7, 8, "n = 7")]
)
@pytest.mark.parametrize("name", ["h200", "mi350x", "executor"])
def test_unaligned_rows_are_declined_everywhere(name, n, k, named):
    machine = load_machine(name)
    for world_size in (1, 2):
        problem = AgGemmProblem(64, n, k, world_size)
        declined = can_fuse(problem, machine, plan_ag_gemm(problem, machine), speed=False)
        assert named in declined.reason
        assert "multiple of 8" in declined.reason
        assert str(declined) == declined.reason
        assert "\n" not in declined.reason


def test_few_rows_of_a_wide_layer_are_declined_for_speed():
    # The weight alone takes the vendor's GEMM 33 us; 56 tiles leave most WGs without work for 60.
    problem = AgGemmProblem(64, 7168, 8192, 2)
    plan = plan_ag_gemm(problem, H200)
    predicted = estimate(problem, H200, plan)
    declined = can_fuse(problem, H200, plan)
    assert predicted.time_ms > predicted.baseline_ms
    assert f"{predicted.time_ms:.3f} ms" in declined.reason
    assert "slower" in declined.reason
    assert can_fuse(problem, H200, plan, speed=False) is None


def test_launch_bound_calls_are_declined():
    # A few rows on a machine whose fused launch costs more than collective and GEMM together.
    problem = AgGemmProblem(16, 768, 1024, 8)
    slow = dataclasses.replace(H200, launch_us=100.0)
    assert can_fuse(problem, slow, plan_ag_gemm(problem, slow)) is not None
    assert can_fuse(problem, H200, plan_ag_gemm(problem, H200)) is None


def test_one_rank_and_the_executor_are_never_declined_for_speed():
    executor = load_machine("executor")
    rng = random.Random()
    for _ in range(50):
        m, n, k = 8 * rng.randint(0, 64), 8 * rng.randint(1, 64), 8 * rng.randint(1, 64)
        alone = AgGemmProblem(m, n, k, 1)
        assert can_fuse(alone, H200, plan_ag_gemm(alone, H200)) is None
        tiny = AgGemmProblem(m, n, k, 8)
        assert can_fuse(tiny, executor, plan_ag_gemm(tiny, executor)) is None


def test_cap_compares_like_with_like():
    problem = AgGemmProblem(32768, 2304, 16384, 2)
    whole, part = predict(problem, H200), predict(problem, H200, cap=44)
    assert part.gemm_ms > 2.5 * whole.gemm_ms
    assert can_fuse(problem, H200, plan_ag_gemm(problem, H200, cap=44)) is None
