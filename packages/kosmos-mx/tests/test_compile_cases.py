"""Every configuration compiles for its targets, keeps subnormals, and uses what the target has."""

from __future__ import annotations

import dataclasses

import pytest
from kosmos_core.testing.compile_guard import CompileCase, covering, run_cases
from kosmos_mx.compile_cases import SCALED_TARGETS, compile_cases

pytestmark = pytest.mark.compile


@pytest.mark.timeout(900)
def test_every_pair_of_settings_passes_the_guard() -> None:
    cases = compile_cases()
    assert len({(c.name, c.target) for c in cases}) == len(cases) > 80
    assert {c.target for c in cases if c.expect.scaled_mma} == set(SCALED_TARGETS)
    check(covering(cases))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_configurations_pass_the_guard() -> None:
    check(compile_cases())


def check(cases: list[CompileCase]) -> None:
    result = run_cases(cases, jobs=2)
    failed = [f"{r.name} {r.target}: {r.reasons}" for r in result.reports if not r.passed]
    assert not failed, "\n".join(failed)


def test_hopper_has_no_block_scaled_mma():
    (case,) = (
        c for c in compile_cases() if (c.name, c.target) == ("gemm tn e4m3 even_k=1", "gfx950")
    )
    report = run_cases([dataclasses.replace(case, target="sm_90")]).reports[0]
    assert not report.passed
    assert any("scaled_mma: wanted at least 1, found 0" in reason for reason in report.reasons)
