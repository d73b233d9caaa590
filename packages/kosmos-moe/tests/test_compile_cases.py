"""Every kind of configuration that plans can choose compiles for sm_90 and gfx950."""

from __future__ import annotations

import pytest
from kosmos_core.testing.compile_guard import run_cases
from kosmos_moe.compile_cases import compile_cases

pytestmark = pytest.mark.compile


@pytest.mark.timeout(900)
def test_all_configurations_pass_the_guard() -> None:
    cases = compile_cases()
    assert len({(c.name, c.target) for c in cases}) == len(cases) >= 17
    result = run_cases(cases, jobs=2)
    failed = [f"{r.name} {r.target}: {r.reasons}" for r in result.reports if not r.passed]
    assert not failed, "\n".join(failed)
