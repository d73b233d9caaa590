"""Every check of the compile guard: a kernel that violates it is found, its correct twin passes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import triton
import triton.language as tl
from kosmos_core.testing.compile_guard import (
    Allowance,
    CompileCase,
    CompileReport,
    Expectations,
    compile_case,
    run_cases,
)

pytestmark = pytest.mark.compile

VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
# From 3.9 on triton itself puts a barrier before a release, waits for TMA stores in full and keeps
# unused acquires; its LLVM keeps the wait after a write-back and does not merge polls.
REPAIRED = VERSION >= (3, 9)


@triton.jit
def assembly(TEXT: tl.constexpr, OUTPUT: tl.constexpr):
    tl.inline_asm_elementwise(TEXT, OUTPUT, [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def publish_kernel(
    flag, src, dst, table, offset, AMD: tl.constexpr, SCOPE: tl.constexpr, DEFECT: tl.constexpr
):
    index = tl.arange(0, 1024)
    tl.store(dst + index, tl.load(src + index))
    if AMD and DEFECT != "drain":
        assembly("s_waitcnt vmcnt(0)\nv_mov_b32 $0, 0", "=v")
    if DEFECT == "one path":
        if offset > 0:
            tl.debug_barrier()
    elif DEFECT != "barrier":
        tl.debug_barrier()
    if AMD and DEFECT == "written back":
        assembly("buffer_wbl2 sc0 sc1\ns_waitcnt vmcnt(0)\nv_mov_b32 $0, 0", "=v")
    if AMD and DEFECT == "gpu write-back":
        assembly("buffer_wbl2 sc1\ns_waitcnt vmcnt(0)\nv_mov_b32 $0, 0", "=v")
    if DEFECT == "late store":
        tl.store(dst + 1024 + index, index)
    if DEFECT == "late scalar":
        tl.store(dst, 7)
    if DEFECT == "write-back" or DEFECT == "written back" or DEFECT == "gpu write-back":
        flag = tl.load(table).to(tl.pointer_type(tl.int32), bitcast=True) + offset
    tl.atomic_add(flag, 1, sem="release", scope=SCOPE)


@triton.jit
def loop_kernel(flag, src, dst, steps, BARRIER_EACH: tl.constexpr):
    index = tl.arange(0, 1024)
    tl.debug_barrier()
    for step in range(steps):
        if BARRIER_EACH:
            tl.debug_barrier()
        assembly("fence.acq_rel.sys; mov.u32 $0, 0;", "=r")
        tl.store(dst + step * 1024 + index, tl.load(src + step * 1024 + index))


@triton.jit
def bump(ptrs, ORDER: tl.constexpr):
    tl.atomic_add(ptrs, 1, sem=ORDER, scope="sys")


@triton.jit
def shared_line_kernel(flag, dst, AMD: tl.constexpr):
    bump(dst + tl.arange(0, 1024), "relaxed")
    if AMD:
        assembly(
            "s_waitcnt vmcnt(0)\nbuffer_wbl2 sc0 sc1\ns_waitcnt vmcnt(0)\nv_mov_b32 $0, 0", "=v"
        )
    tl.debug_barrier()
    bump(flag, "release")
    bump(flag + 1, "release")


@triton.jit
def fence_release_kernel(flag, src, dst, BARRIER: tl.constexpr):
    index = tl.arange(0, 1024)
    tl.store(dst + index, tl.load(src + index))
    if BARRIER:
        tl.debug_barrier()
    assembly("fence.acq_rel.sys; mov.u32 $0, 0;", "=r")
    tl.atomic_add(flag, 1, sem="relaxed", scope="sys")


@triton.jit
def consume_kernel(flag, src, dst, want, HOW: tl.constexpr):
    if HOW == "unused":
        tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    elif HOW == "cas":
        while tl.atomic_cas(flag, 1, 1, sem="acquire", scope="sys") != 1:
            pass
    elif HOW == "two polls":
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        while seen < want:
            seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    else:
        while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < want:
            pass
    index = tl.arange(0, 1024)
    tl.store(dst + index, tl.load(src + index))


@triton.jit
def sentinel_kernel(src, dst, want, VOLATILE: tl.constexpr, CACHE: tl.constexpr):
    index = tl.arange(0, 1024)
    seen = tl.load(src + index, volatile=VOLATILE, cache_modifier=CACHE)
    while tl.sum((seen == want).to(tl.int32)) > 0:
        seen = tl.load(src + index, volatile=VOLATILE, cache_modifier=CACHE)
    tl.store(dst + index, seen)


@triton.jit
def tma_store_kernel(flag, src, dst, rows, cols, WAIT: tl.constexpr):
    out = tl.make_tensor_descriptor(dst, [rows, cols], [cols, 1], [64, 64])
    index = tl.arange(0, 64)
    out.store([0, 0], tl.load(src + index[:, None] * 64 + index[None, :]))
    if WAIT:
        assembly("cp.async.bulk.wait_group 0; mov.u32 $0, 0;", "=r")
    tl.debug_barrier()
    tl.atomic_add(flag, 1, sem="release", scope="sys")


@triton.jit
def tma_load_kernel(flag, src, dst, rows, cols, FENCE: tl.constexpr):
    desc = tl.make_tensor_descriptor(src, [rows, cols], [cols, 1], [64, 64])
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < rows:
        pass
    if FENCE:
        assembly("fence.proxy.async.global; mov.u32 $0, 0;", "=r")
    index = tl.arange(0, 64)
    tl.store(dst + index[:, None] * 64 + index[None, :], desc.load([0, 0]))


@triton.jit
def gemm_kernel(
    flag, a, b, c, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WAIT: tl.constexpr
):
    rm = tl.arange(0, BM)
    rn = tl.arange(0, BN)
    rk = tl.arange(0, BK)
    a_ptrs = a + rm[:, None] * K + rk[None, :]
    b_ptrs = b + rk[:, None] + rn[None, :] * K
    acc = tl.zeros((BM, BN), tl.float32)
    seen = 0
    if WAIT == "before":
        seen += tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    for k in tl.range(0, tl.cdiv(K, BK)):
        if WAIT == "inside":
            seen += tl.atomic_add(flag + k, 0, sem="acquire", scope="sys")
        acc = tl.dot(tl.load(a_ptrs), tl.load(b_ptrs), acc)
        a_ptrs += BK
        b_ptrs += BK
    tl.store(c + rm[:, None] * BN + rn[None, :], (acc + seen).to(tl.bfloat16))


@triton.jit
def tiles_kernel(flag, a, b, c, K, tiles, FLATTEN: tl.constexpr):
    r = tl.arange(0, 64)
    for tile in tl.range(tl.program_id(0), tiles, 132, flatten=FLATTEN):
        seen = tl.atomic_add(flag + tile, 0, sem="acquire", scope="sys")
        acc = tl.zeros((64, 64), tl.float32)
        for k in tl.range(0, tl.cdiv(K, 64)):
            left = tl.load(a + tile * K * 64 + r[:, None] * K + k * 64 + r[None, :])
            acc = tl.dot(left, tl.load(b + r[:, None] + k * 64 + r[None, :] * K), acc)
        tl.store(c + tile * 4096 + r[:, None] * 64 + r[None, :], (acc + seen).to(tl.bfloat16))


@triton.jit
def claim_kernel(a, b, c, counter, rows, cols, K, WARP_SPECIALIZE: tl.constexpr):
    a_desc = tl.make_tensor_descriptor(a, [rows, K], [K, 1], [128, 64])
    b_desc = tl.make_tensor_descriptor(b, [cols, K], [K, 1], [128, 64])
    c_desc = tl.make_tensor_descriptor(c, [rows, cols], [cols, 1], [128, 128])
    tiles = tl.cdiv(rows, 128)
    for _ in tl.range(0, tiles):
        tile = tl.atomic_add(counter, 1, sem="relaxed", scope="gpu")
        if tile < tiles:
            acc = tl.zeros((128, 128), tl.float32)
            for k in tl.range(0, tl.cdiv(K, 64), warp_specialize=WARP_SPECIALIZE):
                acc = tl.dot(a_desc.load([tile * 128, k * 64]), b_desc.load([0, k * 64]).T, acc)
            c_desc.store([tile * 128, 0], acc.to(tl.bfloat16))


# Imported inside: triton refuses a compile-time function that names a builtin function.
@triton.constexpr_function
def abort_while_compiling():
    __import__("os").abort()


@triton.constexpr_function
def sleep_while_compiling():
    __import__("time").sleep(60)


@triton.jit
def aborting_kernel(dst):
    abort_while_compiling()
    tl.store(dst, 1)


@triton.jit
def endless_kernel(dst):
    sleep_while_compiling()
    tl.store(dst, 1)


@triton.jit
def wrong_kernel(dst):
    tl.store(dst, tl.dot(1, 2))


COPY = {"flag": "*i32", "src": "*i32", "dst": "*i32", "want": "i32"}
TILES = {"flag": "*i32", "a": "*bf16", "b": "*bf16", "c": "*bf16", "K": "i32"}
ALIGNED = ("src", "dst", "a", "b", "c", "K", "rows", "cols")


def make(name, kernel, signature, target, constexprs=None, expect=None, **options):
    aligned = tuple(argument for argument in ALIGNED if argument in signature)
    return CompileCase(
        name,
        kernel,
        signature,
        target,
        constexprs=constexprs or {},
        divisible_by_16=aligned,
        options=options,
        expect=expect or Expectations(),
    )


def publish(defect, target, scope="sys", **minimums):
    signature = {"flag": "*i32", "src": "*i32", "dst": "*i32", "table": "*i64", "offset": "i32"}
    constexprs = {"AMD": target.startswith("gfx"), "SCOPE": scope, "DEFECT": defect}
    expect = Expectations(**(minimums or {f"release_{scope}": 1, "barrier": 1}))
    return make(f"publish {defect} {scope}", publish_kernel, signature, target, constexprs, expect)


def consume(how, target):
    expect = Expectations(acquire_sys=0 if how == "unused" else 1)
    return make(f"consume {how}", consume_kernel, COPY, target, {"HOW": how}, expect)


def sentinel(volatile, cache, target, element="*i32", aligned=True):
    signature = {"src": element, "dst": element, "want": "i32"}
    constexprs = {"VOLATILE": volatile, "CACHE": cache}
    name = f"sentinel {volatile} {cache} {element} {aligned}"
    case = make(name, sentinel_kernel, signature, target, constexprs)
    return case if aligned else replace(case, divisible_by_16=())


def gemm(wait, target, tile=(64, 64, 64), **options):
    constexprs = {**dict(zip(("BM", "BN", "BK"), tile, strict=True)), "WAIT": wait}
    expect = Expectations(mma=1)
    name = f"gemm {wait} {tile} {options}"
    return make(name, gemm_kernel, TILES, target, constexprs, expect, **options)


def tma(kernel, **constexprs):
    matrix = {"flag": "*i32", "src": "*bf16", "dst": "*bf16", "rows": "i32", "cols": "i32"}
    return make(f"{kernel.__name__} {constexprs}", kernel, matrix, "sm_90", constexprs)


def claim(warp_specialize):
    types = {"counter": "*i32", "rows": "i32", "cols": "i32", "K": "i32"}
    signature = {"a": "*bf16", "b": "*bf16", "c": "*bf16", **types}
    constexprs = {"WARP_SPECIALIZE": warp_specialize}
    name = f"claim {warp_specialize}"
    return make(name, claim_kernel, signature, "sm_90", constexprs, num_warps=4, num_stages=3)


def tiles(flatten):
    signature = {**TILES, "tiles": "i32"}
    return make(f"tiles {flatten}", tiles_kernel, signature, "sm_90", {"FLATTEN": flatten})


AMD_POLL = (True, ".cv")
# triton 3.9 passes .cv on, and ptxas refuses it together with .volatile.
NVIDIA_POLL = (True, "")
FENCE = {"flag": "*i32", "src": "*i32", "dst": "*i32"}
STEPS = {**FENCE, "steps": "i32"}
WORDS = {"flag": "*i32", "dst": "*i32"}
TWO_RELEASES = Expectations(release_sys=2)
# [case, the check that must find it, or None for a correct kernel]
OLD = (lambda check: None) if REPAIRED else (lambda check: check)
PLANTED: list[tuple[CompileCase, str | None]] = [
    *[(publish("none", target), None) for target in ("sm_90", "sm_100", "gfx942", "gfx950")],
    (publish("none", "sm_90", "gpu"), None),
    (publish("none", "gfx950", "gpu"), None),
    # The source says gpu where the case expects sys.
    (publish("wrong", "sm_90", "gpu", release_sys=1), "expectation"),
    (publish("wrong", "gfx950", "gpu", release_sys=1), "expectation"),
    (publish("barrier", "sm_90"), OLD("barrier")),
    (publish("barrier", "gfx950"), OLD("barrier")),
    (publish("one path", "sm_90"), OLD("barrier")),
    (publish("late store", "sm_90"), OLD("barrier")),
    (publish("late store", "gfx950"), "drain"),
    (publish("late scalar", "sm_90"), None),
    (publish("late scalar", "gfx950"), None),
    (publish("drain", "gfx950"), "drain"),
    (publish("write-back", "gfx950"), OLD("write-back")),
    (publish("written back", "gfx950"), None),
    (publish("gpu write-back", "gfx950"), OLD("write-back")),
    (publish("gpu write-back", "gfx950", "gpu"), None),
    (make("fence", fence_release_kernel, FENCE, "sm_90", {"BARRIER": False}), "barrier"),
    (make("fence twin", fence_release_kernel, FENCE, "sm_90", {"BARRIER": True}), None),
    (make("loop", loop_kernel, STEPS, "sm_90", {"BARRIER_EACH": False}), "barrier"),
    (make("loop twin", loop_kernel, STEPS, "sm_90", {"BARRIER_EACH": True}), None),
    # One line does a tile's atomics and the releases; the write-back is part of the drain.
    (make("line", shared_line_kernel, WORDS, "sm_90", {"AMD": False}, TWO_RELEASES), None),
    (make("line", shared_line_kernel, WORDS, "gfx950", {"AMD": True}, TWO_RELEASES), None),
    *[(consume("poll", target), None) for target in ("sm_90", "sm_100", "gfx942", "gfx950")],
    (consume("unused", "sm_90"), OLD("lost")),
    (consume("cas", "gfx950"), OLD("scope")),
    (consume("cas", "sm_90"), None),
    (consume("two polls", "gfx950"), OLD("divergence")),
    (sentinel(*NVIDIA_POLL, "sm_90"), None),
    (sentinel(*AMD_POLL, "gfx950"), None),
    (sentinel(False, ".cv", "sm_90"), "volatile"),
    (sentinel(True, "", "gfx950"), "volatile"),
    (sentinel(*NVIDIA_POLL, "sm_90", "*bf16", aligned=False), "narrow-poll"),
    (sentinel(*AMD_POLL, "gfx950", "*bf16", aligned=False), "narrow-poll"),
    (sentinel(*NVIDIA_POLL, "sm_90", "*bf16"), None),
    (tma(tma_store_kernel, WAIT=True), None),
    (tma(tma_store_kernel, WAIT=False), OLD("bulk-wait")),
    (tma(tma_load_kernel, FENCE=True), None),
    (tma(tma_load_kernel, FENCE=False), "proxy-fence"),
    (gemm("before", "sm_90"), None),
    (gemm("before", "gfx950"), None),
    (gemm("inside", "sm_90"), "k-loop"),
    (gemm("inside", "gfx950"), "k-loop"),
    (gemm("inside", "gfx950", num_stages=1), None),
    (tiles(False), None),
    (tiles(True), "k-loop"),
    (gemm("never", "sm_90", (256, 128, 32), num_warps=4, num_stages=2), "spills"),
    (gemm("never", "gfx950", (256, 256, 32), num_warps=2, num_stages=1), "spills"),
    (gemm("never", "sm_90", (128, 256, 64), num_warps=8, num_stages=6), "shared"),
    (gemm("never", "gfx950", (256, 256, 64), num_warps=8, num_stages=4), "shared"),
    (claim(True), "warp-specialize"),
    (claim(False), None),
]


@pytest.fixture(scope="module")
def reports() -> dict[str, CompileReport]:
    result = run_cases([case for case, _ in PLANTED])
    assert result.wall_seconds > max(report.compile_seconds for report in result.reports)
    return {report.label: report for report in result.reports}


@pytest.mark.parametrize(
    ("case", "check"), PLANTED, ids=[f"{case.name}-{case.target}" for case, _ in PLANTED]
)
def test_planted_defects_are_found_and_their_twins_pass(case, check, reports):
    report = reports[case.label]
    if check is None:
        assert report.passed, report.reasons
        assert report.findings == []
        assert report.occupancy >= 1
        assert report.registers > 0
        return
    assert not report.passed
    assert check in {finding.check for finding in report.findings}
    assert any(reason.startswith(check) for reason in report.reasons)


def test_a_finding_names_the_lines_at_both_ends(reports):
    case = make("fence", fence_release_kernel, FENCE, "sm_90", {"BARRIER": False})
    (finding,) = reports[case.label].findings
    first_line = fence_release_kernel.starting_line_number
    assert finding.where.endswith(f"(from test_compile_guard.py:{first_line + 6})")
    assert f"after the store at test_compile_guard.py:{first_line + 3} " in finding.message


def test_oversized_shared_memory_cannot_be_resident(reports):
    for case, check in PLANTED:
        if check == "shared":
            report = reports[case.label]
            assert report.occupancy == 0
            assert "residency" in {finding.check for finding in report.findings}


def test_an_allowance_passes_what_it_covers_and_is_printed():
    spilling = gemm("never", "sm_90", (256, 128, 32), num_warps=4, num_stages=2)
    serial = Allowance("serial-mma", 1, "spilled sums are touched")
    spilling = replace(
        spilling, expect=Expectations(allow_spills=10**6, reason="a test", allow=(serial,))
    )
    unfenced = replace(
        tma(tma_load_kernel, FENCE=False),
        expect=Expectations(allow=(Allowance("proxy-fence", 1, "loads what nobody writes"),)),
    )
    first, second = run_cases([spilling, unfenced]).reports
    assert first.passed
    assert first.spills > 0
    assert any("10" in note and "a test" in note for note in first.notes)
    assert second.passed
    assert [finding.check for finding in second.findings] == ["proxy-fence"]
    assert any("loads what nobody writes" in note for note in second.notes)


def test_an_allowance_of_one_does_not_cover_two():
    case = replace(
        gemm("inside", "sm_90"),
        name="two",
        expect=Expectations(
            release_sys=1, mma=10**6, allow=(Allowance("expectation", 1, "counts may drift"),)
        ),
    )
    report = compile_case(case)
    assert sum(reason.startswith("expectation") for reason in report.reasons) == 2


def test_a_dying_or_endless_compiler_is_a_finding_and_the_run_goes_on():
    dying = make("dying", aborting_kernel, {"dst": "*i32"}, "sm_90")
    wrong = make("wrong", wrong_kernel, {"dst": "*i32"}, "sm_90")
    died, failed, passed = run_cases([dying, wrong, consume("poll", "sm_90")]).reports
    assert "compile: the compiler died (exit code -6)" in died.reasons[0]
    assert failed.reasons[0].startswith("compile: CompilationError")
    assert passed.passed
    endless = make("endless", endless_kernel, {"dst": "*i32"}, "gfx950")
    assert "not done after 2 s" in compile_case(endless, timeout_s=2).reasons[0]


@triton.jit
def row_copy_kernel(src, dst, n):
    index = tl.arange(0, 2048)
    tl.store(dst + n + index, tl.load(src + n + index))


@pytest.mark.parametrize("target", ["sm_90", "gfx950"])
def test_narrow_loads_are_found(target: str) -> None:
    case = CompileCase(
        name="row copy",
        kernel=row_copy_kernel,
        signature={"src": "*bf16", "dst": "*bf16", "n": "i32"},
        divisible_by_16=("src", "dst", "n"),
        target=target,
        options={"num_warps": 4},
        expect=Expectations(wide_load=1),
    )
    result = run_cases([case, replace(case, name="any n", divisible_by_16=("src", "dst"))])
    wide, narrow = result.reports
    assert wide.passed
    assert [str(reason) for reason in narrow.reasons] == [
        "expectation: wide_load: wanted at least 1, found 0"
    ]


@triton.jit
def staged_copy_kernel(src, dst, n):
    index = tl.arange(0, 2048)
    for i in tl.range(0, n, 2048, num_stages=3):
        tl.store(dst + i + index, tl.load(src + i + index))


def test_loads_to_shared_memory_count_as_loads() -> None:
    case = CompileCase(
        name="staged copy",
        kernel=staged_copy_kernel,
        signature={"src": "*bf16", "dst": "*bf16", "n": "i32"},
        divisible_by_16=("src", "dst", "n"),
        target="sm_90",
        options={"num_warps": 4},
        expect=Expectations(wide_load=3),
    )
    (report,) = run_cases([case]).reports
    assert report.passed
    assert report.counts["load"] == report.counts["wide_load"] >= 3
