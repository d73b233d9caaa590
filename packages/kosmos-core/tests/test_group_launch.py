"""What launches on GPUs refuse, remember and wait for, without a GPU."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kosmos_core.errors import WorldError
from kosmos_core.worlds import group, virtual_gpu
from kosmos_core.worlds.group import GroupWorld
from kosmos_core.worlds.ordering import LaunchOrder
from kosmos_core.worlds.virtual_gpu import VirtualGpuWorld


class Recorded:
    """Stands in for the process's launcher."""

    def __init__(self, loaded: bool) -> None:
        self.loaded = loaded
        self.launches = 0

    def is_loaded(self, *_: Any) -> bool:
        return self.loaded

    def launch(self, *_: Any) -> None:
        self.launches += 1


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> GroupWorld:
    """A rank on a GPU that is not there."""
    made: GroupWorld = object.__new__(GroupWorld)
    made._device = torch.device("cuda", 0)
    monkeypatch.setattr(group, "_ORDERS", {made._device: LaunchOrder(132)})
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 7, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    return made


@pytest.mark.parametrize("loaded", [False, True])
def test_a_capture_neither_compiles_nor_loads(
    world: GroupWorld, monkeypatch: pytest.MonkeyPatch, loaded: bool
) -> None:
    launcher = Recorded(loaded)
    monkeypatch.setattr(group, "LAUNCHER", launcher)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    if loaded:
        world.launch("kernel", 1, (), "key", num_warps=8, num_stages=1)
    else:
        with pytest.raises(WorldError, match="prepare the call, or make it once, before"):
            world.launch("kernel", 1, (), "key", num_warps=8, num_stages=1)
    assert launcher.launches == int(loaded)
    # A captured launch runs nowhere yet: there is nothing to wait for.
    assert group._ORDERS[world._device].launches == 0


def test_after_a_synchronization_no_stream_is_waited_for(
    world: GroupWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "LAUNCHER", Recorded(True))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    world.launch("kernel", 132, (), "key", num_warps=8, num_stages=1)
    world.synchronize()
    waited: list[Any] = []
    group._ORDERS[world._device].enter(8, 132, waited.append)
    assert waited == []


@pytest.mark.parametrize(
    ("others", "limit", "reserved"),
    [
        ({}, None, 0),
        ({"data": ("nccl", 2)}, None, 32),
        ({"data": ("cpu:gloo,cuda:nccl", 4)}, "16", 16),
        ({"one": ("nccl", 1)}, None, 0),
        ({"hosts": ("gloo", 2)}, None, 0),
        ({"hosts": ("gloo", 2), "data": ("nccl", 2)}, None, 32),
    ],
)
def test_sms_are_reserved_where_other_groups_of_gpus_communicate(
    world: GroupWorld,
    monkeypatch: pytest.MonkeyPatch,
    others: dict[str, tuple[str, int]],
    limit: str | None,
    reserved: int,
) -> None:
    groups = {"mine": ("nccl", 2), "default": ("nccl", 8), **others}
    world._group = "mine"  # type: ignore[assignment]
    known = SimpleNamespace(_world=SimpleNamespace(pg_map=dict.fromkeys(groups)))
    distributed = SimpleNamespace(
        distributed_c10d=known,
        group=SimpleNamespace(WORLD="default"),
        get_world_size=lambda g: groups[g][1],
        get_backend=lambda g: groups[g][0],
    )
    monkeypatch.setattr(group, "dist", distributed)
    monkeypatch.delenv("NCCL_MAX_CTAS", raising=False)
    if limit is not None:
        monkeypatch.setenv("NCCL_MAX_CTAS", limit)
    assert world._default_reserve() == reserved
    if reserved:
        monkeypatch.setenv("NCCL_MAX_CTAS", "many")
        with pytest.raises(WorldError, match="NCCL_MAX_CTAS: got 'many' in the environment"):
            world._default_reserve()


def test_virtual_ranks_load_only_once_their_earlier_calls_are_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # This rank's first call spins until its peer has launched it, too.
    peer_has_launched = threading.Event()
    loads: list[bool] = []

    class Launcher(Recorded):
        def is_loaded(self, kernel: Any, device: int, key: Any) -> bool:
            return key == "first"

        def load(self, *_: Any) -> None:
            # As the driver does, which waits for what runs; 0.2 s stand for the bound.
            loads.append(peer_has_launched.wait(0.2))

        def launch(self, *_: Any) -> None:
            peer_has_launched.set()

    monkeypatch.setattr(virtual_gpu, "LAUNCHER", Launcher(True))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 7, raising=False)
    world: VirtualGpuWorld = object.__new__(VirtualGpuWorld)
    world._device, world._lock = torch.device("cuda", 0), threading.Lock()
    monkeypatch.setattr(world, "synchronize", lambda: peer_has_launched.wait(30))

    def launch(key: str) -> None:
        world.launch("kernel", 16, (), key, num_warps=8, num_stages=1)

    mine = threading.Thread(target=launch, args=("second",))
    mine.start()
    mine.join(0.05)
    launch("first")
    mine.join()
    assert loads == [True]
