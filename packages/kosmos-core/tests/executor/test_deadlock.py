"""Deadlock reports, bounded waits and the device clock, loops without synchronisation."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import triton
import triton.language as tl
from kosmos_core.executor import (
    Deadlock,
    Executor,
    KernelFault,
    Random,
    Starve,
    UnsupportedAsm,
)

I32, I64 = torch.int32, torch.int64


def line_of(text: str) -> str:
    """``file:line`` of the only line of this file that ends with the comment `text`."""
    with open(__file__, encoding="utf-8") as f:
        numbers = [n for n, line in enumerate(f, 1) if line.rstrip().endswith(f"# {text}")]
    assert len(numbers) == 1
    return f"test_deadlock.py:{numbers[0]}"


@triton.jit
def clock():
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def read(flag):
    return tl.atomic_add(flag, 0, sem="acquire", scope="sys")  # read


@triton.jit
def is_aborted(word):
    return tl.atomic_add(word, 0, sem="relaxed", scope="sys") != 0


@triton.jit
def wait_simple(flag, target):
    while tl.atomic_add(flag, 0, sem="acquire", scope="gpu") < target:  # simple
        pass


@triton.jit
def wait_bounded(flag, wanted, abort, bound):
    """1 arrived, 2 somebody gave up, 3 the bound is over."""
    state = tl.full((), 0, tl.int32)
    begin = tl.full((), 0, tl.int64)
    while state == 0:
        seen = read(flag)
        if seen >= wanted:
            state = tl.full((), 1, tl.int32)
        elif is_aborted(abort):
            state = tl.full((), 2, tl.int32)
        else:
            now = clock()
            if begin == 0:
                begin = now
            elif now - begin > bound:
                state = tl.full((), 3, tl.int32)
    return state


@triton.jit
def k_simple(flag, target):
    if tl.program_id(0) == 1:
        wait_simple(flag + 2, target)


@triton.jit
def k_bounded(flag, abort, out, wanted, bound):
    tl.store(out + tl.program_id(0), wait_bounded(flag + 3, wanted, abort, bound))


def test_report_names_who_waits_for_what():
    with Executor(3, race="raise", policy=Random(0)) as ex:
        flags = ex.symmetric(4, I32, "flags")
        flags[2][2] = 1
        with ex.on(2):
            k_simple[(3,)](flags[2], 2)
        with pytest.raises(Deadlock) as e:
            ex.run()
    d = e.value
    assert (d.wg, d.region, d.index, d.rank) == ("rank2.wg1", "flags", 2, 2)
    assert (d.seen, d.wanted, d.line) == ("1", ">= 2", line_of("simple"))
    assert d.waits[0].kernel == "k_simple"
    text = str(d)
    for part in ("rank2.wg1", "flags[2] (rank 2)", "seen 1", "wanted >= 2", line_of("simple")):
        assert part in text
    assert "wait_simple(flag + 2, target)" in text  # the caller's line
    assert len(d.waits) == 1


def test_report_prefers_the_flag_to_the_abort_word():
    for seed in range(4):
        with Executor(1, jump_clock=False, policy=Random(seed)) as ex:
            flags, abort, out = (
                ex.symmetric(n, I32, name)[0]
                for n, name in ((4, "flags"), (1, "abort"), (2, "out"))
            )
            k_bounded[(2,)](flags, abort, out, 5, 10**9)
            with pytest.raises(Deadlock) as e:
                ex.run()
        assert [(w.region, w.index, w.seen, w.wanted) for w in e.value.waits] == [
            ("flags", 3, "0", "5")
        ] * 2
        assert e.value.line == line_of("read")


BOUND_NS = 120 * 10**9


@pytest.mark.parametrize("modes", [{}, {"weak": "random", "stale": True, "race": "raise"}])
def test_bounded_waits_end_because_time_jumps(modes):
    start = time.monotonic()
    with Executor(2, **modes) as ex:
        flags, abort, out = (ex.symmetric(n, I32, "x") for n in (4, 1, 8))
        for rank in range(2):
            with ex.on(rank):
                k_bounded[(8,)](flags[rank], abort[rank], out[rank], 5, BOUND_NS)
        ex.run()
        assert [o.tolist() for o in out] == [[3] * 8] * 2
        assert ex.stats["clock_jumps"] < 20
        assert ex.stats["clock_ns"] > BOUND_NS
        assert ex.stats["switches"] < 1000
    assert time.monotonic() - start < 5


@triton.jit
def k_late(flag, abort, out, bound):
    if tl.program_id(0) == 0:
        tl.store(out, wait_bounded(flag, 1, abort, bound))
    else:
        begin = clock()
        while clock() - begin < bound // 2:
            pass
        tl.atomic_xchg(flag, 1, sem="release", scope="sys")


def test_a_delay_by_the_clock_is_cheap_and_does_not_expire_the_waits_of_others():
    for seed in range(4):
        with Executor(1, policy=Random(seed)) as ex:
            flag, abort, out = (ex.symmetric(1, I32, "x")[0] for _ in range(3))
            k_late[(2,)](flag, abort, out, 10 * 10**9)
            ex.run()
            assert out.item() == 1
            assert ex.stats["switches"] < 400
            assert 5 * 10**9 < ex.stats["clock_ns"] < 10 * 10**9


@triton.jit
def k_counted(flag, out, LIMIT: tl.constexpr):
    i = 0
    while (tl.atomic_add(flag, 0, sem="acquire", scope="gpu") == 0) & (i < LIMIT):
        i += 1
    tl.store(out, i)


def test_a_loop_that_counts_its_polls_is_no_deadlock():
    with Executor(1) as ex:
        flag, out = ex.symmetric(1, I32)[0], ex.symmetric(1, I32)[0]
        k_counted[(1,)](flag, out, 300)
        ex.run()
        assert out.item() == 300


@triton.jit
def k_block_poll(x, out, B: tl.constexpr):
    """Reloads a whole block until every element is there."""
    i = tl.arange(0, B)
    if tl.program_id(0) == 0:
        v = tl.load(x + i, mask=i < 10, other=1, volatile=True)
        while tl.sum((v == 0).to(tl.int32)) > 0:
            v = tl.load(x + i, mask=i < 10, other=1, volatile=True)
        tl.store(out, tl.sum(v))
    else:
        for j in range(9, -1, -1):
            tl.atomic_xchg(x + j, 1, sem="relaxed", scope="gpu")


@pytest.mark.parametrize("seed", range(4))
def test_polls_of_blocks_wake_up_at_any_element(seed):
    with Executor(1, policy=Random(seed)) as ex:
        x, out = ex.symmetric(16, I32)[0], ex.symmetric(1, I32)[0]
        k_block_poll[(2,)](x, out, 16)
        ex.run()
        assert out.item() == 16
        assert ex.stats["switches"] < 60


@triton.jit
def k_two_words(flag, abort, out):
    """The waiter looks at two words a round; the writer is quick between the two looks."""
    if tl.program_id(0) == 0:
        read(abort)
        tl.store(out, wait_bounded(flag, 1, abort, 10**9))
    else:
        for _ in range(5):
            tl.atomic_add(out + 1, 1, sem="relaxed", scope="gpu")
        tl.atomic_xchg(flag, 1, sem="release", scope="sys")
        tl.store(abort + 1, 1)  # stays in the store buffer unless everybody gets stuck


@pytest.mark.parametrize("seed", range(20, 30))
def test_no_wake_up_is_lost_between_two_looks(seed):
    """The flag may change after it was read and before the workgroup parks."""
    with Executor(1, policy=Random(seed), jump_clock=False, patience=0, weak="late") as ex:
        flag, abort, out = (ex.symmetric(2, I32)[0] for _ in range(3))
        k_two_words[(2,)](flag, abort, out)
        ex.run()
        assert out.tolist() == [1, 5]
        assert ex.stats["drains"] == 0


@triton.jit
def k_two_waits(start, flag, out):
    if tl.program_id(0) == 0:
        wait_simple(start, 1)
        wait_simple(flag, 1)
        tl.store(out, 1)
    else:
        for _ in range(6):
            tl.atomic_add(start, 1, sem="release", scope="gpu")
        tl.atomic_add(flag, 1, sem="release", scope="gpu")


@pytest.mark.parametrize("victim", [0, 1])
def test_a_word_of_an_earlier_wait_does_not_keep_a_poller_awake(victim):
    """With the writer starved, the reader must park for the writer to run at all."""
    with Executor(1, policy=Starve(lambda t: t.wg == victim), max_switches=200) as ex:
        start, flag, out = (ex.symmetric(1, I32)[0] for _ in range(3))
        k_two_waits[(2,)](start, flag, out)
        ex.run()
        assert out.item() == 1


@triton.jit
def k_plain_poll(flag, out):
    if tl.program_id(0) == 0:
        while tl.load(flag) == 0:  # plain poll
            pass
        tl.store(out, 1)
    else:
        tl.atomic_xchg(flag, 1, sem="release", scope="gpu")


def test_plain_polling_is_recognised_and_reported_as_a_lint():
    with Executor(1) as ex:
        flag, out = ex.symmetric(1, I32)[0], ex.symmetric(1, I32)[0]
        k_plain_poll[(2,)](flag, out)
        ex.run()
        assert out.item() == 1
        (lint,) = [text for text in ex.lints if "plain (non-volatile) polling" in text]
        assert line_of("plain poll") in lint


@triton.jit
def k_endless(out):
    i = 0
    while i < 1:
        i = i * 1
    tl.store(out, i)


@pytest.mark.parametrize("in_thread", [False, True])
def test_watchdog(in_thread):
    """A loop without synchronisation ends in an error, also outside the main thread."""
    caught: list[KernelFault] = []

    def run():
        with Executor(1, watchdog_s=0.2) as ex:
            k_endless[(1,)](ex.symmetric(1, I32)[0])
            try:
                ex.run()
            except KernelFault as e:
                caught.append(e)

    if in_thread:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join(20)
        assert not thread.is_alive()
    else:
        run()
    (fault,) = caught
    assert fault.wg == "rank0.wg0"
    assert fault.line.startswith("test_deadlock.py:")
    assert "no synchronisation operation for 0.2 s" in str(fault)


def test_watchdog_leaves_busy_but_healthy_kernels_alone():
    with Executor(1, watchdog_s=0.15) as ex:
        flag, out = ex.symmetric(1, I32)[0], ex.symmetric(1, I32)[0]
        k_counted[(1,)](flag, out, 900)
        ex.run()
        assert out.item() == 900


def test_max_switches_bounds_a_livelock():
    @triton.jit
    def k_livelock(x):
        while tl.atomic_add(x, 1, sem="relaxed", scope="gpu") >= 0:
            pass

    with Executor(1, max_switches=500) as ex:
        k_livelock[(2,)](ex.symmetric(1, I32)[0])
        with pytest.raises(Deadlock, match="500 switches"):
            ex.run()


def test_an_executor_that_has_failed_refuses_to_go_on():
    with Executor(1) as ex:
        flag = ex.symmetric(4, I32)[0]
        k_simple[(2,)](flag, 2)
        with pytest.raises(Deadlock):
            ex.run()
        with pytest.raises(RuntimeError, match=r"stopped with Deadlock.*make a new one"):
            k_simple[(2,)](flag, 2)
        with pytest.raises(RuntimeError, match="make a new one"):
            ex.run()


def test_progress_callback():
    seen: list[int] = []
    with Executor(1, progress=lambda e: seen.append(e.stats["switches"]), progress_every=10) as ex:
        flag, out = ex.symmetric(1, I32)[0], ex.symmetric(1, I32)[0]
        k_counted[(1,)](flag, out, 50)
        ex.run()
        assert seen == list(range(10, 10 * (ex.stats["switches"] // 10) + 1, 10))
        assert len(seen) >= 5


@triton.jit
def asm(TEXT: tl.constexpr):
    return tl.inline_asm_elementwise(TEXT, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def k_asm(out, TEXT: tl.constexpr):
    tl.store(out + tl.program_id(0), asm(TEXT))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("fence.proxy.async.global; mov.u32 $0, 0;", 0),
        ("fence.acq_rel.sys; mov.u32 $0, 0;", 0),
        ("fence.sc.gpu; mov.u32 $0, 0;", 0),
        ("s_waitcnt vmcnt(0)\nbuffer_wbl2 sc0 sc1\ns_waitcnt vmcnt(0)\nv_mov_b32 $0, 0", 0),
        ("mov.u32 $0, %smid;", None),
        ("nanosleep.u32 100; mov.u32 $0, 0;", 0),
        ("s_sleep 1\nv_mov_b32 $0, 0", 0),
    ],
)
def test_inline_assembly(text, value):
    with Executor(1, weak="late", race="raise") as ex:
        out = torch.full((3,), -1, dtype=I32)
        k_asm[(3,)](out, text)
        ex.run()
    assert out.tolist() == ([0, 1, 2] if value is None else [value] * 3)


def test_both_clocks_are_in_step():
    @triton.jit
    def k_clocks(out):
        a = clock()
        b = tl.inline_asm_elementwise(
            "s_memrealtime $0\ns_waitcnt lgkmcnt(0)", "=s", [], dtype=tl.int64, is_pure=False,
            pack=1,
        )  # fmt: skip
        tl.store(out, a)
        tl.store(out + 1, b * 10)  # 100 MHz

    out = torch.zeros(2, dtype=I64)
    with Executor(1) as ex:
        k_clocks[(1,)](out)
        ex.run()
    assert 0 < out[0] <= out[1] < out[0] + 10_000


def test_unknown_assembly_is_an_error_and_can_be_registered():
    with Executor(1) as ex:
        k_asm[(1,)](torch.zeros(1, dtype=I32), "frobnicate $0;")
        with pytest.raises(KernelFault, match=r"frobnicate.*register_asm") as e:
            ex.run()
        assert isinstance(e.value.__cause__, UnsupportedAsm)
        assert e.value.wg == "rank0.wg0"
    with Executor(1) as ex:
        ex.register_asm(r"frobnicate", lambda ex, w, asm, args, types: 7 + w.wg)
        out = torch.zeros(2, dtype=I32)
        k_asm[(2,)](out, "frobnicate $0;")
        ex.run()
    assert out.tolist() == [7, 8]
