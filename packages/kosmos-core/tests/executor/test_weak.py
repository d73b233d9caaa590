"""Weak memory: store buffers, scopes, strict tile stores, stale views, coherence."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from kosmos_core.executor import Executor, Random, Starve

I32 = torch.int32


@triton.jit
def k_message(
    data, flag, out, SEM: tl.constexpr, ACQ: tl.constexpr, BARRIER: tl.constexpr, B: tl.constexpr
):
    """Workgroup 0 writes B words and raises a flag; workgroup 1 waits for it and copies them."""
    i = tl.arange(0, B)
    if tl.program_id(0) == 0:
        tl.store(data + i, i + 1)
        if BARRIER:
            tl.debug_barrier()
        tl.atomic_xchg(flag, 1, sem=SEM, scope="gpu")
    else:
        while tl.atomic_add(flag, 0, sem=ACQ, scope="gpu") == 0:
            pass
        tl.store(out + i, tl.load(data + i))


def message(sem="release", acquire="acquire", barrier=True, warm=False, seed=0, **modes):
    """Whether the reader got the data."""
    B = 16
    with Executor(1, policy=Random(seed), seed=seed, **modes) as ex:
        data, flag, out = ex.symmetric(B, I32)[0], ex.symmetric(1, I32)[0], ex.symmetric(B, I32)[0]
        k_message[(2,)](data, flag, out, sem, acquire, barrier, B)
        ex.run()
        return out.tolist() == list(range(1, B + 1))


SEEDS = range(6)
LATE = {"weak": "late", "stale": True}


def test_release_and_acquire_deliver_the_data():
    for modes in (LATE, {"weak": "random", "stale": True}, {**LATE, "strict": True}):
        assert all(message(seed=s, **modes) for s in SEEDS)


@pytest.mark.parametrize("defect", [{"sem": "relaxed"}, {"acquire": "relaxed"}])
def test_missing_release_or_acquire_loses_it(defect):
    assert all(message(seed=s, **defect) for s in SEEDS)  # sequentially consistent: not seen
    assert not any(message(seed=s, **defect, **LATE) for s in SEEDS)


def test_a_missing_acquire_needs_stale_views():
    assert all(message(acquire="relaxed", seed=s, weak="late") for s in SEEDS)


def test_strict_needs_a_barrier_before_the_release():
    assert all(message(barrier=False, seed=s, **LATE) for s in SEEDS)
    assert not all(message(barrier=False, seed=s, strict=True, **LATE) for s in SEEDS)


def test_random_publication_can_be_early():
    results = {message(sem="relaxed", seed=s, weak="random", stale=True) for s in range(40)}
    assert results == {True, False}


@triton.jit
def k_remote(data, flag, out, me, SCOPE: tl.constexpr):
    """Rank 0 writes and signals, rank 1 waits and reads."""
    if me == 0:
        tl.store(data, 5)
        tl.debug_barrier()
        tl.atomic_xchg(flag, 1, sem="release", scope=SCOPE)
    else:
        while tl.atomic_add(flag, 0, sem="acquire", scope="sys") == 0:
            pass
        tl.store(out, tl.load(data))


@pytest.mark.parametrize(("scope", "seen"), [("sys", 5), ("gpu", 0)])
def test_a_release_of_scope_gpu_does_not_reach_other_ranks(scope, seen):
    # Rank 0 must not end before rank 1 has read: at its end everything becomes visible.
    with Executor(2, policy=Starve(lambda t: t.rank == 0), **LATE) as ex:
        data, flag, out = (ex.symmetric(1, I32, n)[0] for n in ("data", "flag", "out"))
        for rank in (0, 1):
            with ex.on(rank):
                k_remote_slow[(1,)](data, flag, out, rank, scope)
        ex.run()
        assert out.item() == seen


@triton.jit
def k_remote_slow(data, flag, out, me, SCOPE: tl.constexpr):
    k_remote(data, flag, out, me, SCOPE)
    if me == 0:
        for _ in range(30):
            tl.atomic_add(flag + 0, 0, sem="relaxed", scope="gpu")


@triton.jit
def k_own(x, out, B: tl.constexpr):
    """A workgroup sees its own stores in program order, whatever is buffered."""
    i = tl.arange(0, B)
    tl.store(x + i, i)
    tl.store(x + 2 * tl.arange(0, B // 2), -1 - i.reshape(2, B // 2).sum(0) * 0)
    tl.store(x + 3, 77)
    tl.store(out + i, tl.load(x + i))
    tl.store(x, 5)
    old = tl.atomic_add(x, 1, sem="relaxed", scope="gpu")
    tl.store(out, old)
    tl.store(out + 1, tl.load(x))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("weak", [None, "late", "random"])
def test_own_stores_are_seen_in_order(weak, strict):
    with Executor(1, weak=weak, stale=weak is not None, strict=strict) as ex:
        x, out = ex.symmetric(8, I32)[0], ex.symmetric(8, I32)[0]
        k_own[(1,)](x, out, 8)
        ex.run()
    assert out.tolist()[2:] == [-1, 77, -1, 5, -1, 7]
    if not strict:
        assert out.tolist()[:2] == [5, 6]
        assert x.tolist() == [6, 1, -1, 77, -1, 5, -1, 7]


@triton.jit
def k_coherent(x, out, WARM: tl.constexpr):
    if tl.program_id(0) == 0:
        tl.atomic_xchg(x, 1, sem="relaxed", scope="gpu")
        tl.store(x + 1, 1)
        tl.atomic_xchg(x + 2, 1, sem="release", scope="gpu")
    else:
        while tl.load(x + 2, volatile=True) == 0:
            pass
        if WARM:
            tl.store(out + 1, tl.load(x + 1, volatile=True))
        tl.store(out, tl.load(x + 1))


@pytest.mark.parametrize("warm", [False, True])
def test_reads_of_one_address_do_not_go_back(warm):
    """A stale load may return the old value, but not after a coherent read saw the new one."""
    with Executor(1, **LATE) as ex:
        x, out = ex.symmetric(3, I32)[0], ex.symmetric(2, I32)[0]
        k_coherent[(2,)](x, out, warm)
        ex.run()
    assert out.tolist() == ([1, 1] if warm else [0, 0])


@triton.jit
def k_stuck_store(x, out):
    """The flag is raised by a plain store that nothing publishes."""
    if tl.program_id(0) == 0:
        tl.store(x, 1)
        while tl.atomic_add(x + 1, 0, sem="relaxed", scope="gpu") == 0:
            pass
    else:
        while tl.load(x, volatile=True) == 0:
            pass
        tl.atomic_xchg(x + 1, 1, sem="relaxed", scope="gpu")


def test_buffered_stores_become_visible_eventually():
    with Executor(1, **LATE) as ex:
        x = ex.symmetric(2, I32)[0]
        k_stuck_store[(2,)](x, x)
        ex.run()
        assert ex.stats["drains"] >= 1
        assert any("until unreleased stores became visible: rank0.wg0" in t for t in ex.lints)


@triton.jit
def k_fence(data, flag, out):
    if tl.program_id(0) == 0:
        tl.store(data, 5)
        tl.inline_asm_elementwise(
            "fence.acq_rel.gpu; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
        tl.atomic_xchg(flag, 1, sem="relaxed", scope="gpu")
    else:
        while tl.load(flag, volatile=True) == 0:
            pass
        tl.inline_asm_elementwise(
            "fence.acq_rel.gpu; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
        tl.store(out, tl.load(data))


@pytest.mark.parametrize("seed", SEEDS)
def test_fences_order_relaxed_flags(seed):
    with Executor(1, policy=Random(seed), race="raise", **LATE) as ex:
        data, flag, out = (ex.symmetric(1, I32, n)[0] for n in ("data", "flag", "out"))
        k_fence[(2,)](data, flag, out)
        ex.run()
        assert out.item() == 5


def test_host_writes_are_seen_by_kernels_that_follow():
    """Also when the region has a view per rank, because a gpu-scope release went there."""

    @triton.jit
    def k_copy(x, flag, out, B: tl.constexpr):
        i = tl.arange(0, B)
        tl.store(out + i, tl.load(x + i))
        tl.debug_barrier()
        tl.store(x + i, i)
        tl.debug_barrier()
        tl.atomic_add(flag, 1, sem="release", scope="gpu")

    with Executor(2, race="raise", strict=True, **LATE) as ex:
        x, flag, out = (ex.symmetric(n, I32) for n in (8, 1, 8))

        def host(rank):
            seen = []
            for step in (1, 2, 3):
                x[rank].fill_(10 * step)
                k_copy[(1,)](x[rank], flag[rank], out[rank], 8)
                seen.append(out[rank].tolist())
            return seen

        assert ex.spmd(host) == [[[10] * 8, [20] * 8, [30] * 8]] * 2
