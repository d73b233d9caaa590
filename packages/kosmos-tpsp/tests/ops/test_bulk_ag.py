"""`bulk_ag` on the CPU executor, all checks on: every choice, 1 to 8 ranks, hand-over, aborts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from kosmos_core.device.barrier import call_clean, call_enter, call_leave, start_hold, start_publish
from kosmos_core.device.layout import HANDOVER, PHASE_REDUCE
from kosmos_core.device.mover import copy_run
from kosmos_core.device.peers import peer_ptr
from kosmos_core.errors import ArgumentError, PeerError, WorkspaceError
from kosmos_core.executor import DataRace, Mutation
from kosmos_core.testing.schedules import Schedule
from kosmos_core.worlds import World, cpu_world, reference_world
from kosmos_tpsp import (
    AgGemmOptions,
    BulkAgOptions,
    GemmRsOptions,
    TpSpWorkspace,
    bulk_ag,
    prepare_bulk_ag,
    reference,
)
from kosmos_tpsp.cli.calls import Call
from kosmos_tpsp.cli.expiry import BOUNDS_US, Expiry, expire_on_cpu
from kosmos_tpsp.cli.killed import trouble_on_cpu
from kosmos_tpsp.cli.rig import Rig, run_on_cpu
from kosmos_tpsp.cli.trouble import KINDS, Trouble
from kosmos_tpsp.device import beside
from kosmos_tpsp.ops.bulk_ag import describe_bulk_ag

OnCpu = Callable[..., list[Any]]
# (rows of a rank, n, k): ragged everywhere, fewer rows than a unit, several tile rows.
SHAPES = ((40, 72, 64), (5, 24, 40), (72, 8, 8), (40, 72, 64))
# Their rows and sums land in the same memory.
OTHERS = (AgGemmOptions(transport="push"), GemmRsOptions(), AgGemmOptions(transport="pull"))


def run(ranks: int, seed: int = 0, wgs: int = 4, vendor: str = "nvidia", **choices: Any) -> None:
    """Calls of several shapes, the first once more on its data, with other ops between them."""
    options = BulkAgOptions(**choices)
    calls = []
    for i, (rows, n, k) in enumerate(SHAPES):
        calls.append(Call(rows * ranks, n, k, i % 3, options))
        calls.append(Call(8 * ranks, 16, 24, i, OTHERS[i % len(OTHERS)]))
    found = run_on_cpu(
        ranks, Rig([*calls, calls[0]]), Schedule.draw(seed, ranks, wgs), wgs=wgs, vendor=vendor
    )
    assert found.problems == []
    assert {verdict.path for verdict in found.verdicts} == {"fused"}
    assert any(verdict.repeated for verdict in found.verdicts)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("transport", ["pull", "push"])
@pytest.mark.parametrize("dx_to", ["handover", "tensor"])
def test_shapes_and_transports(ranks: int, transport: str, dx_to: str) -> None:
    run(ranks, seed=ranks, transport=transport, dx_to=dx_to)


@pytest.mark.parametrize("policy", ["one_way", "two_way", "fixed", "serial"])
@pytest.mark.parametrize("vendor", ["nvidia", "amd"])
def test_policies(policy: str, vendor: str) -> None:
    for seed, transport in enumerate(("pull", "push", "pull")):
        run(3, seed, policy=policy, vendor=vendor, transport=transport)


@pytest.mark.parametrize(("split_k", "wgs"), list(product([1, 2, 4], [2, 5])))
def test_split_tiles_and_caps(split_k: int, wgs: int) -> None:
    run(2, split_k, wgs, split_k=split_k)
    run(3, split_k, 6, split_k=split_k, cap=wgs)


@pytest.mark.parametrize("transport", ["pull", "push"])
def test_eight_ranks(transport: str) -> None:
    run(8, 3, transport=transport)


def test_many_schedules() -> None:
    for seed in range(6):
        run(2 + seed % 3, 100 + seed, 2 + seed % 4)


def test_a_declined_call_gives_ordinary_tensors(on_cpu: OnCpu) -> None:
    def host(rank: int, world: World) -> None:
        with TpSpWorkspace(world, 64, 32) as workspace:
            x, dy, w = torch.ones(8, 20), torch.ones(16, 16), torch.full((16, 20), 2.0)
            given = [t.bfloat16() * (rank + 1) for t in (x, dy, w)]
            gathered, dx = bulk_ag(*given, workspace)
            assert describe_bulk_ag(*given, workspace, BulkAgOptions()).decline is not None
            assert not workspace.holds(dx)
            assert gathered[:, 3].tolist() == [1.0] * 8 + [2.0] * 8
            assert dx.tolist() == [[32.0 * (rank + 1) ** 2] * 20] * 16

    on_cpu(2, host)


def test_no_rows_are_no_error(on_cpu: OnCpu) -> None:
    def host(rank: int, world: World) -> None:
        with TpSpWorkspace(world, 64, 32) as workspace:
            empty = torch.empty(0, 16).bfloat16()
            gathered, dx = bulk_ag(empty, empty, torch.ones(16, 16).bfloat16(), workspace)
            assert gathered.shape == dx.shape == (0, 16)
            ones = torch.ones(8, 16).bfloat16()
            gathered, dx = bulk_ag(ones, ones.repeat(2, 1), ones.repeat(2, 1), workspace)
            workspace.synchronize()
            assert (gathered.tolist(), dx.tolist()) == ([[1.0] * 16] * 16, [[16.0] * 16] * 16)

    on_cpu(2, host)


@pytest.mark.parametrize("special", [float("nan"), float("inf")])
def test_what_is_no_number_stays_where_it_belongs(special: float, on_cpu: OnCpu) -> None:
    def host(rank: int, world: World) -> tuple[list[int], list[int]]:
        with TpSpWorkspace(world, 64, 32) as workspace:
            x, dy, w = (torch.ones(s).bfloat16() for s in ((32, 32), (64, 16), (16, 32)))
            if rank == 1:
                x[5, 7] = dy[33, 5] = special
            gathered, dx = bulk_ag(x, dy, w, workspace)
            workspace.synchronize()
            bad = [(~t.isfinite()).any(1).nonzero().flatten().tolist() for t in (gathered, dx)]
            return bad[0], bad[1]

    assert on_cpu(2, host) == [([37], []), ([37], [33])]


def test_dx_lies_where_it_is_wanted(on_cpu: OnCpu) -> None:
    def host(rank: int, world: World) -> None:
        x, dy, w = (torch.ones(s).bfloat16() for s in ((8, 24), (16, 16), (16, 24)))
        with TpSpWorkspace(world, 16, 24) as workspace:
            _, dx = bulk_ag(x, dy, w, workspace)
            assert workspace.is_handover(dx)
            assert workspace.holds(dx)
            assert dx.data_ptr() == workspace.handover(16, 24).data_ptr()
            gathered, out = torch.empty(16, 24).bfloat16(), torch.empty(16, 24).bfloat16()
            made = bulk_ag(x, dy, w, workspace, gathered=gathered, out=out, dx_to="tensor")
            assert (made[0] is gathered, made[1] is out) == (True, True)
            workspace.synchronize()
            assert out.tolist() == dx.tolist() == [[16.0] * 24] * 16
        with TpSpWorkspace(world, 16, 24, handover=False) as workspace:
            assert not workspace.holds(bulk_ag(x, dy, w, workspace)[1])
            with pytest.raises(WorkspaceError, match="handover: got none"):
                bulk_ag(x, dy, w, workspace, dx_to="handover")
            # The peers are told of that, too.
            world.barrier()
            workspace.reset()

    on_cpu(2, host)


def test_memory_that_dx_goes_to_is_refused(on_cpu: OnCpu) -> None:
    def host(rank: int, world: World) -> None:
        with TpSpWorkspace(world, 16, 16) as workspace:
            x, dy, w = (torch.ones(s).bfloat16() for s in ((8, 16), (16, 16), (16, 16)))
            handed, both = workspace.handover(16, 16), torch.empty(16, 16).bfloat16()
            mine = handed.chunk(2)[rank]
            for text, given, memory in (
                ("x: got memory of", (mine, dy, w), {}),
                ("dy: got memory of", (x, handed, w), {}),
                ("w: got memory of", (x, dy, handed), {}),
                ("gathered: got memory of", (x, dy, w), {"gathered": handed}),
                (
                    "out: got memory that x or dy or w or gathered",
                    (x, dy, w),
                    {"gathered": both, "out": both, "dx_to": "tensor"},
                ),
            ):
                with pytest.raises(ArgumentError, match=text):
                    bulk_ag(*given, workspace, **memory)
                world.barrier()
                workspace.reset()
            # Copied, or with dx elsewhere, it is an operand like any other.
            _, dx = bulk_ag(x, dy, w, workspace)
            bulk_ag(x, dx.t(), w, workspace)
            _, out = bulk_ag(dx.chunk(2)[rank], dx, w, workspace, dx_to="tensor")
            workspace.synchronize()
            assert out.tolist() == [[16.0**3] * 16] * 16

    on_cpu(2, host)


def test_one_rank_and_the_reference_world_hand_nothing_over() -> None:
    x, dy, w = (torch.ones(s).bfloat16() for s in ((8, 24), (8, 16), (16, 24)))
    with TpSpWorkspace(reference_world(), 16, 24) as workspace:
        gathered, dx = bulk_ag(x, dy, w, workspace, dx_to="handover")
    assert torch.equal(gathered, x)
    assert torch.equal(dx, dy @ w)
    again = reference.bulk_ag(x, dy, w, reference_world())
    assert [torch.equal(*pair) for pair in zip(again, (x, dx), strict=True)] == [True, True]


@triton.jit
def fetch_kernel(out_ptr, ctx, elements, call_hash, BLOCK: tl.constexpr):
    """Copies what every peer has handed over, as a reduction beside a weight gradient reads it."""
    call, standing = call_enter(ctx, call_hash)
    if call.ticket == 0:
        start_publish(ctx, call)
        call_clean(ctx, call, standing)
    for peer in range(ctx.WORLD):
        if peer % tl.num_programs(0) == call.ticket:
            standing = start_hold(ctx, call, standing, peer, PHASE_REDUCE)
            from_ptr = peer_ptr(ctx, HANDOVER, peer, tl.bfloat16)
            copy_run(from_ptr, out_ptr + peer * elements, elements, BLOCK, 1)
    call_leave(ctx, call, standing)


def hand_over(
    ranks: int, seed: int, mutations: Sequence[Mutation] = (), **choices: Any
) -> list[bool]:
    """By rank, whether peers always read the products of the call before theirs."""
    m, n, k = 40 * ranks, 32, 32

    def host(rank: int, world: World) -> bool:
        workspace = TpSpWorkspace(world, m, n)
        right = []
        for call in range(3):
            x, w = torch.ones(m // ranks, n).bfloat16(), torch.eye(k, n).bfloat16()
            dy = torch.full((m, k), float(1 + 10 * call + rank)).bfloat16()
            _, dx = bulk_ag(x, dy, w, workspace, **choices)
            out = torch.zeros(ranks, m, n).bfloat16()
            workspace.begin("fetch", 7)
            args = (out, workspace.context(), dx.numel(), 7, 64)
            world.launch(fetch_kernel, 2, args, ("fetch",), num_warps=4, num_stages=1)
            workspace.synchronize()
            right.append(out[:, 3, 5].tolist() == [1.0 + 10 * call + peer for peer in range(ranks)])
        workspace.destroy()
        return all(right)

    schedule = Schedule.draw(seed, ranks, 4)
    with cpu_world(ranks, mutations=mutations, jump_clock=False, **schedule.options()) as world:
        return world.spmd(host, world)


@pytest.mark.parametrize("policy", ["one_way", "two_way", "fixed", "serial"])
def test_what_is_handed_over_is_there_until_every_peer_has_read_it(policy: str) -> None:
    for seed in range(6):
        ranks = 2 + seed % 3
        assert hand_over(ranks, seed, policy=policy) == [True] * ranks


@pytest.mark.parametrize(
    "defect",
    [
        Mutation(
            beside.build_beside, "start_hold_all(ctx, call, standing, PHASE_BUILD)", "standing"
        ),
        Mutation(beside.build_beside, "if CONFIG.HANDOVER and ctx.WORLD > 1:", "if n < 0:"),
    ],
)
def test_a_product_that_is_stored_while_a_peer_may_read_the_last_one_is_seen(
    defect: Mutation,
) -> None:
    regions = []
    for seed in range(6):
        try:
            hand_over(3, seed, (defect,))
        except DataRace as race:
            regions.append(race.region)
    assert set(regions) == {"handover"}


BAD: tuple[tuple[str, dict[str, Any], type[Exception], str], ...] = (
    ("rows", {"dy": (31, 16)}, ArgumentError, "dy: got 31 rows, wanted the 32 of x"),
    ("columns", {"x": (8, 16)}, ArgumentError, "x: got shape .8, 16., wanted the 32 columns of w"),
    ("contraction", {"dy": (32, 24)}, ArgumentError, "wanted a contraction of 24 as in dy"),
    ("dtype", {"dtype": torch.float32}, ArgumentError, "x: got dtype torch.float32"),
    ("no width", {"dy": (32, 0), "w": (0, 32)}, ArgumentError, "got k = 0 and n = 32"),
    ("room", {"x": (24, 32), "dy": (96, 16)}, WorkspaceError, r"workspace: \[96, 32\] needs more"),
    ("policy", {"policy": "any"}, ArgumentError, "policy: got 'any'"),
    ("transport", {"transport": "fly"}, ArgumentError, "transport: got 'fly'"),
    ("dx", {"dx_to": "peer"}, ArgumentError, "dx_to: got 'peer', wanted one of handover, tensor"),
    ("cap", {"cap": 1}, ArgumentError, "cap: got 1, wanted at least 2"),
    ("split", {"split_k": 3}, ArgumentError, "split_k: got 3"),
    ("choice", {"order": "naive"}, ArgumentError, "order: got a choice of this name"),
    ("options", {"options": GemmRsOptions()}, ArgumentError, "wanted BulkAgOptions"),
    ("out", {"out": torch.empty(32, 32).bfloat16()}, ArgumentError, "use dx_to='tensor'"),
    ("memory", {"gathered": torch.empty(32, 8)}, ArgumentError, "gathered: got torch.float32"),
)


@pytest.mark.parametrize(("name", "bad", "kind", "text"), BAD, ids=[case[0] for case in BAD])
def test_bad_input_is_told_to_all(
    name: str, bad: dict[str, Any], kind: type[Exception], text: str, on_cpu: OnCpu
) -> None:
    choices = dict(bad)
    right = {"x": (8, 32), "dy": (32, 16), "w": (16, 32)}
    dtype = choices.pop("dtype", torch.bfloat16)
    wrong = [torch.ones(choices.pop(op, shape), dtype=dtype) for op, shape in right.items()]

    def host(rank: int, world: World) -> None:
        workspace = TpSpWorkspace(world, 64, 32)
        given = [torch.ones(s).bfloat16() for s in right.values()]
        if rank == 2:
            with pytest.raises(kind, match=text):
                bulk_ag(*wrong, workspace, **choices)
        else:
            with pytest.raises(PeerError, match="rank 2 refused its call before launch"):
                wait_for(given, workspace)
        workspace.reset()
        gathered, dx = bulk_ag(*given, workspace)
        workspace.synchronize()
        assert (gathered.unique().tolist(), dx.unique().tolist()) == ([1.0], [16.0])
        workspace.destroy()

    on_cpu(4, host)


def wait_for(given: list[torch.Tensor], workspace: TpSpWorkspace, **choices: Any) -> None:
    bulk_ag(*given, workspace, **choices)
    workspace.synchronize()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "choices",
    [
        {"transport": "pull"},
        {"transport": "push"},
        {"transport": "pull", "dx_to": "tensor"},
        {"transport": "push", "dx_to": "tensor", "policy": "two_way"},
        {"policy": "fixed"},
        {"policy": "serial"},
        {"split_k": 4, "dx_to": "tensor"},
    ],
    ids=str,
)
def test_everybody_is_told_and_revives(kind: str, choices: dict[str, Any]) -> None:
    options = BulkAgOptions(**choices)
    for seed in range(3):
        size = 2 + seed
        calls = [Call(40 * size, 24, 32, 0, options), Call(24 * size, 24, 16, 0, options)]
        trouble = Trouble(calls, victim=seed % size, kind=kind, seed=seed)
        found, seen = trouble_on_cpu(trouble, size, Schedule.draw(seed, size, 4))
        assert [*found.problems, *(text for w in seen for text in w.problems)] == []
        assert len(seen) == size


@pytest.mark.parametrize("queued", [False, True])
def test_a_bound_that_expires_anywhere_leaves_nothing_wrong(queued: bool) -> None:
    ended = 0
    for seed in range(12):
        size = 2 + seed % 3
        options = BulkAgOptions(dx_to=("handover", "tensor")[seed % 2])
        calls = [Call(rows * size, 24, 40, i, options) for i, rows in enumerate((40, 24, 72))]
        expiry = Expiry(calls, BOUNDS_US[seed % 4])
        schedule = Schedule.draw(seed, size, 4)
        found, left = expire_on_cpu(expiry, size, schedule, queued=queued)
        assert found.problems == []
        ended += left[0].error is not None
    assert 0 < ended < 12


def test_preparing_makes_no_call_of_its_own_count(on_cpu: OnCpu) -> None:
    def host(rank: int, world: World) -> bool:
        with TpSpWorkspace(world, 64, 32) as workspace:
            options = BulkAgOptions(transport="push")
            prepare_bulk_ag(workspace, 64, 32, 16, options)
            given = [torch.ones(s).bfloat16() for s in ((32, 32), (64, 16), (16, 32))]
            one = describe_bulk_ag(*given, workspace, options)
            other = describe_bulk_ag(*given, workspace, replace(options, transport="pull"))
            return one.plan.transport == "push" and other.call_hash != one.call_hash

    assert on_cpu(2, host) == [True, True]
