"""Mutations: a changed copy of a function runs, reports keep the lines of the original."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from kosmos_core.executor import DataRace, Deadlock, Executor, KernelFault, Mutation, Random

I32 = torch.int32


@triton.jit
def signal(flag):
    tl.debug_barrier()
    tl.atomic_add(flag, 1, sem="release", scope="gpu")


@triton.jit
def wait(flag, target):
    while tl.atomic_add(flag, 0, sem="acquire", scope="gpu") < target:
        pass


@triton.jit
def k_pass(data, flag, out, B: tl.constexpr):
    i = tl.arange(0, B)
    if tl.program_id(0) == 0:
        tl.store(data + i, i)
        signal(flag)
    else:
        wait(flag, 1)
        tl.store(out + i, tl.load(data + i))  # consumer
    tl.device_assert(i >= 0, "after")  # last


def number_of(text: str) -> int:
    with open(__file__, encoding="utf-8") as f:
        return next(n for n, line in enumerate(f, 1) if line.rstrip().endswith(text))


def run(*mutations, seed=0, **modes):
    modes = {"race": "raise", "strict": True, "weak": "late", "stale": True, **modes}
    with Executor(1, policy=Random(seed), mutations=mutations, **modes) as ex:
        data, flag, out = (
            ex.symmetric(n, I32, name)[0] for n, name in ((16, "data"), (1, "flag"), (16, "out"))
        )
        k_pass[(2,)](data, flag, out, 16)
        ex.run()
        return out.tolist()


def test_the_original_is_correct_before_and_after():
    for seed in range(4):
        assert run(seed=seed) == list(range(16))
        with pytest.raises(DataRace):
            run(Mutation(signal, "tl.debug_barrier()", "pass"), seed=seed)
        assert run(seed=seed) == list(range(16))


@pytest.mark.parametrize(
    ("fn", "old", "new"),
    [
        (signal, "tl.debug_barrier()", "pass"),
        (signal, 'sem="release"', 'sem="relaxed"'),
        (wait, 'sem="acquire"', 'sem="relaxed"'),
    ],
)
def test_defects_in_helpers_are_caught_where_they_show(fn, old, new):
    with pytest.raises(DataRace) as e:
        run(Mutation(fn, old, new))
    assert e.value.line == f"test_mutation.py:{number_of('# consumer')}"
    assert "tl.store(out + i, tl.load(data + i))  # consumer" in str(e.value)


def test_reports_show_the_changed_line_under_its_number():
    with pytest.raises(Deadlock) as e:
        run(Mutation(wait, "< target", "< target + 1"))
    assert e.value.line == f"test_mutation.py:{number_of('< target:')}"
    assert "< target + 1:" in e.value.waits[0].source
    assert "target + 1" in str(e.value)


@pytest.mark.parametrize(
    "new",
    [
        "signal(flag)\n        signal(flag)\n        signal(flag)",  # longer
        "signal(flag)",
    ],
)
def test_lines_after_the_change_keep_their_numbers(new):
    old = "tl.store(data + i, i)\n        signal(flag)"
    both = Mutation(k_pass, old, f"tl.store(data + i, i)\n        {new}")
    fail = Mutation(k_pass, "i >= 0", "i < 0")
    with pytest.raises(KernelFault) as e:
        run(both, fail)
    assert e.value.line == f"test_mutation.py:{number_of('# last')}"
    assert 'tl.device_assert(i < 0, "after")' in str(e.value)


def test_a_shorter_text_keeps_the_numbers_too():
    old = "tl.store(data + i, i)\n        signal(flag)"
    with pytest.raises(Deadlock):
        run(Mutation(k_pass, old, "pass"))
    fail = Mutation(k_pass, "i >= 0", "i < 0")
    with pytest.raises(KernelFault) as e:
        run(Mutation(k_pass, old, "signal(flag)"), fail, race=None)
    assert e.value.line == f"test_mutation.py:{number_of('# last')}"


@pytest.mark.parametrize(("old", "count"), [("flag", 6), ("no such text", 0), ("", 0)])
def test_the_text_must_occur_exactly_once(old, count):
    del count
    with pytest.raises(ValueError, match=r"must occur exactly once in its source, it occurs \d"):
        Mutation(k_pass, old, "x")


def test_a_change_must_be_valid_python_of_a_jitted_function():
    with pytest.raises(ValueError, match="not valid Python"):
        Mutation(signal, "tl.debug_barrier()", "tl.debug_barrier((")
    with pytest.raises(TypeError, match=r"must be a @triton.jit function"):
        Mutation(number_of, "text", "x")


def test_mutations_of_one_function_must_not_touch_each_other():
    first = Mutation(signal, 'sem="release"', 'sem="relaxed"')
    second = Mutation(signal, '1, sem="release"', '2, sem="release"')
    with pytest.raises(ValueError, match="another mutation"):
        run(first, second)
    assert run() == list(range(16))  # the failed start has left nothing behind
