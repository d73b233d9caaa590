"""Entry, start, election and exit of calls, without an operation between them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from kosmos_core.device.barrier import elect_last, start_judge, zero_words
from kosmos_core.device.target import AMD, NVIDIA
from kosmos_core.executor import Executor

Checked = Callable[..., Executor]


@triton.jit
def elect_kernel(counter_ptr, data_ptr, out_ptr, TARGET: tl.constexpr, SIZE: tl.constexpr):
    """Each workgroup stores a block; the last one adds them all up."""
    offsets = tl.arange(0, SIZE)
    pid = tl.program_id(0)
    tl.store(data_ptr + pid * SIZE + offsets, tl.full([SIZE], 1.0, tl.float32) * (pid + 1))
    if elect_last(counter_ptr, tl.num_programs(0), TARGET):
        total = tl.zeros([SIZE], tl.float32)
        for i in range(tl.num_programs(0)):
            total += tl.load(data_ptr + i * SIZE + offsets)
        tl.store(out_ptr + offsets, total)


@pytest.mark.parametrize("target", [NVIDIA, AMD])
@pytest.mark.parametrize("wgs", [1, 2, 5])
def test_exactly_one_is_the_last_and_sees_what_the_others_stored(
    wgs: int, target: tl.constexpr, checked: Checked
) -> None:
    for seed in range(6):
        with checked(1, seed, start="random", slots=(None, 1, 2)[seed % 3]) as ex:
            counter = ex.symmetric(1, torch.int32, "counter")[0]
            data, out = ex.empty(0, wgs * 16, name="data"), ex.empty(0, 16, name="out")
            elect_kernel[(wgs,)](counter, data, out, target, 16)
            ex.run()
            assert out.tolist() == [wgs * (wgs + 1) / 2] * 16
            assert int(counter) == wgs


@triton.jit
def zero_kernel(ptr, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    zero_words(ptr, WORDS, BLOCK)


@pytest.mark.parametrize(("words", "block"), [(64, 64), (256, 64), (1024, 1024)])
def test_words_are_zeroed_and_no_more(words: int, block: int) -> None:
    with Executor() as ex:
        t = ex.tensor(0, torch.ones(words + 8, dtype=torch.int32), "words")
        zero_kernel[(1,)](t, words, block)
        ex.run()
        assert t[:words].eq(0).all()
        assert t[words:].eq(1).all()


@triton.jit
def judge_kernel(seen_ptr, wanted_ptr, out_ptr, count):
    for i in range(count):
        tl.store(out_ptr + i, start_judge(tl.load(seen_ptr + i), tl.load(wanted_ptr + i)))


def word(call_hash: int, epoch: int) -> int:
    return (call_hash << 32 | epoch & 0xFFFFFFFF) - (1 << 64 if call_hash >> 31 else 0)


def test_a_start_word_is_judged_by_epoch_and_then_by_hash() -> None:
    cases = [
        (word(5, 7), word(5, 7), 1),
        (word(5, 6), word(5, 7), 0),
        (word(5, 8), word(5, 7), 0),
        (word(4, 7), word(5, 7), 2),
        (word(4, 5), word(5, 7), 0),
        (word(0, 7), word(5, 7), 2),
        # The epoch wraps and its sign turns over.
        (word(5, -1), word(5, -1), 1),
        (word(5, -1), word(5, 2**31 - 1), 0),
        (word(5, 2**31), word(5, -(2**31)), 1),
        (word(0x7FFFFFFF, 0), word(0x7FFFFFFF, 0), 1),
        (word(0x7FFFFFFF, 0), word(0x7FFFFFFE, 0), 2),
    ]
    with Executor() as ex:
        columns = list(zip(*cases, strict=True))
        seen, wanted = (
            ex.tensor(0, torch.tensor(column, dtype=torch.int64), "words") for column in columns[:2]
        )
        out = ex.empty(0, len(cases), torch.int32, "out")
        judge_kernel[(1,)](seen, wanted, out, len(cases))
        ex.run()
        assert tuple(out.tolist()) == columns[2]
