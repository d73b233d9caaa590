"""The workspace of the TP+SP operations: what it takes, how it is shared, that it is let go."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from kosmos_core.errors import WorkspaceError
from kosmos_core.worlds import SymmetricBuffer, World
from kosmos_heuristics import HeuristicsError, load_machine
from kosmos_tpsp.cli.calls import Call, Operands, compare_all
from kosmos_tpsp.ops.ag_gemm import AgGemmOptions
from kosmos_tpsp.workspaces import TpSpWorkspace

OnCpu = Callable[..., list[Any]]


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("transports", [("pull", "push"), ("push",), ("pull",)])
@pytest.mark.parametrize("reduces", [None, ("pull",)])
@pytest.mark.parametrize(("tokens", "features"), [(96, 24), (1000, 8), (8, 200)])
def test_the_bytes_are_known_beforehand(
    size: int,
    transports: tuple[str, ...],
    reduces: tuple[str, ...] | None,
    tokens: int,
    features: int,
    on_cpu: OnCpu,
) -> None:
    def host(rank: int, world: World) -> tuple[int, int]:
        memory = world.executor.memory  # type: ignore[attr-defined]
        before = set(map(id, memory.regions))
        workspace = TpSpWorkspace(
            world, tokens, features, transports=transports, reduce_transports=reduces
        )
        world.barrier()
        # The status word lives in the host's memory.
        mine = [
            region.nbytes
            for region in memory.regions
            if id(region) not in before and region.rank == rank and region.name != "status"
        ]
        world.barrier()
        return workspace.num_bytes(), sum(mine)

    wanted = TpSpWorkspace.required_bytes(size, tokens, features, "executor", transports, reduces)
    assert on_cpu(size, host) == [(wanted, wanted)] * size


def test_push_alone_costs_less() -> None:
    both = TpSpWorkspace.required_bytes(8, 8192, 4096, "h200")
    push = TpSpWorkspace.required_bytes(8, 8192, 4096, "h200", ("push",))
    # Two shards of an eighth of the rows each.
    assert both - push == 2 * (8192 // 8) * 4096 * 2


def test_the_handover_is_one_piece_of_memory_that_calls_know_again(on_cpu: OnCpu) -> None:
    def host(rank: int, world: World) -> list[bool]:
        with TpSpWorkspace(world, 64, 24) as workspace:
            large, small = workspace.handover(64, 24), workspace.handover(6, 8)
            large.fill_(rank)
            assert small.shape == (6, 8)
            assert small.eq(rank).all()
            with pytest.raises(WorkspaceError, match=r"handover: got 1536 elements, wanted room"):
                workspace.handover(65, 24)
            given = (large, small, small.clone(), large[1:], small.t(), small[:, :4])
            return [workspace.is_handover(t) for t in given]

    # The last one given, and no other view of the same memory.
    assert on_cpu(2, host) == [[False, True, False, False, False, False]] * 2

    def alone(rank: int, world: World) -> bool:
        with TpSpWorkspace(world, 64, 24) as workspace:
            first, second = workspace.handover(8, 8), workspace.handover(8, 8)
            return first.data_ptr() != second.data_ptr() and not workspace.is_handover(first)

    # Nobody reads it there: a tensor as any other.
    assert on_cpu(1, alone) == [True]


def right(rank: int, workspace: TpSpWorkspace, call: Call, seed: int = 0) -> bool:
    """Makes a call and checks it."""
    operands = Operands(seed, workspace.world.size, torch.device("cpu"))
    outs = call.driver.call(operands.given(call, rank), workspace, {}, call.options)
    workspace.synchronize()
    return compare_all(outs, operands.wanted(call, rank))[1] == ""


def test_two_workspaces_are_used_by_turns(on_cpu: OnCpu) -> None:
    calls = [
        Call(24 * 3, 16, 16, 0, AgGemmOptions(transport="pull")),
        Call(40 * 3, 24, 8, 1, AgGemmOptions(layout="nn", transport="push")),
        Call(8 * 3, 8, 24, 2),
    ]

    def host(rank: int, world: World) -> bool:
        one = TpSpWorkspace(world, 40 * 3, 24)
        two = TpSpWorkspace(world, 40 * 3, 24, first_epoch=7)
        found = []
        for i, call in enumerate(calls * 3):
            found.append(right(rank, one if i % 3 else two, call))
            found.append(right(rank, two, call, seed=1))
        one.destroy()
        found.append(right(rank, two, calls[0]))
        two.destroy()
        return all(found)

    for seed in range(3):
        assert on_cpu(3, host, seed=seed) == [True] * 3


def test_destroying_twice_is_destroying_once(on_cpu: OnCpu) -> None:
    def host(rank: int, world: World) -> None:
        workspace = TpSpWorkspace(world, 48, 16)
        assert not workspace.destroyed
        assert right(rank, workspace, Call(48, 16, 16))
        workspace.destroy()
        workspace.destroy()
        assert workspace.destroyed
        workspace.check()
        workspace.synchronize()
        with pytest.raises(WorkspaceError, match="destroyed"):
            workspace.ensure_usable()

    on_cpu(2, host)


def test_a_context_manager_destroys_at_its_end(on_cpu: OnCpu) -> None:
    def host(rank: int, world: World) -> None:
        with TpSpWorkspace(world, 48, 16) as workspace:
            assert not workspace.destroyed
        assert workspace.destroyed
        # A second one after it is ordinary.
        with TpSpWorkspace(world, 48, 16) as again:
            assert isinstance(again, TpSpWorkspace)
            assert right(rank, again, Call(48, 16, 16))

    on_cpu(2, host)


def test_an_exception_inside_the_context_is_not_hidden_and_nobody_is_waited_for(
    on_cpu: OnCpu,
) -> None:
    def host(rank: int, world: World) -> str:
        if rank == 0:
            with pytest.raises(ZeroDivisionError), TpSpWorkspace(world, 48, 16) as workspace:
                _ = 1 // 0
            assert workspace.destroyed
        else:
            # This rank never destroys its own: the other must not wait for it.
            workspace = TpSpWorkspace(world, 48, 16)
        return "over"

    assert on_cpu(2, host, jump_clock=False) == ["over", "over"]


def test_a_reset_starts_again_in_any_state(on_cpu: OnCpu) -> None:
    def host(rank: int, world: World) -> bool:
        workspace = TpSpWorkspace(world, 72, 16, first_epoch=2**31 - 1)
        found = []
        for step in range(4):
            found += [right(rank, workspace, Call(72, 16, 16, data)) for data in range(step)]
            workspace.reset()
        return all(found)

    assert on_cpu(3, host) == [True] * 3


def test_all_ranks_plan_with_the_first_ranks_machine(on_cpu: OnCpu) -> None:
    def host(rank: int, world: World) -> str:
        name = "h200" if rank == 0 else "mi350x"
        return TpSpWorkspace(world, 48, 16, machine=name).machine.name

    assert on_cpu(3, host) == [load_machine("h200").name] * 3


class OfAnotherKind(TpSpWorkspace):
    """Takes the same arguments, and is not the same."""


EQUAL: dict[str, Any] = {"max_tokens": 48, "max_features": 16}
OTHERS: dict[str, dict[str, Any]] = {
    "max_tokens": {"max_tokens": 12800},
    "max_features": {"max_features": 24},
    "transports": {"transports": ("push",)},
    "reduce_transports": {"reduce_transports": ("pull",)},
    "timeout_s": {"timeout_s": 5.0},
    "first_epoch": {"first_epoch": 2},
    "kind": {},
}


@pytest.mark.parametrize("name", OTHERS)
def test_ranks_that_create_different_workspaces_are_refused_before_they_share_memory(
    name: str, on_cpu: OnCpu
) -> None:
    def host(rank: int, world: World) -> None:
        memory = world.executor.memory  # type: ignore[attr-defined]
        before = len(memory.regions)
        kind, other = (OfAnotherKind, OTHERS[name]) if rank == 1 else (TpSpWorkspace, {})
        if name != "kind":
            kind = TpSpWorkspace
        with pytest.raises(WorkspaceError, match=rf"^{name}: got .* on ranks \[1\]"):
            kind(world, **{**EQUAL, **other})
        assert len(memory.regions) == before
        # The order of transports and the number type of a bound make no difference.
        transports = ("push", "pull") if rank else ("pull", "push")
        workspace = TpSpWorkspace(
            world, **EQUAL, transports=transports, reduce_transports=transports,
            timeout_s=120 if rank else 120.0,
        )  # fmt: skip
        assert right(rank, workspace, Call(48, 16, 16))

    on_cpu(3, host, jump_clock=False)


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ({"max_tokens": -1}, "max_tokens: got -1"),
        ({"max_tokens": 64.0}, "max_tokens: got 64.0, wanted an integer"),
        ({"first_epoch": 1.5}, "first_epoch: got 1.5, wanted an integer"),
        ({"trace_events": -1}, "trace_events: got -1, wanted 0 or more"),
        ({"transports": ("fly",)}, "transports: got"),
        ({"transports": "push"}, "transports: got 'push'"),
        ({"transports": None}, "transports: got None"),
        ({"timeout_s": "5"}, "timeout_s: got '5', wanted a number"),
        ({"reduce_transports": ()}, "reduce_transports: got ()"),
        ({"machine": "abacus"}, "abacus"),
    ],
)
def test_a_rank_that_refuses_its_workspace_tells_the_others(
    bad: dict[str, Any], told: str, on_cpu: OnCpu
) -> None:
    def host(rank: int, world: World) -> str:
        with pytest.raises((WorkspaceError, HeuristicsError)) as caught:
            TpSpWorkspace(world, **{**EQUAL, **(bad if rank == 1 else {})})
        return str(caught.value)

    zero, one, two = on_cpu(3, host, jump_clock=False)
    assert told in one
    assert zero == two == f"workspace: rank 1 refused to create it: {one}"


def test_the_bytes_of_partials_are_counted_and_bounded(
    on_cpu: OnCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 2 * 16 * 16 fp32 elements and no more.
    machine = replace(load_machine("executor"), max_split_k_bytes=4 * 2 * 16 * 16)

    def host(rank: int, world: World) -> None:
        workspace = TpSpWorkspace(world, 48, 16, machine=machine)
        least = workspace.num_bytes()
        assert least == workspace.required_bytes(1, 48, 16, machine)
        # The stand-in for none is there from the start: a call in a graph capture may not make it.
        monkeypatch.setattr(type(world), "is_capturing", lambda _: True)
        workspace.reserve_partials(1, 1, 16, 16)
        with pytest.raises(WorkspaceError, match="allocated during graph capture"):
            workspace.reserve_partials(1, 2, 16, 16)
        monkeypatch.undo()
        assert workspace.num_bytes() == least
        workspace.reserve_partials(1, 2, 16, 16)
        # The smaller one is kept for graphs that were captured with it.
        assert workspace.num_bytes() == least + machine.max_split_k_bytes
        with pytest.raises(WorkspaceError, match="take 4096 bytes, wanted at most 2048"):
            workspace.reserve_partials(2, 2, 16, 16)

    on_cpu(1, host)


class Counted(World):
    """A group of one whose memory is counted as long as anybody holds it."""

    machine = "executor"

    def __init__(self) -> None:
        super().__init__(1)
        self.alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
        self.made = 0

    def _make(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        made = torch.empty(num_elements, dtype=dtype)
        self.alive.add(made)
        self.made += 1
        return made

    @property
    def rank(self) -> int:
        return 0

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def num_wgs(self) -> int:
        return 2

    def symmetric(self, name: str, num_elements: int, dtype: torch.dtype) -> SymmetricBuffer:
        made = self._make(num_elements, dtype)
        return SymmetricBuffer(name, made, (made.data_ptr(),))

    def local(self, name: str, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        return self._make(num_elements, dtype)

    def host_visible(self, num_words: int) -> torch.Tensor:
        return self._make(num_words, torch.int64).zero_()

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


CYCLES = 200


def test_nothing_is_left_of_200_destroyed_workspaces() -> None:
    world = Counted()
    # Whoever still holds a destroyed workspace holds none of its memory.
    held = []
    for _ in range(CYCLES):
        workspace = TpSpWorkspace(world, 1024, 64, trace_events=8)
        workspace.reserve_partials(4, 2, 16, 16)
        workspace.destroy()
        held.append(workspace)
    gc.collect()
    assert world.made >= 8 * CYCLES
    # The status word, which the host reads even afterwards, is 8 bytes.
    left = [tensor for tensor in world.alive if tensor.numel() > 1]
    assert len(left) == 0


def test_a_world_without_room_for_a_mover_beside_a_builder_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Counted, "num_wgs", 1)
    with pytest.raises(WorkspaceError, match="world: got 1 workgroups, wanted at least 2"):
        TpSpWorkspace(Counted(), 64, 64)


def test_nothing_is_left_of_a_workspace_that_nobody_holds() -> None:
    world = Counted()
    for _ in range(CYCLES):
        TpSpWorkspace(world, 1024, 64)
    gc.collect()
    assert len(world.alive) == 0


def test_a_workspace_that_is_held_is_found() -> None:
    # What the two tests above count with would see a leak.
    world = Counted()
    held = TpSpWorkspace(world, 1024, 64)
    gc.collect()
    assert len(world.alive) >= 7
    assert not held.destroyed
