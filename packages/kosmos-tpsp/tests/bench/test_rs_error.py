"""The error of a reduction beside that of a ring, and the committed figures of both."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from kosmos_tpsp.bench.rs_error import measure, relative, ring_sum

RESULT = Path(__file__).resolve().parents[4] / "docs" / "results" / "rs_error.json"


def test_the_kernel_rounds_half_as_much_as_a_ring_of_eight() -> None:
    found = measure("small", 64, 64, 32, 8, wgs=2)
    reduction, end_to_end = found.ratios
    assert reduction > 2.0
    assert end_to_end > 1.5
    assert found.repeatable


def test_a_ring_of_exact_sums_is_exact_and_a_long_one_is_not() -> None:
    source = torch.Generator().manual_seed(0)
    whole = torch.randint(-8, 8, (4, 4, 8, 16), generator=source).bfloat16()
    assert relative(ring_sum(whole), whole.double().sum(0)) == 0.0
    rough = torch.randn(8, 8, 8, 16, generator=source).bfloat16()
    once = rough.float().sum(0).bfloat16()
    exact = rough.double().sum(0)
    assert relative(ring_sum(rough), exact) > 2 * relative(once, exact)


def test_the_committed_figures_are_at_least_twice_as_good_as_the_ring() -> None:
    summary = json.loads(RESULT.read_text())
    assert {row["shape"] for row in summary["rows"]} == {"8B-OProj-MBS8", "70B-Down-MBS8"}
    for row in summary["rows"]:
        assert row["ranks"] == 8
        assert row["reduction_ratio"] >= 2.0
        assert row["repeatable"]
