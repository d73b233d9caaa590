"""Leaving a workspace: by `destroy()`, by its block, by an exception, with and without an abort."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kosmos_core.device import layout
from kosmos_core.device.barrier import agree_kernel
from kosmos_core.errors import (
    KosmosError,
    PeerError,
    PeerFaultError,
    PeerTimeoutError,
    WorkspaceError,
)
from kosmos_core.testing.checked import run_checked
from kosmos_core.workspace import Region, Workspace
from kosmos_core.worlds import World

REGIONS = (Region("gather", int(layout.GATHER.value), 200, torch.bfloat16),)


def error_of(call: Callable[[], Any]) -> KosmosError:
    """What a call raises; it must raise one of our errors."""
    with pytest.raises(KosmosError) as caught:
        call()
    return caught.value


def untold(leave: Callable[[Workspace], None]) -> Callable[[int, World], KosmosError]:
    """Ranks that leave a workspace in `leave`, not knowing that rank 0 never made the last call."""

    def host(rank: int, world: World) -> KosmosError:
        workspace = Workspace(world, REGIONS, 4, timeout_s=0.5)
        workspace.agree("first", 1)
        if rank != 0:
            # The host goes on at once, as on a GPU.
            with world.executor.stream(1):  # type: ignore[attr-defined]
                workspace.begin("second", 2)
                key = ("agree", workspace.context_key)
                args = (workspace.context(), 2)
                world.launch(agree_kernel, 1, args, key, num_warps=8, num_stages=1)
        error = error_of(lambda: leave(workspace))
        assert workspace.destroyed
        # Told once.
        workspace.destroy()
        return error

    return host


def leave_block(workspace: Workspace) -> None:
    with workspace:
        pass


@pytest.mark.parametrize("leave", [Workspace.destroy, leave_block])
def test_an_abort_of_the_last_call_is_told_by_leaving(
    leave: Callable[[Workspace], None],
) -> None:
    for seed in range(3):
        for rank, error in enumerate(run_checked(3, untold(leave), seed=seed)):
            assert isinstance(error, PeerError)
            assert error.rank == rank
            assert "The workspace is destroyed" in str(error)
            assert "reset()" not in str(error)


def test_a_reset_says_what_it_forgets(caplog: pytest.LogCaptureFixture) -> None:
    def reset_untold(workspace: Workspace) -> None:
        workspace.reset()
        workspace.destroy()
        raise PeerResetError

    class PeerResetError(KosmosError):
        pass

    assert len(run_checked(2, untold(reset_untold))) == 2
    [record] = [r for r in caplog.records if "reset() forgets a call" in r.getMessage()]
    assert "rank 1 of 2, last call second" in record.getMessage()


@pytest.mark.parametrize("resets", [False, True])
def test_leaving_or_resetting_after_an_error_that_was_told_is_quiet(
    resets: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def host(rank: int, world: World) -> bool:
        with Workspace(world, REGIONS, 4) as workspace:
            # The refusal itself has told rank 0.
            if rank == 0:
                workspace.fault(1, "refused")
            else:
                error_of(lambda: workspace.agree("hello", 1))
            if resets:
                workspace.reset()
        return workspace.destroyed

    assert run_checked(3, host, jump_clock=False) == [True] * 3
    assert not caplog.records


def test_after_a_reset_the_memory_is_released() -> None:
    def host(rank: int, world: World) -> None:
        workspace = Workspace(world, REGIONS, 4)
        if rank == 0:
            workspace.fault(1, "refused")
        error_of(lambda: workspace.agree("hello", 1))
        workspace.reset()
        workspace.destroy()
        assert not hasattr(workspace, "_signal")

    run_checked(2, host)


@pytest.mark.parametrize("goes_on", ["leaves", "calls"])
def test_an_exception_of_one_rank_is_told_to_those_that_stay(goes_on: str) -> None:
    def stay(rank: int, world: World) -> KosmosError:
        def block() -> None:
            with Workspace(world, REGIONS, 4) as workspace:
                workspace.agree("first", 1)
                if rank == 1:
                    raise KeyError("lost")
                if goes_on == "calls":
                    workspace.agree("second", 2)

        if rank != 1:
            return error_of(block)
        with pytest.raises(KeyError, match="lost"):
            block()
        return WorkspaceError("gone")

    for seed in range(3):
        # Nobody waits for the bound.
        errors = run_checked(3, stay, seed=seed, jump_clock=False)
        for error in (errors[0], errors[2]):
            assert type(error) is PeerFaultError
            assert error.raised_by == 1
            assert "rank 1 left the workspace by an exception" in str(error)


def test_an_exception_comes_through_where_nobody_can_be_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lost(*_: Any, **__: Any) -> None:
        raise RuntimeError("the device is lost")

    def host(rank: int, world: World) -> bool:
        workspace = Workspace(world, REGIONS, 4)
        world.barrier()
        monkeypatch.setattr(world, "launch", lost)
        with pytest.raises(KeyError, match="mine"), workspace:
            raise KeyError("mine")
        return workspace.destroyed

    assert run_checked(2, host) == [True, True]
    assert "cannot tell its peers of an exception: the device is lost" in caplog.text


def test_a_rank_that_never_leaves_is_named() -> None:
    def host(rank: int, world: World) -> KosmosError | None:
        workspace = Workspace(world, REGIONS, 4, timeout_s=0.5)
        return None if rank == 1 else error_of(workspace.destroy)

    errors = run_checked(3, host)
    for error in (errors[0], errors[2]):
        assert type(error) is PeerTimeoutError
        assert error.peer == 1
        assert "waited 600 s for rank 1" in str(error)
