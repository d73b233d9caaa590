"""Host code: one OS thread a rank, autograd, exceptions, collectives, streams."""

from __future__ import annotations

import contextvars
import signal
import threading
import time

import pytest
import torch
import triton
import triton.language as tl
from kosmos_core.executor import (
    DataRace,
    Deadlock,
    Executor,
    ExecutorStopped,
    KernelFault,
    PriorityRandom,
    Random,
    RoundRobin,
    Starve,
)

I32 = torch.int32
POLICIES = [
    RoundRobin,
    lambda: Random(1),
    lambda: PriorityRandom(2),
    lambda: Starve(lambda t: t.rank == 1),
]


@triton.jit
def k_multiply(x, y, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i) * tl.load(y + i))


@triton.jit
def k_meet(mine, theirs):
    tl.atomic_add(theirs, 1, sem="release", scope="sys")
    while tl.atomic_add(mine, 0, sem="acquire", scope="sys") < 1:
        pass


@triton.jit
def k_wait(flag, out):
    while tl.atomic_add(flag, 0, sem="acquire", scope="gpu") == 0:
        pass
    tl.store(out, 1)


@triton.jit
def k_raise(flag):
    tl.debug_barrier()
    tl.atomic_xchg(flag, 1, sem="release", scope="gpu")


@triton.jit
def k_fail():
    tl.device_assert(tl.program_id(0) == 1, "kernel failed")


@triton.jit
def k_race(x):
    tl.store(x, tl.program_id(0))


class Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        out = torch.empty_like(x)
        k_multiply[(1,)](x, y, out, x.numel())
        return out

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        gx, gy = torch.empty_like(x), torch.empty_like(y)
        k_multiply[(1,)](grad.contiguous(), y, gx, x.numel())
        k_multiply[(1,)](grad.contiguous(), x, gy, x.numel())
        return gx, gy


@pytest.mark.parametrize("policy", POLICIES)
def test_autograd_with_kernels_in_forward_and_backward(policy):
    def host(rank):
        torch.manual_seed(rank)
        x, y = (torch.randn(16, requires_grad=True) for _ in range(2))
        for _ in range(3):
            z = Multiply.apply(Multiply.apply(x, y), y)
            z.square().sum().backward()
        u, v = (t.detach().clone().requires_grad_() for t in (x, y))
        for _ in range(3):
            (u * v * v).square().sum().backward()
        torch.testing.assert_close(x.grad, u.grad)
        torch.testing.assert_close(y.grad, v.grad)
        return ex.current_rank(), threading.get_ident()

    with Executor(4, policy=policy(), race="raise", weak="late", stale=True) as ex:
        results = ex.spmd(host)
    assert [r[0] for r in results] == [0, 1, 2, 3]
    assert len({r[1] for r in results} | {threading.get_ident()}) == 5


def test_exactly_one_thread_runs_and_the_order_is_deterministic():
    def run(seed):
        log: list[tuple[int, int]] = []
        running: list[int] = []

        def host(rank):
            for step in range(5):
                running.append(rank)
                assert running == [rank]
                log.append((rank, step))
                running.remove(rank)
                k_meet_all[(1,)](flags[rank])

        with Executor(4, policy=Random(seed)) as ex:
            flags = ex.symmetric(1, I32)
            ex.spmd(host)
            return log, ex.schedule_hash

    assert run(1) == run(1)
    assert len({tuple(run(s)[0]) for s in range(5)}) >= 3


@triton.jit
def k_meet_all(flag):
    tl.atomic_add(flag, 1, sem="relaxed", scope="sys")


def test_grad_mode_context_variables_and_arguments_reach_the_threads():
    variable = contextvars.ContextVar("variable")
    variable.set("from outside")

    def host(rank, a, b):
        return rank, a, b, torch.is_grad_enabled(), variable.get()

    with Executor(2) as ex, torch.no_grad():
        assert ex.spmd(host, "a", 2)[1] == (1, "a", 2, False, "from outside")
    with Executor(2) as ex:
        assert ex.spmd(host, "a", 2)[0][3]


def test_a_launch_blocks_its_rank_only():
    def host(rank):
        k_meet[(1,)](flags[rank], flags[1 - rank])
        return flags[rank].item()

    for policy in POLICIES:
        with Executor(2, policy=policy(), race="raise") as ex:
            flags = ex.symmetric(1, I32)
            assert ex.spmd(host) == [1, 1]


# ---- exceptions
def test_an_exception_names_its_rank_and_the_others_go_on():
    finished = []

    def host(rank):
        if rank == 1:
            raise ValueError("boom")
        k_meet_all[(1,)](flags[rank])
        finished.append(rank)
        return rank

    with Executor(3) as ex:
        flags = ex.symmetric(1, I32)
        with pytest.raises(ValueError, match="boom") as e:
            ex.spmd(host)
        assert e.value.__notes__ == ["raised in the host code of rank 1"]
        assert e.value.rank == 1
        assert sorted(finished) == [0, 2]
        out = ex.spmd(host, return_exceptions=True)
        assert (out[0], out[2]) == (0, 2)
        assert isinstance(out[1], ValueError)


def test_the_first_exception_wins_over_the_deadlock_it_causes():
    def host(rank):
        if rank == 1:
            raise ValueError("boom")
        k_meet[(1,)](flags[rank], flags[1 - rank])

    with Executor(2) as ex:
        flags = ex.symmetric(1, I32, "flags")
        with pytest.raises(ValueError, match="boom"):
            ex.spmd(host)
    with Executor(2) as ex:
        flags = ex.symmetric(1, I32, "flags")
        out = ex.spmd(host, return_exceptions=True)
    assert isinstance(out[0], Deadlock)
    assert isinstance(out[1], ValueError)
    assert out[0].region == "flags"


def test_a_rank_that_is_blocked_for_ever_is_a_deadlock():
    cleaned = []

    def host(rank):
        if rank == 1:
            return
        try:
            ex.host_barrier()
        finally:
            cleaned.append(rank)

    with Executor(3) as ex, pytest.raises(Deadlock) as e:
        ex.spmd(host)
    assert cleaned == [0, 2]
    assert e.value.waits == ()
    assert len(e.value.hosts) == 2
    assert "host of rank 2: host_barrier() number 0: waits for ranks [1]" in str(e.value)


@pytest.mark.parametrize("kernel", [k_fail, k_race])
def test_a_failing_kernel_stops_everybody(kernel):
    kind = KernelFault if kernel is k_fail else DataRace

    def host(rank):
        if rank == 1:
            args = () if kernel is k_fail else (x,)
            kernel[(2,)](*args)
        ex.host_barrier()

    def make():
        return Executor(3, race="raise")

    with make() as ex:
        x = ex.symmetric(1, I32)[1]
        with pytest.raises(kind) as e:
            ex.spmd(host)
        assert e.value.wg.startswith("rank1.")
        assert e.value.rank == (1 if kernel is k_fail else e.value.rank)
    with make() as ex:
        x = ex.symmetric(1, I32)[1]
        out = ex.spmd(host, return_exceptions=True)
    assert isinstance(out[1], kind)
    assert [type(o) for o in (out[0], out[2])] == [ExecutorStopped, ExecutorStopped]


def test_host_code_that_swallows_the_deadlock_cannot_launch_again():
    seen = []

    def host(rank):
        try:
            k_wait[(1,)](flag[rank], flag[rank])
        except Deadlock:
            with pytest.raises(ExecutorStopped, match="make a new one"):
                k_wait[(1,)](flag[rank], flag[rank])
            seen.append(rank)

    with Executor(2) as ex:
        flag = ex.symmetric(1, I32)
        with pytest.raises(Deadlock):
            ex.spmd(host)
    assert seen == [0, 1]


def test_system_exit_in_host_code_is_passed_on():
    def host(rank):
        if rank == 0:
            raise SystemExit(3)

    with Executor(2) as ex, pytest.raises(SystemExit):
        ex.spmd(host)


def test_an_interrupt_ends_all_threads():
    """Ctrl-C arrives in the scheduler's thread while host code of a rank runs."""
    running = []

    def host(rank):
        running.append(threading.current_thread())
        if rank == 0:
            time.sleep(0.05)
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.05)
        ex.host_barrier()
        return rank

    # Started in the background, a process is born ignoring the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with Executor(3) as ex:
        try:
            with pytest.raises(KeyboardInterrupt):
                ex.spmd(host)
        finally:
            signal.signal(signal.SIGINT, before)
        assert not any(t.is_alive() for t in running)
        with pytest.raises(RuntimeError, match="make a new one"):
            ex.spmd(host)


# ---- collectives
def test_collectives():
    def host(rank):
        first = ex.host_all_gather(rank * 10)
        ex.host_barrier()
        return first, ex.host_all_gather({"rank": rank})

    with Executor(3, policy=Random(2)) as ex:
        out = ex.spmd(host)
        assert ex.spmd(host) == out
    assert out == [([0, 10, 20], [{"rank": 0}, {"rank": 1}, {"rank": 2}])] * 3


def test_mismatched_collectives_are_an_error():
    def host(rank):
        if rank == 0:
            ex.host_barrier()
        else:
            ex.host_all_gather(rank)

    with Executor(2) as ex, pytest.raises(RuntimeError, match="same collectives in the same order"):
        ex.spmd(host)


def test_what_spmd_refuses():
    with Executor(2) as ex:
        with pytest.raises(RuntimeError, match="inside spmd"):
            ex.spmd(lambda rank: ex.on(0).__enter__())
        with pytest.raises(RuntimeError, match="nested"):
            ex.spmd(lambda rank: ex.spmd(print))
        with pytest.raises(RuntimeError, match="use synchronize"):
            ex.spmd(lambda rank: ex.run())
        with pytest.raises(RuntimeError, match="needs spmd"):
            ex.host_all_gather(1)
        with pytest.raises(ValueError, match=r"rank must be in 0\.\.1, got 2"):
            ex.empty(2, 4)


# ---- streams
@pytest.mark.parametrize("policy", POLICIES)
def test_streams_of_a_rank_run_concurrently(policy):
    def host(rank):
        with ex.stream(1):
            k_wait[(1,)](flags[rank], out[rank])  # does not block the host
        with ex.stream(2):
            k_raise[(1,)](flags[rank])
        ex.synchronize()
        return out[rank].item()

    with Executor(2, policy=policy(), race="raise", strict=True, weak="late") as ex:
        flags, out = ex.symmetric(1, I32, "flags"), ex.symmetric(1, I32, "out")
        assert ex.spmd(host) == [1, 1]


def test_streams_share_the_slots_of_their_rank():
    def host(rank):
        with ex.stream(1):
            k_wait[(1,)](flags[rank], out[rank])
        with ex.stream(2):
            k_raise[(1,)](flags[rank])
        ex.synchronize()

    with Executor(1, slots=1) as ex:
        flags, out = ex.symmetric(1, I32, "flags"), ex.symmetric(1, I32, "out")
        with pytest.raises(Deadlock, match=r"k_raise.*found no slot"):
            ex.spmd(host)


def test_streams_without_spmd_and_launch_order_on_one_stream():
    with Executor(2, policy=Random(4), race="raise") as ex:
        flags, out = ex.symmetric(1, I32, "flags"), ex.symmetric(1, I32, "out")
        with ex.on(1), ex.stream(3):
            k_wait[(1,)](flags[1], out[1])
        with ex.on(1):
            k_raise[(1,)](flags[1])
        ex.synchronize()
        assert out[1].item() == 1


def test_spmd_waits_for_streams_nobody_synchronised():
    def host(rank):
        with ex.stream(1):
            k_raise[(1,)](flags[rank])

    with Executor(2) as ex:
        flags = ex.symmetric(1, I32)
        ex.spmd(host)
        assert [f.item() for f in flags] == [1, 1]


def test_tensors_made_by_host_threads_are_forgotten_when_dead():
    """A long run with fresh tensors every step keeps its registry small."""

    def host(rank):
        for step in range(400):
            x = torch.full((16,), float(step))
            out = torch.empty(16)
            k_multiply[(1,)](x, x, out, 16)
            assert out[0].item() == step * step

    with Executor(2, race="raise", weak="late") as ex:
        ex.spmd(host)
        assert len(ex.memory.regions) < 600
