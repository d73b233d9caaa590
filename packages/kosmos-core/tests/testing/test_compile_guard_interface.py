"""How cases are written and run: struct signatures, what is refused, the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import NamedTuple

import pytest
import triton
import triton.language as tl
from click.testing import CliRunner
from kosmos_core.testing.compile_guard import (
    Allowance,
    CompileCase,
    Expectations,
    run_cases,
)
from kosmos_core.testing.compile_guard.__main__ import main
from kosmos_core.testing.compile_guard.signature import build_source

pytestmark = pytest.mark.compile


class Queue(NamedTuple):
    head_ptr: object
    length: object
    SCOPE: object


class Work(NamedTuple):
    queue: Queue
    data_ptr: object


@triton.jit
def struct_kernel(work, scale, BLOCK: tl.constexpr):
    tile = tl.atomic_add(work.queue.head_ptr, 1, sem="relaxed", scope=work.queue.SCOPE)
    while tile < work.queue.length:
        offsets = tile * BLOCK + tl.arange(0, BLOCK)
        tl.store(work.data_ptr + offsets, offsets.to(tl.float32) * scale)
        tile = tl.atomic_add(work.queue.head_ptr, 1, sem="relaxed", scope=work.queue.SCOPE)


def struct(target="sm_90"):
    return CompileCase(
        "struct",
        struct_kernel,
        {"work": Work(Queue("*i32", "i32", "constexpr"), "*fp32"), "scale": "fp32"},
        target,
        constexprs={"work.queue.SCOPE": "gpu", "BLOCK": 128},
        divisible_by_16=("work.data_ptr", "work.queue.0"),
        pointer_range_32=("work.data_ptr",),
    )


def test_structs_compile_on_both_vendors():
    for report in run_cases([struct("sm_90"), struct("gfx950")]).reports:
        assert report.passed, report.reasons


def test_exceptions_need_reasons():
    with pytest.raises(ValueError, match="allow_spills=4 needs reason"):
        Expectations(allow_spills=4)
    with pytest.raises(ValueError, match="needs a reason"):
        Allowance("barrier", 1, " ")
    with pytest.raises(ValueError, match="'spills' is not one of"):
        Allowance("spills", 1, "use allow_spills")
    with pytest.raises(ValueError, match="release_sys=-1"):
        Expectations(release_sys=-1)


def test_struct_paths_become_constexprs_and_attributes():
    source = build_source(struct("sm_90"))
    assert source.constants == {(0, 0, 2): "gpu", (2,): 128}
    assert source.signature["work"] == Work(Queue("*i32", "i32", "constexpr"), "*fp32")
    assert source.attrs == {
        (0, 1): [["tt.divisibility", 16]],
        (0, 0, 0): [["tt.divisibility", 16]],
    }
    amd = build_source(struct("gfx950"))
    assert amd.attrs[(0, 1)] == [["tt.divisibility", 16], ["tt.pointer_range", 32]]
    inline = Work(Queue("*i32", "i32", tl.constexpr("sys")), "*fp32")
    inline_case = replace(
        struct("sm_90"), signature={"work": inline, "scale": "fp32"}, constexprs={"BLOCK": 64}
    )
    assert build_source(inline_case).constants == {(0, 0, 2): "sys", (2,): 64}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"constexprs": {"BLOCK": 128}}, "'work.queue.SCOPE' is 'constexpr' without a value"),
        ({"constexprs": {"work.queue.scope": 1, "BLOCK": 1}}, "'work.queue.scope'; it has"),
        ({"constexprs": {"work.data_ptr": 1, "BLOCK": 1}}, "its type is '\\*fp32'"),
        ({"divisible_by_16": ("work",)}, "a struct: name its fields"),
        ({"divisible_by_16": ("elsewhere",)}, "the kernel has no 'elsewhere'"),
        ({"signature": {"scale": "fp32"}}, "'work' has neither a type nor a constexpr"),
        ({"signature": {"stranger": "i32"}}, "signature names \\['stranger'\\]"),
    ],
)
def test_a_wrong_case_says_what_is_wrong(change, message):
    with pytest.raises(ValueError, match=message):
        build_source(replace(struct("sm_90"), **change))


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="target='sm_80' is not one of"):
        struct("sm_80")
    with pytest.raises(ValueError, match="two cases named struct"):
        run_cases([struct(), struct()])
    with pytest.raises(ValueError, match="jobs=0"):
        run_cases([struct()], jobs=0)
    with pytest.raises(TypeError, match=r"wanted a @triton\.jit function"):
        build_source(replace(struct(), kernel=print))


REGISTRY = """
import triton
import triton.language as tl
from kosmos_core.testing.compile_guard import CompileCase, Expectations

@triton.jit
def kernel(dst):
    tl.store(dst + tl.arange(0, 128), tl.arange(0, 128))

def compile_cases():
    return [CompileCase("fill", kernel, {"dst": "*i32"}, t) for t in ("sm_90", "gfx950")]

def failing():
    expect = Expectations(release_sys=1)
    return [CompileCase("silent", kernel, {"dst": "*i32"}, "gfx950", expect=expect)]

def empty():
    return []
"""


def test_command_line(tmp_path, monkeypatch):
    (tmp_path / "guard_registry.py").write_text(REGISTRY)
    monkeypatch.chdir(tmp_path)
    runner = CliRunner()
    result = runner.invoke(main, ["guard_registry", "--target", "gfx950", "--json", "out.json"])
    assert result.exit_code == 0, result.output
    assert "1 passed, 0 failed" in result.output
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["passed"] is True
    assert written["wall_seconds"] > 0
    (case,) = written["cases"]
    assert (case["name"], case["target"], case["spills"]) == ("fill", "gfx950", 0)

    result = runner.invoke(main, ["guard_registry:compile_cases", "guard_registry:failing"])
    assert result.exit_code == 1
    assert "2 passed, 1 failed" in result.output
    assert "silent [gfx950]: expectation: release_sys: wanted at least 1, found 0" in result.output

    for arguments in (
        ["guard_registry:missing"],
        ["no_such_module"],
        ["guard_registry:empty"],
        ["guard_registry", "--case", "nothing*"],
    ):
        assert runner.invoke(main, arguments).exit_code == 2
