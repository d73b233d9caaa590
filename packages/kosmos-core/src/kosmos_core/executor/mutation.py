"""Mutations: run a changed copy of a shipped kernel or helper, to show that a test can fail."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Callable
from typing import Any

from .sites import Sites
from .twins import Function, TwinMaker, read_source


class Mutation:
    """Replace a piece of the source of a `@triton.jit` function while an executor is active.

    Reports keep the file name and the line numbers of the original, and show the changed text.

    Args:
        fn: the function, as decorated by `@triton.jit`.
        old: text that occurs exactly once in its source.
        new: text to put in its place.

    Raises:
        TypeError: `fn` is not a `@triton.jit` function.
        ValueError: `old` does not occur exactly once, or the result is not valid Python.
    """

    def __init__(self, fn: Any, old: str, new: str) -> None:
        python_fn = getattr(fn, "fn", None)
        if not callable(python_fn) or not hasattr(python_fn, "__code__"):
            raise TypeError(f"Mutation: fn must be a @triton.jit function, got {fn!r}")
        self.fn: Function = python_fn
        self.old = old
        self.new = new
        source, _ = read_source(python_fn)
        count = source.count(old) if old else 0
        if count != 1:
            raise ValueError(
                f"Mutation of {python_fn.__qualname__}: the text {old!r} must occur exactly once "
                f"in its source, it occurs {count} times"
            )
        _check_syntax(python_fn, self.apply(source))

    def apply(self, source: str) -> str:
        """`source` with the text replaced.

        Raises:
            ValueError: another mutation has removed the text.
        """
        if source.count(self.old) != 1:
            raise ValueError(
                f"Mutation of {self.fn.__qualname__}: the text {self.old!r} is no longer there "
                "once, because another mutation of the function touches it"
            )
        return source.replace(self.old, self.new)


def mutated_twins(
    mutations: tuple[Mutation, ...], maker: TwinMaker, sites: Sites
) -> dict[Function, Function]:
    """Twins of the functions that `mutations` change (several may change one function)."""
    out: dict[Function, Function] = {}
    grouped: dict[Function, list[Mutation]] = {}
    for m in mutations:
        grouped.setdefault(m.fn, []).append(m)
    for fn, group in grouped.items():
        source, first = read_source(fn)
        origin = list(range(1, source.count("\n") + 2))
        for m in group:
            changed = m.apply(source)
            before = source[: source.index(m.old)].count("\n")
            removed, added = m.old.count("\n"), m.new.count("\n")
            source = changed
            inside = [origin[before + min(i, removed)] for i in range(added + 1)]
            origin[before : before + removed + 1] = inside
            _remember_text(sites, fn, source, first, origin, before, added)
        out[fn] = maker.build(fn, source, first, _renumber(origin))
    return out


def _renumber(origin: list[int]) -> Callable[[int], int]:
    return lambda line: origin[min(line, len(origin)) - 1]


def _remember_text(
    sites: Sites, fn: Function, source: str, first: int, origin: list[int], before: int, added: int
) -> None:
    lines = source.split("\n")
    texts: dict[int, list[str]] = {}
    for i in range(before, before + added + 1):
        texts.setdefault(origin[i], []).append(lines[i].strip())
    for line, parts in texts.items():
        text = "; ".join(p for p in parts if p)
        sites.changed[fn.__code__.co_filename, first + line - 1] = text


def _check_syntax(fn: Function, source: str) -> None:
    """Refuse a mutation that is not valid Python.

    Raises:
        ValueError: syntax error.
    """
    try:
        ast.parse(textwrap.dedent(source))
    except SyntaxError as e:
        raise ValueError(
            f"Mutation of {fn.__qualname__}: the changed source is not valid Python: {e}"
        ) from e
