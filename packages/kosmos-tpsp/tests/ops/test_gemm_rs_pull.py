"""What `gemm_rs` leaves in its staging region, and what may be in the data that it polls there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from kosmos_core.device import gemm, sentinel
from kosmos_core.device.layout import STAGING
from kosmos_core.errors import ArgumentError, PeerError
from kosmos_core.executor import Deadlock, Mutation
from kosmos_core.testing.schedules import Schedule
from kosmos_core.worlds import World, cpu_world
from kosmos_tpsp import GemmRsOptions, TpSpWorkspace, ag_gemm, gemm_rs
from kosmos_tpsp.cli.calls import Call
from kosmos_tpsp.cli.rig import Rig, run_on_cpu
from kosmos_tpsp.device import staging
from kosmos_tpsp.ops.gemm_rs import describe_gemm_rs

OnCpu = Callable[..., list[Any]]
PATTERN = int(sentinel.SENTINEL.value)
# (rows of a rank, n): they shrink and grow, so that a half has been filled by a larger call.
SHAPES = ((40, 64), (8, 24), (24, 40), (40, 64), (16, 8))
K = 16


def operands(rank: int, m: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(1000 * rank + m + n)
    x = torch.randn(m, K, generator=source).bfloat16()
    return x, torch.randn(n, K, generator=source).bfloat16()


def written(workspace: TpSpWorkspace, half: int) -> int:
    """Elements of a half that hold something; they are its first."""
    bits = workspace.buffer(int(STAGING.value) + half).view(torch.int16)
    there = (bits != PATTERN).nonzero()
    count = len(there)
    assert count == 0 or int(there.max()) == count - 1
    return count


def test_one_half_holds_the_last_call_and_the_other_one_nothing(on_cpu: OnCpu) -> None:
    def host(rank: int, world: World) -> None:
        workspace = TpSpWorkspace(world, 40 * world.size, 64, reduce_transports=("pull",))
        assert [written(workspace, half) for half in (0, 1)] == [0, 0]
        for turn, (rows, n) in enumerate(SHAPES):
            m = rows * world.size
            x, w = operands(rank, m, n)
            policy = ("one_way", "fixed", "serial")[turn % 3]
            gemm_rs(x, w, workspace, policy=policy)
            workspace.synchronize()
            # A call in between changes nothing.
            ag_gemm(x[:rows], w, workspace)
            workspace.synchronize()
            # Peers poison and fill their own memory only.
            assert written(workspace, turn & 1) == m * n
            assert written(workspace, 1 - turn & 1) == 0
            world.barrier()
        workspace.destroy()

    for seed in range(4):
        on_cpu(3, host, seed=seed)


def test_both_transports_give_the_same_bits(on_cpu: OnCpu) -> None:
    def host(rank: int, world: World) -> None:
        workspace = TpSpWorkspace(world, 160, 64, reduce_transports=("pull", "push"))
        for rows, n in SHAPES:
            x, w = operands(rank, rows * world.size, n)
            pulled = gemm_rs(x, w, workspace, transport="pull")
            assert torch.equal(pulled, gemm_rs(x, w, workspace, transport="push"))
        workspace.destroy()

    on_cpu(4, host)


def test_after_an_abort_a_reset_poisons_both_halves(on_cpu: OnCpu) -> None:
    def host(rank: int, world: World) -> None:
        workspace = TpSpWorkspace(world, 120, 64, reduce_transports=("pull",), timeout_s=0.5)
        x, w = operands(rank, 120, 64)
        first = gemm_rs(x, w, workspace)
        workspace.synchronize()
        world.barrier()
        if rank != 2:
            gemm_rs(x, w, workspace)
            with pytest.raises(PeerError):
                workspace.synchronize()
        world.barrier()
        workspace.reset()
        assert [written(workspace, half) for half in (0, 1)] == [0, 0]
        for _ in range(3):
            assert torch.equal(gemm_rs(x, w, workspace), first)
        workspace.destroy()

    on_cpu(3, host, jump_clock=True)


# Matrix units that hand on a NaN as it came in: every product with one has the sentinel's bits.
PASSES_NAN_ON = Mutation(
    gemm.gemm_step,
    "return tl.dot(a, b, acc)",
    "acc = tl.dot(a, b, acc)\n    return tl.where(acc != acc, "
    f"tl.full((BLOCK_M, BLOCK_N), {PATTERN << 16}, tl.int32).to(tl.float32, bitcast=True), acc)",
)
# Such a NaN cut to its upper half, as hardware may round it, instead of made quiet.
NOT_MADE_QUIET = Mutation(
    sentinel.result_bits, "QUIET_NAN, bits", "value.to(tl.int32, bitcast=True) >> 16, bits"
)


@pytest.mark.parametrize("vendor", ["nvidia", "amd"])
def test_no_partial_sum_looks_like_the_sentinel(vendor: str) -> None:
    def host(rank: int, world: World) -> torch.Tensor:
        workspace = TpSpWorkspace(world, 48, 32, reduce_transports=("pull",))
        x, w = operands(rank, 48, 32)
        if rank == 1:
            x[33, 5] = float("nan")
        out = gemm_rs(x, w, workspace)
        workspace.synchronize()
        workspace.destroy()
        return out

    def run(*mutations: Mutation) -> list[torch.Tensor]:
        options = Schedule.draw(5, 3, 4).options()
        with cpu_world(3, vendor=vendor, jump_clock=False, mutations=mutations, **options) as world:
            return world.spmd(host, world)

    for outs in (run(), run(PASSES_NAN_ON)):
        rows = torch.cat(outs).isfinite().all(1).tolist()
        assert rows == [row != 33 for row in range(48)]
    with pytest.raises(Deadlock, match="staging"):
        run(PASSES_NAN_ON, NOT_MADE_QUIET)


def test_who_only_pushes_pays_nothing_for_pulling(on_cpu: OnCpu) -> None:
    def host(rank: int, world: World) -> None:
        workspace = TpSpWorkspace(world, 48, 32)
        assert workspace.reduce_transports == ("push",)
        assert "staging" not in [region.name for region in workspace.regions]
        x, w = operands(rank, 48, 32)
        with pytest.raises(ArgumentError, match="transport: got 'pull', wanted one of push"):
            gemm_rs(x, w, workspace, transport="pull")
        workspace.reset()
        workspace.destroy()

    on_cpu(2, host)
    push = TpSpWorkspace.required_bytes(8, 8192, 4096, "h200")
    both = TpSpWorkspace.required_bytes(8, 8192, 4096, "h200", reduce_transports=("pull",))
    # Two halves with room for the products of all rows.
    assert both - push == 2 * 8192 * 4096 * 2
    # The rules of this machine pull.
    assert TpSpWorkspace.required_bytes(8, 8192, 4096, "mi350x") == (
        TpSpWorkspace.required_bytes(8, 8192, 4096, "mi350x", ("pull", "push"), ("pull", "push"))
    )


@pytest.mark.parametrize("machine", ["executor", "mi350x"])
def test_the_machine_chooses_the_transport(machine: str, on_cpu: OnCpu) -> None:
    def host(rank: int, world: World) -> str:
        workspace = TpSpWorkspace(world, 48, 32, machine=machine)
        x, w = operands(rank, 48, 32)
        chosen = describe_gemm_rs(x, w, workspace, GemmRsOptions()).plan.transport
        workspace.destroy()
        return str(chosen)

    wanted = "pull" if machine == "mi350x" else "push"
    assert on_cpu(2, host) == [wanted] * 2


@pytest.mark.parametrize(
    "early",
    [
        # When some of its elements are there; when those of the first rank polled are.
        Mutation(sentinel.data_add, "num_missing(bits) == 0", "num_missing(bits) < bits[0].numel"),
        Mutation(sentinel.num_missing, "static_range(1, len(bits))", "static_range(1, 1)"),
        # When what another rank is to add up is there.
        Mutation(staging.pull_unit, "call.rank.to(tl.int64)", "(1 - call.rank).to(tl.int64)"),
    ],
    ids=["some", "first rank", "another rank's"],
)
def test_a_unit_added_up_before_all_of_it_is_there_would_show(early: Mutation) -> None:
    calls = [Call(80, 40, 16, data, GemmRsOptions(transport="pull")) for data in range(4)]
    schedule = replace(Schedule.draw(0, 2, 4), weak="random")
    assert run_on_cpu(2, Rig(calls), schedule).problems == []
    found = run_on_cpu(2, Rig(calls), schedule, mutations=[early]).problems
    assert found
    assert "rows wrong" in found[0]
