"""The H200 rule set: what docs/decisions/0003 says its crews, splits, slices and claims are for."""

import dataclasses
import random
from pathlib import Path

import pytest
from kosmos_heuristics import AgGemmProblem, Curve, load_machine, plan_ag_gemm
from kosmos_heuristics.movers import (
    CLOSE,
    CREW_QUANTUM,
    MIN_CREW,
    MOVER_WEIGHT,
    SATURATING_CREW,
    SHARE_EXPONENT,
    TILES_AFTER_ARRIVAL,
)
from kosmos_heuristics.orders import TileQueue
from kosmos_heuristics.shapes import llama3
from kosmos_heuristics.tiles import FULL_WAVE, GROUP_M_H200, SPLIT_MIN_K, UNIT_BYTES

# The rules are tested on a machine of their own: the packaged figures change with every new
# measurement.
H200 = load_machine(Path(__file__).parent / "data" / "switched.json")
MIB = 1 << 20
CREWS = range(MIN_CREW, 132 // 2 + 1, CREW_QUANTUM)


def with_link(factor):
    """The machine with another link."""
    ways = {}
    for name in ("pull", "push"):
        way = H200.transport_named(name)
        curve = Curve(tuple((wgs, factor * value) for wgs, value in way.gbps.points))
        ways[name] = dataclasses.replace(way, gbps=curve)
    return dataclasses.replace(H200, **ways)


def gather_ms(problem, crew, machine=H200, transport="push"):
    """Remote bytes over what a crew brings beside builders; no code in common with the rules."""
    peak = machine.transport_named(transport).gbps.peak
    missing = max(SATURATING_CREW - crew, 0) / SATURATING_CREW
    rate = peak * (1 - missing**SHARE_EXPONENT)
    return problem.m // problem.world_size * (problem.world_size - 1) * problem.k * 2 / rate / 1e6


def gemm_ms(problem):
    return 2 * problem.m * problem.n * problem.k / 700e9


def predicted_ms(problem, crew):
    """The longer of transport with the tiles after it, and of building while the movers gather."""
    gather, gemm = gather_ms(problem, crew), gemm_ms(problem)
    tile = gemm * 132 / max(1, problem.m / 128 * (problem.n / 256))
    busy = max(crew, SATURATING_CREW)
    delay = MOVER_WEIGHT * busy * gather_ms(problem, busy) / 132
    return max(gather + TILES_AFTER_ARRIVAL * tile, gemm + delay)


def random_problem(rng):
    world_size = rng.choice([2, 3, 4, 8])
    return AgGemmProblem(
        m=world_size * rng.randint(1, 16384),
        n=8 * rng.randint(1, 2000),
        k=8 * rng.randint(8, 2048),
        world_size=world_size,
        layout=rng.choice(["tn", "nn"]),
    )


def ids_of(problem, plan):
    return TileQueue.of(problem, plan, rank=0).num_ids


def test_the_smallest_crew_that_is_close_to_the_best_is_split_among_the_peers():
    # Behind a switch the links serve any peer: a crew loads them however many peers there are.
    rng = random.Random()
    seen = set()
    for _ in range(300):
        problem = random_problem(rng)
        times = {crew: predicted_ms(problem, crew) for crew in CREWS}
        close = CLOSE * min(times.values())
        if any(time == pytest.approx(close, rel=1e-9) for time in times.values()):
            continue
        crew = min(crew for crew, time in times.items() if time <= close)
        plan = plan_ag_gemm(problem, H200)
        assert plan.movers_per_peer == -(-crew // problem.num_peers)
        assert plan.num_movers == plan.movers_per_peer * problem.num_peers
        seen.add(crew)
    assert len(seen) > 1


def test_no_crew_is_larger_than_it_takes_to_bring_the_peak():
    rng = random.Random()
    for _ in range(300):
        problem = random_problem(rng)
        crew = plan_ag_gemm(problem, H200).num_movers
        # Rounded up to the steps of crews and to whole movers a peer.
        assert crew < SATURATING_CREW + CREW_QUANTUM + problem.num_peers - 1


def test_crews_by_what_decides():
    # Where bytes decide, the crew brings most of the link; where the GEMM does, it is not far
    # behind it, and far ahead with the smallest crew where the output is wide.
    for shape in llama3("ag_gemm", "tn"):
        problem = AgGemmProblem(shape.m, shape.n, shape.k, 2)
        plan = plan_ag_gemm(problem, H200)
        if shape.n == 768:
            assert "bytes decide" in plan.rule
            assert gather_ms(problem, plan.num_movers) <= 1.2 * gather_ms(problem, CREWS[-1])
        else:
            assert gather_ms(problem, SATURATING_CREW) < gemm_ms(problem)
            assert gather_ms(problem, plan.num_movers) < 1.1 * gemm_ms(problem)
        # A gather that is a little longer than the GEMM is as fast with any crew.
        if gather_ms(problem, MIN_CREW) >= 1.1 * gemm_ms(problem):
            assert plan.num_movers > MIN_CREW
        if shape.n >= 3584:
            assert plan.num_movers == MIN_CREW


@pytest.mark.parametrize("m", [0, 2, 8192])
def test_a_small_gpu_has_the_least_crew_and_it_is_fitted(m):
    small = dataclasses.replace(H200, num_wgs=12)
    plan = plan_ag_gemm(AgGemmProblem(m, 768, 4096, 2), small)
    assert f"{MIN_CREW} WGs" in plan.rule
    assert plan.num_movers == 6


@pytest.mark.parametrize("layout", ["tn", "nn"])
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_crew_never_grows_with_width(world_size, layout):
    crews = [
        plan_ag_gemm(AgGemmProblem(8192, n, 4096, world_size, layout), H200).num_movers
        for n in range(256, 16384, 256)
    ]
    assert crews == sorted(crews, reverse=True)
    assert crews[0] > crews[-1]


def test_narrow_layers_never_have_fewer_movers_than_very_wide_ones():
    rng = random.Random()
    for _ in range(100):
        problem = dataclasses.replace(random_problem(rng), m=840 * rng.randint(10, 80))
        crews = [
            plan_ag_gemm(dataclasses.replace(problem, n=n), H200).num_movers for n in (256, 16384)
        ]
        assert crews[0] >= crews[1]


def test_crew_never_grows_with_the_link():
    for n, k in ((2304, 16384), (1280, 8192), (3584, 4096)):
        problem = AgGemmProblem(16384, n, k, 2)
        crews = [plan_ag_gemm(problem, with_link(f)).num_movers for f in (0.4, 0.7, 1, 1.5, 3)]
        assert crews == sorted(crews, reverse=True)
        assert crews[0] > crews[-1]


def test_a_crew_is_that_of_the_transport_used():
    problem = AgGemmProblem(16384, 2304, 16384, 2)
    slow_pull = dataclasses.replace(H200, pull=with_link(0.4).pull)
    pushed = plan_ag_gemm(problem, slow_pull, transport="push").num_movers
    pulled = plan_ag_gemm(problem, slow_pull, transport="pull").num_movers
    assert pulled > pushed


def test_rows_are_pushed_also_where_they_are_kept():
    problem = AgGemmProblem(8192, 768, 4096, 2)
    dgrad = dataclasses.replace(problem, layout="nn")
    for kept in (problem, dgrad, dataclasses.replace(problem, keep_gathered=True)):
        assert plan_ag_gemm(kept, H200).transport == "push"
    assert plan_ag_gemm(dgrad, H200, transport="pull").transport == "pull"


def test_narrow_tiles_only_where_they_save_waves():
    wide = plan_ag_gemm(AgGemmProblem(32768, 7168, 8192, 2), H200)
    assert wide.block_n == 256
    # 192 tiles of 256 columns take two rounds of 132 WGs, 384 of 128 columns three half rounds.
    few = plan_ag_gemm(AgGemmProblem(8192, 768, 4096, 2), H200)
    assert (few.block_n, few.num_stages) == (128, 4)
    # 132 tiles of 256 columns fill the grid exactly once.
    exact = plan_ag_gemm(AgGemmProblem(128 * 132, 256, 4096, 1), H200)
    assert exact.block_n == 256


@pytest.mark.parametrize("layout", ["tn", "nn"])
@pytest.mark.parametrize(
    ("tiles", "factor", "split"),
    [
        *((1, 4, 1), (33, 4, 33), (34, 2, 34), (66, 2, 66)),
        # Past half a wave the halves would fill the grid more than once.
        *((67, 1, 0), (131, 1, 0)),
        # A full wave leaves nothing to fill; a little more than one leaves nearly all of it.
        *((132, 1, 0), (133, 2, 66), (198, 2, 66), (199, 1, 0), (264, 1, 0)),
    ],
)
def test_split_without_peers_is_by_waves(layout, tiles, factor, split):
    problem = AgGemmProblem(128 * tiles, 128, 4096, 1, layout)
    shape = {"block_n": 128, "num_stages": 4}
    plan = plan_ag_gemm(problem, H200, **shape)
    assert (plan.split_k, plan.split_tiles) == (factor, split)


def test_parts_fill_the_grid_at_most_once():
    rng = random.Random()
    seen = set()
    for _ in range(500):
        problem = random_problem(rng)
        plan = plan_ag_gemm(problem, H200, cap=rng.choice([None, 132, 100, 20, 5]))
        assert plan.split_tiles * plan.split_k <= plan.cap
        seen.add(plan.split_k)
        ids = ids_of(problem, plan)
        assert plan.split_k == 1 or plan.split_tiles in (ids, plan.cap // 2)
        if plan.split_k == 4:
            assert plan.split_tiles == ids
    assert seen >= {1, 2}


def test_tail_is_split_where_the_gather_is_the_longer_side():
    # Nothing overlaps what follows the last arrival, however full the last wave is.
    rng = random.Random()
    for _ in range(100):
        problem = AgGemmProblem(2 * rng.randint(4096, 32768), 8 * rng.randint(16, 64), 4096, 2)
        plan = plan_ag_gemm(problem, H200)
        assert gather_ms(problem, plan.num_movers) > gemm_ms(problem)
        assert (plan.split_k, plan.split_tiles) == (2, 66)


def test_tail_of_a_long_gemm_is_split_only_where_the_last_wave_is_not_full():
    rng = random.Random()
    splits = set()
    for _ in range(200):
        problem = AgGemmProblem(
            512 * rng.randint(16, 64), 256 * rng.randint(16, 52), SPLIT_MIN_K, 2
        )
        plan = plan_ag_gemm(problem, H200)
        tiles = problem.m // 128 * (problem.n // 256)
        # The movers are missing for as long as they gather.
        missing = plan.num_movers / 132 * gather_ms(problem, plan.num_movers) / gemm_ms(problem)
        last = tiles / 132 * (1 + missing) % 1
        if abs(last - FULL_WAVE) > 1e-6 and 1e-6 < last < 1 - 1e-6:
            assert plan.split_tiles == (66 if last <= FULL_WAVE else 0)
            splits.add(plan.split_k)
        short = dataclasses.replace(problem, k=SPLIT_MIN_K - 8)
        assert plan_ag_gemm(short, H200).split_tiles == 0
    assert splits == {1, 2}


def test_a_split_needs_a_step_a_part_and_room_for_its_partials():
    few = AgGemmProblem(512, 512, 8192, 2)
    assert plan_ag_gemm(few, H200).split_k == 4
    for k, factor in ((256, 4), (248, 2), (128, 2), (120, 1)):
        assert plan_ag_gemm(dataclasses.replace(few, k=k), H200).split_k == factor
    plan = plan_ag_gemm(few, H200)
    partial_bytes = plan.split_tiles * plan.block_m * plan.block_n * 4
    for room, factor in ((4, 4), (3, 2), (2, 2), (1, 1), (0, 1)):
        tight = dataclasses.replace(H200, max_split_k_bytes=room * partial_bytes)
        assert plan_ag_gemm(few, tight).split_k == factor


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_no_rows_are_planned_too(world_size):
    plan = plan_ag_gemm(AgGemmProblem(0, 768, 4096, world_size), H200)
    assert (plan.split_k, plan.split_tiles, plan.claim_run) == (1, 0, 1)


def test_units_are_large_enough_to_pay_for_their_claim_and_not_larger():
    rng = random.Random()
    for _ in range(300):
        problem = random_problem(rng)
        plan = plan_ag_gemm(problem, H200)
        unit = 256 * problem.k * 2 / plan.slices
        assert unit >= UNIT_BYTES or plan.slices == 1
        assert unit < 2 * UNIT_BYTES or plan.slices == 256
        # The count that completes a tile row: ranks with different caps have to agree on it.
        capped = plan_ag_gemm(problem, H200, cap=rng.choice([100, 20, 5]))
        assert capped.slices == plan.slices


def test_slices_of_some_shapes():
    # A tile row of 8 MiB: 32 units of a quarter of a MiB.
    assert plan_ag_gemm(AgGemmProblem(65536, 2304, 16384, 2), H200).slices == 32
    # A tile row of 128 KiB is one unit.
    assert plan_ag_gemm(AgGemmProblem(512, 768, 256, 2), H200).slices == 1
    # Never thinner than a row.
    assert plan_ag_gemm(AgGemmProblem(8, 8, 8 * MIB, 1), H200).slices == 256


def test_the_first_claim_is_the_largest_run_that_leaves_two_waves():
    rng = random.Random()
    for waves, run in ((3.99, 1), (4, 2), (5.99, 2), (6, 4), (9.99, 4), (10, 8), (50, 8)):
        exact = AgGemmProblem(128 * int(132 * waves), 256, 4096, 1)
        assert plan_ag_gemm(exact, H200).claim_run == run
    runs = set()
    for _ in range(400):
        problem, cap = random_problem(rng), rng.choice([132, 66, 8])
        plan = plan_ag_gemm(problem, H200, cap=cap)
        whole = ids_of(problem, plan) - plan.split_tiles
        wanted = [r for r in (8, 4, 2) if whole >= (r + 2) * cap] or [1]
        assert plan.claim_run == wanted[0]
        runs.add(plan.claim_run)
    assert runs == {1, 2, 4, 8}


def test_tile_rows_are_swept_together_only_when_the_gather_is_ahead():
    wide = AgGemmProblem(8192, 7168, 8192, 2)
    # Tile rows of two row blocks: together as many row blocks as in a local sweep.
    plan = plan_ag_gemm(wide, H200)
    assert (plan.group_m, plan.group_rows) == (GROUP_M_H200, GROUP_M_H200 // 2)
    tall = plan_ag_gemm(wide, H200, tile_row_rows=128 * GROUP_M_H200)
    assert tall.group_rows == 1
    assert plan_ag_gemm(AgGemmProblem(8192, 768, 4096, 2), H200).group_rows == 1
    assert plan_ag_gemm(dataclasses.replace(wide, world_size=1), H200).group_rows == 1
