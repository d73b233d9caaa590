"""The configurations that plans can choose compile for sm_90 and gfx950 as the guard wants.

The test command compiles every pair of settings once, `nox -s compile -- -m compile` every product.
"""

from __future__ import annotations

import dataclasses

import pytest
from kosmos_core.testing.compile_guard import (
    CompileCase,
    Expectations,
    covering,
    run_cases,
)
from kosmos_tpsp.compile_cases import compile_cases

pytestmark = pytest.mark.compile


def check(cases: list[CompileCase]) -> None:
    result = run_cases(cases, jobs=2)
    failed = [f"{r.name} {r.target}: {r.reasons}" for r in result.reports if not r.passed]
    assert not failed, "\n".join(failed)


@pytest.mark.timeout(900)
def test_every_pair_of_settings_passes_the_guard() -> None:
    cases = compile_cases()
    assert len({(c.name, c.target) for c in cases}) == len(cases) > 300
    chosen = covering(cases)
    assert 150 < len(chosen) < 220
    check(chosen)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_configurations_pass_the_guard() -> None:
    check(compile_cases())


def test_guard_fails_when_more_is_expected_than_the_kernel_does():
    case = dataclasses.replace(compile_cases()[0], expect=Expectations(acquire_gpu=99))
    assert not run_cases([case]).passed
