"""Plans on every machine: properties, rules from curves, overrides, explanations, refusals."""

import dataclasses
import json
import random
from pathlib import Path

import pytest
from kosmos_heuristics import (
    MACHINE_NAMES,
    AgGemmPlan,
    AgGemmProblem,
    PlanError,
    load_machine,
    plan_ag_gemm,
)
from kosmos_heuristics.ag_gemm import OVERRIDES
from kosmos_heuristics.shapes import llama3

# Rules from curves are tested on a machine of their own: the packaged figures change with every
# new measurement.
H200 = load_machine(Path(__file__).parent / "data" / "switched.json")
EXECUTOR = load_machine("executor")


def random_problem(rng):
    world_size = rng.randint(1, 8)
    return AgGemmProblem(
        m=world_size * rng.choice([0, 1, 7, 100, 256, 1024, 8192]),
        n=8 * rng.randint(1, 2000),
        k=8 * rng.randint(1, 2000),
        world_size=world_size,
        layout=rng.choice(["tn", "nn"]),
        keep_gathered=rng.choice([None, True, False]),
    )


@pytest.mark.parametrize("name", MACHINE_NAMES)
def test_properties_of_plans(name):
    machine = load_machine(name)
    rng = random.Random()
    for _ in range(300):
        problem = random_problem(rng)
        cap = rng.choice([None, rng.randint(2, 300)])
        plan = plan_ag_gemm(problem, machine, cap=cap)
        assert plan == plan_ag_gemm(problem, machine, cap=cap)
        assert plan.cap == min(cap or machine.num_wgs, machine.num_wgs)
        assert plan.num_movers <= plan.cap - plan.num_movers
        assert (plan.num_movers > 0) == (problem.world_size > 1)
        assert plan.num_movers <= plan.movers_per_peer * problem.num_peers
        assert plan.tile_row_rows % plan.slices == 0
        partial_bytes = plan.split_k * plan.split_tiles * plan.block_m * plan.block_n * 4
        assert (plan.split_k == 1) == (plan.split_tiles == 0)
        assert plan.split_k == 1 or partial_bytes <= machine.max_split_k_bytes
        assert plan.split_k == 1 or problem.k >= plan.split_k * plan.block_k
        explained = plan.explain()
        assert all(f"{field} = " in explained for field in plan.to_dict() if field != "rule")
        assert "derived from" not in explained


def test_h200_crews_by_what_decides():
    narrow = [(8192, 768, 4096), (8192, 1280, 8192), (65536, 768, 4096), (32768, 1280, 8192)]
    for m, n, k in narrow:
        plan = plan_ag_gemm(AgGemmProblem(m, n, k, 2), H200)
        assert plan.num_movers == 32
        assert "bytes decide" in plan.rule
    for m, n, k in [(8192, 7168, 8192), (32768, 13312, 16384)]:
        plan = plan_ag_gemm(AgGemmProblem(m, n, k, 2), H200)
        assert 8 <= plan.num_movers <= 16
        assert "GEMM decides" in plan.rule


@pytest.mark.parametrize("world_size", range(2, 9))
def test_crew_from_curves_is_shared_by_the_peers(world_size):
    # Behind a switch the links serve any peer: 32 WGs saturate them however many peers there are.
    plan = plan_ag_gemm(AgGemmProblem(840 * 8, 768, 4096, world_size), H200)
    assert 32 <= plan.num_movers < 32 + world_size - 1
    assert plan.movers_per_peer == -(-32 // (world_size - 1))


def test_crew_from_curves_never_grows_with_width():
    for world_size in range(2, 9):
        for layout in ("tn", "nn"):
            crews = [
                plan_ag_gemm(AgGemmProblem(8192, n, 4096, world_size, layout), H200).num_movers
                for n in range(256, 16384, 256)
                if 8192 % world_size == 0
            ]
            assert crews == sorted(crews, reverse=True)


def test_knee_is_the_last_point_of_near_full_rate_per_wg():
    # Push: 42.5, 40.6 and 7.3 GB/s per WG at 4, 8 and 48 WGs.
    assert knee_wgs(H200, "push") == 8


def test_h200_pushes_unless_the_gathered_operand_is_kept():
    problem = AgGemmProblem(8192, 768, 4096, 2)
    assert plan_ag_gemm(problem, H200).transport == "push"
    kept = dataclasses.replace(problem, keep_gathered=True)
    assert plan_ag_gemm(kept, H200).transport == "pull"
    dgrad = dataclasses.replace(problem, layout="nn")
    assert plan_ag_gemm(dgrad, H200).transport == "pull"
    assert plan_ag_gemm(kept, H200, transport="push").transport == "push"


def test_h200_narrow_tiles_only_where_they_save_waves():
    wide = plan_ag_gemm(AgGemmProblem(32768, 7168, 8192, 2), H200)
    assert wide.block_n == 256
    # 192 tiles of 256 columns take two rounds of 132 WGs, 384 of 128 columns three half rounds.
    few = plan_ag_gemm(AgGemmProblem(8192, 768, 4096, 2), H200)
    assert (few.block_n, few.num_stages) == (128, 4)
    # 132 tiles of 256 columns fill the grid exactly once.
    exact = plan_ag_gemm(AgGemmProblem(128 * 132, 256, 4096, 1), H200)
    assert exact.block_n == 256


def test_h200_splits_k_while_all_splits_fit_one_wave():
    for layout in ("tn", "nn"):
        few = plan_ag_gemm(AgGemmProblem(512, 512, 8192, 2, layout), H200)
        tiles = 2 * 2 * 512 // few.block_n
        assert few.split_k == 4
        assert tiles * few.split_k <= few.cap
        many = plan_ag_gemm(AgGemmProblem(8192, 768, 4096, 2, layout), H200)
        assert many.split_k == 1


@pytest.mark.parametrize(("tiles", "factor"), [(33, 4), (34, 2), (66, 2), (67, 1)])
def test_h200_split_k_limits(tiles, factor):
    problem = AgGemmProblem(128 * tiles, 128, 4096, 1)
    assert plan_ag_gemm(problem, H200).split_k == factor


def test_h200_sweeps_tile_rows_together_only_when_the_gather_is_ahead():
    assert plan_ag_gemm(AgGemmProblem(8192, 7168, 8192, 2), H200).group_rows == 4
    assert plan_ag_gemm(AgGemmProblem(8192, 768, 4096, 2), H200).group_rows == 1


def test_slices_do_not_depend_on_the_cap():
    for machine in map(load_machine, MACHINE_NAMES):
        for shape in llama3("ag_gemm", "tn")[:6]:
            problem = AgGemmProblem(shape.m, shape.n, shape.k, 8)
            slices = {plan_ag_gemm(problem, machine, cap=cap).slices for cap in (2, 5, 16, None)}
            assert len(slices) == 1


def test_a_slice_is_a_copy_step_or_more():
    rng = random.Random()
    for _ in range(100):
        plan = plan_ag_gemm(AgGemmProblem(8192, 768, k := 8 * rng.randint(1, 1000), 2), H200)
        assert plan.slices == 1 or plan.tile_row_rows // plan.slices * k >= plan.copy_elements


def test_fixed_policy_has_8_per_peer_or_what_is_given():
    problem = AgGemmProblem(8192, 768, 4096, 8)
    for machine in (H200, load_machine("mi350x")):
        assert plan_ag_gemm(problem, machine, policy="fixed").movers_per_peer == 8
    assert plan_ag_gemm(problem, H200, policy="fixed", movers_per_peer=3).num_movers == 21


def test_executor_plans_are_tiny():
    plan = plan_ag_gemm(AgGemmProblem(384, 200, 128, 4), EXECUTOR)
    assert (plan.cap, plan.num_movers, plan.slices) == (4, 2, 2)
    assert (plan.block_m, plan.block_n, plan.block_k, plan.tile_row_rows) == (16, 32, 32, 32)


def test_overrides_are_taken_and_explained():
    problem = AgGemmProblem(8192, 768, 4096, 2)
    given = {
        "block_m": 64,
        "block_n": 64,
        "block_k": 32,
        "num_warps": 4,
        "num_stages": 2,
        "tile_row_rows": 128,
        "slices": 2,
        "group_m": 3,
        "group_rows": 5,
        "xcd_bucketing": True,
        "num_xcds": 2,
        "copy_elements": 256,
    }
    assert set(given) == set(OVERRIDES)
    plan = plan_ag_gemm(problem, H200, split_k=3, movers_per_peer=5, **given)
    for name, value in {**given, "split_k": 3, "movers_per_peer": 5}.items():
        assert getattr(plan, name) == value
        line = next(line for line in plan.explain().splitlines() if line.startswith(f"{name} ="))
        assert "given by the caller" in line


def test_xcd_bucketing_override_brings_the_machines_xcds():
    problem = AgGemmProblem(2048, 768, 4096, 2)
    mi350x = load_machine("mi350x")
    assert plan_ag_gemm(problem, mi350x, xcd_bucketing=True).num_xcds == 8
    assert plan_ag_gemm(problem, mi350x, xcd_bucketing=False).num_xcds == 1


def test_plan_prints_in_one_line_and_as_json():
    plan = plan_ag_gemm(AgGemmProblem(8192, 768, 4096, 2), H200)
    assert "\n" not in str(plan)
    data = json.loads(json.dumps(plan.to_dict()))
    assert AgGemmPlan(**data) == plan
    assert all(f" {name}={value}" in str(plan) for name, value in plan.to_dict().items())


def test_every_field_shows_in_the_line_that_ranks_compare():
    plan = plan_ag_gemm(AgGemmProblem(8192, 768, 4096, 2), H200)
    changed = {
        "transport": "pull",
        "policy": "fixed",
        "order": "naive",
        "rule": "another",
        "movers_per_peer": 33,
        "xcd_bucketing": None,
    }
    for field, value in plan.to_dict().items():
        other = changed.get(field, 2 * value if isinstance(value, int) else value)
        if field in ("xcd_bucketing", "num_xcds"):
            other_plan = dataclasses.replace(plan, xcd_bucketing=True, num_xcds=2)
        else:
            other_plan = dataclasses.replace(plan, **{field: other})
        assert str(other_plan) != str(plan)
        assert other_plan != plan


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"cap": 1}, "cap"),
        ({"cap": 0}, "cap"),
        ({"cap": 2.0}, "cap"),
        ({"transport": "shove"}, "transport"),
        ({"policy": "two-way"}, "policy"),
        ({"order": "random"}, "order"),
        ({"movers_per_peer": 0}, "movers_per_peer"),
        ({"movers_per_peer": -1}, "movers_per_peer"),
        ({"split_k": 0}, "split_k"),
        ({"block_m": 100}, "block_m"),
        ({"block_n": 8}, "block_n"),
        ({"slices": 3}, "slices"),
        ({"slices": 512}, "slices"),
        ({"tile_row_rows": 64}, "tile_row_rows"),
        ({"num_xcds": 4}, "num_xcds"),
        ({"xcd_bucketing": 1}, "xcd_bucketing"),
        ({"copy_elements": 1000}, "copy_elements"),
        ({"group_m": 0}, "group_m"),
        ({"block_q": 64}, "override"),
    ],
)
def test_bad_arguments_are_named(arguments, named):
    with pytest.raises(PlanError) as caught:
        plan_ag_gemm(AgGemmProblem(8192, 768, 4096, 2), H200, **arguments)
    assert str(caught.value).startswith(f"{named}: got ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("field", "value"), [("num_movers", 67), ("num_movers", 0)])
def test_impossible_crews_are_refused(field, value):
    plan = plan_ag_gemm(AgGemmProblem(8192, 768, 4096, 2), H200)
    with pytest.raises(PlanError, match=field):
        dataclasses.replace(plan, **{field: value})
