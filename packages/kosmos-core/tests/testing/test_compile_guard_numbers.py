"""What the guard says of arithmetic: flushed subnormals, and block-scaled matrix instructions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import triton
import triton.language as tl
from kosmos_core.testing.compile_guard import CompileCase, Expectations, run_cases

pytestmark = pytest.mark.compile


@triton.jit
def product_kernel(a, b, out, FLUSH: tl.constexpr):
    i = tl.arange(0, 256)
    x, y = tl.load(a + i), tl.load(b + i)
    if FLUSH:
        z = tl.inline_asm_elementwise(
            "mul.ftz.f32 $0, $1, $2;", "=r,r,r", [x, y], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        z = x * y
    tl.store(out + i, z)


def product(target: str, flush: bool, **options: object) -> CompileCase:
    return CompileCase(
        name=f"product {flush} {options}",
        kernel=product_kernel,
        signature=dict.fromkeys(("a", "b", "out"), "*fp32"),
        target=target,
        constexprs={"FLUSH": flush},
        options={"num_warps": 4, **options},
        expect=Expectations(keeps_subnormals=True),
    )


def test_flushed_subnormals_are_found_where_a_case_asks():
    flushing = product("sm_90", True)
    amd = product("gfx950", False, allow_flush_denorm=True)
    cases = [product("sm_90", False), product("gfx950", False), flushing, amd]
    cases.append(replace(flushing, name="does not ask", expect=Expectations()))
    nvidia_kept, amd_kept, nvidia, amd_flushed, unasked = run_cases(cases).reports
    assert nvidia_kept.passed, nvidia_kept.reasons
    assert amd_kept.passed, amd_kept.reasons
    assert nvidia.reasons == ["subnormals: mul.ftz.f32 flushes subnormals"]
    assert len(amd_flushed.reasons) == 1
    assert amd_flushed.reasons[0].endswith("wanted 3")
    assert unasked.passed


@triton.jit
def scaled_kernel(a, sa, b, sb, out, B: tl.constexpr, SCALED: tl.constexpr):
    i = tl.arange(0, B)
    g = tl.arange(0, B // 32)
    at = i[:, None] * B + i[None, :]
    codes = i[:, None] * (B // 32) + g[None, :]
    x, y = tl.load(a + at), tl.load(b + at)
    if SCALED:
        z = tl.dot_scaled(x, tl.load(sa + codes), "e4m3", y.T, tl.load(sb + codes), "e4m3")
    else:
        z = tl.dot(x.to(tl.float8e4nv, bitcast=True), y.T.to(tl.float8e4nv, bitcast=True))
    tl.store(out + at, z)


def scaled(target: str, scales: bool) -> CompileCase:
    return CompileCase(
        name=f"scaled {scales}",
        kernel=scaled_kernel,
        signature={**dict.fromkeys(("a", "sa", "b", "sb"), "*u8"), "out": "*fp32"},
        target=target,
        constexprs={"B": 128, "SCALED": scales},
        divisible_by_16=("a", "sa", "b", "sb", "out"),
        options={"num_warps": 8},
        expect=Expectations(mma=1, scaled_mma=1),
    )


def test_block_scaled_instructions_are_told_from_others():
    native = ("gfx950", "sm_100")
    with_scales = run_cases([scaled(target, True) for target in native]).reports
    assert [report.passed for report in with_scales] == [True, True], with_scales
    others = run_cases([scaled("sm_90", True), *(scaled(t, False) for t in native)]).reports
    for report in others:
        assert report.reasons == ["expectation: scaled_mma: wanted at least 1, found 0"]
