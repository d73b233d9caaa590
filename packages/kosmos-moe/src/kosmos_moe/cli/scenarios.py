"""Random scenarios for long explorations: everything about one run, from one seed."""

from __future__ import annotations

import random
import traceback
from dataclasses import dataclass, replace
from typing import Any

from kosmos_core.testing.schedules import Schedule

from kosmos_moe.cli.calls import Call
from kosmos_moe.cli.rig import Rig, run_on_cpu
from kosmos_moe.ops.options import POLICIES, MoeOptions
from kosmos_moe.router import RouterOptions

# Around the points where the epoch's sign, its 32 bits and its parity turn over.
EPOCHS = (1, 2, 7, 2**31 - 2, 2**31 - 1, -(2**31), -3, -2, -1)
TOKENS = (0, 0, 1, 5, 8, 13, 20, 33)
WIDTHS = (8, 16, 24, 40, 72)
ROUTINGS = ("random", "random", "random", "one-expert", "ties", "uniform", "zipf:1.5")
MAX_TOPK = 6


@dataclass(frozen=True)
class Scenario:
    """One run.

    Attributes:
        seed: that it was drawn from.
        ranks: number of ranks.
        wgs: workgroups of a rank.
        vendor: whose code path runs.
        schedule: who runs when.
        calls: in order, on one workspace.
        capacity: of the workspace.
        first_epoch: epoch of the first call.
    """

    seed: int
    ranks: int
    wgs: int
    vendor: str
    schedule: Schedule
    calls: tuple[Call, ...]
    capacity: float | None
    first_epoch: int

    @classmethod
    def draw(cls, seed: int) -> Scenario:
        """The scenario of a seed."""
        rng = random.Random(f"moe scenario {seed}")
        ranks = rng.choice((1, 2, 2, 2, 3, 3, 3, 3, 4, 4, 8))
        wgs = rng.randint(2, 5) if ranks < 8 else 2
        wgs = min(wgs, 4)
        calls = [_call(rng, ranks, data) for data in range(rng.randint(2, 4 if ranks < 8 else 2))]
        if rng.random() < 0.5:
            calls.append(calls[0])
        schedule = Schedule.draw(seed, ranks, wgs)
        if any(call.options.policy != "two_way" for call in calls):
            # A crew that does nothing else needs all workgroups to be resident.
            schedule = replace(schedule, slots=None)
        return cls(
            seed=seed,
            ranks=ranks,
            wgs=wgs,
            vendor=rng.choice(("nvidia", "nvidia", "amd")),
            schedule=schedule,
            calls=tuple(calls),
            capacity=rng.choice((None, None, None, 0.5, 1.5)),
            first_epoch=rng.choice(EPOCHS),
        )

    def run(self) -> Found:
        """Runs it with every check on; whatever is raised is a finding."""
        rig = Rig(self.calls, self.seed, self.capacity, self.first_epoch)
        try:
            run = run_on_cpu(self.ranks, rig, self.schedule, wgs=self.wgs, vendor=self.vendor)
        except Exception:
            return Found(self.seed, self.ranks, False, "", 0, traceback.format_exc())
        problem = "\n".join(run.problems)
        back = any(call.options.save for call in self.calls)
        return Found(self.seed, self.ranks, back, run.schedule_hash, len(run.verdicts), problem)

    def __str__(self) -> str:
        calls = "; ".join(str(call) for call in self.calls)
        where = f"{self.ranks} ranks, {self.vendor}, first epoch {self.first_epoch}"
        return f"{where}, capacity {self.capacity}, {self.schedule}: {calls}"


@dataclass(frozen=True)
class Found:
    """What a scenario gave.

    Attributes:
        seed: of the scenario.
        ranks: how many it had.
        backward: whether some of its calls had a backward.
        schedule_hash: identifies its schedule, "" if it did not get that far.
        calls: calls that ended, over all ranks.
        problem: what is wrong, "" if nothing is.
    """

    seed: int
    ranks: int
    backward: bool
    schedule_hash: str
    calls: int
    problem: str


def _call(rng: random.Random, ranks: int, data: int) -> Call:
    experts = ranks * rng.randint(1, 4)
    groups = rng.choice([g for g in (1, 1, 2, 3) if experts % g == 0])
    chosen = rng.randint(1, groups)
    topk = rng.randint(1, min(MAX_TOPK, experts // groups * chosen))
    routing = rng.choice(ROUTINGS)
    best = max(1, min(experts // groups, topk // chosen))
    more: dict[str, Any] = {}
    if rng.random() < 0.4:
        more = {"aux_coefficient": 0.1, "z_coefficient": 0.01}
    router = RouterOptions(
        topk, score=rng.choice(("softmax", "sigmoid")), score_first=rng.random() < 0.7,
        normalize=rng.random() < 0.4, scaling=rng.choice((1.0, 2.5)), groups=groups,
        group_topk=chosen, group_best=best, forced="uniform" if routing == "uniform" else None,
        **more,
    )  # fmt: skip
    options = MoeOptions(
        cap=rng.choice((None, None, 2)),
        policy=rng.choice(("two_way",) * len(POLICIES) + POLICIES),
        order=rng.choice(("destination_minor", "destination_minor", "destination_major")),
        save=rng.random() < 0.5,
    )
    return Call(
        tuple(rng.choice(TOKENS) for _ in range(ranks)), rng.choice(WIDTHS), rng.choice(WIDTHS),
        experts, router, rng.choice((0, 0, 16, 40)), routing, rng.random() < 0.2,
        rng.random() < 0.3, data, options,
    )  # fmt: skip
