"""Schedules of the CPU executor, drawn from a seed: who runs when, when stores become visible."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kosmos_core.executor import Policy, Task

POLICIES = (
    "round_robin",
    "random",
    "priority_random",
    "starve_rank",
    "starve_wg",
    "starve_movers",
    "starve_builders",
)
DELAYS = tuple(name for name in POLICIES if name.startswith("starve"))
STARTS = ("ascending", "descending", "random")
# Which workgroups become movers is decided by arrival; the first ids usually arrive first.
FIRST_IDS = 2
# Drops of the priority policy fall within this many steps, a few calls of a small shape.
PRIORITY_STEPS = 3000


@dataclass(frozen=True)
class Schedule:
    """Everything that decides a run besides the calls; equal schedules give equal runs.

    Attributes:
        seed: of the policy and of the memory model.
        policy: one of `POLICIES`.
        rank: rank that is starved, by the policies that starve.
        wg: workgroup id that is starved.
        weak: when stores become visible, "late" or "random".
        switch: where workgroups may be interrupted, "sync" or "memory".
        slots: resident workgroups of a rank, None for all.
        start: order in which workgroups start.
    """

    seed: int = 0
    policy: str = "random"
    rank: int = 0
    wg: int = 0
    weak: str = "random"
    switch: str = "sync"
    slots: int | None = None
    start: str = "ascending"

    @classmethod
    def draw(
        cls, seed: int, ranks: int, wgs: int, policies: tuple[str, ...] = POLICIES
    ) -> Schedule:
        """The schedule of a seed: consecutive seeds take turns through the policies."""
        rng = random.Random(f"schedule {seed}")
        policy = policies[seed % len(policies)]
        # Round robin has no choices of its own: only the memory model tells its runs apart.
        weak = "random" if policy == "round_robin" else rng.choice(("late", "random", "random"))
        return cls(
            seed=seed,
            policy=policy,
            rank=rng.randrange(ranks),
            wg=rng.randrange(wgs),
            weak=weak,
            switch=rng.choice(("sync", "sync", "sync", "memory")),
            slots=rng.choice((None, None, *range(1, wgs))),
            start=rng.choice(STARTS),
        )

    def victim(self, task: Task) -> bool:
        """Whether the policy starves a task."""
        if task.is_host:
            return self.policy == "starve_rank" and task.rank == self.rank
        return {
            "starve_rank": task.rank == self.rank,
            "starve_wg": (task.rank, task.wg) == (self.rank, self.wg),
            "starve_movers": task.wg < FIRST_IDS,
            "starve_builders": task.wg >= FIRST_IDS,
        }[self.policy]

    def make_policy(self) -> Policy:
        """A fresh policy object; it holds state, so it serves one run."""
        from kosmos_core.executor import PriorityRandom, Random, RoundRobin, Starve

        if self.policy == "round_robin":
            return RoundRobin()
        if self.policy == "random":
            return Random(self.seed)
        if self.policy == "priority_random":
            return PriorityRandom(self.seed, depth=4, steps=PRIORITY_STEPS)
        return Starve(self.victim, seed=self.seed)

    def options(self) -> dict[str, Any]:
        """Arguments for `cpu_world`: this schedule with every check of the executor on."""
        return {
            "policy": self.make_policy(),
            "seed": self.seed,
            "weak": self.weak,
            "stale": True,
            "switch": self.switch,
            "slots": self.slots,
            "start": self.start,
            "race": "raise",
            "strict": True,
        }

    def __str__(self) -> str:
        starved = {
            "starve_rank": f"({self.rank})",
            "starve_wg": f"(rank {self.rank}, wg {self.wg})",
        }.get(self.policy, "")
        slots = "all" if self.slots is None else self.slots
        return (
            f"seed {self.seed}: {self.policy}{starved}, weak {self.weak}, switch {self.switch}, "
            f"slots {slots}, start {self.start}"
        )
