"""The MI350 rule set: Table B.3 as printed, and the readings of docs/decisions/0002."""

import dataclasses

import pytest
from kosmos_heuristics import AgGemmProblem, load_machine, plan_ag_gemm
from kosmos_heuristics.orders import TileQueue
from kosmos_heuristics.shapes import llama3

MACHINES = [load_machine("mi350x"), load_machine("mi355x")]


@pytest.fixture(params=MACHINES, ids=lambda machine: machine.name)
def machine(request):
    return request.param


@pytest.mark.parametrize(
    ("layout", "n", "movers"),
    [
        ("tn", 3576, 8),
        ("tn", 3584, 6),
        ("tn", 13312, 6),
        ("tn", 768, 8),
        ("nn", 4600, 8),
        ("nn", 4608, 6),
        ("nn", 3584, 8),
    ],
)
def test_rows_1_and_2_movers_by_width(machine, layout, n, movers):
    plan = plan_ag_gemm(AgGemmProblem(8192, n, 4096, 8, layout), machine)
    assert plan.movers_per_peer == movers
    assert plan.num_movers == 7 * movers
    assert f"B.3 row {1 if layout == 'tn' else 2}" in plan.rule


def test_a1_width_is_the_local_one_so_layers_differ(machine):
    # Under the other reading (hidden size, here k) all shapes of Table C.3 would have 6.
    crews = {
        shape.layer + shape.model: plan_ag_gemm(
            AgGemmProblem(shape.m, shape.n, shape.k, 8), machine
        ).movers_per_peer
        for shape in llama3("ag_gemm", "tn")
    }
    wide = {name for name, crew in crews.items() if crew == 6}
    assert wide == {"FC18B", "FC170B", "FC1405B"}
    assert set(crews.values()) == {6, 8}
    dgrad = {
        shape.layer + shape.model
        for shape in llama3("ag_gemm", "nn")
        if plan_ag_gemm(AgGemmProblem(shape.m, shape.n, shape.k, 8, "nn"), machine).movers_per_peer
        == 6
    }
    assert dgrad == {"Down405B"}


def test_a8_split_k_counts_every_partial(machine):
    split = {
        shape.name: plan_ag_gemm(AgGemmProblem(shape.m, shape.n, shape.k, 8, "nn"), machine).split_k
        for shape in llama3("ag_gemm", "nn")
    }
    assert {name: factor for name, factor in split.items() if factor > 1} == {
        "8B-OProj-MBS1": 4,
        "8B-OProj-MBS2": 2,
        "70B-OProj-MBS1": 2,
    }


@pytest.mark.parametrize(("tiles", "factor"), [(64, 4), (65, 2), (128, 2), (129, 1)])
def test_a8_limits_in_tiles_of_256(machine, tiles, factor):
    problem = AgGemmProblem(256 * tiles, 256, 4096, 1, "nn")
    assert plan_ag_gemm(problem, machine).split_k == factor
    forward = dataclasses.replace(problem, layout="tn")
    assert plan_ag_gemm(forward, machine).split_k == 1


def test_a8_counts_the_papers_tiles_whatever_tile_is_compiled(machine):
    for tiles, factor in ((64, 4), (65, 2), (129, 1)):
        narrow = AgGemmProblem(256 * tiles, 64, 4096, 1, "nn")
        assert plan_ag_gemm(narrow, machine, block_n=64).split_k == factor


def test_a8_all_tiles_of_a_split_shape_are_split(machine):
    for shape in llama3("ag_gemm", "nn"):
        problem = AgGemmProblem(shape.m, shape.n, shape.k, 8, "nn")
        plan = plan_ag_gemm(problem, machine)
        all_ids = TileQueue.of(problem, plan, rank=0).num_ids
        assert plan.split_tiles == (all_ids if plan.split_k > 1 else 0)


def test_ragged_chunks_whose_padded_partials_do_not_fit_are_not_split(machine):
    # 128 tiles of 256 x 256 as the paper counts, but 7 remote chunks of 32 rows that are numbered
    # as whole tile rows: 1920 ids of 128 x 256.
    problem = AgGemmProblem(256, 128 * 256, 4096, 8, "nn")
    assert plan_ag_gemm(problem, machine).split_k == 1
    assert plan_ag_gemm(dataclasses.replace(problem, world_size=1), machine).split_k == 2


def test_short_contraction_is_not_split(machine):
    block_k = machine.tile.block_k
    assert plan_ag_gemm(AgGemmProblem(256, 256, 4 * block_k, 1, "nn"), machine).split_k == 4
    assert plan_ag_gemm(AgGemmProblem(256, 256, 4 * block_k - 8, 1, "nn"), machine).split_k == 2
    assert plan_ag_gemm(AgGemmProblem(256, 256, block_k, 1, "nn"), machine).split_k == 1


@pytest.mark.parametrize(
    ("rows", "columns", "on"),
    [(32, 32, True), (41, 25, False), (5, 1, True), (4, 256, False), (1, 1, False)],
)
def test_row_13_xcd_bucketing(machine, rows, columns, on):
    for layout in ("tn", "nn"):
        plan = plan_ag_gemm(AgGemmProblem(rows * 256, columns * 256, 512, 1, layout), machine)
        assert plan.xcd_bucketing is on
        assert plan.num_xcds == (8 if on else 1)


def test_a9_tile_rows_are_counted_over_all_ranks(machine):
    # 4 tile rows in each rank's chunk, 32 over all ranks.
    assert plan_ag_gemm(AgGemmProblem(8192, 768, 4096, 8), machine).xcd_bucketing


@pytest.mark.parametrize("world_size", range(2, 9))
def test_a11_crew_per_peer_is_kept_and_the_total_scales(machine, world_size):
    plan = plan_ag_gemm(AgGemmProblem(840 * 8, 768, 4096, world_size), machine)
    assert (plan.movers_per_peer, plan.num_movers) == (8, 8 * (world_size - 1))


@pytest.mark.parametrize(
    ("cap", "per_peer", "movers"),
    [(256, 8, 56), (112, 8, 56), (111, 7, 49), (28, 2, 14), (14, 1, 7), (13, 1, 6), (2, 1, 1)],
)
def test_a12_movers_take_at_most_half_the_cap(machine, cap, per_peer, movers):
    plan = plan_ag_gemm(AgGemmProblem(8192, 768, 4096, 8), machine, cap=cap)
    assert (plan.cap, plan.movers_per_peer, plan.num_movers) == (cap, per_peer, movers)


def test_tiles_are_claimed_one_by_one(machine):
    for layout in ("tn", "nn"):
        for shape in llama3("ag_gemm", layout):
            problem = AgGemmProblem(shape.m, shape.n, shape.k, 8, layout)
            assert plan_ag_gemm(problem, machine).claim_run == 1


@pytest.mark.parametrize(("movers", "slices"), [(1, 1), (6, 4), (8, 8)])
def test_a_slice_for_each_mover_of_a_peer(machine, movers, slices):
    problem = AgGemmProblem(8192, 768, 4096, 8)
    assert plan_ag_gemm(problem, machine, movers_per_peer=movers).slices == slices


def test_the_paper_pulls(machine):
    for layout in ("tn", "nn"):
        assert plan_ag_gemm(AgGemmProblem(8192, 768, 4096, 8, layout), machine).transport == "pull"


def test_rules_do_not_depend_on_the_model():
    for layout in ("tn", "nn"):
        for shape in llama3("ag_gemm", layout):
            problem = AgGemmProblem(shape.m, shape.n, shape.k, 8, layout)
            assert plan_ag_gemm(problem, MACHINES[0]) == plan_ag_gemm(problem, MACHINES[1])
