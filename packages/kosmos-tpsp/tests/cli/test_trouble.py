"""A rank that fails, differs or refuses: all are told, nobody waits, nothing wrong is left."""

from __future__ import annotations

from typing import Any

import pytest
from kosmos_core.executor import Mutation
from kosmos_core.testing.schedules import Schedule
from kosmos_tpsp.cli.calls import Call
from kosmos_tpsp.cli.expiry import BOUNDS_US, Expiry, expire_on_cpu
from kosmos_tpsp.cli.killed import trouble_on_cpu
from kosmos_tpsp.cli.trouble import KINDS, Trouble
from kosmos_tpsp.device import build
from kosmos_tpsp.ops.ag_gemm import AgGemmOptions
from kosmos_tpsp.ops.bulk_ag import BulkAgOptions
from kosmos_tpsp.ops.bulk_column import BulkColumnOptions
from kosmos_tpsp.ops.bulk_rs import BulkRsOptions
from kosmos_tpsp.ops.catalog import driver_of
from kosmos_tpsp.ops.gemm_rs import GemmRsOptions

CHOICES: tuple[dict[str, Any], ...] = (
    {"transport": "pull"},
    {"transport": "push"},
    {"layout": "nn", "transport": "push"},
    {"policy": "two_way", "transport": "pull"},
    {"policy": "fixed"},
    {"policy": "serial"},
    {"split_k": 4},
)


def problems(
    kind: str, size: int, seed: int, *mutations: Mutation, op: Any = AgGemmOptions, **choices: Any
) -> list[str]:
    """What one schedule of trouble shows that must not be."""
    options = op(**choices)
    shape_of = driver_of(options).shape_of
    calls = [
        Call(*shape_of(40 * size, 24, 32), 0, options),
        Call(*shape_of(24 * size, 24, 16), 0, options),
    ]
    run, seen = trouble_on_cpu(
        Trouble(calls, victim=seed % size, kind=kind, seed=seed),
        size,
        Schedule.draw(seed, size, 4),
        mutations=mutations,
    )
    assert run.failure is not None or len(seen) == size
    return [*run.problems, *(f"rank {w.rank}: {text}" for w in seen for text in w.problems)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_everybody_is_told_and_revives(kind: str, size: int) -> None:
    for seed in range(8 - size):
        assert problems(kind, size, seed) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("choices", CHOICES, ids=str)
def test_whatever_the_choices_are(kind: str, choices: dict[str, Any]) -> None:
    assert problems(kind, 3, 8, **choices) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", ["one_way", "two_way", "serial"])
@pytest.mark.parametrize("transport", ["pull", "push"])
def test_whatever_a_reduction_is_like(kind: str, policy: str, transport: str) -> None:
    for seed in (8, 9):
        found = problems(kind, 3, seed, op=GemmRsOptions, policy=policy, transport=transport)
        assert found == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("transport", ["pull", "push"])
@pytest.mark.parametrize("op", [BulkAgOptions, BulkRsOptions, BulkColumnOptions])
def test_whatever_a_collective_beside_a_gemm_is_like(kind: str, transport: str, op: Any) -> None:
    for seed, policy in enumerate(("one_way", "fixed", "serial")):
        assert problems(kind, 3, seed, op=op, policy=policy, transport=transport) == []


def test_eight_ranks() -> None:
    assert problems("killed", 8, 5) == []
    assert problems("killed", 8, 5, op=GemmRsOptions, transport="pull") == []


def test_values_of_an_aborted_call_that_are_neither_right_nor_nan_are_seen() -> None:
    kept = Mutation(build.tile_sum, 'begin_with = float("nan")', "begin_with = 0.0")
    found = problems("killed", 2, 0, kept)
    assert any("left wrong values" in problem for problem in found)


@pytest.mark.parametrize("queued", [False, True])
def test_a_bound_that_expires_anywhere_ends_every_rank(queued: bool) -> None:
    ended = 0
    for seed in range(16):
        size = 2 + seed % 3
        calls = [Call(rows * size, 24, 40, i) for i, rows in enumerate((40, 24, 72))]
        expiry = Expiry(calls, BOUNDS_US[seed % 4])
        schedule = Schedule.draw(seed, size, 4)
        run, left = expire_on_cpu(expiry, size, schedule, queued=queued)
        assert run.problems == []
        ended += left[0].error is not None
    # The bounds are such that some runs end so and some do not.
    assert 0 < ended < 16
