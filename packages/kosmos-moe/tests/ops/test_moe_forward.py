"""The forward in one launch: every router, hostile routings, odd sizes, 1 to 8 ranks, schedules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from kosmos_core.errors import ArgumentError, PeerFaultError, WorkspaceError
from kosmos_core.testing.schedules import Schedule
from kosmos_core.worlds import World, cpu_world
from kosmos_moe import MoeOptions, MoEWorkspace, RouterOptions, moe_forward
from kosmos_moe.cli.calls import Call, Operands
from kosmos_moe.cli.rig import Ledger, Rig, make, run_on_cpu
from kosmos_moe.ops.options import ORDERS, POLICIES

SMALL: dict[str, Any] = {"hidden": 40, "inter": 24, "experts": 6, "router": RouterOptions(2)}
LOSSES = {"aux_coefficient": 0.1, "z_coefficient": 0.01}


def call_of(*tokens: int, **fields: Any) -> Call:
    return Call(tokens, **{**SMALL, **fields})


def check(
    calls: list[Call], seeds: range = range(2), ranks: int | None = None, **options: Any
) -> None:
    """Runs the calls, the first of them twice, on some schedules; all bits must be equal."""
    ledger = Ledger()
    capacity, epoch = options.pop("capacity", None), options.pop("first_epoch", 1)
    size = ranks or len(calls[0].tokens)
    for seed in seeds:
        rig = Rig([*calls, calls[0]], capacity=capacity, first_epoch=epoch, ledger=ledger)
        schedule = Schedule.draw(seed, size, options.get("wgs", 4))
        if any(call.options.policy != "two_way" for call in calls):
            schedule = replace(schedule, slots=None)
        run = run_on_cpu(size, rig, schedule, **options)
        assert run.problems == [], f"{schedule}\n" + "\n".join(run.problems)
        assert len(run.verdicts) == size * (len(calls) + 1)
        assert all(v.repeated for v in run.verdicts[-1:])


ROUTERS = {
    "softmax": RouterOptions(3, **LOSSES),
    "after": RouterOptions(3, score_first=False),
    "sigmoid": RouterOptions(3, score="sigmoid", normalize=True, scaling=2.5, **LOSSES),
    "sigmoid after": RouterOptions(2, score="sigmoid", score_first=False),
    "groups": RouterOptions(4, score="sigmoid", groups=3, group_topk=2, normalize=True),
    "best of group": RouterOptions(2, groups=3, group_topk=2, group_best=3),
    "all": RouterOptions(12, **LOSSES),
    "one": RouterOptions(1),
    "uniform": RouterOptions(5, forced="uniform", **LOSSES),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_every_router(name: str) -> None:
    call = call_of(19, 8, router=ROUTERS[name], experts=12)
    check([call, replace(call, biased=True, padded=True, data=1)])


@pytest.mark.parametrize("vendor", ["nvidia", "amd"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_every_number_of_ranks(ranks: int, vendor: str) -> None:
    tokens = tuple((17, 0, 9, 30)[r % 4] for r in range(ranks))
    call = call_of(*tokens, experts=3 * ranks, shared_inter=16)
    wgs = 4 if ranks < 8 else 2
    seeds = range(2) if ranks < 8 else range(1)
    # The other policies between calls of the first one.
    options = MoeOptions(policy="planned_split" if vendor == "nvidia" else "serial")
    other = replace(call, tokens=tokens[::-1], data=1, options=options)
    check([call, other], seeds, vendor=vendor, wgs=wgs)


HOSTILE = {
    "all to one expert": call_of(20, 13, 9, routing="one-expert"),
    "all to one expert and no other": call_of(
        20, 13, 9, routing="one-expert", router=RouterOptions(1)
    ),
    "all ties": call_of(20, 13, 9, routing="ties"),
    "one rank has all tokens": call_of(40, 0, 0),
    "no tokens anywhere": call_of(0, 0, 0),
    "one token": call_of(0, 1, 0),
    "k is all experts": call_of(9, 3, 4, router=RouterOptions(6)),
    "one expert a rank": call_of(9, 3, 4, experts=3),
    "skewed": call_of(20, 13, 9, routing="zipf:2.0"),
    "padding": call_of(20, 13, 9, padded=True, routing="zipf:0.5"),
    "narrow": call_of(9, 3, 4, hidden=8, inter=8),
    "wide": call_of(9, 3, 4, hidden=200, inter=136),
    "many experts": call_of(9, 3, 4, experts=75, router=RouterOptions(7)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_routings(name: str) -> None:
    check([HOSTILE[name], replace(HOSTILE[name], data=1)], range(3))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("order", ORDERS)
def test_policies_and_orders(policy: str, order: str) -> None:
    options = MoeOptions(policy=policy, order=order, save=True)
    check([call_of(20, 5, 9, options=options, shared_inter=24)], range(1))


def test_caps_and_crews() -> None:
    call = call_of(20, 5, 9)
    check([replace(call, options=MoeOptions(cap=2))], range(3))
    check([replace(call, options=MoeOptions(dispatch_crew=2, combine_crew=1))])


def test_layers_of_other_sizes_share_a_workspace() -> None:
    check(
        [
            call_of(20, 5, 9),
            call_of(3, 25, 0, hidden=72, inter=16, experts=12, router=RouterOptions(5)),
            call_of(0, 0, 17, hidden=16, inter=40, experts=3, shared_inter=8, biased=True),
        ],
        range(4),
    )


@pytest.mark.parametrize("epoch", [2**31 - 1, -1, -(2**31)])
def test_epochs_wrap(epoch: int) -> None:
    check([call_of(9, 0, 4), call_of(2, 7, 4, data=1)], range(1), first_epoch=epoch)


def test_a_rank_without_work_may_be_a_call_ahead() -> None:
    one = {"routing": "one-expert", "router": RouterOptions(1)}
    check([call_of(9, 0, 0, data=i, **one) for i in range(4)], range(4))


def run_once(rank: int, world: World, call: Call, capacity: float | None) -> Any:
    operands = Operands(0, world.device)
    workspace = Rig([call], capacity=capacity).workspace(world)
    given = operands.inputs(call, rank)
    try:
        found = make(call, given, workspace)[0]
        return operands.judge(call, rank, given, found)[1]
    except WorkspaceError as error:
        return str(error)
    finally:
        workspace.destroy()


@pytest.mark.parametrize("overflow", ["reference", "raise"])
def test_overflow_is_the_same_on_all_ranks(overflow: str, on_cpu: Callable[..., Any]) -> None:
    options = MoeOptions(overflow=overflow)
    call = call_of(40, 0, 30, routing="one-expert", options=options)
    found = on_cpu(3, run_once, call, 0.5)
    if overflow == "raise":
        assert all("capacity: the routing sends some rank more rows" in text for text in found)
    else:
        assert found == ["", "", ""]


def test_what_fits_a_small_arena_runs_fused(on_cpu: Callable[..., Any]) -> None:
    options = MoeOptions(overflow="raise")
    call = call_of(20, 20, 20, routing="uniform", options=options)
    call = replace(call, router=RouterOptions(2, forced="uniform"))
    assert on_cpu(3, run_once, call, 1.0) == ["", "", ""]


def test_a_graph_may_not_hold_what_the_host_must_look_at(
    on_cpu: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def host(rank: int, world: World) -> str:
        call = call_of(9)
        workspace = Rig([call], capacity=0.5).workspace(world)
        given = Operands(0, world.device).inputs(call, rank)
        monkeypatch.setattr(world, "is_capturing", lambda: True)
        with pytest.raises(WorkspaceError, match="capacity=None") as caught:
            make(call, given, workspace)
        monkeypatch.undo()
        workspace.destroy()
        return str(caught.value)

    on_cpu(1, host)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_token_that_is_not_finite_spoils_itself_only(
    bad: float, on_cpu: Callable[..., Any]
) -> None:
    call = call_of(9, 5)

    def host(rank: int, world: World) -> tuple[torch.Tensor, torch.Tensor]:
        operands = Operands(0, world.device)
        given = operands.inputs(call, rank)
        if rank == 0:
            given.x[3] = bad
        workspace = Rig([call]).workspace(world)
        found = make(call, given, workspace)[0]
        clean = make(call, operands.inputs(call, rank), workspace)[0]
        workspace.destroy()
        assert all(len(set(row)) == 2 for row in found.ids.tolist())
        return found.y, clean.y

    for rank, (y, clean) in enumerate(on_cpu(2, host)):
        spoiled = [3] if rank == 0 else []
        kept = [t for t in range(len(y)) if t not in spoiled]
        assert torch.equal(y[kept], clean[kept])
        assert not y[spoiled].isfinite().any()


def test_a_bad_routing_is_given_up_by_the_kernel(
    on_cpu: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the host would see on the CPU, the kernel must find on a GPU."""
    monkeypatch.setattr("kosmos_moe.reference.check_routing", lambda ids, experts: None)
    call = call_of(9, 5, routing="zipf:1.0")

    def host(rank: int, world: World, ids: list[int]) -> tuple[str, bool]:
        given = Operands(0, world.device).inputs(call, rank)
        workspace = Rig([call]).workspace(world)
        assert given.routing is not None
        if rank == 1:
            given.routing[0][2] = torch.tensor(ids)
        found = make(call, given, workspace)[0]
        with pytest.raises(PeerFaultError) as caught:
            workspace.synchronize()
        workspace.reset()
        workspace.destroy()
        return str(caught.value), bool(found.y.isnan().all())

    for ids in ([3, 3], [0, 6], [-1, 2]):
        for text, _ in on_cpu(2, host, ids):
            assert "rank 1 refused its call before launch: bad argument" in text
    assert all(spoiled for _, spoiled in on_cpu(2, host, [3, 3])[1:])


def test_a_peer_that_does_not_come_is_named() -> None:
    call = call_of(9, 5, 3)

    def host(rank: int, world: World) -> str:
        workspace = replace(Rig([call]), timeout_s=1.0).workspace(world)
        given = Operands(0, world.device).inputs(call, rank)
        if rank == 2:
            return ""
        found = make(call, given, workspace)[0]
        with pytest.raises(Exception, match="rank 2") as caught:
            workspace.synchronize()
        assert found.y.isnan().all()
        return type(caught.value).__name__

    with cpu_world(3, race="raise", strict=True) as world:
        found = world.spmd(lambda rank: host(rank, world))
    assert found == ["PeerTimeoutError", "PeerTimeoutError", ""]


def test_another_layer_on_one_rank_is_a_mismatch(on_cpu: Callable[..., Any]) -> None:
    def host(rank: int, world: World) -> str:
        call = call_of(9, 5, router=RouterOptions(2 if rank else 3))
        given = Operands(0, world.device).inputs(call, rank)
        workspace = Rig([call_of(9, 5, router=RouterOptions(3))]).workspace(world)
        make(call, given, workspace)[0]
        with pytest.raises(Exception, match="another call") as caught:
            workspace.synchronize()
        return type(caught.value).__name__

    assert on_cpu(2, host) == ["PeerMismatchError"] * 2


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"x": torch.zeros(4, 40)}, "x: got dtype torch.float32"),
        ({"x": torch.zeros(4, 2, 40).bfloat16()}, "x: got shape"),
        ({"w1": torch.zeros(6, 40, 40).bfloat16()}, "w1: got shape"),
        ({"w2": torch.zeros(5, 40, 24).bfloat16()}, "w2: got shape"),
        ({"router_weight": torch.zeros(6, 32)}, "router_weight: got shape"),
        ({"bias": torch.zeros(5)}, "bias: got shape"),
        ({"padding": torch.zeros(9)}, "padding: got dtype"),
        ({"routing": (torch.zeros(9, 2), torch.zeros(9, 2))}, "ids: got dtype"),
        ({"routing": (torch.ones(9, 2).int(), torch.ones(9, 2))}, "distinct experts"),
        ({"shared": (torch.zeros(8, 40).bfloat16(), torch.zeros(40, 5).bfloat16())}, "shared w1"),
        ({"x": torch.zeros(99, 40).bfloat16()}, "99 tokens need more"),
        ({"router": RouterOptions(3)}, "topk = 3 needs more"),
        ({"policy": "one_way"}, "policy: got 'one_way'"),
        ({"cap": 1}, "cap: got 1"),
        ({"dispatch_crew": 9}, "dispatch_crew"),
        ({"nonsense": 1}, "nonsense: got a choice"),
        ({"workspace": None}, "workspace: got NoneType"),
    ],
)
def test_bad_input(change: dict[str, Any], told: str, on_cpu: Callable[..., Any]) -> None:
    call = call_of(9)

    def host(rank: int, world: World) -> None:
        given = Operands(0, world.device).inputs(call, rank)
        workspace = Rig([call]).workspace(world)
        arguments = {
            "x": given.x, "router_weight": given.router, "w1": given.w1, "w2": given.w2,
            "workspace": workspace, "router": call.router, **change,
        }  # fmt: skip
        with pytest.raises((ArgumentError, WorkspaceError), match=told):
            moe_forward(**arguments)
        workspace.destroy()

    on_cpu(1, host)


def test_rows_that_are_not_aligned_take_the_reference_path(on_cpu: Callable[..., Any]) -> None:
    assert on_cpu(2, run_once, call_of(9, 5, inter=12), None) == ["", ""]


def test_num_bytes_is_known_beforehand(on_cpu: Callable[..., Any]) -> None:
    def host(rank: int, world: World) -> None:
        workspace = MoEWorkspace(world, 64, 40, 24, 6, 2, capacity=1.5)
        expected = MoEWorkspace.required_bytes(workspace.limits, "executor")
        assert workspace.num_bytes() == expected > workspace.buffer(4).numel() * 2
        workspace.destroy()
        workspace.destroy()

    on_cpu(2, host)
