"""What the checks print: one line a case, or one JSON object."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any

from kosmos_tpsp.cli.calls import Call, Verdict
from kosmos_tpsp.cli.rig import Run


@dataclass
class Case:
    """One shape under one set of choices. The fields but `decline` are those of the JSON object.

    Attributes:
        path: "fused", or "reference" if any call was declined.
        schedules: distinct schedules that ran.
        calls: calls a schedule on fresh data; one more repeats the first.
        kernel_launches: launches a call and rank.
        remote_bytes: gathered rows that cross ranks, a call and rank.
        max_rel_err: largest relative error against FP64, over all calls and ranks.
        bitwise_repeat: whether equal calls gave equal bits, also in other schedules.
        races, deadlocks: schedules that ended so while this shape was running.
        decline: why a call was declined and what to do, "" if none was.
    """

    op: str
    world: str
    m: int
    n: int
    k: int
    dtype: str
    layout: str
    policy: str
    order: str | None
    transport: str | None
    cap: int | None
    schedules: int
    calls: int
    path: str
    kernel_launches: int
    remote_bytes: int
    max_rel_err: float | None
    bitwise_repeat: bool | None
    races: int
    deadlocks: int
    passed: bool
    decline: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The members of the JSON object."""
        members = asdict(self)
        del members["decline"]
        return members

    def __str__(self) -> str:
        error = "none" if self.max_rel_err is None else f"{self.max_rel_err:.2e}"
        repeat = {None: "not tried", True: "yes", False: "NO"}[self.bitwise_repeat]
        return (
            f"{self.op} {self.world} {self.layout} m={self.m} n={self.n} k={self.k} {self.dtype} "
            f"{self.policy} {self.order or 'no order'} {self.transport or 'no transport'} "
            f"cap={'all' if self.cap is None else self.cap} schedules={self.schedules} "
            f"calls={self.calls}: {self.path}, {self._launches}"
            f"{self.remote_bytes} B from peers, error {error}, bitwise repeat {repeat}, "
            f"{self.races} races, {self.deadlocks} deadlocks: "
            f"{'passed' if self.passed else 'FAILED'}{self.decline and ': ' + self.decline}"
        )

    @property
    def _launches(self) -> str:
        # A declined call launches no kernel of its own.
        if self.path == "reference":
            return ""
        return f"{self.kernel_launches} launch{'' if self.kernel_launches == 1 else 'es'}, "


@dataclass
class Report:
    """All cases of one command.

    Attributes:
        cases: one a shape.
        problems: what is wrong, a text each.
        remarks: what happened besides, a line each.
        extra: further members of the JSON object.
    """

    cases: list[Case] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems and all(case.passed for case in self.cases)

    def to_json(self) -> str:
        """One JSON object."""
        cases = [case.as_dict() for case in self.cases]
        return json.dumps({"cases": cases, "passed": self.passed, **self.extra})


def case_of(
    call: Call, world: str, size: int, calls: int, runs: list[Run], *, allow_decline: bool
) -> Case:
    """The case of a call's shape, over all runs.

    Args:
        call: any call of the shape.
        world: how the command line names the world.
        size: ranks.
        calls: calls a run on fresh data.
        runs: what the schedules gave.
        allow_decline: whether the reference path counts as passed.
    """
    own = [v for run in runs for v in run.verdicts if v.call.shape == call.shape]
    ended = [run for run in runs if run.failure is not None and run.shape in (None, call.shape)]
    repeats = [v.repeated for v in own if v.repeated is not None]
    declined = any(v.path == "reference" for v in own)
    o = call.options
    return Case(
        op=call.op,
        world=world,
        m=call.m,
        n=call.n,
        k=call.k,
        dtype=call.dtype,
        layout=call.layout,
        policy=o.policy,
        order=getattr(o, "order", None),
        transport=own[0].transport if own else o.transport,
        cap=o.cap,
        schedules=len({run.schedule_hash for run in runs}),
        calls=calls,
        path="reference" if declined else "fused",
        kernel_launches=max((v.launches for v in own), default=0),
        remote_bytes=call.remote_bytes(size),
        max_rel_err=_finite(max((v.rel_err for v in own), default=None)),
        bitwise_repeat=all(repeats) if repeats else None,
        races=sum(type(run.failure).__name__ == "DataRace" for run in ended),
        deadlocks=sum(type(run.failure).__name__ == "Deadlock" for run in ended),
        passed=bool(own)
        and not ended
        and not any(v.problem for v in own)
        and (allow_decline or not declined),
        decline=_decline(own, allow_decline),
    )


def _decline(verdicts: list[Verdict], allowed: bool) -> str:
    reason = next((v.decline for v in verdicts if v.decline), "")
    if not reason:
        return ""
    return f"declined: {reason}" + ("" if allowed else "; --allow-decline accepts it")


def _finite(value: float | None) -> float | None:
    # JSON has no infinity; an output with a NaN in it has no error to report.
    return value if value is not None and math.isfinite(value) else None
