"""Plans of gemm_rs and the bulk operations on every machine: properties, overrides, refusals."""

import dataclasses
import json
import random

import pytest
from kosmos_heuristics import (
    MACHINE_NAMES,
    BulkAgProblem,
    BulkRsProblem,
    Decline,
    GemmRsProblem,
    PlanError,
    ProblemError,
    can_fuse,
    estimate,
    load_machine,
    plan_ag_gemm,
    plan_bulk_ag,
    plan_bulk_rs,
    plan_gemm_rs,
)
from kosmos_heuristics import AgGemmProblem as AgProblem
from kosmos_heuristics.bulk_plans import AG_OVERRIDES, RS_OVERRIDES
from kosmos_heuristics.gemm_rs import OVERRIDES
from kosmos_heuristics.tiles import tile_grid

H200 = load_machine("h200")
OPS = {
    "gemm_rs": (GemmRsProblem, plan_gemm_rs, OVERRIDES, "reducers_per_peer"),
    "bulk_ag": (BulkAgProblem, plan_bulk_ag, AG_OVERRIDES, "movers_per_peer"),
    "bulk_rs": (BulkRsProblem, plan_bulk_rs, RS_OVERRIDES, "reducers_per_peer"),
}
POLICIES = ("one_way", "two_way", "fixed", "serial")


@pytest.fixture(params=OPS)
def op(request):
    return OPS[request.param]


def random_problem(kind, rng):
    world_size = rng.randint(1, 8)
    tokens = world_size * 32 * rng.choice([0, 1, 3, 8, 100, 1024])
    sizes = {name: 32 * rng.randint(1, 500) for name in "mnk"}
    sizes[kind.TOKENS] = tokens
    return kind(**sizes, world_size=world_size, dtype=rng.choice(["bf16", "mxfp8"]))


@pytest.mark.parametrize("name", MACHINE_NAMES)
def test_properties_of_plans(op, name):
    kind, planner, _, per_peer = op
    whole, rng = load_machine(name), random.Random()
    for _ in range(200):
        machine = dataclasses.replace(whole, num_wgs=rng.choice([2, 7, 16, whole.num_wgs]))
        problem = random_problem(kind, rng)
        cap, policy = rng.choice([None, rng.randint(2, 300)]), rng.choice(POLICIES)
        plan = planner(problem, machine, cap=cap, policy=policy)
        assert plan == planner(problem, machine, cap=cap, policy=policy)
        assert plan.cap == min(cap or machine.num_wgs, machine.num_wgs)
        assert plan.num_movers <= plan.cap - plan.num_movers
        assert (plan.num_movers > 0) == (problem.world_size > 1)
        count = getattr(plan, per_peer) * problem.num_peers
        shared = problem.num_peers > plan.cap // 2
        assert plan.num_movers == (plan.cap // 2 if shared else count)
        tiles = tile_grid(problem, plan.block_m, plan.block_n)
        assert plan.split_tiles <= tiles
        assert (plan.split_k == 1) == (plan.split_tiles == 0)
        partial_bytes = plan.split_k * plan.split_tiles * plan.block_m * plan.block_n * 4
        assert partial_bytes <= machine.max_split_k_bytes
        assert plan.split_k == 1 or problem.k >= plan.split_k * plan.block_k
        assert "\n" not in str(plan)
        assert str(plan).startswith(plan.OP + " cap=")
        explained = plan.explain()
        assert all(f"{field} = " in explained for field in plan.to_dict() if field != "rule")
        assert "derived from" not in explained
        data = json.loads(json.dumps(plan.to_dict()))
        assert type(plan)(**data) == plan
        predicted = estimate(problem, machine, plan)
        if problem.tokens:
            assert predicted.efficiency > 0
            assert predicted.time_ms >= machine.launch_us * 1e-3
            assert predicted.baseline_ms > 0
        else:
            assert predicted.time_ms == 0
        assert can_fuse(problem, machine, plan, speed=False) is None


def test_sizes_of_problems():
    rs = GemmRsProblem(m=64, n=40, k=16, world_size=4)
    assert (rs.remote_bytes, rs.flops) == (3 * 16 * 40 * 2, 2 * 64 * 40 * 16)
    ag = BulkAgProblem(m=64, n=40, k=16, world_size=4)
    assert ag.remote_bytes == 3 * 16 * 40 * 2
    reduce = BulkRsProblem(m=16, n=40, k=64, world_size=4)
    assert (reduce.remote_bytes, reduce.tokens) == (3 * 16 * 40 * 2, 64)
    # MXFP8 gathers 33 bytes for 32 elements; what is reduced stays BF16.
    wide = {"m": 128, "n": 64, "k": 128, "world_size": 4, "dtype": "mxfp8"}
    assert BulkAgProblem(**wide).remote_bytes == 3 * 32 * 64 * 33 // 32
    assert AgProblem(**wide).remote_bytes == 3 * 32 * 128 * 33 // 32
    assert GemmRsProblem(**wide).remote_bytes == 3 * 32 * 64 * 2
    assert BulkRsProblem(**wide).remote_bytes == 3 * 32 * 64 * 2
    assert not AgProblem(**wide, layout="nn").keeps_gathered


@pytest.mark.parametrize(
    ("kind", "changes", "named"),
    [
        *((kind, {"dtype": "fp8"}, "dtype") for kind, *_ in OPS.values()),
        *((kind, {"world_size": 9}, "world_size") for kind, *_ in OPS.values()),
        *((kind, {"n": 0}, "n") for kind, *_ in OPS.values()),
        *((kind, {"n": 1 << 31}, "n") for kind, *_ in OPS.values()),
        *((kind, {kind.TOKENS: 4098}, kind.TOKENS) for kind, *_ in OPS.values()),
        *(
            (kind, {"layout": "nt" if kind.OP != "bulk_rs" else "tn"}, "layout")
            for kind, *_ in OPS.values()
        ),
        (GemmRsProblem, {"k": 0}, "k"),
        (BulkRsProblem, {"m": 0}, "m"),
        (GemmRsProblem, {"k": 48, "dtype": "mxfp8"}, "k"),
        # Whole MXFP8 blocks of 32 tokens a chunk.
        (BulkAgProblem, {"m": 4 * 48, "dtype": "mxfp8"}, "m"),
    ],
)
def test_bad_problems_are_named(kind, changes, named):
    good = {"m": 4096, "n": 512, "k": 4096, "world_size": 4}
    with pytest.raises(ProblemError) as caught:
        kind(**{**good, **changes})
    assert str(caught.value).startswith(f"{named}: got ")
    assert "\n" not in str(caught.value)


def good_problem(kind):
    return kind(m=4096, n=512, k=4096, world_size=2)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"cap": 1}, "cap"),
        ({"cap": None, "policy": "two-way"}, "policy"),
        ({"split_k": 3}, "split_k"),
        ({"split_k": 16}, "split_k"),
        ({"split_tiles": 4}, "split_tiles"),
        ({"claim_run": 0}, "claim_run"),
        ({"block_m": 100}, "block_m"),
        ({"unit_rows": 3}, "unit_rows"),
        ({"num_xcds": 4}, "num_xcds"),
        ({"tile_row_rows": 256}, "override"),
    ],
)
def test_bad_arguments_are_named(op, arguments, named):
    kind, planner, _, per_peer = op
    for given, name in ((arguments, named), ({per_peer: 0}, per_peer)):
        with pytest.raises(PlanError) as caught:
            planner(good_problem(kind), H200, **given)
        assert str(caught.value).startswith(f"{name}: got ")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"order": "local_first"}, "order"),
        ({"band_rows": 100}, "band_rows"),
        ({"max_movers": 1}, "max_movers"),
        ({"max_movers": 133}, "max_movers"),
        ({"source_unroll": 8}, "source_unroll"),
    ],
)
def test_bad_arguments_of_gemm_rs_are_named(arguments, named):
    with pytest.raises(PlanError, match=f"^{named}: got "):
        plan_gemm_rs(good_problem(GemmRsProblem), H200, **arguments)


def test_pushed_or_pulled_a_bulk_reduction_lets_as_many_builders_join():
    problem = BulkRsProblem(2304, 4096, 8192, 8)
    for way in ("pull", "push"):
        mesh = plan_bulk_rs(problem, load_machine("mi350x"), transport=way)
        assert (mesh.transport, mesh.max_movers) == (way, 56)
        switch = plan_bulk_rs(problem, H200, transport=way)
        assert (switch.transport, switch.max_movers) == (way, switch.cap)
        fixed = plan_bulk_rs(problem, H200, transport=way, policy="fixed")
        assert fixed.max_movers == fixed.num_movers
    for name, value in (("transport", "ring"), ("transport", None), ("max_movers", 133)):
        with pytest.raises(PlanError, match=f"^{name}: got "):
            plan_bulk_rs(problem, H200, **{name: value})


def test_overrides_are_taken_and_explained(op):
    kind, planner, overrides, per_peer = op
    given = {
        "block_m": 64,
        "block_n": 64,
        "block_k": 32,
        "num_warps": 4,
        "num_stages": 2,
        "max_movers": 40,
        "band_rows": 128,
        "unit_rows": 32,
        "unit_cols": 64,
        "source_unroll": 1,
        "group_m": 3,
        "copy_elements": 256,
        "copy_depth": 1,
        "split_tiles": 7,
        "claim_run": 3,
        "xcd_bucketing": True,
        "num_xcds": 2,
    }
    given = {name: value for name, value in given.items() if name in overrides}
    assert set(given) == set(overrides)
    plan = planner(good_problem(kind), H200, split_k=8, **{per_peer: 5}, **given)
    for name, value in {**given, "split_k": 8, per_peer: 5}.items():
        assert getattr(plan, name) == value
        line = next(line for line in plan.explain().splitlines() if line.startswith(f"{name} ="))
        assert "given by the caller" in line


def test_a_given_split_is_that_of_all_tiles(op):
    kind, planner, *_ = op
    problem = good_problem(kind)
    plan = planner(problem, H200, split_k=4, block_n=64)
    assert plan.split_tiles == tile_grid(problem, plan.block_m, 64)
    assert planner(problem, H200, split_k=1).split_tiles == 0


def test_fixed_policy_has_8_per_peer_or_what_is_given(op):
    kind, planner, _, per_peer = op
    for machine in (H200, load_machine("mi350x")):
        problem = good_problem(kind)
        assert getattr(planner(problem, machine, policy="fixed"), per_peer) == 8
        assert getattr(planner(problem, machine, policy="fixed", **{per_peer: 3}), per_peer) == 3


def test_tiles_of_bulk_operations_have_no_chunks():
    # 100 rows: one ragged row block of the whole, four of four chunks.
    bulk = BulkAgProblem(100, 256, 64, 4)
    chunked = GemmRsProblem(100, 256, 64, 4)
    assert (tile_grid(bulk, 128, 256), tile_grid(chunked, 128, 256)) == (1, 4)


def test_rows_that_are_not_aligned_are_declined():
    for problem, planner, what in (
        (GemmRsProblem(8192, 4100, 512, 2), plan_gemm_rs, "n"),
        (GemmRsProblem(8192, 4096, 516, 2), plan_gemm_rs, "k"),
        (BulkAgProblem(8192, 4096, 516, 2), plan_bulk_ag, "k"),
        (BulkRsProblem(516, 4096, 8192, 2), plan_bulk_rs, "m"),
    ):
        declined = can_fuse(problem, H200, planner(problem, H200))
        assert isinstance(declined, Decline)
        assert f"rows of {what} = " in declined.reason
    # No row is as long as the tokens.
    odd = BulkRsProblem(512, 4096, 16386, 2)
    assert can_fuse(odd, H200, plan_bulk_rs(odd, H200)) is None


def test_an_estimate_wants_the_plan_of_its_problem():
    rs, ag = GemmRsProblem(8192, 4096, 512, 2), AgProblem(8192, 4096, 512, 2)
    with pytest.raises(PlanError, match="plan: got 'ag_gemm'"):
        estimate(rs, H200, plan_ag_gemm(ag, H200))


def test_order_and_policy_show_in_the_estimate():
    machine = load_machine("mi350x")
    problem = GemmRsProblem(65536, 4096, 512, 8)
    times = {
        order: estimate(problem, machine, plan_gemm_rs(problem, machine, order=order)).time_ms
        for order in ("band_major", "row_major")
    }
    assert 1.2 < times["row_major"] / times["band_major"] < 1.7
    for kind, planner in ((BulkAgProblem, plan_bulk_ag), (GemmRsProblem, plan_gemm_rs)):
        wide = kind(65536, 4096, 3584, 8)
        one_way, serial = (
            estimate(wide, machine, planner(wide, machine, policy=policy)).time_ms
            for policy in ("one_way", "serial")
        )
        assert one_way < serial


def test_ranks_with_different_caps_agree_on_what_an_owner_counts():
    rng = random.Random(0)
    shapes = set()
    for _ in range(300):
        size = rng.choice([2, 4, 8])
        problem = GemmRsProblem(
            size * rng.randint(1, 4096), 8 * rng.randint(1, 1024), 8 * rng.randint(8, 512), size
        )
        machine = load_machine(rng.choice(["h200", "mi350x"]))
        plans = [
            plan_gemm_rs(problem, machine, cap=cap, transport="push")
            for cap in (None, 2, rng.randint(2, machine.num_wgs))
        ]
        agreed = {(p.block_m, p.block_n, p.band_rows) for p in plans}
        assert len(agreed) == 1
        shapes |= agreed
    assert len({(m, n) for m, n, _ in shapes}) > 1
