"""Table B.3 for gemm_rs, the bulk operations and MXFP8, and the readings of docs/decisions/0004."""

import dataclasses

import pytest
from kosmos_heuristics import (
    AgGemmPairProblem,
    AgGemmProblem,
    BulkAgProblem,
    BulkRsProblem,
    GemmRsProblem,
    ProblemError,
    can_fuse,
    estimate,
    load_machine,
    plan_ag_gemm,
    plan_ag_gemm_pair,
    plan_bulk_ag,
    plan_bulk_rs,
    plan_gemm_rs,
)

MACHINES = [load_machine("mi350x"), load_machine("mi355x")]
# Model: hidden size, local widths of FC1, QKV, Down, OProj at TP 8.
LLAMA3 = {
    "405B": (16384, 13312, 2304, 6656, 2048),
    "70B": (8192, 7168, 1280, 3584, 1024),
    "8B": (4096, 3584, 768, 1792, 512),
}
MBS = (1, 2, 4, 8)


@pytest.fixture(params=MACHINES, ids=lambda machine: machine.name)
def machine(request):
    return request.param


def reducers(machine, k, waves, dtype="bf16", cap=None):
    """The crew for a local K and so many waves of 256 x 256 tiles over 256 WGs."""
    problem = GemmRsProblem(256 * 256, 256 * waves, k, 8, dtype=dtype)
    plan = plan_gemm_rs(problem, machine, cap=cap)
    assert plan.rule.startswith("B.3 row 4")
    return plan.reducers_per_peer


@pytest.mark.parametrize(
    ("k", "waves", "bf16", "mxfp8"),
    [
        *((4096, 1, 4, 5), (4096, 16, 4, 5), (13312, 2, 4, 5)),
        *((4064, 15, 6, 7), (4064, 16, 6, 8), (3072, 15, 6, 7), (3072, 16, 6, 8)),
        *((3040, 15, 8, 8), (3040, 16, 8, 10), (800, 1, 8, 8), (800, 16, 8, 10)),
        # MXFP8 has no variant for a short K (A10).
        *((768, 7, 8, 8), (768, 8, 10, 10), (768, 15, 10, 10), (768, 16, 14, 14), (32, 40, 14, 14)),
    ],
)
def test_row_4_reducers_by_local_k_and_waves(machine, k, waves, bf16, mxfp8):
    assert reducers(machine, k, waves) == bf16
    assert reducers(machine, k, waves, "mxfp8") == mxfp8


def test_a10_waves_are_tiles_over_the_cap_and_not_rounded(machine):
    # 15.9 waves: rounded up they would be 16 and bring 14 reducers a peer.
    problem = GemmRsProblem(256 * 254, 256 * 16, 512, 8)
    assert plan_gemm_rs(problem, machine).reducers_per_peer == 10
    assert plan_gemm_rs(dataclasses.replace(problem, m=256 * 256), machine).reducers_per_peer == 14
    # 8 waves on 256 WGs are 16 on 128: 14 a peer, of which half the WGs are entitled to half.
    assert reducers(machine, 512, 8) == 10
    assert reducers(machine, 512, 8, cap=128) == 7


def test_a10_k_is_the_local_one(machine):
    crews = {
        (model, layer): {
            plan_gemm_rs(
                GemmRsProblem(8192 * mbs, sizes[0], sizes[column], 8), machine
            ).reducers_per_peer
            for mbs in MBS
        }
        for model, sizes in LLAMA3.items()
        for layer, column in (("Down", 3), ("OProj", 4))
    }
    assert crews == {
        ("405B", "Down"): {4},
        ("405B", "OProj"): {8},
        ("70B", "Down"): {6},
        ("70B", "OProj"): {8},
        ("8B", "Down"): {8},
        # The only short K: 2, 4, 8 and 16 waves.
        ("8B", "OProj"): {8, 10, 14},
    }


@pytest.mark.parametrize(
    ("k", "bf16", "mxfp8"),
    [
        *((7168, 2, 2), (7136, 4, 2), (3584, 4, 2), (3552, 6, 4), (2304, 6, 4), (2272, 8, 4)),
        *((1792, 8, 4), (1760, 8, 8), (768, 8, 8)),
    ],
)
def test_row_3_bulk_movers_by_contraction(machine, k, bf16, mxfp8):
    for dtype, crew in (("bf16", bf16), ("mxfp8", mxfp8)):
        plan = plan_bulk_ag(BulkAgProblem(8192, 4096, k, 8, dtype=dtype), machine)
        assert (plan.movers_per_peer, plan.num_movers) == (crew, 7 * crew)
        assert "B.3 row 3" in plan.rule


@pytest.mark.parametrize(
    ("width", "bf16", "mxfp8"),
    [
        *((8192, 2, 4), (8191, 4, 8), (5120, 4, 8), (5119, 4, 4), (3584, 4, 4), (3583, 8, 4)),
        *((768, 8, 4), (13312, 2, 4)),
    ],
)
def test_row_5_bulk_reducers_by_width(machine, width, bf16, mxfp8):
    for dtype, crew in (("bf16", bf16), ("mxfp8", mxfp8)):
        plan = plan_bulk_rs(BulkRsProblem(width, 4096, 8192, 8, dtype=dtype), machine)
        assert (plan.reducers_per_peer, plan.num_movers) == (crew, 7 * crew)
        assert "B.3 row 5" in plan.rule


def test_a2_width_is_the_layers_local_one(machine):
    # Read as the hidden size, 70B-QKV and 405B-QKV would have 2 a peer: less than the unfused times
    # of the paper allow.
    crews = {
        (model, layer): plan_bulk_rs(
            BulkRsProblem(sizes[column], sizes[0], 65536, 8), machine
        ).reducers_per_peer
        for model, sizes in LLAMA3.items()
        for layer, column in (("FC1", 1), ("QKV", 2))
    }
    assert crews == {
        ("405B", "FC1"): 2,
        ("70B", "FC1"): 4,
        ("8B", "FC1"): 4,
        ("405B", "QKV"): 8,
        ("70B", "QKV"): 8,
        ("8B", "QKV"): 8,
    }


@pytest.mark.parametrize(("layout", "row"), [("tn", 1), ("nn", 2)])
@pytest.mark.parametrize("n", [768, 3584, 4608, 13312])
def test_rows_1_and_2_mxfp8_has_8_whatever_the_width(machine, layout, row, n):
    plan = plan_ag_gemm(AgGemmProblem(8192, n, 4096, 8, layout, "mxfp8"), machine)
    assert plan.movers_per_peer == 8
    assert f"B.3 row {row}: MXFP8" in plan.rule


def test_rows_11_and_12_mxfp8_is_not_split(machine):
    few = {"m": 2048, "n": 2048, "k": 8192, "world_size": 8}
    assert plan_ag_gemm(AgGemmProblem(**few, layout="nn"), machine).split_k == 4
    assert plan_ag_gemm(AgGemmProblem(**few, layout="nn", dtype="mxfp8"), machine).split_k == 1
    for kind, planner in ((BulkAgProblem, plan_bulk_ag), (BulkRsProblem, plan_bulk_rs)):
        assert planner(kind(**few), machine).split_k == 4
        assert planner(kind(**few, dtype="mxfp8"), machine).split_k == 1


@pytest.mark.parametrize(
    ("tiles", "gathering", "reducing"),
    [(1, 4, 4), (64, 4, 4), (65, 2, 1), (128, 2, 1), (129, 1, 1)],
)
def test_rows_11_and_12_limits_in_tiles(machine, tiles, gathering, reducing):
    ag = plan_bulk_ag(BulkAgProblem(256 * tiles, 256, 4096, 1), machine)
    rs = plan_bulk_rs(BulkRsProblem(256 * tiles, 256, 4096, 1), machine)
    assert (ag.split_k, rs.split_k) == (gathering, reducing)
    # All tiles are split: two of ours for one of the paper's.
    assert ag.split_tiles == (2 * tiles if gathering > 1 else 0)
    assert rs.split_tiles == (2 * tiles if reducing > 1 else 0)


def test_row_12_needs_room_for_all_four_partials(machine):
    problem = BulkRsProblem(256 * 64, 256, 4096, 1)
    tight = dataclasses.replace(machine, max_split_k_bytes=machine.max_split_k_bytes - 1)
    assert plan_bulk_rs(problem, machine).split_k == 4
    # Not 2 instead: row 12 has the one factor.
    assert plan_bulk_rs(problem, tight).split_k == 1
    assert plan_bulk_ag(BulkAgProblem(256 * 64, 256, 4096, 1), tight).split_k == 2


def test_row_12_splits_64_tiles_at_most_whatever_the_room(machine):
    roomy = dataclasses.replace(machine, max_split_k_bytes=1 << 30)
    assert plan_bulk_rs(BulkRsProblem(256 * 64, 256, 4096, 1), roomy).split_k == 4
    assert plan_bulk_rs(BulkRsProblem(256 * 65, 256, 4096, 1), roomy).split_k == 1
    assert plan_bulk_ag(BulkAgProblem(256 * 65, 256, 4096, 1), roomy).split_k == 4


def test_row_12_on_the_papers_shapes(machine):
    split = {
        f"{model}-{layer}"
        for model, sizes in LLAMA3.items()
        for layer, column in (("FC1", 1), ("QKV", 2))
        if plan_bulk_rs(BulkRsProblem(sizes[column], sizes[0], 8192, 8), machine).split_k > 1
    }
    assert split == {"8B-QKV"}


def test_row_13_covers_ag_gemm_only(machine):
    sizes = {"m": 8192, "n": 4096, "k": 4096, "world_size": 8}
    assert plan_ag_gemm(AgGemmProblem(**sizes), machine).xcd_bucketing
    assert plan_ag_gemm(AgGemmProblem(**sizes, dtype="mxfp8"), machine).xcd_bucketing
    for kind, planner in (
        (GemmRsProblem, plan_gemm_rs),
        (BulkAgProblem, plan_bulk_ag),
        (BulkRsProblem, plan_bulk_rs),
    ):
        plan = planner(kind(**sizes), machine)
        assert (plan.xcd_bucketing, plan.num_xcds) == (False, 1)


@pytest.mark.parametrize("world_size", range(2, 9))
def test_a11_crews_per_peer_are_kept_and_totals_scale(machine, world_size):
    sizes = {"n": 4096, "world_size": world_size}
    ag = plan_bulk_ag(BulkAgProblem(m=840 * 8, k=768, **sizes), machine)
    assert (ag.movers_per_peer, ag.num_movers) == (8, 8 * (world_size - 1))
    for plan in (
        plan_gemm_rs(GemmRsProblem(m=840 * 8, k=1792, **sizes), machine),
        plan_bulk_rs(BulkRsProblem(m=768, k=840 * 8, **sizes), machine),
    ):
        assert (plan.reducers_per_peer, plan.num_movers) == (8, 8 * (world_size - 1))


@pytest.mark.parametrize(
    ("cap", "reducing", "gathering"),
    # In proportion, halves up; then at most half the cap. A gather keeps its movers.
    [(256, 8, 8), (240, 8, 8), (239, 7, 8), (128, 4, 8), (112, 4, 8), (48, 2, 3), (14, 1, 1)],
)
def test_a12_reducing_kernels_shrink_both_roles_and_gathers_their_builders(
    machine, cap, reducing, gathering
):
    rs = plan_gemm_rs(GemmRsProblem(8192, 4096, 1792, 8), machine, cap=cap)
    bulk_rs = plan_bulk_rs(BulkRsProblem(768, 4096, 8192, 8), machine, cap=cap)
    bulk_ag = plan_bulk_ag(BulkAgProblem(8192, 4096, 768, 8), machine, cap=cap)
    assert (rs.reducers_per_peer, rs.num_movers) == (reducing, 7 * reducing)
    assert (bulk_rs.reducers_per_peer, bulk_rs.num_movers) == (reducing, 7 * reducing)
    assert (bulk_ag.movers_per_peer, bulk_ag.num_movers) == (gathering, 7 * gathering)


def test_saturation_is_8_per_peer(machine):
    sizes = GemmRsProblem(8192, 16384, 6656, 8)
    assert plan_gemm_rs(sizes, machine).max_movers == 56
    assert plan_gemm_rs(dataclasses.replace(sizes, world_size=2), machine).max_movers == 8
    # A crew larger than that stays, and none joins it.
    many = plan_gemm_rs(GemmRsProblem(65536, 4096, 512, 8), machine)
    assert (many.num_movers, many.max_movers) == (98, 98)
    fixed = plan_gemm_rs(sizes, machine, policy="fixed", reducers_per_peer=3)
    assert (fixed.num_movers, fixed.max_movers) == (21, 21)


def test_a_band_gives_every_wg_a_tile_a_step(machine):
    # 8 chunks x 2 row blocks x 16 columns of 128 x 256: 256 tiles from one tile row each.
    assert plan_gemm_rs(GemmRsProblem(65536, 4096, 512, 8), machine).band_rows == 256
    assert plan_gemm_rs(GemmRsProblem(65536, 4096, 512, 4), machine).band_rows == 512
    # Bounded by four tile rows and by the chunk.
    assert plan_gemm_rs(GemmRsProblem(65536, 512, 512, 2), machine).band_rows == 1024
    assert plan_gemm_rs(GemmRsProblem(1024, 512, 512, 2), machine).band_rows == 512
    # Ranks with different caps agree on it.
    caps = {plan_gemm_rs(GemmRsProblem(65536, 4096, 512, 4), machine, cap=c) for c in (9, 100)}
    assert {plan.band_rows for plan in caps} == {512}


def test_rules_do_not_depend_on_the_model():
    for dtype in ("bf16", "mxfp8"):
        for sizes in LLAMA3.values():
            for problem, planner in (
                (GemmRsProblem(16384, sizes[0], sizes[3], 8, dtype=dtype), plan_gemm_rs),
                (BulkAgProblem(16384, sizes[0], sizes[1], 8, dtype=dtype), plan_bulk_ag),
                (BulkRsProblem(sizes[2], sizes[0], 16384, 8, dtype=dtype), plan_bulk_rs),
            ):
                assert planner(problem, MACHINES[0]) == planner(problem, MACHINES[1])


def test_the_paper_pulls(machine):
    assert plan_gemm_rs(GemmRsProblem(8192, 4096, 512, 8), machine).transport == "pull"
    assert plan_bulk_ag(BulkAgProblem(8192, 4096, 512, 8), machine).transport == "pull"
    assert plan_bulk_rs(BulkRsProblem(512, 4096, 8192, 8), machine).transport == "pull"


# Paper Table C.7, MXFP8: 8B-OProj and 405B-Down, m, n, k, KOSMOS ms.
PAIRS = [
    (8192, 512, 4096, 0.238),
    (65536, 512, 4096, 1.395),
    (8192, 6656, 16384, 1.840),
    (65536, 6656, 16384, 17.485),
]


def test_the_pair_gathers_and_multiplies_twice(machine):
    pair = AgGemmPairProblem(8192, 1792, 4096, 8)
    single = AgGemmProblem(8192, 1792, 4096, 8, "nn", "mxfp8")
    assert pair.data_gradient == dataclasses.replace(single, keep_gathered=False)
    assert pair.remote_bytes == 2 * single.remote_bytes
    assert pair.flops == 2 * single.flops
    plan = plan_ag_gemm_pair(pair, machine)
    assert "B.3 row 2: MXFP8" in plan.rule
    assert (plan.movers_per_peer, plan.split_k) == (8, 1)
    assert plan.xcd_bucketing
    assert str(plan).startswith("ag_gemm_pair cap=256 movers_per_peer=8 ")
    # Few tiles on a machine whose rules would split those of one GEMM.
    h200, few = load_machine("h200"), {"m": 512, "n": 512, "k": 8192, "world_size": 2}
    split = plan_ag_gemm(AgGemmProblem(**few, layout="nn", dtype="mxfp8"), h200)
    assert (split.split_k, plan_ag_gemm_pair(AgGemmPairProblem(**few), h200).split_k) == (4, 1)


def test_predicted_times_of_the_pair():
    machine = MACHINES[0]
    for m, n, k, measured in PAIRS:
        problem = AgGemmPairProblem(m, n, k, 8)
        plan = plan_ag_gemm_pair(problem, machine)
        assert estimate(problem, machine, plan).time_ms == pytest.approx(measured, rel=0.2)
        assert can_fuse(problem, machine, plan) is None
        one_way, fixed, serial = (
            estimate(problem, machine, plan_ag_gemm_pair(problem, machine, policy=policy)).time_ms
            for policy in ("one_way", "fixed", "serial")
        )
        assert one_way < min(fixed, serial)
    alone = AgGemmPairProblem(8192, 512, 4096, 1)
    assert estimate(alone, machine, plan_ag_gemm_pair(alone, machine)).bytes_ms == 0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"dtype": "bf16"}, "dtype"),
        ({"layout": "tn"}, "layout"),
        ({"m": 8 * 48}, "m"),
        ({"k": 48}, "k"),
        ({"keep_gathered": True}, "keep_gathered"),
    ],
)
def test_bad_pairs_are_named(changes, named):
    good = {"m": 8192, "n": 512, "k": 4096, "world_size": 8}
    with pytest.raises(ProblemError, match=f"^{named}: got "):
        AgGemmPairProblem(**{**good, **changes})


# Paper Tables C.5, C.9 and C.11, BF16: sizes, KOSMOS ms, RCCL then hipBLASLt ms. Of each table one
# shape that the GEMM decides and two that the bytes do. Nothing was fitted to them.
CELLS = [
    (GemmRsProblem, plan_gemm_rs, (8192, 16384, 6656), 1.703, 2.015),
    (GemmRsProblem, plan_gemm_rs, (32768, 8192, 1024), 1.446, 1.886),
    (GemmRsProblem, plan_gemm_rs, (65536, 4096, 512), 1.367, 1.704),
    (BulkAgProblem, plan_bulk_ag, (8192, 16384, 13312), 3.386, 3.794),
    (BulkAgProblem, plan_bulk_ag, (32768, 8192, 1280), 1.218, 1.920),
    (BulkAgProblem, plan_bulk_ag, (65536, 4096, 768), 1.242, 1.751),
    (BulkRsProblem, plan_bulk_rs, (13312, 16384, 8192), 3.256, 3.971),
    (BulkRsProblem, plan_bulk_rs, (1280, 8192, 32768), 1.195, 1.922),
    (BulkRsProblem, plan_bulk_rs, (768, 4096, 65536), 1.226, 1.736),
]


@pytest.mark.parametrize(("kind", "planner", "sizes", "fused", "unfused"), CELLS)
def test_predicted_times_of_some_cells(kind, planner, sizes, fused, unfused):
    problem = kind(*sizes, 8)
    plan = planner(problem, MACHINES[0])
    predicted = estimate(problem, MACHINES[0], plan)
    assert predicted.time_ms == pytest.approx(fused, rel=0.2)
    assert predicted.baseline_ms == pytest.approx(unfused, rel=0.2)
    assert can_fuse(problem, MACHINES[0], plan) is None
