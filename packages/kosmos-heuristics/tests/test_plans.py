"""Plans on every machine: properties, overrides, explanations, refusals."""

import dataclasses
import json
import random

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
from kosmos_heuristics.orders import TileQueue
from kosmos_heuristics.plans import ORDERS
from kosmos_heuristics.shapes import llama3

H200 = load_machine("h200")
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
        order = rng.choice(ORDERS)
        plan = plan_ag_gemm(problem, machine, cap=cap, order=order)
        assert plan == plan_ag_gemm(problem, machine, cap=cap, order=order)
        assert plan.cap == min(cap or machine.num_wgs, machine.num_wgs)
        assert plan.num_movers <= plan.cap - plan.num_movers
        assert (plan.num_movers > 0) == (problem.world_size > 1)
        assert plan.num_movers <= plan.movers_per_peer * problem.num_peers
        # Only below one mover a peer do the peers share movers.
        shared = problem.num_peers > plan.cap // 2
        assert shared or plan.num_movers == plan.movers_per_peer * problem.num_peers
        assert plan.tile_row_rows % plan.slices == 0
        partial_bytes = plan.split_k * plan.split_tiles * plan.block_m * plan.block_n * 4
        assert (plan.split_k == 1) == (plan.split_tiles == 0)
        assert plan.split_k in (1, 2, 4, 8)
        assert partial_bytes <= machine.max_split_k_bytes
        assert plan.split_tiles <= TileQueue.of(problem, plan, rank=0).num_ids
        assert plan.split_k == 1 or problem.k >= plan.split_k * plan.block_k
        assert plan.claim_run in (1, 2, 4, 8)
        explained = plan.explain()
        assert all(f"{field} = " in explained for field in plan.to_dict() if field != "rule")
        assert "derived from" not in explained


@pytest.mark.parametrize("name", MACHINE_NAMES)
@pytest.mark.parametrize("num_wgs", [2, 3, 7, 16, 17])
def test_plans_for_a_part_of_a_gpu(name, num_wgs):
    # Virtual ranks on one GPU: each is a machine of few WGs.
    machine = dataclasses.replace(load_machine(name), num_wgs=num_wgs)
    rng = random.Random()
    for _ in range(50):
        plan = plan_ag_gemm(random_problem(rng), machine)
        assert plan.cap == num_wgs
        assert plan.num_movers <= num_wgs // 2


def test_slices_do_not_depend_on_the_cap():
    for machine in map(load_machine, MACHINE_NAMES):
        for shape in llama3("ag_gemm", "tn")[:6]:
            problem = AgGemmProblem(shape.m, shape.n, shape.k, 8)
            slices = {plan_ag_gemm(problem, machine, cap=cap).slices for cap in (2, 5, 16, None)}
            assert len(slices) == 1


@pytest.mark.parametrize("name", MACHINE_NAMES)
def test_a_slice_is_a_copy_step_or_more(name):
    machine, rng = load_machine(name), random.Random()
    for _ in range(100):
        plan = plan_ag_gemm(AgGemmProblem(8192, 768, k := 8 * rng.randint(1, 1000), 2), machine)
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
        "copy_depth": 1,
        "split_tiles": 7,
        "claim_run": 3,
    }
    assert set(given) == set(OVERRIDES)
    plan = plan_ag_gemm(problem, H200, split_k=8, movers_per_peer=5, **given)
    for name, value in {**given, "split_k": 8, "movers_per_peer": 5}.items():
        assert getattr(plan, name) == value
        line = next(line for line in plan.explain().splitlines() if line.startswith(f"{name} ="))
        assert "given by the caller" in line


def test_xcd_bucketing_override_brings_the_machines_xcds():
    problem = AgGemmProblem(2048, 768, 4096, 2)
    mi350x = load_machine("mi350x")
    assert plan_ag_gemm(problem, mi350x, xcd_bucketing=True).num_xcds == 8
    assert plan_ag_gemm(problem, mi350x, xcd_bucketing=False).num_xcds == 1


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", MACHINE_NAMES)
def test_a_given_split_is_that_of_all_tiles(name, order):
    machine, rng = load_machine(name), random.Random()
    for _ in range(50):
        problem = random_problem(rng)
        blocks = {"block_m": 32, "block_n": 64, "tile_row_rows": 128}
        overrides = rng.choice([{}, blocks])
        plan = plan_ag_gemm(problem, machine, order=order, split_k=4, **overrides)
        assert plan.split_tiles == TileQueue.of(problem, plan, rank=0).num_ids
        assert plan.split_k == (4 if problem.m else 1)
        assert plan_ag_gemm(problem, machine, order=order, split_k=1).split_tiles == 0


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
        "copy_depth": 1,
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
        ({"split_k": 3}, "split_k"),
        ({"split_k": 16}, "split_k"),
        ({"split_k": 2.5}, "split_k"),
        ({"split_tiles": -1}, "split_tiles"),
        ({"split_tiles": 8, "split_k": 1}, "split_tiles"),
        ({"split_tiles": 0, "split_k": 2}, "split_tiles"),
        ({"claim_run": 0}, "claim_run"),
        ({"copy_depth": 0}, "copy_depth"),
        ({"copy_depth": 4}, "copy_depth"),
        ({"block_m": 100}, "block_m"),
        ({"block_n": 8}, "block_n"),
        ({"block_k": 0}, "block_k"),
        ({"num_stages": 0}, "num_stages"),
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
