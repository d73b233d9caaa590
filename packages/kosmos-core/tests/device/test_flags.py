"""Arrival counters carry data, within a rank and between ranks; the abort word ends every wait."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from kosmos_core.device import layout
from kosmos_core.device.flags import abort_all, abort_word, flag_arrive, flag_read, flag_wait
from kosmos_core.device.layout import Call, Context
from kosmos_core.device.target import AMD, NVIDIA
from kosmos_core.executor import DataRace, Deadlock, Executor, Mutation

Checked = Callable[..., Executor]
N = 64


@triton.jit
def pass_on_kernel(
    flag_ptr,
    data_ptr,
    out_ptr,
    units,
    SCOPE: tl.constexpr,
    TARGET: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Workgroups 1 and on store a unit each and count it in; workgroup 0 waits for all and sums."""
    offsets = tl.arange(0, SIZE)
    pid = tl.program_id(0)
    if pid == 0:
        while flag_read(flag_ptr, SCOPE) < units:
            pass
        total = tl.zeros([SIZE], tl.float32)
        for unit in range(units):
            total += tl.load(data_ptr + unit * SIZE + offsets)
        tl.store(out_ptr + offsets, total)
    else:
        value = tl.full([SIZE], 1.0, tl.float32) * pid
        tl.store(data_ptr + (pid - 1) * SIZE + offsets, value)
        flag_arrive(flag_ptr, SCOPE, TARGET)


@pytest.mark.parametrize("target", [NVIDIA, AMD])
@pytest.mark.parametrize("scope", ["gpu", "sys"])
def test_what_was_counted_in_can_be_read(
    scope: str, target: tl.constexpr, checked: Checked
) -> None:
    for seed in range(8):
        with checked(1, seed, slots=(None, 2)[seed % 2]) as ex:
            flag = ex.symmetric(1, torch.int32, "flag")[0]
            data, out = ex.empty(0, 4 * N, name="data"), ex.empty(0, N, name="out")
            with ex.on(0):
                pass_on_kernel[(5,)](flag, data, out, 4, scope, target, N)
            ex.run()
            assert out.tolist() == [10.0] * N
            assert ex.lints == []


@triton.jit
def between_ranks_kernel(
    rank, flag_ptr, data_ptr, out_ptr, SCOPE: tl.constexpr, SIZE: tl.constexpr, TARGET: tl.constexpr
):
    offsets = tl.arange(0, SIZE)
    if rank == 0:
        tl.store(data_ptr + offsets, tl.full([SIZE], 3.0, tl.float32))
        flag_arrive(flag_ptr, SCOPE, TARGET)
    else:
        while flag_read(flag_ptr, SCOPE) < 1:
            pass
        tl.store(out_ptr + offsets, tl.load(data_ptr + offsets))


def between_ranks(ex: Executor, scope: str) -> list[float]:
    flags = ex.symmetric(1, torch.int32, "flag")
    data, out = ex.empty(1, N, name="data"), ex.empty(1, N, name="out")
    for rank in (0, 1):
        with ex.on(rank):
            between_ranks_kernel[(1,)](rank, flags[1], data, out, scope, N, NVIDIA)
    ex.run()
    values: list[float] = out.tolist()
    return values


def test_between_ranks_the_scope_is_the_system(checked: Checked) -> None:
    with checked(2) as ex:
        assert between_ranks(ex, "sys") == [3.0] * N
    with checked(2) as ex, pytest.raises(DataRace, match="scope error"):
        between_ranks(ex, "gpu")


@pytest.mark.parametrize(
    ("old", "new"), [("publish(SCOPE, TARGET)", "pass"), ('sem="release"', 'sem="relaxed"')]
)
def test_without_barrier_or_release_the_data_races(old: str, new: str, checked: Checked) -> None:
    with (
        checked(2, mutations=[Mutation(flag_arrive, old, new)]) as ex,
        pytest.raises(DataRace, match="data"),
    ):
        between_ranks(ex, "sys")


@triton.jit
def wait_kernel(ctx, rank, out_ptr, flag_ptr, bound_us, wanted, SCOPE: tl.constexpr):
    """Waits for a counter that may never come; out: what the wait returned."""
    zero = rank * 0
    wide = zero.to(tl.int64)
    signal_ptr = (tl.load(ctx.table_ptr + rank)).to(tl.pointer_type(tl.int64), bitcast=True)
    call = Call(rank, zero + 9, zero, wide, zero, flag_ptr, signal_ptr, (wide + bound_us) * 1000)
    ok = flag_wait(ctx, call, flag_ptr, wanted, zero + 1, zero + 5, 3, 2, SCOPE)
    tl.store(out_ptr, ok)


@triton.jit
def give_up_kernel(ctx, rank, code):
    """Gives up at once."""
    zero = rank * 0
    abort_all(ctx, rank, zero + 9, zero + code, zero + 1, zero, zero, zero, zero, zero)


@triton.jit
def read_abort_kernel(ctx, rank, out_ptr):
    """The abort word of a rank."""
    signal_ptr = (tl.load(ctx.table_ptr + rank)).to(tl.pointer_type(tl.int64), bitcast=True)
    tl.store(out_ptr, abort_word(signal_ptr))


class Words:
    """Signal and control words of the ranks of an executor, as a workspace would have them."""

    def __init__(self, ex: Executor, size: int) -> None:
        self.signal = ex.symmetric(int(layout.SIGNAL_WORDS.value), torch.int64, "signal")
        self.control = ex.symmetric(64, torch.int32, "control")
        self.status = ex.symmetric(1, torch.int64, "status")
        self.contexts = []
        for rank in range(size):
            table = ex.pointers(rank, self.signal, "table")
            others = (tl.constexpr(n) for n in (size, 1024, 1024, 32, int(NVIDIA.value), 0))
            words = (table, self.control[rank], self.status[rank], self.status[rank])
            self.contexts.append(Context(*words, *others))

    def record(self, on_rank: int, raiser: int) -> list[int]:
        first = int(layout.RECORD.value) + raiser * int(layout.RECORD_WORDS.value)
        values: list[int] = self.signal[on_rank][first : first + 8].tolist()
        return values

    def abort(self, rank: int) -> int:
        return int(self.signal[rank][int(layout.ABORT.value)])


def test_a_counter_that_has_come_ends_a_wait(checked: Checked) -> None:
    with checked(1) as ex:
        words, flag = Words(ex, 1), ex.symmetric(1, torch.int32, "flag")[0]
        out = ex.empty(0, 1, torch.int32, "out")
        flag[0] = 7
        ex.initialised(flag)
        with ex.on(0):
            wait_kernel[(1,)](words.contexts[0], 0, out, flag, 1000, 7, "gpu")
        ex.run()
        assert int(out) == 1
        assert words.abort(0) == 0


def test_a_wait_that_outlasts_its_bound_is_recorded_on_every_rank(checked: Checked) -> None:
    with checked(3) as ex:
        words, flag = Words(ex, 3), ex.symmetric(1, torch.int32, "flag")[2]
        out = ex.empty(2, 1, torch.int32, "out")
        with ex.on(2):
            wait_kernel[(1,)](words.contexts[2], 2, out, flag, 1000, 7, "gpu")
        ex.run()
        assert int(out) == 0
        assert ex.stats["clock_ns"] > 1_000_000
        code, raiser, peer = int(layout.TIMEOUT.value), 2, 1
        for rank in range(3):
            assert words.abort(rank) == code | raiser << 8 | peer << 16
            # code, peer, phase, flag, index, seen, wanted, epoch
            assert words.record(rank, 2) == [code, peer, 3, 2, 5, 0, 7, 9]
            assert words.record(rank, 0) == [0] * 8


def test_a_wait_that_outlasts_its_bound_names_a_peer_that_never_started(checked: Checked) -> None:
    with checked(3) as ex:
        words, flag = Words(ex, 3), ex.symmetric(1, torch.int32, "flag")[2]
        out = ex.empty(2, 1, torch.int32, "out")
        # The wait is for rows of rank 1, which is here; rank 0 is still in an earlier call.
        start = int(layout.START.value)
        words.signal[2][start] = 5
        ex.initialised(words.signal[2])
        with ex.on(2):
            wait_kernel[(1,)](words.contexts[2], 2, out, flag, 1000, 7, "gpu")
        ex.run()
        code, word = int(layout.TIMEOUT.value), int(layout.FLAG_START.value)
        assert words.record(0, 2) == [code, 0, 3, word, 0, 5, 0, 9]


def test_a_wait_ends_once_somebody_gives_up(checked: Checked) -> None:
    for seed in range(4):
        with checked(2, seed, jump_clock=False) as ex:
            words, flag = Words(ex, 2), ex.symmetric(1, torch.int32, "flag")[0]
            out = ex.empty(0, 1, torch.int32, "out")
            with ex.on(0):
                wait_kernel[(1,)](words.contexts[0], 0, out, flag, 10**9, 7, "gpu")
            with ex.on(1):
                give_up_kernel[(1,)](words.contexts[1], 1, 3)
            ex.run()
            assert int(out) == 0
            # Only the one that gave up left a record.
            assert words.record(0, 0) == [0] * 8
            assert words.record(0, 1)[0] == 3


def test_a_wait_that_does_not_look_at_the_abort_word_hangs(checked: Checked) -> None:
    blind = Mutation(flag_wait, "elif is_aborted(call.signal_ptr):", "elif call.rank < 0:")
    with checked(2, jump_clock=False, mutations=[blind]) as ex:
        words, flag = Words(ex, 2), ex.symmetric(1, torch.int32, "flag")[0]
        out = ex.empty(0, 1, torch.int32, "out")
        with ex.on(0):
            wait_kernel[(1,)](words.contexts[0], 0, out, flag, 10**9, 7, "gpu")
        with ex.on(1):
            give_up_kernel[(1,)](words.contexts[1], 1, 3)
        with pytest.raises(Deadlock) as caught:
            ex.run()
        assert (caught.value.wg, caught.value.region) == ("rank0.wg0", "flag")


def test_only_the_first_workgroup_of_a_rank_leaves_a_record(checked: Checked) -> None:
    with checked(2) as ex:
        words = Words(ex, 2)
        out = ex.empty(1, 1, torch.int64, "out")
        with ex.on(0):
            give_up_kernel[(1,)](words.contexts[0], 0, 1)
            give_up_kernel[(1,)](words.contexts[0], 0, 3)
        ex.run()
        with ex.on(1):
            read_abort_kernel[(1,)](words.contexts[1], 1, out)
        ex.run()
        assert words.record(1, 0)[0] == 1
        assert int(out) & 0xFF == 1
