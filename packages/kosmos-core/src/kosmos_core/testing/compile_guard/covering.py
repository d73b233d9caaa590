"""A small choice among many cases that leaves no pair of settings out.

What makes one configuration spill or lose an order is nearly always one setting, or two that meet.
A run that must be short compiles every such pair once instead of every product of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

import triton.language as tl

from kosmos_core.testing.compile_guard.cases import CompileCase

Pair = tuple[tuple[str, str], tuple[str, str]]


def covering(cases: Sequence[CompileCase]) -> list[CompileCase]:
    """The cases that together hold every pair of settings that any of `cases` holds.

    A setting is a constant of the kernel or of one of its structs, a backend option, or what is
    known divisible by 16. Pairs are counted for each kernel and target by itself, those that two
    cases differ in. The same cases give the same choice, in their own order.
    """
    groups: dict[tuple[int, str], list[int]] = {}
    for index, case in enumerate(cases):
        groups.setdefault((id(case.kernel), case.target), []).append(index)
    chosen: list[int] = []
    for group in groups.values():
        found = [dict(_settings(cases[index])) for index in group]
        names = set().union(*found)
        found = [{name: settings.get(name, "left out") for name in names} for settings in found]
        pairs = [_pairs(settings, found) for settings in found]
        missing: set[Pair] = set().union(*pairs)
        first = True
        while missing or first:
            first = False
            # The earliest of those that bring most.
            best = max(range(len(group)), key=lambda i: (len(pairs[i] & missing), -i))
            chosen.append(group[best])
            missing -= pairs[best]
    return [cases[index] for index in sorted(chosen)]


def _settings(case: CompileCase) -> Iterator[tuple[str, str]]:
    for name, value in case.signature.items():
        yield from _constants(name, value)
    for name, value in {**case.constexprs, **case.options}.items():
        yield name, repr(value)
    yield "divisible_by_16", ",".join(sorted(case.divisible_by_16))


def _constants(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, tl.constexpr):
        yield name, repr(value.value)
    elif isinstance(value, tuple):
        for index, inner in enumerate(value):
            yield from _constants(f"{name}.{index}", inner)


def _pairs(settings: dict[str, str], group: list[dict[str, str]]) -> set[Pair]:
    """Pairs of what differs in the group; one that differs alone makes a pair with itself."""
    differ = [s for s in settings.items() if any(other[s[0]] != s[1] for other in group)]
    return {*combinations(sorted(differ), 2), *((s, s) for s in differ)}


__all__ = ["covering"]
