"""NamedTuples and tuples: as kernel arguments, built in kernels, returned, carried by loops."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from kosmos_core.executor import Executor, Random

I32 = torch.int32


class Flags(NamedTuple):
    ptr: Any
    count: Any
    SCOPE: Any
    extra: Any = None


class Context(NamedTuple):
    flags: Flags
    data: Any
    pair: tuple
    BLOCK: Any


class Counter(NamedTuple):
    i: Any
    total: Any


@triton.jit
def flag_wait(f, i, target):
    while tl.atomic_add(f.ptr + i, 0, sem="acquire", scope=f.SCOPE) < target:
        pass
    return f


@triton.jit
def next_counter(c):
    return Counter(c.i + 1, c.total + c.i)


@triton.jit
def k_struct(ctx, out, n):
    flags = ctx.flags
    mine = Flags(flags.ptr + 1, flags.count, tl.constexpr("sys"))
    if mine.extra is None:
        tl.atomic_add(mine.ptr, 3, sem="release", scope=mine.SCOPE)
    flags = flag_wait(flags, 1, 3)
    c = Counter(0, 0)
    while c.i < n:
        c = next_counter(c)
    i = tl.arange(0, ctx.BLOCK)
    x = tl.load(ctx.data + i)
    low, high = ctx.pair
    tl.store(out + i, x + c.total + flags.count + low * high)
    if ctx.BLOCK == 16:
        tl.store(out + ctx.BLOCK, tl.sum(x))


def run(**modes):
    with Executor(1, policy=Random(1), **modes) as ex:
        flags = ex.symmetric(4, I32, "flags")[0]
        data, out = torch.arange(16.0), torch.zeros(17)
        ctx = Context(Flags(flags, 7, tl.constexpr("sys")), data, (2, 5), tl.constexpr(16))
        k_struct[(1,)](ctx, out, 4)
        ex.run()
    return out, ex.schedule_hash


@pytest.mark.parametrize(
    "modes", [{}, {"weak": "late", "stale": True, "race": "raise", "strict": True}]
)
def test_named_tuples(modes):
    want = torch.arange(17.0) + 6 + 7 + 10
    want[16] = 120
    assert torch.equal(run(**modes)[0], want)


@triton.jit
def k_optional(t, o):
    if t.extra is None:
        tl.store(o, 1)
    else:
        tl.store(o, tl.load(t.extra))
    if t.SCOPE is not None:
        tl.store(o + 1, t.SCOPE * t.count)


@pytest.mark.parametrize("given", [False, True])
def test_none_in_a_named_tuple(given):
    extra = torch.tensor([5], dtype=I32) if given else None
    scope = tl.constexpr(3) if given else tl.constexpr(None)
    o = torch.zeros(2, dtype=I32)
    with Executor(1) as ex:
        k_optional[(1,)](Flags(o, 4, scope, extra), o)
        ex.run()
    assert o.tolist() == ([5, 12] if given else [1, 0])


class Op(NamedTuple):
    x: Any
    N: Any


@triton.jit
def k_nested(ops, o):
    i = tl.arange(0, ops[0].N)
    acc = tl.zeros((ops[0].N,), tl.float32)
    for j in tl.static_range(len(ops)):
        acc += tl.load(ops[j].x + i)
    tl.store(o + i, acc)


def test_tuple_of_named_tuples():
    tensors = [torch.randn(8) for _ in range(3)]
    o = torch.zeros(8)
    with Executor(1) as ex:
        k_nested[(1,)](tuple(Op(t, tl.constexpr(8)) for t in tensors), o)
        ex.run()
    torch.testing.assert_close(o, tensors[0] + tensors[1] + tensors[2])


def test_under_triton_interpret(tmp_path):
    """The same kernels with TRITON_INTERPRET=1, where jitted functions are of another class."""
    code = (
        f"import sys, importlib.util as u; s = u.spec_from_file_location('t', {__file__!r}); "
        "t = u.module_from_spec(s); sys.modules['t'] = t; s.loader.exec_module(t); "
        "assert type(t.k_struct).__name__ == 'InterpretedFunction'; "
        "print(t.run(race='raise', weak='random'))"
    )
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    # The same values, and the same schedule as in this process.
    assert done.stdout.strip() == str(run(race="raise", weak="random"))
