"""Simulated time: the cost model, the timed policy, traffic counts."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from kosmos_core.executor import CostModel, Executor, Random

F32, I32, I64 = torch.float32, torch.int32, torch.int64
COST = CostModel(
    local_gbps=10.0,
    remote_gbps=1.0,
    tflops=1.0,
    atomic_ns=100,
    remote_atomic_ns=1000,
    wake_ns=50,
    launch_ns=0,
)


@triton.jit
def clock():
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def k_copy(x, out, times, B: tl.constexpr):
    i = tl.arange(0, B)
    begin = clock()
    v = tl.load(x + i)
    middle = clock()
    tl.store(out + i, v)
    tl.store(times + 2 * tl.program_id(0), middle - begin)
    tl.store(times + 2 * tl.program_id(0) + 1, clock() - middle)


@pytest.mark.parametrize(("owner", "ns"), [(0, 400), (1, 4000)])
def test_loads_cost_by_where_the_memory_is(owner, ns):
    with Executor(2, cost=COST) as ex:
        x = ex.empty(owner, 1024, F32, "x").zero_()
        out, times = ex.empty(0, 1024, F32, "out"), ex.empty(0, 4, I64, "times")
        k_copy[(1,)](x, out, times, 1024)
        ex.run()
        load, store = times.tolist()[:2]
    assert load == pytest.approx(4096 / (10 if owner == 0 else 1), abs=50)
    assert store == pytest.approx(4096 / 10, abs=50)
    assert ns <= load < 1.1 * ns
    assert ex.traffic == ({} if owner == 0 else {(0, 1, "x"): 4096})


@triton.jit
def k_dot(x, out, B: tl.constexpr):
    i = tl.arange(0, B)[:, None] * B + tl.arange(0, B)[None, :]
    v = tl.load(x + i)
    begin = clock()
    v = tl.dot(v, v)
    tl.store(out, clock() - begin)


def test_dots_cost_their_flops():
    out = torch.zeros(1, dtype=I64)
    with Executor(1, cost=COST) as ex:
        k_dot[(1,)](torch.zeros(64, 64), out, 64)
        ex.run()
    assert out.item() == pytest.approx(2 * 64**3 / 1000, abs=50)


def elapsed(wgs, **options):
    with Executor(1, cost=COST, **options) as ex:
        x, out = ex.empty(0, 1024, F32, "x").zero_(), ex.empty(0, 1024, F32, "out")
        k_copy[(wgs,)](x, out, ex.empty(0, 64, I64, "times"), 1024)
        ex.run()
        return ex.clock.ns


def test_workgroups_run_at_the_same_time_unless_they_wait_for_a_slot():
    one = elapsed(1)
    assert elapsed(16) == one
    assert elapsed(16, slots=4) == pytest.approx(4 * one, rel=0.01)


@triton.jit
def k_chain(flags, data, out, B: tl.constexpr):
    """Workgroup n waits for n - 1, then loads a block and passes on."""
    pid = tl.program_id(0)
    if pid > 0:
        while tl.atomic_add(flags + pid, 0, sem="acquire", scope="gpu") == 0:
            pass
    tl.store(out + pid, tl.sum(tl.load(data + tl.arange(0, B))))
    tl.debug_barrier()
    tl.atomic_add(flags + pid + 1, 1, sem="release", scope="gpu")


@pytest.mark.parametrize("policy", [None, lambda: Random(1)])
def test_time_is_handed_on_by_flags(policy):
    """A chain takes the sum of its links, whatever the order of execution."""
    with Executor(1, cost=COST, policy=policy() if policy else None, race="raise") as ex:
        flags, data = ex.symmetric(9, I32)[0], ex.symmetric(1024, F32)[0]
        out = ex.symmetric(8, F32)[0]
        k_chain[(8,)](flags, data, out, 1024)
        ex.run()
        assert 8 * 409 < ex.clock.ns < 8 * 1200


def test_launches_of_a_rank_follow_each_other_and_ranks_overlap():
    with Executor(2, cost=COST) as ex:
        x, out, times = (ex.symmetric(1024, d) for d in (F32, F32, I64))

        def host(rank):
            k_copy[(1,)](x[rank], out[rank], times[rank], 1024)
            first = ex.clock.host_time(rank)
            if rank == 0:
                k_copy[(1,)](x[rank], out[rank], times[rank], 1024)
            second = ex.clock.host_time(rank)
            ex.host_barrier()
            return first, second, ex.clock.host_time(rank)

        a, b = ex.spmd(host)
    assert a[0] == b[0] == b[1] > 0
    assert a[1] == 2 * a[0]
    assert a[2] == b[2] == a[1]


def test_bounded_waits_still_end():
    @triton.jit
    def k_bounded(flag, out, bound):
        begin = clock()
        state = 0
        while state == 0:
            if tl.atomic_add(flag, 0, sem="acquire", scope="gpu") == 1:
                state = 1
            elif clock() - begin > bound:
                state = 2
        tl.store(out, state)

    with Executor(1, cost=COST) as ex:
        out = ex.symmetric(1, I32)[0]
        k_bounded[(1,)](ex.symmetric(1, I32)[0], out, 10**10)
        ex.run()
        assert out.item() == 2
