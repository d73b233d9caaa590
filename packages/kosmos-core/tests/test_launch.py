"""Launches by key: one number a key, and nothing of the caller's that is changed for good."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from kosmos_core import launch
from kosmos_core.launch import Launcher, intern_key
from triton.runtime import _allocation


class SlowKey:
    """A key whose hash runs Python, as those of plans do, and lets every other thread in."""

    def __init__(self, value: int, gate: threading.Barrier) -> None:
        self.value = value
        self._gate = gate

    def __hash__(self) -> int:
        # The others come by in every hash until somebody, behind the lock, waits in vain.
        with contextlib.suppress(threading.BrokenBarrierError):
            self._gate.wait(0.2)
        return hash((SlowKey, self.value))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SlowKey) and other.value == self.value


def test_equal_keys_have_equal_numbers() -> None:
    assert intern_key(("some", "key")) == intern_key(("some", "key"))
    assert intern_key(("some", "key")) != intern_key(("another", "key"))


def test_threads_never_give_two_keys_one_number() -> None:
    threads = 4
    gate = threading.Barrier(threads)
    numbers: list[int] = []
    started = [
        threading.Thread(target=lambda i=i: numbers.append(intern_key(SlowKey(i, gate))))
        for i in range(threads)
    ]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    assert len(set(numbers)) == threads


class Compiled:
    """What a kernel compiles to, noting the allocator under which it is launched."""

    function = 0
    packed_metadata = None

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def run(self, *args: Any) -> None:
        self.seen.append(_allocation._allocator.get())


class Kernel:
    """What is compiled on first use, noting how often."""

    def __init__(self, compiled: Compiled) -> None:
        self.compiled = compiled
        self.compilations = 0

    def run(self, *args: Any, grid: tuple[int, ...], warmup: bool, **options: Any) -> Compiled:
        assert warmup, "compiling must not launch"
        self.compilations += 1
        return self.compiled


@pytest.fixture
def own_allocator() -> Iterator[Any]:
    before = _allocation._allocator.get()

    def own(size: int, alignment: int, stream: int | None) -> Any:
        raise AssertionError("nothing is allocated here")

    triton.set_allocator(own)
    yield own
    triton.set_allocator(before)


def test_the_callers_allocator_stays(own_allocator: Any) -> None:
    launcher, compiled = Launcher(), Compiled()
    kernel = Kernel(compiled)
    for _ in range(2):
        launcher.launch(kernel, 1, (), "key", 0, 0, num_warps=8, num_stages=1)
        assert _allocation._allocator.get() is own_allocator
    assert len(compiled.seen) == 2
    assert own_allocator not in compiled.seen
    assert compiled.seen[0] is compiled.seen[1]


def test_loading_runs_nothing_and_the_launch_after_it_compiles_nothing() -> None:
    launcher, compiled = Launcher(), Compiled()
    kernel = Kernel(compiled)
    assert not launcher.is_loaded(kernel, 0, "key")
    launcher.load(kernel, (), "key", 0, num_warps=8, num_stages=1)
    assert launcher.is_loaded(kernel, 0, "key")
    assert (kernel.compilations, compiled.seen) == (1, [])
    launcher.launch(kernel, 1, (), "key", 0, 0, num_warps=8, num_stages=1)
    assert (kernel.compilations, len(compiled.seen)) == (1, 1)


class Pointers(NamedTuple):
    """A struct as kernels have it."""

    x_ptr: torch.Tensor
    rows: int
    WORLD: tl.constexpr


class Constants(NamedTuple):
    """A struct of constants."""

    BLOCK: tl.constexpr
    STAGES: tl.constexpr


def test_launches_pass_addresses_and_compilation_sees_tensors() -> None:
    passed: list[tuple[Any, ...]] = []

    class Recording(Compiled):
        def run(self, *args: Any) -> None:
            passed.append(args)

    class Seeing(Kernel):
        def run(self, *args: Any, **options: Any) -> Compiled:
            assert isinstance(args[0], torch.Tensor)
            assert isinstance(args[1].x_ptr, torch.Tensor)
            return super().run(*args, **options)

    t, world = torch.zeros(4), tl.constexpr(2)
    constants = Constants(tl.constexpr(64), tl.constexpr(3))
    given = (t, Pointers(t, 7, world), constants, 5)
    launcher, kernel = Launcher(), Seeing(Recording())
    for _ in range(2):
        launcher.launch(kernel, 3, given, "key", 0, 11, num_warps=8, num_stages=1)
    wanted = (t.data_ptr(), (t.data_ptr(), 7, world), constants, 5)
    assert [args[-4:] for args in passed] == [wanted] * 2
    assert passed[0][:4] == (3, 1, 1, 11)


def test_descriptors_live_on_the_device_and_in_the_order_of_the_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[str] = []
    given: list[int] = []
    capturing = False
    empty = torch.empty

    def recorded(size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        made.append(str(device))
        return empty(size, dtype=dtype)

    monkeypatch.setattr("torch.empty", recorded)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: capturing)
    launch._scratch_on.cache_clear()
    kept: list[torch.Tensor] = []

    class Allocating(Compiled):
        size = 64

        def run(self, *args: Any) -> None:
            kept.append(_allocation._allocator.get()(self.size, 16, args[3]))
            given.append(kept[-1].data_ptr())

    allocating = Allocating()
    launcher, kernel = Launcher(), Kernel(allocating)

    def go(device: int, stream: int) -> int:
        launcher.launch(kernel, 1, (), "key", device, stream, num_warps=8, num_stages=1)
        return given[-1]

    first = go(0, 7)
    assert go(0, 7) == first
    # What runs at the same time shares nothing.
    assert len({first, go(0, 8), go(1, 7)}) == 3
    assert made == ["cuda:0", "cuda:0", "cuda:1"]
    allocating.size = 128
    assert go(0, 7) != first
    assert kept[-1].numel() == 128
    capturing = True
    assert len({go(0, 7), go(0, 7), given[-3]}) == 3
    launch._scratch_on.cache_clear()
