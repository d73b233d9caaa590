"""How timings are taken, summarised and described."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable

import pytest
from kosmos_core.testing.bench import (
    Timing,
    environment,
    geomean,
    host_microseconds,
    quantile,
    time_rounds,
)
from kosmos_core.worlds import reference_world


class Recorder:
    """A timer that notes what it is asked for and makes variant `slow` take twice as long."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, int]] = []

    def time(self, name: str, fn: Callable[[], object], warmup: int, calls: int) -> list[float]:
        self.asked.append((name, warmup, calls))
        fn()
        return [2.0 if name == "slow" else 1.0] * calls


def test_the_median_is_that_of_the_rounds_and_the_spread_is_between_them() -> None:
    timing = Timing.of([[1.0, 1.0, 9.0], [2.0, 2.0, 2.0], [4.0, 4.0, 4.0]])
    assert timing.round_ms == (1.0, 2.0, 4.0)
    assert timing.median_ms == 2.0
    assert timing.spread == pytest.approx(1.5)
    assert timing.p20_ms == pytest.approx(1.6)
    assert timing.p80_ms == pytest.approx(4.0)


@pytest.mark.parametrize("rounds", [[], [[]], [[1.0], []]])
def test_nothing_measured_is_no_timing(rounds: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="at least one call"):
        Timing.of(rounds)


def test_quantiles_interpolate() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([0.0, 10.0], 0.2) == pytest.approx(2.0)
    assert quantile([7.0], 0.8) == 7.0


def test_geometric_means_leave_out_what_was_not_measured() -> None:
    assert geomean([2.0, None, 8.0]) == pytest.approx(4.0)
    assert geomean([None]) is None


def test_every_round_measures_every_variant_in_an_order_of_its_own() -> None:
    timer = Recorder()
    called = []
    variants = {
        name: lambda name=name: called.append(name) for name in ("a", "b", "slow", "d", "e")
    }
    announced: list[str] = []
    measured = time_rounds(
        variants, timer, rounds=4, warmup=3, calls=5, seed=7, advance=announced.append
    )
    rounds = [[name for name, *_ in timer.asked[i : i + 5]] for i in range(0, 20, 5)]
    assert all(sorted(names) == sorted(variants) for names in rounds)
    assert len({tuple(names) for names in rounds}) > 1
    assert announced == called == [name for names in rounds for name in names]
    assert {(warmup, calls) for _, warmup, calls in timer.asked} == {(3, 5)}
    assert list(measured) == list(variants)
    assert measured["slow"].median_ms == 2.0
    assert measured["a"].median_ms == 1.0


def test_ranks_with_the_same_seed_shuffle_alike() -> None:
    orders = []
    for seed in (1, 1, 2):
        timer = Recorder()
        names = dict.fromkeys("abcdefgh", lambda: None)
        time_rounds(names, timer, rounds=3, warmup=0, calls=1, seed=seed)
        orders.append([name for name, *_ in timer.asked])
    assert orders[0] == orders[1] != orders[2]


def test_host_time_is_per_call() -> None:
    calls = []
    us = host_microseconds(lambda: calls.append(0), reference_world(), calls=50, repeats=2)
    assert len(calls) == 2 * (20 + 50)
    assert 0 < us < 1000


@pytest.mark.parametrize("collects", [True, False])
def test_garbage_is_not_collected_meanwhile_and_is_again_afterwards(collects: bool) -> None:
    seen = []
    before = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        host_microseconds(
            lambda: seen.append(gc.isenabled()), reference_world(), calls=5, repeats=2
        )
        assert gc.isenabled() is collects
    finally:
        (gc.enable if before else gc.disable)()
    # The warm-up is not timed.
    assert seen == 2 * ([collects] * 20 + [False] * 5)


def test_the_environment_names_machine_and_versions() -> None:
    described = json.loads(json.dumps(environment(reference_world())))
    assert described["machine"]["ranks"] == 1
    assert {"python", "torch", "triton"} <= set(described["versions"])
    assert described["date"].endswith("+00:00")
    assert described["commit"] is None or len(described["commit"].rstrip("+")) == 40


def test_the_commit_is_known_in_a_tree_of_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    own = environment(reference_world())["commit"]
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    assert environment(reference_world())["commit"] == own
