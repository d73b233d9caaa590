"""Scheduling policies, start orders, slots, switching, replay, the hash of a schedule."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from kosmos_core.executor import (
    Deadlock,
    Executor,
    PriorityRandom,
    Random,
    Replay,
    RoundRobin,
    Starve,
)

I32 = torch.int32


@triton.jit
def k_order(counter, order, n):
    """Every workgroup claims n entries of `order` and writes its id."""
    pid = tl.program_id(0)
    for _ in range(n):
        i = tl.atomic_add(counter, 1, sem="relaxed", scope="sys")
        tl.store(order + i, pid)


@triton.jit
def k_barrier(counter, data, out, n, B: tl.constexpr):
    """A grid barrier: needs all workgroups resident."""
    pid = tl.program_id(0)
    tl.store(data + pid, pid + 1)
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release", scope="gpu")
    while tl.atomic_add(counter, 0, sem="acquire", scope="gpu") < n:
        pass
    i = tl.arange(0, B)
    tl.store(out + pid, tl.sum(tl.load(data + i, mask=i < n, other=0)))


def order(policy=None, wgs=4, n=3, **options):
    with Executor(1, policy=policy, **options) as ex:
        counter, out = ex.symmetric(1, I32)[0], ex.symmetric(wgs * n, I32)[0]
        k_order[(wgs,)](counter, out, n)
        ex.run()
        return out.tolist(), ex


def test_round_robin_takes_turns():
    assert order(RoundRobin())[0] == [0, 1, 2, 3] * 3
    assert order(None)[0] == [0, 1, 2, 3] * 3


def test_start_orders():
    assert order(start="descending", n=1, wgs=4)[0] == [3, 2, 1, 0]
    orders = {tuple(order(start="random", seed=s, n=1, wgs=6)[0]) for s in range(6)}
    assert len(orders) > 2
    assert all(sorted(o) == list(range(6)) for o in orders)


def test_random_policies_are_seeded():
    for policy in (Random, PriorityRandom):
        runs = [order(policy(s)) for s in (1, 1, 2, 3, 4)]
        assert runs[0][0] == runs[1][0]
        assert runs[0][1].schedule_hash == runs[1][1].schedule_hash
        assert len({tuple(r[0]) for r in runs}) >= 3
        assert len({r[1].schedule_hash for r in runs}) == len({tuple(r[1].schedule) for r in runs})


def test_priority_random_runs_one_task_until_it_drops():
    got, _ = order(PriorityRandom(0, depth=1))
    assert got == sorted(got, key=got.index)  # never comes back to a workgroup that it left
    dropped = {tuple(order(PriorityRandom(s, depth=4, steps=12))[0]) for s in range(8)}
    assert any(list(d) != sorted(d, key=d.index) for d in dropped)


def test_starve_runs_victims_last():
    got, _ = order(Starve(lambda t: t.wg == 0))
    assert got[-3:] == [0, 0, 0]
    got, _ = order(Starve(lambda t: t.pid[0] >= 1, RoundRobin()))
    assert got == [0, 0, 0] + [1, 2, 3] * 3


def test_slots_bound_residency():
    got, _ = order(RoundRobin(), slots=1)
    assert got == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]


@pytest.mark.parametrize(("slots", "completes"), [(None, True), (8, True), (7, False)])
def test_a_grid_barrier_needs_all_workgroups_resident(slots, completes):
    with Executor(1, slots=slots, race="raise", weak="late", stale=True, strict=True) as ex:
        counter, data, out = (ex.symmetric(n, I32)[0] for n in (1, 8, 8))
        k_barrier[(8,)](counter, data, out, 8, 8)
        if completes:
            ex.run()
            assert out.tolist() == [36] * 8
        else:
            with pytest.raises(Deadlock, match="1 workgroups have found no slot") as e:
                ex.run()
            assert len(e.value.waits) == 7


@triton.jit
def k_increment(x, n):
    for _ in range(n):
        tl.store(x, tl.load(x) + 1)


def test_switch_memory_interleaves_plain_accesses():
    def total(switch):
        with Executor(1, switch=switch) as ex:
            x = ex.symmetric(1, I32)[0]
            k_increment[(4,)](x, 5)
            ex.run()
            return x.item()

    assert total("sync") == 20
    assert total("memory") < 20


def test_replay_reproduces_schedule_and_hash():
    options = {"weak": "random", "seed": 5, "start": "random"}
    got, ex = order(Random(3), **options)
    again, replayed = order(Replay(ex.schedule), **options)
    assert again == got
    assert replayed.schedule == ex.schedule
    assert replayed.schedule_hash == ex.schedule_hash


def test_the_hash_covers_decisions_about_visibility():
    @triton.jit
    def k_stores(x, counter):
        for i in range(20):
            tl.store(x + i, i)
            tl.atomic_add(counter, 1, sem="relaxed", scope="gpu")

    def run(seed):
        with Executor(1, weak="random", seed=seed) as ex:
            x, counter = ex.symmetric(32, I32)[0], ex.symmetric(1, I32)[0]
            k_stores[(2,)](x, counter)
            ex.run()
            return ex.schedule, ex.schedule_hash

    first, second, third = run(0), run(1), run(1)
    assert first[0] == second[0]
    assert first[1] != second[1]
    assert second == third


def test_replay_refuses_a_schedule_of_something_else():
    _, ex = order(Random(3), wgs=4)
    with pytest.raises(ValueError, match="cannot run"):
        order(Replay(ex.schedule), wgs=2)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("weak", "maybe"),
        ("race", True),
        ("switch", "always"),
        ("start", "asc"),
        ("slots", 0),
        ("patience", -1),
        ("num_ranks", 0),
        ("max_switches", 0),
    ],
)
def test_bad_options_are_refused(option, value):
    with pytest.raises(ValueError, match=option):
        Executor(**{option: value})


def test_stale_needs_weak():
    with pytest.raises(ValueError, match="stale=True needs weak"):
        Executor(2, stale=True)
