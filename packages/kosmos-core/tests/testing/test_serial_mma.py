"""The guard refuses a K loop whose tensor-core instructions the assembler serialises."""

from __future__ import annotations

import pytest
import triton
import triton.language as tl
from kosmos_core.testing.compile_guard import CompileCase, compile_case

pytestmark = pytest.mark.compile


@triton.jit
def tiles_kernel(a_ptr, b_ptr, c_ptr, ok_ptr, head_ptr, m, n, k, BRANCH: tl.constexpr):
    a = tl.make_tensor_descriptor(a_ptr, [m, k], [k.to(tl.int64), 1], [128, 64])
    b = tl.make_tensor_descriptor(b_ptr, [n, k], [k.to(tl.int64), 1], [128, 64])
    c = tl.make_tensor_descriptor(c_ptr, [m, n], [n.to(tl.int64), 1], [128, 128])
    columns = tl.cdiv(n, 128)
    tile = tl.atomic_add(head_ptr, 1, sem="relaxed")
    while tile < tl.cdiv(m, 128) * columns:
        row = tile // columns * 128
        col = tile % columns * 128
        ok = tl.load(ok_ptr)
        acc = tl.zeros((128, 128), tl.float32)
        if BRANCH:
            if ok == 0:
                acc = tl.full((128, 128), float("nan"), tl.float32)
            elif ok == 1:
                for i in tl.range(0, k, 64, num_stages=3):
                    acc = tl.dot(a.load([row, i]), b.load([col, i]).T, acc)
            else:
                for i in tl.range(0, k, 64, num_stages=3):
                    acc = tl.dot(a.load([0, i]), b.load([col, i]).T, acc)
        else:
            for i in tl.range(0, k, 64, num_stages=3):
                acc = tl.dot(a.load([row, i]), b.load([col, i]).T, acc)
        if ok != 0:
            c.store([row, col], acc.to(tl.bfloat16))
        tile = tl.atomic_add(head_ptr, 1, sem="relaxed")


def case(branch: bool) -> CompileCase:
    return CompileCase(
        name=f"tiles branch={branch}",
        kernel=tiles_kernel,
        signature={
            **dict.fromkeys(("a_ptr", "b_ptr", "c_ptr"), "*bf16"),
            **dict.fromkeys(("ok_ptr", "head_ptr"), "*i32"),
            **dict.fromkeys(("m", "n", "k"), "i32"),
        },
        constexprs={"BRANCH": branch},
        divisible_by_16=("a_ptr", "b_ptr", "c_ptr", "n", "k"),
        target="sm_90",
        options={"num_warps": 8, "num_stages": 3},
    )


def test_one_loop_keeps_the_pipeline():
    report = compile_case(case(branch=False))
    assert report.passed, report.reasons


def test_sums_from_several_branches_are_refused():
    report = compile_case(case(branch=True))
    assert [f.check for f in report.findings] == ["serial-mma"]
    assert not report.passed
