"""The workspace: memory, epochs, agreement of ranks, and every way in which they fail to agree."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import pytest
import torch
from kosmos_core.device import layout
from kosmos_core.device.barrier import agree_kernel, fault_kernel
from kosmos_core.errors import (
    KosmosError,
    PeerError,
    PeerFaultError,
    PeerMismatchError,
    PeerTimeoutError,
    WorkspaceError,
)
from kosmos_core.peer_errors import EXCEPTION, FAULT_REASONS, LAUNCH
from kosmos_core.testing.checked import run_checked
from kosmos_core.workspace import (
    Region,
    Workspace,
    control_sizes,
    workspace_num_bytes,
)
from kosmos_core.worlds import SymmetricBuffer, World

SHARD = Region("shard", int(layout.SHARD.value), 96, torch.bfloat16, depth=2)
GATHER = Region("gather", int(layout.GATHER.value), 200, torch.bfloat16)
REGIONS = (SHARD, GATHER)
EPOCH = int(layout.EPOCH.value)


def error_of(call: Callable[[], Any]) -> KosmosError:
    """What a call raises; it must raise one of our errors."""
    with pytest.raises(KosmosError) as caught:
        call()
    return caught.value


# ---------------------------------------------------------------------- memory


@pytest.mark.parametrize("rows", [1, 31, 32, 33, 200])
def test_counters_fit_their_sets(rows: int) -> None:
    stride, set_words, arrival_words = control_sizes(rows)
    granule, ranks = int(layout.SET_GRANULE.value), int(layout.MAX_RANKS.value)
    assert stride >= rows
    assert stride & (stride - 1) == 0
    assert set_words % granule == arrival_words % granule == 0
    assert set_words >= int(layout.COUNTERS.value) + ranks * stride + 1024
    assert arrival_words >= ranks * stride


@pytest.mark.parametrize("size", [1, 2, 8])
@pytest.mark.parametrize("trace_events", [0, 5])
def test_the_bytes_are_those_that_are_allocated(size: int, trace_events: int) -> None:
    def host(rank: int, world: World) -> tuple[int, int]:
        workspace = Workspace(world, REGIONS, 40, trace_events=trace_events)
        memory = world.executor.memory  # type: ignore[attr-defined]
        # The status word lives in the host's memory.
        mine = [r.nbytes for r in memory.regions if r.rank == rank and r.name != "status"]
        world.barrier()
        return workspace.num_bytes(), sum(mine)

    for told, taken in run_checked(size, host):
        assert told == taken
        if not trace_events:
            assert told == workspace_num_bytes(REGIONS, 40)


def test_the_table_holds_every_ranks_addresses() -> None:
    def host(rank: int, world: World) -> None:
        workspace = Workspace(world, REGIONS, 4)
        spaces = world.all_gather_object(workspace)
        table = workspace.context().table_ptr.view(-1, int(layout.MAX_RANKS.value))
        for row in (SHARD.row, SHARD.row + 1, GATHER.row):
            wanted = [space.buffer(row).data_ptr() for space in spaces]
            assert table[row, : world.size].tolist() == wanted
            assert len(set(wanted)) == world.size
            assert all(address % 16 == 0 for address in wanted)
        assert workspace.buffer(SHARD.row).numel() == SHARD.num_elements
        # A region that nobody has is nowhere.
        assert table[GATHER.row + 1].eq(0).all()

    run_checked(3, host)


@pytest.mark.parametrize("bound", [0.0, -1.0, 1e-4, 1e9])
def test_a_bound_out_of_range_is_refused(bound: float) -> None:
    def host(rank: int, world: World) -> str:
        return str(error_of(lambda: Workspace(world, REGIONS, 4, timeout_s=bound)))

    for told in run_checked(2, host):
        assert f"timeout_s: got {bound}" in told


# ------------------------------------------------------------------------ life


def test_destroying_is_idempotent_and_final() -> None:
    def host(rank: int, world: World) -> None:
        workspace = Workspace(world, REGIONS, 4)
        workspace.agree("hello", 1)
        workspace.destroy()
        workspace.destroy()
        assert workspace.destroyed
        for call in (
            workspace.ensure_usable,
            workspace.reset,
            lambda: workspace.agree("hello", 1),
            lambda: workspace.begin("hello", 1),
        ):
            error = error_of(call)
            assert type(error) is WorkspaceError
            assert "it is destroyed; create a new one on every rank" in str(error)
        # A destroyed workspace has nobody left to tell, and nothing to complain of.
        workspace.fault(1, "hello")
        workspace.check()

    run_checked(2, host)


def test_the_context_manager_destroys() -> None:
    def host(rank: int, world: World) -> bool:
        with Workspace(world, REGIONS, 4) as workspace:
            workspace.agree("hello", 1)
        return workspace.destroyed

    assert run_checked(2, host) == [True, True]


def test_an_exception_goes_through_the_context_manager_without_waiting() -> None:
    def host(rank: int, world: World) -> str:
        if rank == 1:
            Workspace(world, REGIONS, 4)
            return "elsewhere"
        with pytest.raises(KeyError, match="lost"), Workspace(world, REGIONS, 4) as workspace:
            raise KeyError("lost")
        return "destroyed" if workspace.destroyed else "alive"

    assert run_checked(2, host, jump_clock=False) == ["destroyed", "elsewhere"]


def test_another_ranks_workspace_is_refused() -> None:
    def host(rank: int, world: World) -> str:
        workspace = Workspace(world, REGIONS, 4)
        other = world.all_gather_object(workspace)[1 - rank]
        told = str(error_of(lambda: other.agree("hello", 1)))
        workspace.agree("hello", 1)
        return told

    for rank, told in enumerate(run_checked(2, host)):
        assert f"it belongs to rank {1 - rank}, got rank {rank}" in told


class Counted(World):
    """A group of one whose memory is counted as long as anybody holds it."""

    def __init__(self) -> None:
        super().__init__(1)
        self.alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    def local(self, name: str, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        made = torch.empty(num_elements, dtype=dtype)
        self.alive.add(made)
        return made

    def symmetric(self, name: str, num_elements: int, dtype: torch.dtype) -> SymmetricBuffer:
        made = self.local(name, num_elements, dtype)
        return SymmetricBuffer(name, made, (made.data_ptr(),))

    def host_visible(self, num_words: int) -> torch.Tensor:
        return self.local("status", num_words, torch.int64).zero_()

    @property
    def rank(self) -> int:
        return 0

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def num_wgs(self) -> int:
        return 2

    def launch(
        self,
        kernel: Any,
        num_wgs: int,
        args: Sequence[Any],
        key: Hashable,
        *,
        num_warps: int,
        num_stages: int,
    ) -> None:
        raise AssertionError("nothing is launched here")

    def barrier(self) -> None:
        return

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value]

    def all_gather_tensor(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def synchronize(self) -> None:
        return


def test_200_cycles_leave_nothing() -> None:
    world = Counted()
    # Even whoever holds a destroyed workspace holds none of its memory.
    held = []
    for _ in range(200):
        workspace = Workspace(world, REGIONS, 4, trace_events=3)
        workspace.destroy()
        held.append(workspace)
    gc.collect()
    assert len(world.alive) == 0
    kept = Workspace(world, REGIONS, 4)
    # signal, arrival, two shards, gather, control, table, status: what a leak would show as.
    assert len(world.alive) == 8
    assert not kept.destroyed


def test_200_cycles_do_not_fill_the_executor() -> None:
    def host(rank: int, world: World) -> int:
        Workspace(world, REGIONS, 4).destroy()
        world.barrier()
        memory = world.executor.memory  # type: ignore[attr-defined]
        before = len(memory.regions)
        for _ in range(200):
            Workspace(world, REGIONS, 4).destroy()
        world.barrier()
        return len(memory.regions) - before

    # The executor forgets regions in batches; 3200 have come and gone.
    assert max(run_checked(2, host)) < 800


# ------------------------------------------------------------------- agreement


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("first", [1, 2**31 - 2, -2, -(2**31)])
def test_ranks_that_agree_go_on_and_the_epoch_with_them(size: int, first: int) -> None:
    def host(rank: int, world: World) -> int:
        workspace = Workspace(world, REGIONS, 4, first_epoch=first)
        for i in range(5):
            workspace.agree("hello", 100 + i)
        return int(workspace.context().control_ptr[EPOCH])

    calls = 0 if size == 1 else 5
    wanted = (first + calls + 2**31) % 2**32 - 2**31
    for seed in range(2 if size < 8 else 1):
        assert run_checked(size, host, seed=seed) == [wanted] * size


def test_two_workspaces_do_not_meet() -> None:
    def host(rank: int, world: World) -> None:
        one, two = Workspace(world, REGIONS, 4), Workspace(world, REGIONS, 4, first_epoch=9)
        for i in range(4):
            one.agree("one", i)
            two.agree("two", 50 + i)
            two.agree("two", 70 + i)
        one.destroy()
        two.agree("two", 1)

    for seed in range(3):
        run_checked(3, host, seed=seed)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_rank_that_makes_another_call_is_named(size: int) -> None:
    odd = size - 1

    def host(rank: int, world: World) -> KosmosError:
        workspace = Workspace(world, REGIONS, 4)
        workspace.agree("first", 7)
        world.barrier()
        error = error_of(lambda: workspace.agree("second", 8 if rank == odd else 9))
        later = error_of(lambda: workspace.agree("third", 7))
        assert str(later) == str(error)
        world.barrier()
        workspace.reset()
        workspace.agree("fourth", 7)
        return error

    for seed in range(3):
        for rank, error in enumerate(run_checked(size, host, seed=seed, jump_clock=False)):
            assert type(error) is PeerMismatchError
            assert error.rank == rank
            assert error.op == "second"
            assert error.flag == "start word"
            assert odd in (error.peer, error.raised_by)
            assert error.seen != error.wanted
            assert f"rank {rank} of {size}" in str(error)
            if size > 2:
                assert f"ranks [{odd}] differ from ranks" in str(error)


def test_a_rank_that_does_not_come_is_named_after_the_bound() -> None:
    def host(rank: int, world: World) -> tuple[KosmosError, float]:
        workspace = Workspace(world, REGIONS, 4, timeout_s=0.25)
        workspace.agree("first", 7)
        world.barrier()
        clock = world.executor.clock  # type: ignore[attr-defined]
        begin = clock.ns
        error = None if rank == 1 else error_of(lambda: workspace.agree("second", 8))
        took = (clock.ns - begin) * 1e-9
        world.barrier()
        # The one that did not come is told at its next call.
        found = error_of(lambda: workspace.agree("third", 9)) if error is None else error
        workspace.reset()
        workspace.agree("fourth", 7)
        return found, took

    for rank, (error, took) in enumerate(run_checked(3, host)):
        assert type(error) is PeerTimeoutError
        assert (error.rank, error.peer) == (rank, 1)
        assert error.raised_by in (0, 2)
        assert (error.phase, error.flag, error.index) == ("leave", "start word", 1)
        assert error.op == ("third" if rank == 1 else "second")
        assert "waited 0.25 s for rank 1" in str(error)
        assert "reset()" in str(error)
        if rank != 1:
            # The executor's clock jumps by whole seconds when all wait.
            assert 0.25 < took < 4


@pytest.mark.parametrize("reason", sorted(FAULT_REASONS.keys() - {EXCEPTION, LAUNCH}))
def test_a_fault_tells_the_peers_its_reason(reason: int) -> None:
    def host(rank: int, world: World) -> KosmosError:
        workspace = Workspace(world, REGIONS, 4)
        if rank == 0:
            workspace.fault(reason, "refused")
            return error_of(workspace.synchronize)
        return error_of(lambda: workspace.agree("hello", 1))

    for rank, error in enumerate(run_checked(3, host, jump_clock=False)):
        assert type(error) is PeerFaultError
        assert (error.rank, error.raised_by) == (rank, 0)
        assert f"rank 0 refused its call before launch: bad {FAULT_REASONS[reason]}" in str(error)


def test_copies_of_a_workspace_are_itself_and_it_is_not_pickled() -> None:
    def host(rank: int, world: World) -> None:
        workspace = Workspace(world, REGIONS, 4)
        assert copy.copy(workspace) is workspace
        assert copy.deepcopy([workspace, world]) == [workspace, world]
        with pytest.raises(TypeError, match=r"Workspace: got pickled.*state_dict"):
            pickle.dumps(workspace)
        workspace.destroy()

    run_checked(2, host)


def test_callers_modes_and_default_devices_are_none_of_a_workspaces_business() -> None:
    def host(rank: int, world: World) -> None:
        with torch.inference_mode(), torch.device("meta"):
            workspace = Workspace(world, REGIONS, 4)
            workspace.agree("inside", 1)
        workspace.agree("outside", 2)
        workspace.reset()
        workspace.agree("again", 3)
        workspace.destroy()

    run_checked(2, host)


def test_errors_are_sticky_until_the_reset() -> None:
    def host(rank: int, world: World) -> None:
        workspace = Workspace(world, REGIONS, 4)
        if rank == 0:
            workspace.fault(1, "refused")
        else:
            error_of(lambda: workspace.agree("hello", 1))
        world.barrier()
        launches = world.executor.stats["launches"]  # type: ignore[attr-defined]
        for call in (
            workspace.check,
            workspace.synchronize,
            lambda: workspace.begin("next", 1),
            lambda: workspace.agree("next", 1),
        ):
            assert isinstance(error_of(call), PeerError)
        assert world.executor.stats["launches"] == launches  # type: ignore[attr-defined]
        world.barrier()
        workspace.reset()
        workspace.check()
        for i in range(3):
            workspace.agree("again", i)

    run_checked(2, host)


def test_a_group_of_one_has_nobody_to_wait_for_or_to_tell() -> None:
    def host(rank: int, world: World) -> None:
        workspace = Workspace(world, REGIONS, 4)
        workspace.agree("hello", 1)
        workspace.fault(1, "refused")
        workspace.synchronize()
        assert world.executor.stats["launches"] == 0  # type: ignore[attr-defined]

    run_checked(1, host)


# --------------------------------------------------------------------- launches


class Launches(Counted):
    """A rank whose launches are noted and never run; its stream and captures are chosen."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.keys: dict[Any, Hashable] = {}
        self.waits: list[Any] = []
        self.stream = 1
        self.capturing = False

    def launch(
        self,
        kernel: Any,
        num_wgs: int,
        args: Sequence[Any],
        key: Hashable,
        *,
        num_warps: int,
        num_stages: int,
    ) -> None:
        self.keys[kernel] = key

    def order_after(self, stream: Any) -> None:
        self.waits.append(stream)

    def current_stream(self) -> Any:
        return self.stream

    def is_capturing(self) -> bool:
        return self.capturing


def test_groups_of_different_sizes_share_no_compiled_code() -> None:
    keys: dict[Any, set[Hashable]] = {agree_kernel: set(), fault_kernel: set()}
    for size, rows in ((2, 4), (4, 4), (8, 4), (8, 40)):
        world = Launches(size)
        workspace = Workspace(world, REGIONS, rows)
        workspace.agree("hello", 1)
        workspace.fault(1, "refused")
        for kernel, found in keys.items():
            found.add(world.keys[kernel])
    assert [len(found) for found in keys.values()] == [4, 4]


def test_a_captured_call_waits_for_no_stream_outside_and_none_waits_for_it() -> None:
    world = Launches(2)
    workspace = Workspace(world, REGIONS, 4)
    workspace.begin("eager", 1)
    world.stream, world.capturing = 2, True
    workspace.begin("captured", 1)
    workspace.agree("captured", 1)
    assert world.waits == []
    world.stream, world.capturing = 3, False
    workspace.begin("eager", 1)
    assert world.waits == [1]


def test_a_fault_is_not_captured_into_a_graph() -> None:
    world = Launches(2)
    workspace = Workspace(world, REGIONS, 4)
    world.capturing = True
    workspace.fault(1, "refused")
    assert world.keys == {}
