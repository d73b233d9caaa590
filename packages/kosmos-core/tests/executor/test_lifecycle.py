"""Entering and leaving: everything is restored, nothing leaks, no GPU driver is touched."""

from __future__ import annotations

import gc
import importlib.util
import json
import sys
import weakref
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from kosmos_core.executor import Executor, ExecutorError, Random, Starve
from kosmos_core.executor.language import language
from triton.runtime import driver

I32 = torch.int32


@triton.jit
def helper(x):
    return tl.cdiv(x, 2) + tl.sum(tl.zeros((4,), tl.int32))


@triton.jit
def k_simple(out):
    tl.store(out + tl.program_id(0), helper(tl.program_id(0) + 5))


@triton.jit
def k_bad():
    tl.device_assert(tl.program_id(0) < 0, "no")


@triton.jit
def k_meet(mine, theirs, out):
    tl.atomic_add(theirs, 1, sem="release", scope="sys")
    while tl.atomic_add(mine, 0, sem="acquire", scope="sys") < 1:
        pass
    tl.store(out, 1)


def snapshot():
    objects = {id(o): o for o, _, _ in language()._patches}
    return {(i, n): v for i, o in objects.items() for n, v in list(vars(o).items())}


def test_everything_is_restored():
    before, names = snapshot(), dict(globals())
    with Executor(1) as ex:
        assert snapshot() != before
        k_simple[(2,)](torch.zeros(2, dtype=I32))
        ex.run()
    after = snapshot()
    assert after.keys() == before.keys()
    assert all(after[k] is before[k] for k in before)
    assert globals().keys() == names.keys()
    if not triton.knobs.runtime.interpret:
        with pytest.raises(RuntimeError, match="outside of the scope of a kernel"):
            helper(1)


def test_restored_after_failures_too():
    before = snapshot()
    with Executor(1) as ex:
        k_bad[(1,)]()
        with pytest.raises(ExecutorError):
            ex.run()
    with pytest.raises(ZeroDivisionError), Executor(1):
        raise ZeroDivisionError
    after = snapshot()
    assert all(after[k] is before[k] for k in before)


def test_one_at_a_time_and_once():
    with Executor(1) as ex:
        with pytest.raises(RuntimeError, match="only one Executor"), Executor(1):
            pass
        k_simple[(1,)](torch.zeros(1, dtype=I32))
        ex.run()
    with pytest.raises(RuntimeError, match="can be entered once"), ex:
        pass


def test_forgotten_launches_are_an_error():
    with pytest.raises(RuntimeError, match=r"1 launches were queued and never run"), Executor(1):
        k_simple[(1,)](torch.zeros(1, dtype=I32))


class NoDriver:
    def __getattr__(self, name):
        raise AssertionError(f"the GPU driver was asked for {name}")


def test_no_gpu_driver_is_touched(monkeypatch):
    monkeypatch.setattr(driver, "_active", NoDriver(), raising=False)
    monkeypatch.setattr(driver, "_default", NoDriver(), raising=False)
    with pytest.raises(AssertionError, match="GPU driver"):
        driver.active.get_current_device()

    @triton.jit
    def k_target(out):
        if tl.target_info.is_cuda():
            tl.store(out, 1)
        elif tl.target_info.is_hip():
            tl.store(out, 2)
        else:
            tl.store(out, 3)

    out, more = torch.zeros(1, dtype=I32), torch.zeros(2, dtype=I32)
    with Executor(1) as ex:
        k_target[(1,)](out, num_warps=4)
        k_simple[lambda meta: (2,)](more)
        k_simple.warmup(more, grid=(1,))
        ex.run()
    assert out.item() == 3
    assert more.tolist() == [3, 3]


def test_nothing_leaks():
    def once():
        with Executor(2, policy=Random(1), race="raise", weak="random", stale=True) as ex:
            flags, out = ex.symmetric(1, I32), ex.symmetric(1, I32)
            ex.spmd(lambda r: k_meet[(1,)](flags[r], flags[1 - r], out[r]) and None)
            return weakref.ref(ex), weakref.ref(flags[0].untyped_storage())

    for _ in range(3):
        once()
    gc.collect()
    before = len(gc.get_objects())
    refs = [once() for _ in range(30)]
    gc.collect()
    assert all(r() is None for pair in refs for r in pair)
    assert len(gc.get_objects()) - before < 300


def test_tensors_are_released_without_the_garbage_collector():
    with Executor(1) as ex:
        t = ex.symmetric(1 << 20, I32)[0]
        held = torch._C._storage_Use_Count(t.untyped_storage()._cdata)
    assert torch._C._storage_Use_Count(t.untyped_storage()._cdata) < held


def test_trace_is_perfetto_json(tmp_path):
    with Executor(2, policy=Random(3), trace=True) as ex:
        flags, out = ex.symmetric(1, I32, "flags"), ex.symmetric(4, I32)
        for rank in range(2):
            with ex.on(rank):
                k_simple[(3,)](out[rank])
                k_meet[(1,)](flags[rank], flags[1 - rank], out[rank])
        ex.run()
    path = tmp_path / "trace.json"
    count = ex.save_trace(path)
    trace = json.loads(path.read_text())
    events = trace["traceEvents"]
    assert len(events) == count
    spans = [e for e in events if e["ph"] == "X"]
    meta = [e for e in events if e["ph"] == "M"]
    assert {e["name"] for e in meta} == {"process_name", "thread_name"}
    assert {e["args"]["name"] for e in meta} >= {"rank 0", "rank 1", "rank0.wg2"}
    assert {e["cat"] for e in spans} >= {"kernel", "device_function"}
    names = [e["name"] for e in spans if e["cat"] == "kernel"]
    assert sorted(names) == ["k_meet"] * 2 + ["k_simple"] * 6
    assert any(e["name"] == "helper" for e in spans)
    for e in spans:
        assert e["dur"] > 0
        assert e["ts"] >= 0
        assert (e["pid"], e["tid"]) in {(r, w) for r in range(2) for w in range(3)}


def test_trace_shows_what_a_workgroup_spins_on(tmp_path):
    with Executor(2, policy=Starve(lambda t: t.rank == 1), trace=True) as ex:
        flags, out = ex.symmetric(1, I32, "flags"), ex.symmetric(4, I32)
        with ex.on(0):
            k_meet[(1,)](flags[0], flags[1], out[0])
        with ex.on(1):
            k_meet[(1,)](flags[1], flags[0], out[1])
        ex.run()
    ex.save_trace(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    (spin, *_) = [e for e in events if e.get("cat") == "spin"]
    assert spin["args"]["on"] == "flags[0] (rank 0)"
    assert spin["args"]["line"].startswith("test_lifecycle.py:")


def test_save_trace_needs_trace():
    with Executor(1) as ex, pytest.raises(RuntimeError, match="trace=True"):
        ex.save_trace("unused.json")


def test_stats_count():
    with Executor(1) as ex:
        k_simple[(3,)](ex.symmetric(3, I32)[0])
        ex.run()
    stats = ex.stats
    assert (stats["launches"], stats["workgroups"], stats["stores"]) == (1, 3, 3)
    assert stats["switches"] == len(ex.schedule) == 3


def test_benchmark_kernel_is_fast_with_all_checks():
    """8 ranks x 8 workgroups with every check on, as benchmarks/bench_executor.py times it."""
    path = Path(__file__).parents[2] / "benchmarks" / "bench_executor.py"
    spec = importlib.util.spec_from_file_location("bench_executor", path)
    bench = importlib.util.module_from_spec(spec)
    sys.modules["bench_executor"] = bench
    spec.loader.exec_module(bench)
    runs = [bench.run_once(8, 8, 256, seed, **bench.MODES["all checks"]) for seed in range(2)]
    assert all(stats["dots"] == 1024 for _, stats in runs)
    assert min(seconds for seconds, _ in runs) < bench.BOUND_S
