"""The core: sharing, waiting, roles; and the native core held equal to the Python one."""

from __future__ import annotations

import random
from types import ModuleType

import pytest
from kosmos_heuristics.errors import PlanError
from kosmos_heuristics.simulate import engine
from kosmos_heuristics.simulate.native import load_native, play
from kosmos_heuristics.simulate.program import (
    BUILDER,
    DOWNSTREAM,
    DUAL,
    GONE,
    MOVER,
    NO_COUNTER,
    PLANNED,
    REDUCER,
    TILES,
    UPSTREAM,
    Flow,
    Program,
    Queue,
    Rank,
)

needs_native = pytest.mark.skipif(load_native() is None, reason="the native core is not built")


def program(rank: Rank, wgs: int, counters: list[int], flows: int = 1, **change: object) -> Program:
    parts: dict[str, object] = {
        "ranks": [rank],
        "flows": [Flow(0, (0, index)) for index in range(flows)],
        "tables": [[0.0] + [10.0 / movers for movers in range(1, wgs + 1)]],
        "groups": flows,
        "build_rate": [1.0] * (wgs + 1),
        "build_drag": [1.0] * (wgs + 1),
        "move_drag": [1.0] * (wgs + 1),
        "counters": counters,
    }
    return Program(**{**parts, **change})  # type: ignore[arg-type]


def rank_of(roles: list[int], after: int = BUILDER, **change: object) -> Rank:
    queues = [Queue(), Queue(), Queue()]
    return Rank(queues, [0.0] * len(roles), roles, [after] * len(roles), **change)  # type: ignore[arg-type]


def test_movers_of_a_flow_share_its_bandwidth() -> None:
    rank = rank_of([MOVER, MOVER])
    rank.queues[UPSTREAM].add(100.0)
    rank.queues[UPSTREAM].add(50.0)
    # 5 bytes/us each: the short one ends at 10; the other has 50 left and the flow for itself.
    played = engine.play(program(rank, 2, []), trace=True)
    assert [span.end_us for span in played.spans] == pytest.approx([10.0, 15.0])


def test_a_waiting_builder_uses_no_power() -> None:
    rank = rank_of([BUILDER, BUILDER, MOVER], after=GONE)
    rank.queues[UPSTREAM].add(100.0, 0, NO_COUNTER, (0, 1))
    rank.queues[TILES].add(20.0)
    rank.queues[TILES].add(5.0, 0, (0, 1))
    # Alone a builder runs twice as fast as two do.
    played = engine.play(program(rank, 3, [1], build_rate=[0.0, 2.0, 1.0, 1.0]), trace=True)
    by_item = {(s.queue, s.item): s for s in played.spans}
    assert by_item[TILES, 0].end_us == pytest.approx(10.0)
    assert by_item[TILES, 1].start_us == pytest.approx(10.0)
    assert by_item[TILES, 1].end_us == pytest.approx(12.5)
    assert played.wait_us[0][TILES] == pytest.approx(10.0)


def test_one_way_movers_become_builders_and_fixed_ones_do_not() -> None:
    ends = {}
    for after in (BUILDER, GONE):
        rank = rank_of([MOVER, BUILDER], after=after)
        rank.queues[UPSTREAM].add(10.0)
        for _ in range(4):
            rank.queues[TILES].add(10.0)
        ends[after] = engine.play(program(rank, 2, [])).end_us[0]
    assert ends == {BUILDER: pytest.approx(21.0), GONE: pytest.approx(40.0)}


def test_builders_join_the_reduction_up_to_the_limit() -> None:
    ends = []
    for join in (0, 1, 2):
        rank = rank_of([REDUCER, BUILDER, BUILDER], join=join)
        for _ in range(7):
            rank.queues[DOWNSTREAM].add(10.0)
        table = [[0.0, 10.0, 10.0, 10.0]]
        ends.append(engine.play(program(rank, 3, [], tables=table)).end_us[0])
    # Seven units of a microsecond, by one, two and three workgroups.
    assert ends == pytest.approx([7.0, 4.0, 3.0])


def test_a_dual_mover_pushes_what_is_ready_before_it_builds() -> None:
    rank = rank_of([DUAL])
    for _ in range(3):
        rank.queues[TILES].add(1.0, 0, NO_COUNTER, (0, 1))
    rank.queues[DOWNSTREAM].add(10.0, 0, (0, 1))
    played = engine.play(program(rank, 1, [2]), trace=True)
    assert [span.queue for span in played.spans] == [TILES, TILES, DOWNSTREAM, TILES]


def test_a_planned_workgroup_builds_its_tiles_and_then_only_transfers() -> None:
    rank = rank_of([PLANNED, BUILDER], steal=2)
    for _ in range(6):
        rank.queues[TILES].add(1.0)
    rank.queues[DOWNSTREAM].add(10.0)
    played = engine.play(program(rank, 2, []), trace=True)
    assert [s.queue for s in played.spans if s.wg == 0] == [TILES, TILES, DOWNSTREAM]


def test_a_continuation_stays_with_its_workgroup() -> None:
    rank = rank_of([BUILDER, BUILDER])
    rank.queues[TILES].add(1.0)
    rank.queues[TILES].add(1.0)
    last = rank.queues[TILES].add_continuation(0, 5.0, NO_COUNTER)
    played = engine.play(program(rank, 2, []), trace=True)
    assert {s.item: s.wg for s in played.spans} == {0: 0, 1: 1, last: 0}
    assert played.end_us[0] == pytest.approx(6.0)


def test_a_builder_sends_its_tile_before_it_claims_the_next() -> None:
    rank = rank_of([BUILDER, REDUCER])
    rank.queues[TILES].add(10.0)
    rank.queues[TILES].add(10.0)
    sent = rank.queues[TILES].add_continuation(0, 50.0, NO_COUNTER, (0, 1), flow=1)
    rank.queues[DOWNSTREAM].add(20.0, 0, (0, 1))
    played = engine.play(program(rank, 2, [1]), trace=True)
    ends = {(s.queue, s.item): s.end_us for s in played.spans}
    # 50 bytes at 10 a microsecond; then the sum has the flow to itself, beside the second tile.
    assert ends[TILES, sent] == pytest.approx(15.0)
    assert ends[DOWNSTREAM, 0] == pytest.approx(17.0)
    assert ends[TILES, 1] == pytest.approx(25.0)


@pytest.mark.parametrize("core", ["python", pytest.param("native", marks=needs_native)])
def test_what_nobody_can_start_is_reported(core: str) -> None:
    rank = rank_of([BUILDER])
    rank.queues[TILES].add(1.0, 0, (0, 1))
    with pytest.raises(engine.Stalled, match="the first for counter 0 at 1"):
        play(program(rank, 1, [1]), core=core)
    rank = rank_of([BUILDER])
    rank.queues[DOWNSTREAM].add(1.0)
    with pytest.raises(engine.Stalled, match="1 items of queue 2 were never claimed"):
        play(program(rank, 1, []), core=core)


def random_program(seed: int) -> Program:
    """Several ranks, shared and two-sided flows, every role, counters that all get signalled."""
    draw = random.Random(seed)
    ranks, wgs = draw.randint(1, 3), draw.randint(4, 12)
    counters: list[int] = []
    specs = []
    flows = [Flow(r, (0, r), (1, ranks + d)) for r in range(ranks) for d in range(ranks)]
    for rank in range(ranks):
        roles = [draw.choice((MOVER, BUILDER, DUAL, REDUCER, PLANNED)) for _ in range(wgs - 3)]
        roles += [MOVER, BUILDER, REDUCER]
        spec = rank_of(roles, after=draw.choice((BUILDER, DUAL)), steal=draw.randint(0, 3))
        spec.starts = [draw.random() for _ in roles]
        spec.alternate, spec.join = draw.random() < 0.5, draw.randint(0, 4)
        spec.switch_at = draw.choice((0, 4, 1000))
        specs.append(spec)
        for _ in range(draw.randint(1, 30)):
            counters += [1, 1]
            at = len(counters) - 2
            flow = rank * ranks + draw.randrange(ranks)
            spec.queues[UPSTREAM].add(draw.uniform(1, 99), flow, NO_COUNTER, (at, at + 1))
            spec.queues[TILES].add(draw.uniform(1, 9), 0, (at, at + 1), (at + 1, at + 2))
            spec.queues[DOWNSTREAM].add(draw.uniform(1, 99), flow, (at + 1, at + 2))
        if draw.random() < 0.5:
            flow = draw.choice((0, rank * ranks + 1))
            spec.queues[TILES].add_continuation(0, 3.0, NO_COUNTER, flow=flow)
    table = [0.0] + [9.0 / movers**0.7 for movers in range(1, ranks * wgs + 1)]
    return Program(
        ranks=specs,
        flows=flows,
        tables=[table, [2 * value for value in table]],
        groups=2 * ranks,
        build_rate=[0.0] + [(builders / wgs) ** -0.4 for builders in range(1, wgs + 1)],
        build_drag=[1.0 - 0.01 * movers for movers in range(wgs + 1)],
        move_drag=[1.0 - 0.02 * builders for builders in range(wgs + 1)],
        counters=counters,
        flag_us=draw.choice((0.0, 0.3)),
    )


@needs_native
@pytest.mark.parametrize("seed", range(40))
def test_the_native_core_equals_the_python_one(seed: int) -> None:
    both = [play(random_program(seed), trace=True, core=core) for core in ("python", "native")]
    assert both[0] == both[1]


def test_without_the_native_core_the_python_one_serves_with_a_notice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from kosmos_heuristics.simulate import native

    monkeypatch.setattr(native, "load_native", lambda: None)
    monkeypatch.setattr(native, "_noticed", False)
    with pytest.warns(RuntimeWarning, match="native core was not built"):
        played = native.play(random_program(1))
    assert played == engine.play(random_program(1))
    with pytest.raises(PlanError, match="core: got 'native'"):
        native.play(random_program(1), core="native")


@needs_native
def test_the_native_core_refuses_indices_out_of_range() -> None:
    wrong = random_program(1)
    wrong.ranks[0].queues[TILES].need_hi[0] = len(wrong.counters) + 1
    with pytest.raises(ValueError, match="program: need out of range"):
        play(wrong, core="native")
    wrong = random_program(1)
    wrong.build_rate.pop()
    with pytest.raises(ValueError, match="program: rates are shorter than the grid"):
        play(wrong, core="native")


def test_a_native_core_of_an_older_source_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from kosmos_heuristics.simulate import native

    monkeypatch.setattr(native.importlib, "import_module", lambda name: ModuleType(name))
    assert native.load_native() is None
