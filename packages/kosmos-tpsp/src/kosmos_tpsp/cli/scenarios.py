"""Random scenarios for long explorations: everything about one run, from one seed."""

from __future__ import annotations

import functools
import random
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from kosmos_core.testing.schedules import Schedule
from kosmos_heuristics import Machine, load_machine

from kosmos_tpsp.cli.calls import Call
from kosmos_tpsp.cli.rig import Rig, run_on_cpu
from kosmos_tpsp.ops.ag_gemm import AgGemmOptions
from kosmos_tpsp.ops.bulk_ag import BulkAgOptions
from kosmos_tpsp.ops.bulk_column import BulkColumnOptions
from kosmos_tpsp.ops.bulk_rs import BulkRsOptions
from kosmos_tpsp.ops.catalog import driver_of
from kosmos_tpsp.ops.gemm_rs import GemmRsOptions

# Around the points where the epoch's sign, its 32 bits and its parity turn over.
EPOCHS = (1, 2, 7, 2**31 - 2, 2**31 - 1, -(2**31), -3, -2, -1)
ROWS = (1, 5, 8, 16, 24, 32, 40, 72)
# Many ranks make many workgroups: their calls are small.
FEW_ROWS = (1, 5, 8, 24)
# Deep and narrow: enough rows that the plan buckets the tile queue by die.
DEEP_ROWS = 1032
FEATURES = (8, 16, 24, 40)
CONTRACTIONS = (8, 16, 24, 40, 64, 128)
# Rows of this width are not 16-byte aligned: the call is declined.
DECLINED = 12
# Choices that not every op has, and how the summary calls them.
OWN_CHOICES = {
    "order": "order", "keep_gathered": "kept", "dx_to": "dx to", "block_scaled": "block-scaled",
}  # fmt: skip
LAYERS = "layers"
RULES = ("executor", "executor", "executor", "h200", "mi350")


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
        caps: cap of each rank, None for all workgroups.
        first_epoch: epoch of the first call.
        queued: whether the host queues launches instead of waiting for each.
        rules: rule set of the plans.
        tile_row_rows: rows that arrive as one.
        num_xcds: dies that the tile queue may be bucketed by.
    """

    seed: int
    ranks: int
    wgs: int
    vendor: str
    schedule: Schedule
    calls: tuple[Call, ...]
    caps: tuple[int | None, ...]
    first_epoch: int
    queued: bool
    rules: str
    tile_row_rows: int
    num_xcds: int

    @classmethod
    def draw(cls, seed: int, op: str = "ag_gemm", dtype: str = "bf16") -> Scenario:
        """The scenario of a seed; calls of `op`, with some of the others between them.

        `LAYERS` in place of an op: the calls of training steps of two layers.
        """
        named = [op] if op != "ag_gemm" or dtype != "bf16" else []
        named += [dtype] if dtype != "bf16" else []
        rng = random.Random(" ".join(["scenario", *named, str(seed)]))
        ranks = rng.choice((1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 8))
        wgs = rng.randint(2, 5) if ranks < 8 else rng.randint(2, 3)
        deep = op == "ag_gemm" and ranks <= 2 and rng.random() < 0.05
        calls = tuple(_steps(rng, ranks) if op == LAYERS else _calls(rng, ranks, deep, op))
        if dtype == "mxfp8":
            # Equal calls stay equal.
            made = {call: _in_mxfp8(rng, call, ranks) for call in dict.fromkeys(calls)}
            calls = tuple(made[call] for call in calls)
        return cls(
            seed=seed,
            ranks=ranks,
            wgs=wgs,
            vendor=rng.choice(("nvidia", "nvidia", "amd")),
            schedule=Schedule.draw(seed, ranks, wgs),
            calls=calls,
            caps=tuple(rng.choice((None, None, *range(2, wgs + 1))) for _ in range(ranks)),
            first_epoch=rng.choice(EPOCHS),
            queued=rng.random() < 0.3,
            rules=rng.choice(RULES),
            tile_row_rows=rng.choice((16, 32, 32, 64)),
            num_xcds=rng.choice((2, 4)) if deep else 1,
        )

    def machine(self) -> Machine:
        """The executor's machine model with this scenario's rules."""
        return replace(
            _executor_machine(),
            rule_set=self.rules,
            num_wgs=self.wgs,
            tile_row_rows=self.tile_row_rows,
            num_xcds=self.num_xcds,
        )

    def run(self) -> Found:
        """Runs it with every check on; whatever is raised is a finding."""
        rig = Rig(
            self.calls, self.seed, self.caps, self.first_epoch, machine=self.machine(),
            queued=self.queued,
        )  # fmt: skip
        try:
            run = run_on_cpu(self.ranks, rig, self.schedule, wgs=self.wgs, vendor=self.vendor)
        except Exception:
            return Found(self.seed, "", 0, traceback.format_exc(), self.counts())
        return Found(
            self.seed, run.schedule_hash, len(run.verdicts), "\n".join(run.problems), self.counts()
        )

    def counts(self) -> Counter[tuple[str, str]]:
        """(dimension, value) of the scenario, and of each of its calls."""
        s = self.schedule
        found = Counter[tuple[str, str]]()
        for name, value in (
            ("ranks", self.ranks), ("workgroups", self.wgs), ("vendor", self.vendor),
            ("schedule", s.policy), ("weak", s.weak), ("switch", s.switch),
            ("slots", s.slots or "all"), ("start", s.start), ("first epoch", self.first_epoch),
            ("host", "queues launches" if self.queued else "waits"), ("rules", self.rules),
            ("tile row", self.tile_row_rows), ("dies", self.num_xcds),
            ("caps", "differ" if len(set(self.caps)) > 1 else "equal"),
        ):  # fmt: skip
            found[name, str(value)] += 1
        for call in self.calls:
            o = call.options
            # Padded to whole groups no contraction is.
            declined = call.dtype == "bf16" and call.driver.other_of(call.shape) == DECLINED
            choices = {
                "op": call.op, "dtype": call.dtype, "layout": call.layout, "policy": o.policy,
                "transport": o.transport or "plan's", "split k": o.split_k or "plan's",
                "movers a peer": getattr(o, call.driver.crew) or "plan's",
                "call": "empty" if call.tokens == 0 else "declined" if declined else "full",
            }  # fmt: skip
            for field_name, dimension in OWN_CHOICES.items():
                if hasattr(o, field_name):
                    value = getattr(o, field_name)
                    choices[dimension] = "plan's" if value is None else value
            for name, choice in choices.items():
                found[name, str(choice)] += 1
        return found

    def __str__(self) -> str:
        calls = "; ".join(str(call) for call in self.calls)
        where = f"{self.ranks} ranks, {self.vendor}, first epoch {self.first_epoch}"
        return f"{where}, {self.schedule}: {calls}"


@dataclass(frozen=True)
class Found:
    """What a scenario gave.

    Attributes:
        seed: of the scenario.
        schedule_hash: identifies its schedule, "" if it did not get that far.
        calls: calls that ended, over all ranks.
        problem: what is wrong, "" if nothing is.
        counts: what it covered.
    """

    seed: int
    schedule_hash: str
    calls: int
    problem: str
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)


@functools.cache
def _executor_machine() -> Machine:
    return load_machine("executor")


def _calls(rng: random.Random, ranks: int, deep: bool, op: str) -> list[Call]:
    """Two to four calls, and often the first of them again at the end."""
    if deep:
        return [Call(DEEP_ROWS, 8, 8, 0, _gather_options(rng, 1))]
    most, choice = (2, FEW_ROWS) if ranks == 8 else (4, ROWS)
    calls = []
    for data in range(rng.randint(2, most)):
        kind = rng.random()
        rows = 0 if kind < 0.08 else rng.choice(choice)
        other = DECLINED if kind > 0.95 else rng.choice(CONTRACTIONS)
        split_k = rng.choice((None, None, None, 1, 2, 4))
        n = rng.choice(FEATURES)
        options: Any = _gather_options(rng, split_k)
        # What all ops push lands in the same memory.
        if op != "ag_gemm" and (data == 0 or rng.random() < 0.6):
            options = OPTIONS[op](rng, split_k)
        shape = driver_of(options).shape_of(rows * ranks, n, other)
        calls.append(Call(*shape, data, options))
    return [*calls, calls[0]] if rng.random() < 0.5 else calls


def _steps(rng: random.Random, ranks: int) -> list[Call]:
    """What a column- and a row-parallel layer call in a few steps, of other sizes each time."""
    calls = []
    for step in range(1 if ranks == 8 else rng.randint(1, 3)):
        tokens = ranks * rng.choice(FEW_ROWS if ranks == 8 else ROWS)
        hidden, inner = rng.choice(FEATURES), rng.choice(FEATURES)
        transport = rng.choice(("pull", "push", None))
        gather = AgGemmOptions(transport=transport)
        # Forward, then backward: the row-parallel layer's, whose gathered gradient is kept, first.
        calls += [
            Call(tokens, inner, hidden, step, gather),
            Call(tokens, hidden, inner, step, GemmRsOptions(transport=transport)),
            Call(tokens, inner, hidden, step, replace(gather, layout="nn", keep_gathered=True)),
            Call(tokens, hidden, inner, step, BulkColumnOptions(transport=transport)),
        ]
    return calls


def _in_mxfp8(rng: random.Random, call: Call, ranks: int) -> Call:
    """Most calls that can have operands in MXFP8."""
    if "mxfp8" not in call.driver.dtypes or rng.random() < 0.2:
        return call
    options = call.options
    if hasattr(options, "block_scaled"):
        scaled = rng.choice((None, None, False, True))
        kept = options.keep_gathered and not scaled
        options = replace(options, block_scaled=scaled, keep_gathered=kept or None)
    return replace(call, options=options).in_mxfp8(ranks)


def _scatter_options(rng: random.Random, split_k: int | None) -> GemmRsOptions:
    return GemmRsOptions(
        policy=rng.choice(("one_way", "one_way", "two_way", "fixed", "serial")),
        order=rng.choice(("band_major", "band_major", "row_major")),
        transport=rng.choice(("pull", "pull", "push", None)),
        reducers_per_peer=rng.choice((None, None, 1, 2, 3)),
        split_k=split_k,
    )


def _bulk_rs_options(rng: random.Random, split_k: int | None) -> BulkRsOptions:
    return BulkRsOptions(
        policy=rng.choice(("one_way", "one_way", "two_way", "fixed", "serial")),
        transport=rng.choice((None, "pull", "push", "push")),
        reducers_per_peer=rng.choice((None, None, 1, 2, 3)),
        split_k=split_k,
    )


def _gather_options(rng: random.Random, split_k: int | None) -> AgGemmOptions:
    chosen: dict[str, Any] = {
        "layout": rng.choice(("tn", "tn", "nn")),
        "keep_gathered": rng.choice((None, None, True, False)),
        "policy": rng.choice(("one_way", "one_way", "two_way", "fixed", "serial")),
        "order": rng.choice(("local_first", "local_first", "chunk_major", "naive")),
        "transport": rng.choice(("pull", "push", None)),
        "movers_per_peer": rng.choice((None, None, 1, 2, 3)),
        "split_k": split_k,
    }
    return AgGemmOptions(**chosen)


def _beside_options(rng: random.Random, split_k: int | None) -> BulkAgOptions:
    return BulkAgOptions(
        dx_to=rng.choice((None, "handover", "tensor")),
        policy=rng.choice(("one_way", "one_way", "two_way", "fixed", "serial")),
        transport=rng.choice(("pull", "push", None)),
        movers_per_peer=rng.choice((None, None, 1, 2, 3)),
        split_k=split_k,
    )


def _column_options(rng: random.Random, split_k: int | None) -> Any:
    """Mostly of both calls in one, between calls of either."""
    kind = rng.random()
    if kind < 0.2:
        return _beside_options(rng, split_k)
    if kind < 0.4:
        return _bulk_rs_options(rng, split_k)
    return BulkColumnOptions(
        policy=rng.choice(("one_way", "one_way", "two_way", "fixed", "serial")),
        transport=rng.choice((None, "pull", "push")),
        movers_per_peer=rng.choice((None, None, 1, 2, 3)),
        split_k=split_k,
    )


# How the choices of each op are drawn.
OPTIONS: dict[str, Callable[[random.Random, int | None], Any]] = {
    "ag_gemm": _gather_options,
    "gemm_rs": _scatter_options,
    "bulk_ag": _beside_options,
    "bulk_rs": _bulk_rs_options,
    "bulk_column": _column_options,
}
