"""`bulk_column`: what one launch hands over to the next, on the executor with all checks on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kosmos_core.errors import ArgumentError, PeerError
from kosmos_core.executor import DataRace
from kosmos_core.testing.schedules import Schedule
from kosmos_core.worlds import World, cpu_world, reference_world
from kosmos_tpsp import (
    AgGemmOptions,
    BulkAgOptions,
    BulkColumnOptions,
    BulkRsOptions,
    GemmRsOptions,
    TpSpWorkspace,
    bulk_ag,
    bulk_column,
    bulk_rs,
)
from kosmos_tpsp.cli.calls import Call
from kosmos_tpsp.cli.rig import Rig, run_on_cpu

OnCpu = Callable[..., list[Any]]
Shape = tuple[int, int, int]
# (rows of a rank, n, k): what one call hands over does not fit the next, and fits it again.
SHAPES: tuple[Shape, ...] = ((40, 40, 16), (24, 72, 40), (5, 8, 24))


def column(ranks: int, shape: Shape, data: int, **choices: Any) -> Call:
    """A call of both ops in one."""
    rows, n, k = shape
    return Call(rows * ranks, n, k, data, BulkColumnOptions(**choices))


def between(ranks: int) -> list[Call]:
    """Calls of all other ops."""
    return [
        Call(24 * ranks, 40, 16, 7, AgGemmOptions(transport="push")),
        # Its tokens are k, and it pulls what the check puts into the handover.
        Call(24, 40, 24 * ranks, 7, BulkRsOptions()),
        Call(24 * ranks, 40, 16, 7, GemmRsOptions()),
        Call(24, 40, 24 * ranks, 7, BulkRsOptions(transport="push")),
        Call(24 * ranks, 40, 16, 7, BulkAgOptions(dx_to="handover")),
    ]


def run(ranks: int, calls: list[Call], seed: int, wgs: int = 4, **more: Any) -> None:
    found = run_on_cpu(ranks, Rig(calls, **more), Schedule.draw(seed, ranks, wgs), wgs=wgs)
    assert found.problems == []
    assert {v.path for v in found.verdicts} == {"fused"}
    repeats = [v.repeated for v in found.verdicts if v.repeated is not None]
    assert len(repeats) == ranks * (len(calls) - len(set(calls)))
    assert all(repeats)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("transport", ["pull", "push"])
def test_calls_one_after_another(ranks: int, transport: str) -> None:
    calls = [column(ranks, s, i, transport=transport) for i, s in enumerate(SHAPES)]
    for seed in range(2):
        run(ranks, [*calls, *calls], seed)


@pytest.mark.parametrize("policy", ["one_way", "two_way", "fixed", "serial"])
def test_policies_splits_and_caps(policy: str) -> None:
    for seed, (split_k, cap) in enumerate([(1, 2), (2, 3), (4, None)]):
        calls = [
            column(3, s, i, policy=policy, split_k=split_k, cap=cap) for i, s in enumerate(SHAPES)
        ]
        run(3, [*calls, calls[0]], seed)


@pytest.mark.parametrize("ranks", [2, 3])
def test_between_calls_of_all_other_ops(ranks: int) -> None:
    calls: list[Call] = []
    for i, other in enumerate(between(ranks)):
        calls += [column(ranks, SHAPES[i % 2], i % 2), other]
    for seed in range(3):
        run(ranks, [*calls, calls[0]], 10 + seed, 2 + seed)


def test_eight_ranks() -> None:
    calls = [column(8, s, i) for i, s in enumerate(SHAPES[:2])]
    run(8, [*calls, calls[0]], 5, 2)


def test_caps_that_differ_between_ranks() -> None:
    calls = [column(3, s, i) for i, s in enumerate(SHAPES)]
    for seed in range(3):
        run(3, [*calls, calls[0]], seed, 5, caps=(2, 5, 3))


def test_queued_launches() -> None:
    calls = [column(3, s, i) for i, s in enumerate(SHAPES)]
    run(3, [*calls, *calls], 3, queued=True)


def grads(
    rank: int, size: int, shape: Shape
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor, torch.Tensor]:
    """Operands of a rank; dx_shard and dw in FP64 of all ranks' operands."""
    rows, n, k = shape

    def of(r: int) -> tuple[torch.Tensor, ...]:
        source = torch.Generator().manual_seed(r)
        sizes = ((rows, n), (rows * size, k), (k, n))
        return tuple(torch.randn(s, generator=source).bfloat16() for s in sizes)

    everybody = [of(r) for r in range(size)]
    x = torch.cat([given[0] for given in everybody]).double()
    shard = sum(dy.double().chunk(size)[rank] @ w.double() for _, dy, w in everybody)
    assert isinstance(shard, torch.Tensor)
    return everybody[rank], shard, everybody[rank][1].double().t() @ x


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted).norm() / wanted.norm())


def test_main_grad_gathers_what_calls_add(on_cpu: OnCpu) -> None:
    def host(rank: int, world: World) -> None:
        given, shard, gradient = grads(rank, 3, SHAPES[0])
        with TpSpWorkspace(world, 192, 72) as workspace:
            held = torch.zeros(gradient.shape)
            for _ in range(2):
                got, dw = bulk_column(*given, workspace, main_grad=held)
                assert dw is None
                workspace.synchronize()
                assert error(got, shard) < 6e-3
            assert error(held, 2 * gradient) < 1e-5

    on_cpu(3, host)


def test_dx_is_handed_over_in_place(on_cpu: OnCpu) -> None:
    def host(rank: int, world: World) -> None:
        given, _, _ = grads(rank, 2, SHAPES[0])
        with TpSpWorkspace(world, 192, 72) as workspace:
            gathered, dx = bulk_ag(*given, workspace)
            assert workspace.is_handover(dx)
            shard, dw = bulk_rs(dx, given[1], gathered, workspace)
            again, same = bulk_column(*given, workspace)
            workspace.synchronize()
            assert torch.equal(shard, again)
            assert dw is not None
            assert same is not None
            assert torch.equal(dw, same)

    on_cpu(2, host)


def test_without_a_handover_dx_is_sent(on_cpu: OnCpu) -> None:
    def host(rank: int, world: World) -> None:
        given, shard, gradient = grads(rank, 3, SHAPES[0])
        with TpSpWorkspace(world, 192, 72, handover=False) as workspace:
            got, dw = bulk_column(*given, workspace)
            workspace.synchronize()
            assert error(got, shard) < 6e-3
            assert dw is not None
            assert error(dw, gradient) < 4e-3

    on_cpu(3, host)


def test_in_the_reference_world() -> None:
    given, shard, gradient = grads(0, 1, SHAPES[0])
    with TpSpWorkspace(reference_world(), 192, 72) as workspace:
        got, dw = bulk_column(*given, workspace)
        assert error(got, shard) < 4e-3
        assert dw is not None
        assert error(dw, gradient) < 4e-3


def test_bad_input_is_told_to_all(on_cpu: OnCpu) -> None:
    bad: tuple[tuple[dict[str, Any], str], ...] = (
        ({"policy": "both"}, "policy: got 'both'"),
        ({"crew": 3}, "crew: got a choice of this name"),
        ({"options": BulkRsOptions()}, "wanted BulkColumnOptions"),
        ({"cap": 1}, "cap: got 1"),
        ({"main_grad": torch.empty(16, 40).bfloat16()}, "main_grad: got torch.bfloat16"),
    )

    def host(rank: int, world: World) -> None:
        given, shard, _ = grads(rank, 4, SHAPES[0])
        workspace = TpSpWorkspace(world, 192, 72)
        for choices, text in bad:
            if rank == 2:
                with pytest.raises(ArgumentError, match=text):
                    bulk_column(*given, workspace, **choices)
            else:
                with pytest.raises(PeerError, match="rank 2 refused its call before launch"):
                    wait_for(given, workspace)
            workspace.reset()
        got, _ = bulk_column(*given, workspace)
        workspace.synchronize()
        assert error(got, shard) < 8e-3
        workspace.destroy()

    on_cpu(4, host)


def wait_for(given: tuple[torch.Tensor, ...], workspace: TpSpWorkspace) -> None:
    bulk_column(*given, workspace)
    workspace.synchronize()


def reduce(*given: Any, **memory: Any) -> None:
    bulk_rs(*given, **memory)
    given[-1].synchronize()


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_leaves_between_both_calls_is_named(victim: int) -> None:
    def host(rank: int, world: World) -> None:
        given, shard, _ = grads(rank, 3, SHAPES[0])
        workspace = TpSpWorkspace(world, 192, 72, timeout_s=0.5)
        out, held = torch.zeros(40, 40).bfloat16(), torch.zeros(16, 40)
        gathered, dx = bulk_ag(*given, workspace)
        if rank != victim:
            with pytest.raises(PeerError) as caught:
                reduce(dx, given[1], gathered, workspace, out=out, main_grad=held)
            assert victim in (caught.value.peer, caught.value.raised_by)
            assert out.isnan().all()
        world.barrier()
        workspace.reset()
        got, _ = bulk_column(*given, workspace)
        workspace.synchronize()
        assert error(got, shard) < 8e-3
        workspace.destroy()

    schedule = Schedule.draw(victim, 3, 4)
    with cpu_world(3, **schedule.options()) as world:
        world.spmd(host, world)


def test_what_an_earlier_call_handed_over_is_refused_as_is_a_view_of_the_last(
    on_cpu: Callable[..., list[Any]],
) -> None:
    def host(rank: int, world: World) -> list[str]:
        x, dy, w = (torch.ones(s).bfloat16() for s in ((8, 24), (16, 16), (16, 24)))
        said = []
        with TpSpWorkspace(world, 16, 24) as workspace:
            gathered, first = bulk_ag(x, dy, w, workspace)
            _, last = bulk_ag(x, dy + 1, w, workspace)
            # The first one holds what the last call made.
            for dx in (first, last.view(16, 24), last[2:]):
                with pytest.raises(ArgumentError) as refused:
                    bulk_rs(dx, dy, gathered, workspace)
                said.append(str(refused.value).split(",")[0])
                workspace.world.barrier()
                workspace.reset()
            _, last = bulk_ag(x, dy, w, workspace)
            shard, _ = bulk_rs(last, dy, gathered, workspace)
            workspace.synchronize()
            assert shard.eq(32).all()
        return said

    wanted = "dx: got memory of the handover that bulk_ag did not give last"
    assert on_cpu(2, host) == [[wanted] * 3] * 2


@pytest.mark.parametrize("waits", [False, True])
def test_a_caller_that_writes_to_what_was_handed_over_races_with_peers(waits: bool) -> None:
    def host(rank: int, world: World) -> None:
        x, dy, w = (torch.ones(s).bfloat16() for s in ((40, 40), (120, 16), (16, 40)))
        workspace = TpSpWorkspace(world, 120, 40)
        for _ in range(2):
            gathered, dx = bulk_ag(x, dy, w, workspace)
            shard, _ = bulk_rs(dx, dy, gathered, workspace)
            workspace.synchronize()
            if waits:
                # Whoever makes another call has left those before it.
                workspace.agree("between", 0)
            dx.zero_()
            assert shard.eq(48).all()
        workspace.destroy()

    for seed in range(2):
        schedule = Schedule.draw(seed, 3, 3)
        with cpu_world(3, wgs=3, jump_clock=False, **schedule.options()) as world:
            if waits:
                world.spmd(host, world)
            else:
                with pytest.raises(DataRace, match="handover"):
                    world.spmd(host, world)
