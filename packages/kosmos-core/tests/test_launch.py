"""Launches by key: one number a key, and nothing of the caller's that is changed for good."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import triton
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


def test_descriptors_live_on_the_device_of_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[str] = []
    monkeypatch.setattr("torch.empty", lambda *_, device, **__: devices.append(str(device)))

    class Allocating(Compiled):
        def run(self, *args: Any) -> None:
            _allocation._allocator.get()(64, 16, None)

    launcher, kernel = Launcher(), Kernel(Allocating())
    for device in (1, 0, 1):
        for _ in range(2):
            launcher.launch(kernel, 1, (), "key", device, 0, num_warps=8, num_stages=1)
    assert sorted(set(devices)) == ["cuda:0", "cuda:1"]
