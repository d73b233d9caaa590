"""Host code of virtual ranks on a GPU, without the GPU."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
from kosmos_core.errors import WorldError
from kosmos_core.worlds import virtual_gpu
from kosmos_core.worlds.virtual_gpu import VirtualGpuWorld


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> VirtualGpuWorld:
    """Three ranks, which meet within half a second."""
    idle = SimpleNamespace(synchronize=lambda: None)
    for name, value in {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "Stream": lambda device: idle,
        "current_stream": lambda device: idle,
        "stream": lambda stream: contextlib.nullcontext(),
        "set_device": lambda device: None,
        "synchronize": lambda device: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(virtual_gpu, "machine_name", lambda device: "h200")
    monkeypatch.setattr(virtual_gpu, "num_sms", lambda device: 132)
    monkeypatch.setattr(virtual_gpu, "MEET_TIMEOUT_S", 0.5)
    return VirtualGpuWorld(3)


def test_a_rank_that_returns_leaves_nobody_waiting(world: VirtualGpuWorld) -> None:
    def host(rank: int) -> None:
        if rank != 1:
            world.barrier()

    with pytest.raises(WorldError, match=r"ranks \[1\] did not come to a meeting of the others"):
        world.spmd(host)
    assert world.spmd(lambda rank: world.all_gather_object(rank)) == [[0, 1, 2]] * 3


def test_a_rank_that_fails_is_what_the_caller_hears_of(world: VirtualGpuWorld) -> None:
    def host(rank: int) -> None:
        if rank == 1:
            raise KeyError("lost")
        world.barrier()

    with pytest.raises(KeyError, match="lost"):
        world.spmd(host)
