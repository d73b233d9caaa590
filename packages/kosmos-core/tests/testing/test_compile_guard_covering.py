"""The choice of cases that holds every pair of settings."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any, NamedTuple

import triton
import triton.language as tl
from kosmos_core.testing.compile_guard import CompileCase, covering


class Config(NamedTuple):
    """Constants of a kernel."""

    A: tl.constexpr
    B: tl.constexpr
    C: tl.constexpr
    D: tl.constexpr


@triton.jit
def first_kernel(x_ptr, CONFIG):
    """Takes a struct of constants."""


@triton.jit
def other_kernel(x_ptr, CONFIG):
    """Takes the same."""


def case(kernel: Any, values: tuple[int, ...], target: str = "sm_90", **more: Any) -> CompileCase:
    name = f"{kernel.fn.__name__} {values} {more}"
    config = Config(*(tl.constexpr(v) for v in values))
    signature = {"x_ptr": "*bf16", "CONFIG": config}
    return CompileCase(name, kernel, signature, target, **more)


def values(case: CompileCase) -> tuple[int, ...]:
    return tuple(v.value for v in case.signature["CONFIG"])


def test_every_pair_of_settings_is_held_by_few_cases() -> None:
    cases = [case(first_kernel, v) for v in product((0, 1), (0, 1, 2), (0, 1), (0, 1, 2))]
    chosen = covering(cases)
    for a, b in combinations(range(4), 2):
        wanted = {(values(c)[a], values(c)[b]) for c in cases}
        assert {(values(c)[a], values(c)[b]) for c in chosen} == wanted
    assert 9 <= len(chosen) <= 14 < len(cases)
    assert chosen == covering(cases)
    assert [c for c in cases if c in chosen] == chosen


def test_kernels_and_targets_are_covered_each_by_itself() -> None:
    kinds = [(k, t) for k in (first_kernel, other_kernel) for t in ("sm_90", "gfx950")]
    cases = [case(k, (a, 0, 0, 0), t) for k, t in kinds for a in (0, 1)]
    assert covering(cases) == cases


def test_options_and_divisibility_are_settings() -> None:
    cases = [
        case(first_kernel, (0, 0, 0, 0)),
        case(first_kernel, (0, 0, 0, 0), options={"num_warps": 8}),
        case(first_kernel, (0, 0, 0, 0), divisible_by_16=("x_ptr",)),
    ]
    assert covering(cases) == cases


def test_one_case_covers_itself_and_none_none() -> None:
    alone = case(first_kernel, (0, 0, 0, 0))
    assert covering([alone]) == [alone]
    assert covering([]) == []
