"""A wait must not end by a clock that each warp reads for itself."""

from __future__ import annotations

import pytest
import triton
import triton.language as tl
from kosmos_core.device.target import AMD, NVIDIA, clock_ns, is_over
from kosmos_core.testing.compile_guard import CompileCase, compile_case

pytestmark = pytest.mark.compile


@triton.jit
def late(begin, bound, SHARED: tl.constexpr, TARGET: tl.constexpr):
    return is_over(begin, bound, TARGET) if SHARED else clock_ns(TARGET) - begin > bound


@triton.jit
def wait_kernel(flag, out, bound, SHARED: tl.constexpr, BODY: tl.constexpr, TARGET: tl.constexpr):
    begin = clock_ns(TARGET)
    if BODY == "state":
        state = tl.full((), 0, tl.int32)
        while state == 0:
            if tl.atomic_add(flag, 0, sem="acquire", scope="gpu") > 0:
                state = tl.full((), 1, tl.int32)
            elif late(begin, bound, SHARED, TARGET):
                state = tl.full((), 2, tl.int32)
    elif BODY == "condition":
        while not late(begin, bound, SHARED, TARGET):
            tl.atomic_add(flag, 0, sem="acquire", scope="gpu")
    else:
        # Times are written down, and nothing depends on them.
        tl.store(out, clock_ns(TARGET) - begin)


def clock_findings(shared: bool, body: str, target: str) -> int:
    report = compile_case(
        CompileCase(
            name=f"{body} {target}",
            kernel=wait_kernel,
            signature={"flag": "*i32", "out": "*i64", "bound": "i64"},
            constexprs={
                "SHARED": shared,
                "BODY": body,
                "TARGET": (AMD if target.startswith("gfx") else NVIDIA).value,
            },
            target=target,
            options={"num_warps": 8, "num_stages": 2},
        )
    )
    assert "compile" not in {f.check for f in report.findings}, report.findings
    return sum(f.check == "clock" for f in report.findings)


@pytest.mark.parametrize("target", ["sm_90", "gfx950"])
@pytest.mark.parametrize("body", ["state", "condition"])
def test_a_bound_that_is_over_for_one_warp_only_is_found(body: str, target: str) -> None:
    assert clock_findings(False, body, target) > 0
    assert clock_findings(True, body, target) == 0


@pytest.mark.parametrize("target", ["sm_90", "gfx950"])
def test_a_time_that_is_only_written_down_is_no_branch(target: str) -> None:
    assert clock_findings(False, "times", target) == 0
