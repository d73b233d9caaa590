"""Every configuration that plans can choose compiles for sm_90 and gfx950 as the guard wants."""

from __future__ import annotations

import dataclasses

import pytest
from kosmos_core.testing.compile_guard import Expectations, run_cases
from kosmos_tpsp.compile_cases import compile_cases

pytestmark = pytest.mark.compile


def test_all_configurations_pass_the_guard():
    cases = compile_cases()
    assert len({(c.name, c.target) for c in cases}) == len(cases) > 80
    result = run_cases(cases, jobs=2)
    failed = [f"{r.name} {r.target}: {r.reasons}" for r in result.reports if not r.passed]
    assert not failed, "\n".join(failed)
    assert result.wall_seconds < 300


def test_guard_fails_when_more_is_expected_than_the_kernel_does():
    case = dataclasses.replace(compile_cases()[0], expect=Expectations(acquire_gpu=99))
    assert not run_cases([case]).passed
