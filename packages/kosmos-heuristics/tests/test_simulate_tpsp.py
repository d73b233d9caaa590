"""Programs of the TP+SP kernels: what every schedule must obey, and what the paper found."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from kosmos_heuristics.errors import MachineError, PlanError, ProblemError
from kosmos_heuristics.orders import TileQueue
from kosmos_heuristics.simulate import model
from kosmos_heuristics.simulate.crews import per_peer, split_k
from kosmos_heuristics.simulate.model import TILE_ROW as TILE
from kosmos_heuristics.simulate.model import SimMachine, sim_machine
from kosmos_heuristics.simulate.native import play
from kosmos_heuristics.simulate.program import (
    DOWNSTREAM,
    NO_COUNTER,
    TILES,
    UPSTREAM,
    Flow,
    Program,
    Queue,
)
from kosmos_heuristics.simulate.simulate import bytes_ms, simulate
from kosmos_heuristics.simulate.tpsp import KERNELS, POLICIES, Case, build


@pytest.fixture(scope="module")
def machine() -> SimMachine:
    return sim_machine("mi350x")


def random_case(draw: random.Random) -> Case:
    sizes = [draw.choice((256, 512, 768, 1024, 2048, 4096)) for _ in range(2)]
    tokens = 8 * draw.randint(1, 1200)
    kernel = draw.choice(KERNELS)
    m, n, k = (sizes[0], sizes[1], tokens) if kernel == "bulk_rs" else (tokens, *sizes)
    return Case(
        kernel,
        m,
        n,
        k,
        draw.choice(("bf16", "mxfp8")),
        draw.choice((1, 2, 4, 8)),
        draw.choice(POLICIES),
        cap=draw.choice((None, 2, 5, 100)),
    )


@pytest.mark.parametrize("seed", range(60))
def test_no_schedule_beats_its_bound_and_all_time_is_accounted_for(seed: int) -> None:
    case = random_case(random.Random(seed))
    machine = sim_machine("mi350x", case.dtype)
    outcome = simulate(case, machine)
    assert outcome.time_ms > outcome.bound_ms
    wgs = min(case.cap or machine.num_wgs, machine.num_wgs)
    parts = (outcome.build_ms, outcome.move_ms, outcome.build_wait_ms, outcome.move_wait_ms)
    total = sum(parts) + outcome.idle_ms
    assert total == pytest.approx(wgs * (outcome.time_ms - machine.launch_us * 1e-3), rel=1e-6)


@pytest.mark.parametrize("seed", range(20))
def test_more_link_or_tflops_never_slows_a_run_beyond_noise(seed: int) -> None:
    case = random_case(random.Random(seed))
    machine = sim_machine("mi350x", case.dtype)
    time = simulate(case, machine).time_ms
    faster = (
        replace(machine, tflops=machine.tflops * 1.5),
        replace(
            machine,
            link_gbps=machine.link_gbps * 1.5,
            copy_gbps=machine.copy_gbps * 1.5,
            reduce_gbps=machine.reduce_gbps * 1.5,
        ),
    )
    for better in faster:
        # Noise: who gets the last tile changes, and a greedy queue promises nothing about it.
        assert simulate(case, better).time_ms <= time * 1.03


def test_a_run_repeats_bit_for_bit(machine: SimMachine) -> None:
    case = Case("gemm_rs", 8192, 4096, 1792)
    assert simulate(case, machine, trace=True) == simulate(case, machine, trace=True)


@pytest.mark.parametrize("order", ["local_first", "chunk_major"])
def test_tiles_are_claimed_in_the_order_of_the_kernels(order: str, machine: SimMachine) -> None:
    # Sizes whose sweep groups are a tile row high, so that both definitions can be compared.
    m, n, world = 4 * 4 * TILE, 3 * TILE, 4
    case = Case("ag_gemm_tn", m, n, 512, world_size=world, order=order)
    program = build(case, machine)
    tiles = program.ranks[0].queues[TILES]
    units = program.ranks[0].queues[UPSTREAM]
    rows: dict[int, tuple[int, int]] = {}
    for item in range(units.claims):
        position = list(dict.fromkeys(units.sig_lo)).index(units.sig_lo[item])
        rows[units.sig_lo[item]] = (position % (world - 1), position // (world - 1))
    simulated = [
        (-1, -1) if tiles.need_lo[i] == tiles.need_hi[i] else rows[tiles.need_lo[i]]
        for i in range(tiles.claims)
    ]
    queue = TileQueue(
        world_size=world,
        rank=0,
        chunk_rows=m // world,
        n=n,
        k=512,
        block_m=TILE,
        block_n=TILE,
        block_k=64,
        tile_row_rows=TILE,
        group_m=1,
        group_rows=1,
        split_k=1,
        split_tiles=0,
        order=order,
    )
    wanted = []
    for index in range(queue.num_ids):
        tile = queue.tile(index)
        wanted.append((-1, -1) if tile.src_rank == 0 else (tile.src_rank - 1, tile.row_block))
    assert simulated == wanted


def test_a_traced_run_claims_in_queue_order_and_movers_turn_builders(machine: SimMachine) -> None:
    case = Case("ag_gemm_tn", 16384, 7168, 4096)
    outcome = simulate(case, machine, trace=True)
    spans = outcome.played.spans
    claims = sorted((s.claimed_us, s.item) for s in spans if s.queue == TILES)
    assert [claimed for claimed, _ in claims] == [
        s.claimed_us for s in sorted((s for s in spans if s.queue == TILES), key=lambda s: s.item)
    ]
    movers = {s.wg for s in spans if s.queue == UPSTREAM}
    assert len(movers) == outcome.num_movers == 42
    for wg in movers:
        own = sorted((s for s in spans if s.wg == wg), key=lambda s: s.start_us)
        kinds = [s.queue for s in own]
        assert kinds == sorted(kinds, reverse=True), "a mover that built moves no more"
    assert any(s.queue == TILES and s.wg in movers for s in spans)


@pytest.mark.parametrize("kernel", ["ag_gemm_tn", "ag_gemm_nn"])
def test_overlap_pays_and_the_gather_order_matters(kernel: str, machine: SimMachine) -> None:
    case = Case(kernel, 32768, 2304, 16384)
    times = {p: simulate(replace(case, policy=p), machine).time_ms for p in POLICIES}
    assert times["one_way"] < times["serial"]
    assert times["one_way"] <= times["fixed"] * 1.01
    orders = [
        simulate(replace(case, order=order), machine).time_ms
        for order in ("local_first", "chunk_major", "naive")
    ]
    assert orders == sorted(orders)
    assert orders[0] * 1.1 < orders[2]


def test_reduced_in_bands_is_faster_than_row_by_row(machine: SimMachine) -> None:
    case = Case("gemm_rs", 32768, 8192, 3584)
    band, row = (
        simulate(replace(case, order=order), machine).time_ms
        for order in ("band_major", "row_major")
    )
    assert band * 1.2 < row


def test_the_pair_of_mxfp8_does_both_gemms_and_both_gathers() -> None:
    # Without the boost, of which the longer call has less, and without what a tile costs anyway.
    plain = {"boost": 0.0, "tile_us": 0.0, "acquire_us": 0.0, "nt_share": 1.0}
    machine = replace(sim_machine("mi350x", "mxfp8"), **plain)
    single = Case("ag_gemm_tn", 8192, 1024, 2048, "mxfp8")
    pair = replace(single, kernel="ag_gemm_nn")
    assert pair.flops == 2 * single.flops
    assert pair.remote_bytes == 2 * single.remote_bytes
    assert bytes_ms(pair, machine) == pytest.approx(2 * bytes_ms(single, machine))
    program = build(pair, machine)
    cost = sum(program.ranks[0].queues[TILES].cost)
    assert cost == pytest.approx(2 * sum(build(single, machine).ranks[0].queues[TILES].cost))


def test_crews_and_splits_of_table_b3() -> None:
    assert [per_peer("bulk_ag", "bf16", 8192, 8192, k, 256) for k in (7168, 3584, 2304, 768)] == [
        2,
        4,
        6,
        8,
    ]
    assert per_peer("gemm_rs", "bf16", 65536, 4096, 512, 256) == 14
    assert per_peer("gemm_rs", "mxfp8", 65536, 16384, 6656, 256) == 5
    assert [split_k("ag_gemm_nn", "bf16", tiles) for tiles in (64, 128, 129)] == [4, 2, 1]
    assert split_k("ag_gemm_nn", "mxfp8", 1) == 1
    assert Case("ag_gemm_tn", 8192, 768, 4096, cap=20).num_movers(sim_machine("mi350x")) == 7


def test_bad_input_names_the_field(tmp_path: object) -> None:
    with pytest.raises(ProblemError, match="m: got 100, wanted a multiple of world_size 8"):
        Case("gemm_rs", 100, 256, 256)
    with pytest.raises(ProblemError, match="k: got 100"):
        Case("bulk_rs", 256, 256, 100)
    with pytest.raises(PlanError, match="order: got 'naive'"):
        Case("gemm_rs", 256, 256, 256, order="naive")
    with pytest.raises(PlanError, match="cap: got 1"):
        Case("gemm_rs", 256, 256, 256, cap=1)
    with pytest.raises(MachineError, match="machine: got 'no such'"):
        sim_machine("no such")
    good = {"common": dict(vars(sim_machine("mi350x"))), "bf16": {}}
    good["common"]["link_gbps"] = -1.0
    with pytest.raises(MachineError, match=r"link_gbps: got -1\.0"):
        model.from_data(good, "bf16")
    del good["common"]["link_gbps"]
    with pytest.raises(MachineError, match="link_gbps: got None"):
        model.from_data(good, "bf16")


def all_ranks(single: Program, world: int) -> Program:
    """The reduction with every rank played: partials go to the rank that owns the chunk."""
    spec, size = single.ranks[0], len(single.counters)
    ranks, flows = [], []
    for rank in range(world):
        tiles, units, seen = Queue(), Queue(), dict.fromkeys(range(size), 0)
        old = spec.queues[TILES]
        for item in range(old.claims):
            counter = old.sig_lo[item]
            owner = seen[counter]
            seen[counter] += 1
            at = owner * size + counter
            tiles.add(old.cost[item], 0, NO_COUNTER, (at, at + 1))
        old = spec.queues[DOWNSTREAM]
        for item in range(old.claims):
            need = (rank * size + old.need_lo[item], rank * size + old.need_hi[item])
            units.add(old.cost[item], rank, need)
        queues = [tiles, Queue(), units]
        ranks.append(replace(spec, queues=queues))
        flows.append(Flow(rank, (0, rank)))
    counters = single.counters * world
    return replace(single, ranks=ranks, flows=flows, groups=world, counters=counters)


@pytest.mark.parametrize("order", ["band_major", "row_major"])
@pytest.mark.parametrize("sizes", [(8192, 4096, 1792), (16384, 2048, 512)])
def test_the_rank_that_is_played_ends_with_the_slowest_of_all(
    order: str, sizes: tuple[int, int, int], machine: SimMachine
) -> None:
    single = build(Case("gemm_rs", *sizes, world_size=4, order=order), machine)
    one = play(single).end_us[0]
    ends = play(all_ranks(single, 4)).end_us
    assert max(ends) == pytest.approx(one, rel=0.02)
    if order == "row_major":
        # The first chunk is there long before the last.
        assert ends[0] < ends[-1]
