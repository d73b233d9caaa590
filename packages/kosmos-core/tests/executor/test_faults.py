"""Memory faults and bad arguments."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from kosmos_core.executor import Executor, KernelFault, MemoryFault

I32 = torch.int32


@triton.jit
def k_store(x, first, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(x + first + i, i)  # here


@triton.jit
def k_load_masked(x, n, limit, out, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(out + i, tl.load(x + n * i, mask=i < limit, other=0))


@triton.jit
def k_unaligned(x):
    p = x.to(tl.pointer_type(tl.int8), bitcast=True) + 2
    tl.store(p.to(tl.pointer_type(tl.int32), bitcast=True), 1)


@triton.jit
def k_split(table, out, B: tl.constexpr):
    """One load from several tensors at once."""
    p = tl.load(table + tl.arange(0, B)).to(tl.pointer_type(tl.int32), bitcast=True)
    tl.store(out + tl.arange(0, B), tl.load(p + 1))


def here() -> str:
    with open(__file__, encoding="utf-8") as f:
        numbers = [n for n, line in enumerate(f, 1) if line.rstrip().endswith("# here")]
    return f"test_faults.py:{numbers[0]}"


@pytest.mark.parametrize(
    ("first", "index"), [(20, 32), (-3, None), (40, 40), (10**6, None), (-(10**6), None)]
)
@pytest.mark.parametrize("modes", [{}, {"weak": "late", "race": "raise"}])
def test_out_of_bounds(first, index, modes):
    with Executor(1, **modes) as ex:
        ex.symmetric(32, I32, "before")
        x = ex.symmetric(32, I32, "x")[0]
        ex.symmetric(32, I32, "after")
        k_store[(1,)](x, first, 16)
        with pytest.raises(MemoryFault) as e:
            ex.run()
    assert e.value.wg == "rank0.wg0"
    assert e.value.line == here()
    assert "outside every registered tensor" in str(e.value)
    assert "tl.store(x + first + i, i)" in str(e.value)
    if index is not None:
        assert (e.value.region, e.value.index) == ("x", index)


@pytest.mark.parametrize(("stride", "limit", "ok"), [(1, 4, True), (9, 4, True), (11, 4, False)])
def test_masked_elements_may_point_anywhere(stride, limit, ok):
    with Executor(1) as ex:
        x, out = ex.symmetric(32, I32, "x")[0], ex.symmetric(16, I32)[0]
        x.copy_(torch.arange(32))
        k_load_masked[(1,)](x, stride, limit, out, 16)
        if ok:
            ex.run()
            assert out.tolist() == [stride * i for i in range(limit)] + [0] * (16 - limit)
        else:
            with pytest.raises(MemoryFault, match=r"as its element 33"):
                ex.run()


def test_misaligned():
    with Executor(1) as ex:
        k_unaligned[(1,)](ex.symmetric(4, I32, "x")[0])
        with pytest.raises(MemoryFault, match=r"misaligned access of 4 bytes.*inside x\[0\]"):
            ex.run()


def test_memory_fault_is_a_kernel_fault():
    assert issubclass(MemoryFault, KernelFault)


@pytest.mark.parametrize("modes", [{}, {"weak": "late", "stale": True, "race": "raise"}])
def test_one_instruction_may_touch_several_tensors(modes):
    with Executor(1, **modes) as ex:
        parts = [ex.symmetric(4, I32, "part")[0] for _ in range(4)]
        for k, p in enumerate(parts):
            p.fill_(k + 1)
        table = ex.pointers(0, parts)
        out = ex.symmetric(4, I32)[0]
        k_split[(1,)](table, out, 4)
        ex.run()
        assert out.tolist() == [1, 2, 3, 4]


def test_tensors_of_the_executor_are_aligned_and_named():
    with Executor(2) as ex:
        for dtype in (torch.int8, torch.bfloat16, torch.int64):
            t = ex.empty(1, (3, 5), dtype, "t")
            assert t.data_ptr() % 256 == 0
            assert (t.shape, t.dtype) == ((3, 5), dtype)
            assert ex.memory.describe(t[1, 2].data_ptr()) == "t[7] (rank 1)"
        assert ex.empty(0, 0).numel() == 0


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((1,), {}, "missing a required argument"),
        ((torch.zeros(1), 0, 16), {"num_wraps": 4}, "unknown keyword argument 'num_wraps'"),
        (([1, 2], 0, 16), {}, r"x: cannot pass a list"),
        ((torch.zeros(1), 2**70, 16), {}, "does not fit in 64 bits"),
        ((torch.zeros(1, device="meta"), 0, 16), {}, "CPU tensors, got device meta"),
    ],
)
def test_bad_arguments_are_refused_at_the_launch(args, kwargs, message):
    with Executor(1) as ex, pytest.raises(TypeError, match=message):
        k_store[(1,)](*args, **kwargs)
    assert ex.stats["launches"] == 0


@pytest.mark.parametrize("grid", [(1, 2, 3, 4), (-1,), ()])
def test_bad_grids_are_refused(grid):
    with Executor(1) as ex, pytest.raises(ValueError, match="grid must have"):
        k_store[grid](ex.symmetric(32, I32)[0], 0, 16)


def test_an_empty_grid_ends_at_once():
    with Executor(1, race="raise") as ex:
        x = ex.symmetric(32, I32)[0]
        launch = k_store[(0,)](x, 0, 16)
        ex.run()
        assert launch.done
        assert x.sum() == 0


def test_unregistered_tensors_are_refused():
    with Executor(1) as ex, pytest.raises(ValueError, match="not registered"):
        ex.sentinel(torch.zeros(4), 1)
