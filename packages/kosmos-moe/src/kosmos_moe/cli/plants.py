"""Planted defects: mutations of the shipped kernel that the executor must catch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kosmos_core.executor import DataRace, Deadlock, KernelFault, Mutation
from kosmos_core.testing.schedules import Schedule

from kosmos_moe.cli.calls import Call
from kosmos_moe.cli.rig import Rig, Run, run_on_cpu
from kosmos_moe.router import RouterOptions

SEEDS = tuple(range(8))
SMALL = {"hidden": 40, "inter": 24, "experts": 6, "router": RouterOptions(2)}


@dataclass(frozen=True)
class Caught:
    """How a defect showed itself.

    Attributes:
        kind: class of the report, or "wrong result".
        report: its text.
        seed: of the schedule.
    """

    kind: str
    report: str
    seed: int


@dataclass(frozen=True)
class Plant:
    """A defect.

    Attributes:
        name: of the defect.
        rule: of docs/memory-model.md that it breaks, or "plan" for one of the layer's own.
        what: the defect in a line.
        edits: (function, text that occurs once in its source, text in its place).
        tokens: of each rank, call by call.
        sizes: other fields of the calls.
        capacity: of the workspace.
        fixed: fields of the schedules that are not drawn.
        wgs: workgroups of a rank.
    """

    name: str
    rule: str
    what: str
    edits: tuple[tuple[Any, str, str], ...]
    tokens: tuple[tuple[int, ...], ...] = ((20, 0, 9), (5, 17, 12), (20, 0, 9))
    sizes: dict[str, Any] = field(default_factory=dict)
    capacity: float | None = None
    fixed: dict[str, Any] = field(default_factory=dict)
    wgs: int = 4

    @property
    def calls(self) -> list[Call]:
        """The calls, each on data of its own."""
        sizes = {**SMALL, **self.sizes}
        return [Call(tokens, data=i, **sizes) for i, tokens in enumerate(self.tokens)]

    def mutations(self) -> tuple[Mutation, ...]:
        """The edits, checked against the source.

        Raises:
            ValueError: a text does not occur exactly once.
        """
        return tuple(Mutation(fn, old, new) for fn, old, new in self.edits)

    def run(self, seed: int, mutations: Sequence[Mutation]) -> Run:
        """One schedule, with the defect or without."""
        ranks = len(self.tokens[0])
        schedule = replace(Schedule.draw(seed, ranks, self.wgs), **self.fixed)
        rig = Rig(self.calls, seed, self.capacity)
        return run_on_cpu(ranks, rig, schedule, wgs=self.wgs, mutations=mutations)

    def catch(self) -> Caught | None:
        """Plants the defect and tries the seeds until one shows it; None if none does.

        Reports of the executor, which name workgroup, region and line, come before wrong results.
        """
        mutations = self.mutations()
        first: Caught | None = None
        for seed in SEEDS:
            run = self.run(seed, mutations)
            if run.problems:
                kind = "wrong result"
                if isinstance(run.failure, (DataRace, Deadlock, KernelFault)):
                    kind = type(run.failure).__name__
                caught = Caught(kind, "\n".join(run.problems), seed)
                if kind != "wrong result":
                    return caught
                first = first or caught
                if seed - first.seed > 2:
                    break
        return first

    def false_alarms(self, seed: int) -> list[str]:
        """Problems of the same schedule without the defect."""
        return self.run(seed, ()).problems
