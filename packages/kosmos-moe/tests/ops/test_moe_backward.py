"""The backward in one launch: every gradient against FP64, bit for bit under all schedules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from kosmos_core.errors import ArgumentError, WorkspaceError
from kosmos_core.testing.schedules import Schedule
from kosmos_core.worlds import World
from kosmos_moe import MoeOptions, MoEWorkspace, RouterOptions
from kosmos_moe.cli.calls import Call, Operands
from kosmos_moe.cli.rig import Ledger, Rig, make, make_back, run_on_cpu
from kosmos_moe.ops.moe_backward import moe_backward

SAVE = MoeOptions(save=True)
SMALL: dict[str, Any] = {
    "hidden": 40, "inter": 24, "experts": 6, "router": RouterOptions(2), "options": SAVE,
}  # fmt: skip
LOSSES = {"aux_coefficient": 0.1, "z_coefficient": 0.01}


def call_of(*tokens: int, **fields: Any) -> Call:
    return Call(tokens, **{**SMALL, **fields})


def check(calls: list[Call], seeds: range = range(2), **options: Any) -> None:
    """Runs the calls, the first of them twice, on some schedules; all bits must be equal."""
    ledger = Ledger()
    size = len(calls[0].tokens)
    for seed in seeds:
        rig = Rig([*calls, calls[0]], ledger=ledger)
        schedule = Schedule.draw(seed, size, options.get("wgs", 4))
        if calls[0].options.policy != "two_way":
            schedule = replace(schedule, slots=None)
        run = run_on_cpu(size, rig, schedule, **options)
        assert run.problems == [], f"{schedule}\n" + "\n".join(run.problems)
        assert all(v.repeated for v in run.verdicts[-1:])


ROUTERS = {
    "softmax": RouterOptions(3, normalize=True, **LOSSES),
    "after": RouterOptions(3, score_first=False, **LOSSES),
    "sigmoid": RouterOptions(3, score="sigmoid", normalize=True, scaling=2.5, **LOSSES),
    "sigmoid after": RouterOptions(2, score="sigmoid", score_first=False),
    "groups": RouterOptions(4, score="sigmoid", groups=3, group_topk=2, normalize=True),
    "uniform": RouterOptions(5, forced="uniform", **LOSSES),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_every_router(name: str) -> None:
    check([call_of(19, 8, router=ROUTERS[name], experts=12, padded=True)], range(1))


@pytest.mark.parametrize("vendor", ["nvidia", "amd"])
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_numbers_of_ranks(ranks: int, vendor: str) -> None:
    tokens = tuple((17, 0, 9, 30)[r % 4] for r in range(ranks))
    policy = {1: "serial", 3: "two_way", 4: "planned_split"}[ranks]
    options = MoeOptions(save=True, policy=policy)
    call = call_of(*tokens, experts=3 * ranks, shared_inter=16, options=options)
    check([call], range(1), vendor=vendor)


def test_eight_ranks() -> None:
    check([call_of(9, 0, 4, 12, 1, 0, 7, 3, experts=16)], range(1), wgs=2)


HOSTILE = {
    "all to one expert and no other": call_of(
        20, 13, 9, routing="one-expert", router=RouterOptions(1)
    ),
    "one rank has all tokens": call_of(40, 0, 0),
    "no tokens anywhere": call_of(0, 0, 0),
    "k is all experts": call_of(9, 3, 4, router=RouterOptions(6)),
    "given": call_of(20, 13, 9, routing="zipf:1.5", padded=True),
    "wide": call_of(9, 3, 4, hidden=200, inter=136),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_routings(name: str) -> None:
    check([HOSTILE[name]], range(2))


def test_several_calls_before_their_backwards() -> None:
    check([call_of(20, 5, 9), call_of(3, 25, 0, data=1), call_of(0, 8, 17, data=2)], range(3))


def test_caps_and_few_slots() -> None:
    check([call_of(20, 5, 9, options=replace(SAVE, cap=2))])


def test_what_a_declined_forward_saved_goes_the_reference_way(on_cpu: Callable[..., Any]) -> None:
    call = call_of(9, 5, inter=12, shared_inter=8)

    def host(rank: int, world: World) -> str:
        operands = Operands(0, world.device)
        workspace = Rig([call]).workspace(world)
        _, saved = make(call, operands.inputs(call, rank), workspace)
        assert not saved.fused
        gradients = make_back(call, operands, rank, saved, workspace)
        assert gradients is not None
        workspace.destroy()
        return operands.judge_gradients(call, rank, saved, gradients, world)

    assert on_cpu(2, host) == ["", ""]


def test_bad_input(on_cpu: Callable[..., Any]) -> None:
    call = call_of(9)

    def host(rank: int, world: World) -> None:
        operands = Operands(0, world.device)
        given = operands.inputs(call, rank)
        workspace = Rig([call]).workspace(world)
        _, saved = make(call, given, workspace)
        _, unsaved = make(replace(call, options=MoeOptions()), given, workspace)
        dy = operands.dy(call, rank)
        for bad, kept, told in (
            (dy.float(), saved, "dy: got dtype"),
            (dy[:3], saved, "dy: got shape"),
            (dy, unsaved, "saved: got a forward that kept nothing"),
        ):
            with pytest.raises(ArgumentError, match=told):
                moe_backward(bad, kept, workspace)
        workspace.destroy()
        untrained = MoEWorkspace(world, 9, 40, 24, 6, 2)
        with pytest.raises(WorkspaceError, match="training=True"):
            moe_backward(dy, saved, untrained)
        untrained.destroy()
        assert saved.num_bytes() > 0
        assert torch.is_tensor(saved.tensors["act_ptr"])

    on_cpu(1, host)
