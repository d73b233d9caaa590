"""Arithmetic of the executor against torch, bit for bit; fast operators against triton's."""

from __future__ import annotations

import itertools
import operator

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from kosmos_core.executor import Executor
from kosmos_core.executor.language import language
from kosmos_core.executor.numerics import BF16, E4M3, E5M2, Handle, cast, np_dtype


def random_floats(count: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, count, dtype=np.uint32).view(np.float32)
    scaled = rng.standard_normal(count) * np.exp2(rng.integers(-12, 12, count))
    return np.concatenate([bits, scaled.astype(np.float32)])


@pytest.mark.parametrize(
    ("dtype", "torch_dtype", "limit"),
    [
        (BF16, torch.bfloat16, None),
        (E4M3, torch.float8_e4m3fn, 448.0),
        (E5M2, torch.float8_e5m2, 57344.0),
    ],
)
def test_casts_are_bit_exact(dtype, torch_dtype, limit):
    x = random_floats(200_000)
    t = torch.from_numpy(x)
    want = (t if limit is None else t.clamp(-limit, limit)).to(torch_dtype)
    with np.errstate(all="ignore"):
        got = cast(x, dtype)
    bits = f"uint{8 * dtype.itemsize}"
    number = ~torch.isnan(want.float()).numpy()
    mine = got.view(bits)[number]
    assert number.sum() > 150_000
    assert np.array_equal(mine, want.view(getattr(torch, bits)).numpy()[number])
    assert np.isnan(got.astype(np.float32)[~number]).all()


TYPES = [tl.int32, tl.int64, tl.int8, tl.uint32, tl.float32, tl.bfloat16, tl.float16]
OPERATORS = ("add", "sub", "mul", "lt", "le", "gt", "ge", "eq", "ne", "floordiv", "mod")


def make(ty, shape, seed):
    rng = np.random.default_rng(seed)
    values = rng.integers(1, 5, shape or (1,)).astype(np.float32)
    if ty not in (tl.uint32,):
        values *= np.where(rng.random(values.shape) < 0.5, -1, 1)
    data = values.astype(np_dtype(ty))
    return tl.tensor(Handle(data, ty), tl.block_type(ty, list(shape)) if shape else ty)


def outcome(fn, *args):
    try:
        out = fn(*args)
    except (TypeError, ValueError, AttributeError, AssertionError) as e:
        return type(e)
    return str(out.type), out.handle.data.dtype, out.handle.data


@pytest.mark.parametrize("name", OPERATORS)
def test_fast_operators_agree_with_tritons(name):
    """Every pair of types and shapes, and constants, through the operator and through triton."""
    op = getattr(operator, name)
    slow = language()._bind(vars(tl.tensor)[f"__{name}__"])
    assert vars(tl.tensor)[f"__{name}__"] is not slow
    checked = 0
    with Executor(1), np.errstate(all="ignore"):
        for (a, b), (sa, sb) in itertools.product(
            itertools.product(TYPES, TYPES), [((), ()), ((4, 2), (4, 2)), ((4, 2), ()), ((), (2,))]
        ):
            if name in ("floordiv", "mod") and not (a.is_int() and b.is_int()):
                continue
            if tl.uint32 in (a, b) and a != b:
                continue
            x, y = make(a, sa, 1), make(b, sb, 2)
            compare(outcome(op, x, y), outcome(slow, x, y))
            checked += 1
        for a, shape, constant in itertools.product(TYPES, [(), (4, 2)], [3, -2, 2.5, 2**40]):
            if name in ("floordiv", "mod") and not (a.is_int() and isinstance(constant, int)):
                continue
            x = make(a, shape, 3)
            compare(outcome(op, x, constant), outcome(slow, x, constant))
            compare(outcome(op, x, tl.constexpr(constant)), outcome(slow, x, constant))
            checked += 1
    assert checked > 50


def compare(got, want):
    if isinstance(want, type):
        assert got is want
        return
    assert got[:2] == want[:2]
    assert np.array_equal(got[2], want[2], equal_nan=got[2].dtype.kind == "f")


@pytest.mark.parametrize("offset", [5, -3])
def test_pointer_arithmetic(offset):
    with Executor(1):
        ty = tl.pointer_type(tl.float32)
        p = tl.tensor(Handle(np.array([1000], np.uint64), ty), ty)
        i = tl.tensor(Handle(np.array([offset], np.int32), tl.int32), tl.int32)
        block = tl.arange(0, 4)
        assert (p + i).handle.data.tolist() == [1000 + 4 * offset]
        assert (p + offset).handle.data.tolist() == [1000 + 4 * offset]
        assert (p + block).handle.data.tolist() == [1000, 1004, 1008, 1012]
        assert (p + block + i).handle.data.tolist() == [1000 + 4 * (offset + k) for k in range(4)]
        assert (p + block).type == tl.block_type(ty, [4])


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_nan_becomes_the_canonical_one_in_fp8(dtype):
    bits = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF], np.uint32)
    with np.errstate(all="ignore"):
        made = cast(bits.view(np.float32), dtype)
    assert made.view(np.uint8).tolist() == [0x7F] * 4
    infinities = cast(np.array([np.inf, -np.inf], np.float32), dtype).astype(np.float32)
    largest = {E4M3: 448.0, E5M2: 57344.0}[dtype]
    assert infinities.tolist() == [largest, -largest]


@triton.jit
def k_scaled(a, sa, b, sb, o, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m = tl.arange(0, M)
    n = tl.arange(0, N)
    k = tl.arange(0, K)
    g = tl.arange(0, K // 32)
    x = tl.load(a + m[:, None] * K + k[None, :])
    y = tl.load(b + n[:, None] * K + k[None, :])
    xs = tl.load(sa + m[:, None] * (K // 32) + g[None, :])
    ys = tl.load(sb + n[:, None] * (K // 32) + g[None, :])
    tl.store(o + m[:, None] * N + n[None, :], tl.dot_scaled(x, xs, "e4m3", y.T, ys, "e4m3"))


def scaled_product(x, x_code, y, y_code):
    """float64 of the product of [16, 64] and [16, 64] transposed, a scale code each."""
    out = torch.empty(16, 16)
    codes = [torch.full((16, 2), code, dtype=torch.uint8) for code in (x_code, y_code)]
    with Executor(1) as ex:
        arguments = (x.to(torch.float8_e4m3fn), codes[0], y.to(torch.float8_e4m3fn), codes[1])
        with ex.on(0):
            k_scaled[(1,)](*arguments, out, 16, 16, 64)
        ex.run()
    return out.double()


@pytest.mark.parametrize(("x_code", "y_code"), [(127, 127), (254, 0), (0, 254), (200, 60)])
def test_block_scales_meet_before_they_overflow(x_code, y_code):
    x, y = (torch.randint(-15, 16, (16, 64)).float() for _ in range(2))
    want = (x @ y.T).double() * 2.0 ** (x_code + y_code - 254)
    assert torch.equal(scaled_product(x, x_code, y, y_code), want)


def test_a_nan_scale_makes_its_rows_nan():
    one = torch.ones(16, 64)
    assert bool(scaled_product(one, 255, one, 127).isnan().all())
