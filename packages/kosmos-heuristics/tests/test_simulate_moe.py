"""Programs of the MoE layer."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kosmos_heuristics.errors import PlanError, ProblemError
from kosmos_heuristics.simulate.crews import moe_backward_crews, moe_forward_crews
from kosmos_heuristics.simulate.model import SimMachine, sim_machine
from kosmos_heuristics.simulate.moe import DIRECTIONS, POLICIES, MoeCase, build_moe
from kosmos_heuristics.simulate.program import DOWNSTREAM, TILES, UPSTREAM
from kosmos_heuristics.simulate.simulate import simulate_moe

SMALL = MoeCase("forward", 1000, 1024, 512, 32, 4)


@pytest.fixture(scope="module")
def machine() -> SimMachine:
    return sim_machine("mi350x")


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", ["bf16", "mxfp8"])
@pytest.mark.parametrize("skew", [1.0, 2.5, 8.0])
@pytest.mark.parametrize("world", [1, 2, 8])
def test_every_row_goes_out_and_comes_back(
    direction: str, dtype: str, skew: float, world: int
) -> None:
    machine = replace(sim_machine("mi350x", dtype), unit_us=0.0)
    skew = min(skew, float(world))
    case = replace(SMALL, direction=direction, dtype=dtype, skew=skew, world_size=world)
    program = build_moe(case, machine)
    # Every rank sends tokens x topk rows, to within the rounding of rows to whole ones.
    rows = case.tokens * case.topk * (1 if skew == 1.0 else world)
    row = case.dispatch_bytes + (case.hidden * 33 / 32 if case.column_wise else 0.0)
    out = sum(sum(rank.queues[UPSTREAM].cost) for rank in program.ranks)
    back = sum(sum(rank.queues[DOWNSTREAM].cost) for rank in program.ranks)
    assert out == pytest.approx(rows * row, rel=0.01)
    assert back == pytest.approx(rows * case.hidden * 2, rel=0.01)
    outcome = simulate_moe(case, machine)
    assert outcome.time_ms > outcome.bound_ms


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_policies_end_and_two_way_beats_fixed(
    policy: str, direction: str, machine: SimMachine
) -> None:
    case = MoeCase(direction, 4096, 4096, 1536, 64, 8, policy=policy, skew=2.0)
    fixed = simulate_moe(replace(case, policy="fixed"), machine).time_ms
    time = simulate_moe(case, machine).time_ms
    if policy == "two_way":
        assert time < fixed
    assert time <= fixed * 1.02


@pytest.mark.parametrize("skew", [1.0, 2.0])
def test_on_a_switch_the_busiest_rank_s_inlet_is_shared(skew: float) -> None:
    machine = sim_machine("h200")
    case = replace(SMALL, tokens=4096, skew=skew)
    ample = replace(machine, link_gbps=machine.link_gbps * 4)
    time = simulate_moe(case, machine).time_ms
    assert simulate_moe(case, machine).time_ms > simulate_moe(case, ample).time_ms
    assert time > simulate_moe(case, machine).bound_ms


def test_destination_major_pushes_crowd_one_link(machine: SimMachine) -> None:
    case = MoeCase("forward", 4096, 4096, 1536, 64, 8)
    minor = simulate_moe(case, machine).time_ms
    major = simulate_moe(replace(case, push_order="destination_major"), machine).time_ms
    assert minor * 1.1 < major


def test_a_rank_with_more_load_takes_longer_and_one_of_eight_stands_for_all(
    machine: SimMachine,
) -> None:
    even = simulate_moe(SMALL, machine)
    # A skew that rounds to nothing plays all ranks: alike, they end when the one rank did.
    all_ranks = simulate_moe(replace(SMALL, skew=1.0 + 1e-9), machine)
    assert len(all_ranks.played.end_us) == 8
    assert all_ranks.time_ms == pytest.approx(even.time_ms, rel=0.02)
    large = MoeCase("backward", 4096, 4096, 1536, 64, 8)
    ratio = simulate_moe(replace(large, skew=2.0), machine).time_ms
    assert ratio > simulate_moe(large, machine).time_ms * 1.5


def test_tiles_wait_only_for_the_sources_whose_rows_they_read(machine: SimMachine) -> None:
    # 500 rows of each source for each expert: a row block of 256 reads one source, or two.
    case = MoeCase("forward", 4000, 512, 512, 8, 1)
    tiles = build_moe(case, machine).ranks[0].queues[TILES]
    first = [(lo, hi) for lo, hi in zip(tiles.need_lo, tiles.need_hi, strict=True)]
    wide = 2 * case.inter // 256
    assert first[0] == (0, 1)
    assert first[wide] == (0, 2)
    assert first[2 * wide] == (1, 2) or first[2 * wide] == (1, 3)


def test_crews_of_table_b3() -> None:
    assert [moe_forward_crews("bf16", i, False, 256) for i in (768, 2048, 3072)] == [
        (32, 128),
        (24, 128),
        (16, 128),
    ]
    assert moe_forward_crews("mxfp8", 768, True, 256) == (64, 128)
    assert moe_forward_crews("mxfp8", 2048, False, 100) == (16, 48)
    assert moe_forward_crews("bf16", 2048, False, 8) == (4, 4)
    assert moe_backward_crews("bf16", 1.0, 9.0, 256) == (32, 32)
    assert moe_backward_crews("mxfp8", 1.0, 1.0, 256) == (64, 128)


def test_bad_input_names_the_field() -> None:
    with pytest.raises(ProblemError, match="experts: got 31"):
        replace(SMALL, experts=31)
    with pytest.raises(ProblemError, match=r"skew: got 9\.0"):
        replace(SMALL, skew=9.0)
    with pytest.raises(ProblemError, match="topk: got 33"):
        replace(SMALL, topk=33)
    with pytest.raises(PlanError, match="policy: got 'one_way'"):
        replace(SMALL, policy="one_way")
