"""`ag_gemm` on the CPU executor, all checks on: every choice, 1 to 8 ranks, odd shapes, views."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from kosmos_core.testing.schedules import Schedule
from kosmos_core.worlds import World
from kosmos_tpsp.cli.calls import Call, Wanted, compare
from kosmos_tpsp.cli.rig import Rig, Run, run_on_cpu
from kosmos_tpsp.ops import prepared
from kosmos_tpsp.ops.ag_gemm import AgGemmOptions, ag_gemm, describe_call, prepare_ag_gemm
from kosmos_tpsp.workspaces import TpSpWorkspace

OnCpu = Callable[..., list[Any]]
# (rows of a rank, n, k): ragged everywhere, several tile rows, fewer rows than a slice.
SHAPES = ((40, 40, 64), (5, 24, 40), (72, 8, 8))


def run(ranks: int, seed: int = 0, shapes: tuple[Any, ...] = SHAPES, **choices: Any) -> Run:
    """One schedule of calls of several shapes, each twice, in one workspace."""
    vendor, wgs = choices.pop("vendor", "nvidia"), choices.pop("wgs", 4)
    options = AgGemmOptions(**choices)
    calls = [
        Call(rows * ranks, n, k, data, options)
        for data, (rows, n, k) in enumerate((*shapes, *shapes[:1]))
    ]
    rig = Rig([*calls, calls[0]], seed)
    return run_on_cpu(ranks, rig, Schedule.draw(seed, ranks, wgs), wgs=wgs, vendor=vendor)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("transport", ["pull", "push"])
@pytest.mark.parametrize("layout", ["tn", "nn"])
def test_shapes_by_turns_in_one_workspace(ranks: int, transport: str, layout: str) -> None:
    found = run(ranks, seed=ranks, transport=transport, layout=layout)
    assert found.problems == []
    assert {verdict.transport for verdict in found.verdicts} == {transport}
    assert {verdict.path for verdict in found.verdicts} == {"fused"}


def test_eight_ranks() -> None:
    for seed, transport in enumerate(("pull", "push")):
        shapes = ((24, 24, 24), (8, 8, 16))
        assert run(8, seed, shapes, transport=transport, wgs=2).problems == []


@pytest.mark.parametrize("policy", ["one_way", "two_way", "fixed", "serial"])
@pytest.mark.parametrize("order", ["local_first", "chunk_major", "naive"])
def test_policies_and_orders(policy: str, order: str) -> None:
    for seed, transport in enumerate(("pull", "push")):
        found = run(3, seed, policy=policy, order=order, transport=transport)
        assert found.problems == []
        assert {v.launches for v in found.verdicts} == {2 if policy == "serial" else 1}


@pytest.mark.parametrize("split_k", [2, 4])
@pytest.mark.parametrize("layout", ["tn", "nn"])
def test_splits_of_the_contraction(split_k: int, layout: str) -> None:
    shapes = ((24, 40, 128), (40, 8, 264))
    for seed, vendor in enumerate(("nvidia", "amd")):
        found = run(2, seed, shapes, split_k=split_k, layout=layout, vendor=vendor)
        assert found.problems == []


@pytest.mark.parametrize("keep", [True, False])
def test_the_gathered_input_is_returned_or_not(keep: bool) -> None:
    for seed, (layout, transport) in enumerate(product(("tn", "nn"), ("pull", "push"))):
        found = run(3, seed, layout=layout, transport=transport, keep_gathered=keep)
        assert found.problems == []


@pytest.mark.parametrize("cap", [2, 3, 5])
def test_caps_and_crews(cap: int) -> None:
    for movers in (1, 2, 3):
        assert run(2, movers, cap=cap, wgs=5, movers_per_peer=movers).problems == []


@pytest.mark.parametrize("vendor", ["nvidia", "amd"])
def test_both_vendors_code(vendor: str) -> None:
    assert run(4, 5, vendor=vendor, layout="nn", policy="two_way").problems == []


@pytest.mark.parametrize("epoch", [2**31 - 2, -(2**31), -2])
def test_epochs_turn_over(epoch: int) -> None:
    calls = [Call(24 * 3, 16, 16, data) for data in range(6)]
    rig = Rig(calls, first_epoch=epoch)
    assert run_on_cpu(3, rig, Schedule.draw(9, 3, 4)).problems == []


def matrix(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(torch.bfloat16)


ROWS, N, K = 24, 24, 16

VIEWS: dict[str, tuple[Callable[[int], torch.Tensor], Callable[[int], torch.Tensor]]] = {
    "transposed": (
        lambda rank: matrix(K, ROWS, seed=rank).t(), lambda rank: matrix(K, N, seed=9 + rank).t()
    ),
    "wide rows": (
        lambda rank: matrix(ROWS, K + 8, seed=rank)[:, :K],
        lambda rank: matrix(N, 2 * K, seed=9 + rank)[:, ::2],
    ),
    "every second row": (
        lambda rank: matrix(2 * ROWS, K, seed=rank)[::2], lambda rank: matrix(N, K, seed=9 + rank)
    ),
    "odd offset": (
        lambda rank: matrix(ROWS * K + 1, seed=rank)[1:].view(ROWS, K),
        lambda rank: matrix(N * K + 3, seed=9 + rank)[3:].view(N, K),
    ),
    "one row repeated": (
        lambda rank: matrix(1, K, seed=rank).expand(ROWS, K),
        lambda rank: matrix(N, 1, seed=9 + rank).expand(N, K),
    ),
}  # fmt: skip


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("transport", ["pull", "push"])
def test_views_give_what_their_copies_give(view: str, transport: str, on_cpu: OnCpu) -> None:
    make_x, make_w = VIEWS[view]

    def host(rank: int, world: World) -> None:
        workspace = TpSpWorkspace(world, ROWS * world.size, K)
        x, w = make_x(rank), make_w(rank)
        assert not (x.is_contiguous() and w.is_contiguous() and x.data_ptr() % 16 == 0)
        out = ag_gemm(x, w, workspace, transport=transport)
        copied = ag_gemm(x.contiguous(), w.contiguous(), workspace, transport=transport)
        workspace.synchronize()
        gathered = torch.cat([make_x(r) for r in range(world.size)])
        assert compare(out, Wanted.of(gathered.double() @ w.double().t()))[1] == ""
        assert torch.equal(out, copied)

    on_cpu(3, host)


def test_the_input_may_be_overwritten_once_the_call_is_over(on_cpu: OnCpu) -> None:
    # Each rank refills the same tensor for every call: a peer that still pulled from it would get
    # rows of the next call.
    def host(rank: int, world: World) -> None:
        workspace = TpSpWorkspace(world, ROWS * world.size, K)
        x, w = torch.empty(ROWS, K, dtype=torch.bfloat16), matrix(N, K, seed=50 + rank)
        for step in range(4):
            x.copy_(matrix(ROWS, K, seed=10 * step + rank))
            out = ag_gemm(x, w, workspace, transport="pull")
            gathered = torch.cat([matrix(ROWS, K, seed=10 * step + r) for r in range(world.size)])
            assert compare(out, Wanted.of(gathered.double() @ w.double().t()))[1] == ""

    for seed in range(3):
        on_cpu(3, host, seed=seed)


def test_no_rows_launch_nothing_and_return_empty_outputs(on_cpu: OnCpu) -> None:
    def host(rank: int, world: World) -> list[tuple[int, ...]]:
        workspace = TpSpWorkspace(world, ROWS * world.size, K)
        launches = world.executor.stats["launches"]  # type: ignore[attr-defined]
        out = ag_gemm(matrix(0, K), matrix(N, K), workspace)
        kept = ag_gemm(matrix(0, K), matrix(K, N), workspace, layout="nn")
        assert world.executor.stats["launches"] == launches  # type: ignore[attr-defined]
        return [tuple(t.shape) for t in (out, *kept)]

    assert on_cpu(2, host) == [[(0, N), (0, N), (0, K)]] * 2


def test_rows_that_are_not_aligned_take_the_reference_path_on_every_rank(
    on_cpu: OnCpu, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared, "_LOGGED", set())

    def host(rank: int, world: World) -> str:
        workspace = TpSpWorkspace(world, ROWS * world.size, K)
        x, w = matrix(ROWS, 12, seed=rank), matrix(N, 12, seed=9 + rank)
        outs = [ag_gemm(x, w, workspace) for _ in range(3)]
        gathered = torch.cat([matrix(ROWS, 12, seed=r) for r in range(world.size)])
        for out in outs:
            assert isinstance(out, torch.Tensor)
            assert compare(out, Wanted.of(gathered.double() @ w.double().t()))[1] == ""
        ag_gemm(x[: ROWS // 2], w, workspace)
        # Fused calls go on before and after.
        fused = ag_gemm(matrix(ROWS, K, seed=rank), matrix(N, K), workspace)
        assert isinstance(fused, torch.Tensor)
        assert fused.isfinite().all()
        return str(describe_call(x, w, workspace, AgGemmOptions()).decline)

    with caplog.at_level(logging.WARNING, logger="kosmos_tpsp"):
        for reason in on_cpu(3, host):
            assert "rows of k = 12 bf16 elements are 24 bytes, not a multiple of 16" in reason
    said = [record for record in caplog.records if "takes the reference path" in record.message]
    # Once, however often, with however many rows and on however many ranks it is called.
    assert len(said) == 1


@pytest.mark.parametrize("k", [K, 12])
def test_no_result_requires_grad_fused_or_declined(k: int, on_cpu: OnCpu) -> None:
    def host(rank: int, world: World) -> str | None:
        workspace = TpSpWorkspace(world, ROWS * world.size, K)
        x, w = matrix(ROWS, k).requires_grad_(), matrix(N, k).requires_grad_()
        results = ag_gemm(x, w, workspace, keep_gathered=True)
        assert not any(result.requires_grad for result in results)
        return describe_call(x, w, workspace, AgGemmOptions(keep_gathered=True)).decline

    assert [reason is None for reason in on_cpu(2, host)] == [k == K] * 2


def test_prepare_makes_the_call_that_it_prepares(on_cpu: OnCpu) -> None:
    def host(rank: int, world: World) -> int:
        workspace = TpSpWorkspace(world, ROWS * world.size, K)
        prepare_ag_gemm(workspace, ROWS, N, K, AgGemmOptions(layout="nn"))
        prepared = len(workspace.prepared)
        ag_gemm(matrix(ROWS, K), matrix(K, N), workspace, layout="nn")
        assert len(workspace.prepared) == prepared
        return prepared

    assert on_cpu(2, host) == [1, 1]


def test_both_launches_of_a_serial_call_are_loaded_before_the_first_runs(
    on_cpu: OnCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a GPU that several ranks share, loading the second would wait for the first, which may wait
    # for a peer that has to load it too.
    steps: dict[int, list[tuple[str, Any]]] = {0: [], 1: []}

    def host(rank: int, world: World) -> None:
        workspace = TpSpWorkspace(world, 64, 64)
        launch = world.launch

        def load(kernel: Any, args: Any, key: Any, **rest: Any) -> None:
            steps[world.rank].append(("load", key))

        def note(kernel: Any, num_wgs: int, args: Any, key: Any, **rest: Any) -> None:
            steps[world.rank].append(("launch", key))
            launch(kernel, num_wgs, args, key, **rest)

        if rank == 0:
            monkeypatch.setattr(world, "load", load)
            monkeypatch.setattr(world, "launch", note)
        world.barrier()
        ag_gemm(
            torch.ones(32, 64).bfloat16(), torch.ones(8, 64).bfloat16(), workspace, policy="serial"
        )
        world.barrier()
        workspace.destroy()

    on_cpu(2, host)
    for made in steps.values():
        # What follows is the leaving of the workspace.
        (one, first), (two, second), *launched = made[:4]
        assert (one, two) == ("load", "load")
        assert first != second
        assert launched == [("launch", first), ("launch", second)]
