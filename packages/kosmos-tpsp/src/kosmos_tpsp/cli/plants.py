"""Planted defects: changed copies of the shipped kernel and helpers that the executor must catch.

Each shows that a rule of docs/memory-model.md is needed and that its breach would be found.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kosmos_core.executor import DataRace, Deadlock, KernelFault, Mutation
from kosmos_core.testing.schedules import Schedule

from kosmos_tpsp.cli.calls import Call
from kosmos_tpsp.cli.expiry import BOUNDS_US, Expiry, expire_on_cpu
from kosmos_tpsp.cli.killed import trouble_on_cpu
from kosmos_tpsp.cli.rig import Rig, Run, run_on_cpu
from kosmos_tpsp.cli.trouble import Trouble
from kosmos_tpsp.ops.catalog import DRIVERS


@dataclass(frozen=True)
class Caught:
    """How a defect showed.

    Attributes:
        kind: "DataRace", "Deadlock", "MemoryFault", "KernelFault", or "wrong result" for whatever
            the host saw: values, bits, exceptions.
        report: the whole text.
        wg: workgroup that it names, "" in a wrong result.
        region: tensor or flag that it names.
        line: source line that it names, ``file:line``.
        seed: schedule that showed it.
        seconds: processor time of the schedules up to that one.
    """

    kind: str
    report: str
    wg: str
    region: str
    line: str
    seed: int
    seconds: float


@dataclass(frozen=True)
class Plant:
    """A defect and where it must show.

    Attributes:
        name: what `check --plant` takes.
        rule: the rule that it breaks, as docs/memory-model.md numbers them.
        what: the defect in a line.
        edits: (function, text that occurs once in it, text in its place).
        shapes: (tokens of a rank, n, k; m where k are the tokens) of the calls, in order.
        ranks: number of ranks.
        seeds: of the schedules that are tried until one shows it.
        choices: options of the calls.
        each: further options of each call, in order; empty where all are alike.
        fixed: fields of the schedules that are not drawn.
        wgs: workgroups of a rank.
        op: whose calls show it.
        dtype: of the operands.
        trouble: what goes wrong besides (`Trouble.kind`, or "expiry"), "" if nothing does.
    """

    name: str
    rule: str
    what: str
    edits: tuple[tuple[Any, str, str], ...]
    shapes: tuple[tuple[int, int, int], ...] = ((40, 32, 32), (24, 24, 16), (40, 32, 32))
    ranks: int = 2
    seeds: tuple[int, ...] = tuple(range(8))
    choices: dict[str, Any] = field(default_factory=dict)
    each: tuple[dict[str, Any], ...] = ()
    fixed: dict[str, Any] = field(default_factory=dict)
    wgs: int = 4
    op: str = "ag_gemm"
    dtype: str = "bf16"
    trouble: str = ""

    def mutations(self) -> tuple[Mutation, ...]:
        """The edits, checked against the source.

        Raises:
            ValueError: a text does not occur exactly once.
        """
        return tuple(Mutation(fn, old, new) for fn, old, new in self.edits)

    def in_mxfp8(self) -> Plant:
        """The same defect with operands in MXFP8, on whole groups of tokens where they must be."""
        whole = DRIVERS[self.op].granule("mxfp8")
        shapes = tuple((-(-rows // whole) * whole, n, k) for rows, n, k in self.shapes)
        return replace(self, dtype="mxfp8", shapes=shapes)

    @property
    def calls(self) -> list[Call]:
        """The calls, each on data of its own."""
        each = self.each or ({},) * len(self.shapes)
        driver = DRIVERS[self.op]
        return [
            Call(
                *driver.shape_of(rows * self.ranks, n, other), i,
                driver.options(**{**self.choices, **more}), self.dtype,
            )
            for i, ((rows, n, other), more) in enumerate(zip(self.shapes, each, strict=True))
        ]  # fmt: skip

    def schedule(self, seed: int) -> Schedule:
        """The schedule of a seed."""
        return replace(Schedule.draw(seed, self.ranks, self.wgs), **self.fixed)

    def run(self, seed: int, mutations: Sequence[Mutation]) -> Run:
        """One schedule, with the defect or without."""
        schedule = self.schedule(seed)
        if not self.trouble:
            return run_on_cpu(
                self.ranks, Rig(self.calls), schedule, wgs=self.wgs, mutations=mutations
            )
        if self.trouble == "expiry":
            expiry = Expiry(self.calls, BOUNDS_US[seed % len(BOUNDS_US)])
            return expire_on_cpu(expiry, self.ranks, schedule, wgs=self.wgs, mutations=mutations)[0]
        trouble = Trouble(self.calls[:2], victim=seed % self.ranks, kind=self.trouble)
        run, seen = trouble_on_cpu(trouble, self.ranks, schedule, wgs=self.wgs, mutations=mutations)
        run.remarks += [f"rank {w.rank}: {text}" for w in seen for text in w.problems]
        return run

    def catch(self) -> Caught | None:
        """Plants the defect and tries the seeds until one shows it; None if none does.

        Reports of the executor, which name workgroup, region and line, come before wrong results.
        """
        begin = time.process_time()
        mutations = self.mutations()
        first: Caught | None = None
        for seed in self.seeds:
            run = self.run(seed, mutations)
            if run.problems:
                caught = _caught(run, seed, time.process_time() - begin)
                if caught.wg:
                    return caught
                first = first or caught
        return first

    def false_alarms(self, last: int) -> list[str]:
        """Problems of the same schedules, up to that of seed `last`, without the defect."""
        seeds = self.seeds[: self.seeds.index(last) + 1]
        return [problem for seed in seeds for problem in self.run(seed, ()).problems]


def _caught(run: Run, seed: int, seconds: float) -> Caught:
    report = "\n".join(run.problems)
    failure = run.failure
    if isinstance(failure, (DataRace, Deadlock, KernelFault)):
        return Caught(
            type(failure).__name__, report, failure.wg, failure.region, failure.line, seed, seconds
        )
    return Caught("wrong result", report, "", "", "", seed, seconds)
