"""Sums of what several ranks have, and what transport and builders cost each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kosmos_core.device.gemm import store_splits
from kosmos_core.device.layout import MAX_RANKS
from kosmos_core.kernels.beside import Heads, Matrices, beside_kernel, sum_kernel
from kosmos_core.kernels.measure import Routes
from kosmos_core.measure.budget import DEPTHS, GROUP_M, Budget, SumVariant
from kosmos_core.measure.copies import CHECK_WGS, POISON, CopyBench, Way, pattern, ways
from kosmos_core.measure.gemm import GemmBench
from kosmos_core.measure.timing import Timer, agree, by_crew, figures
from kosmos_core.worlds.base import World

# Words of a queue, so that each has a line of its own.
LINE = 32
# A mover beside builders has so many units to itself at least, or it would read them from a cache.
UNITS_OF_ONE = 4


@dataclass(frozen=True)
class Sum:
    """What is added up.

    Attributes:
        direction: "reduce", the same rows at every rank, or "sum", rows that all lie here.
        sources: how many.
    """

    direction: str
    sources: int

    def __str__(self) -> str:
        return f"{self.direction} of {self.sources}"

    @property
    def counted(self) -> int:
        """Sources whose bytes count: what crosses the link, or all that is read here."""
        return self.sources - 1 if self.direction == "reduce" else self.sources


def sums(world_size: int) -> list[Sum]:
    """What is added up in a group of this size; alone, what larger groups would find here."""
    if world_size == 1:
        return [Sum("sum", 2), Sum("sum", 8)]
    return [Sum("reduce", world_size), Sum("sum", world_size)]


class SumBench:
    """Sums on the buffers of a copy bench. Collective.

    Args:
        copies: the buffers.
    """

    def __init__(self, copies: CopyBench) -> None:
        self.copies = copies
        self.world = copies.world
        self.budget = copies.budget
        self._tables = {kind: self._table(kind) for kind in sums(self.world.size)}
        self.world.barrier()

    def slot_elements(self, kind: Sum) -> int:
        """Elements of each source, whole units."""
        slots = kind.sources if kind.direction == "sum" else 1
        unit = self.budget.unit_elements
        return self.copies.num_elements // slots // unit * unit

    def _table(self, kind: Sum) -> torch.Tensor:
        """int64 [2 * MAX_RANKS]: the address of each source, and of the sum."""
        ranks = int(MAX_RANKS.value)
        own = self.world.rank
        table = torch.zeros(2, ranks, dtype=torch.int64)
        for source in range(kind.sources):
            if kind.direction == "reduce":
                table[0, source] = self.copies.source.addresses[source]
            else:
                slot = 2 * self.slot_elements(kind) * source
                table[0, source] = self.copies.source.addresses[own] + slot
        table[1, 0] = self.copies.target.addresses[own]
        placed = self.world.local(f"routes of {kind}", 2 * ranks, torch.int64)
        placed.copy_(table.flatten())
        return placed

    def table(self, kind: Sum) -> torch.Tensor:
        """The addresses of what is added up and of the sum."""
        return self._tables[kind]

    def step_elements(self, kind: Sum, variant: SumVariant) -> int:
        """Elements of each source in a step: those of all are in registers at once."""
        share: int = variant.step_elements >> (kind.sources - 1).bit_length()
        return max(16, share)

    def add(self, kind: Sum, variant: SumVariant, wgs: int, units: int) -> None:
        """Launches `wgs` workgroups that add up `units` units."""
        step = self.step_elements(kind, variant)
        args = (
            Routes(self.table(kind)),
            self.copies.head,
            units,
            self.budget.unit_elements,
            step,
            kind.sources,
        )
        key = ("sum", self.budget.unit_elements, kind.sources, step, variant.num_warps)
        self.world.launch(sum_kernel, wgs, args, key, num_warps=variant.num_warps, num_stages=1)

    def check(self, kind: Sum, variant: SumVariant) -> None:
        """Adds everything up once and compares every element. Collective.

        Raises:
            MeasurementError: on every rank, when an element is wrong on one.
        """
        world, slot = self.world, self.slot_elements(kind)
        target = self.copies.target.local.view(torch.int16)
        world.synchronize()
        world.barrier()
        target.fill_(POISON)
        self.copies.reset()
        self.add(kind, variant, min(CHECK_WGS, world.num_wgs), slot // self.budget.unit_elements)
        world.synchronize()
        world.barrier()
        wrong = int((target[:slot] != self.wanted(kind)).sum())
        wrong += int((target[slot:] != POISON).sum())
        fault = f"{wrong} of {slot} sums are wrong after {kind}, {variant}" if wrong else None
        agree(world, fault)

    def wanted(self, kind: Sum) -> torch.Tensor:
        """int16 [slot]: the sums."""
        world, slot = self.world, self.slot_elements(kind)
        remote = kind.direction == "reduce"
        total = torch.zeros(slot, dtype=torch.float32, device=world.device)
        for source in range(kind.sources):
            rank = source if remote else world.rank
            held = pattern(self.copies.num_elements, rank, world.device).view(torch.bfloat16)
            total += held[:slot] if remote else held[source * slot : (source + 1) * slot]
        return total.to(torch.bfloat16).view(torch.int16)

    def gbps(self, timer: Timer, kind: Sum, variant: SumVariant, wgs: int) -> float:
        """GB/s (10^9 bytes) of the counted sources, of the slowest rank."""
        most = self.budget.copy_elements[0 if wgs <= 2 else 1]
        units = max(1, min(most, self.slot_elements(kind)) // self.budget.unit_elements)
        ms = timer.median(
            lambda: self.add(kind, variant, wgs, units),
            self.copies.reset,
            warmup=self.budget.warmup,
            repeats=self.budget.repeats,
        )
        return units * self.budget.unit_elements * 2 * kind.counted / (ms * 1e6)


class BesideBench:
    """Movers and builders in one launch, on the buffers of the other benches. Collective.

    Args:
        added: sums, and the copies that they use the buffers of.
        gemm: the builders' operands.
    """

    def __init__(self, added: SumBench, gemm: GemmBench) -> None:
        self.added = added
        self.gemm = gemm
        self.world = gemm.world
        self.budget = gemm.budget
        queues = self.budget.gemm_batch
        self.queues = self.world.local("queues beside", 2 * LINE * queues, torch.int32)
        self.moved = self.world.local("units moved", self.world.num_wgs, torch.int32)

    def reset(self) -> None:
        """Fills the queues anew and forgets what was moved; before every batch."""
        self.queues.zero_()
        self.moved.zero_()

    def kinds(self) -> list[Way | Sum]:
        """Transports that builders stand beside."""
        copied: list[Way | Sum] = [way for way in ways(self.world.size) if way.peers <= 1]
        return copied + [kind for kind in sums(self.world.size) if kind.direction == "reduce"]

    def run(self, kind: Way | Sum, movers: int, m: int) -> None:
        """A batch of launches, each with so many movers beside a GEMM of `m` rows."""
        unit, tile = self.budget.unit_elements, self.gemm.tile
        if isinstance(kind, Sum):
            table, depth = self.added.table(kind), 0
            step = self.added.step_elements(kind, self.budget.sum_variants[0])
            units = self.added.slot_elements(kind) // unit
        else:
            table, depth = self.added.copies.table(kind), DEPTHS[kind.direction]
            step = self.budget.beside_step
            units = self.added.copies.num_elements // unit
        units = max(movers, min(units, movers * max(UNITS_OF_ONE, units // movers)))
        sources = kind.sources if isinstance(kind, Sum) else 0
        matrices = Matrices(self.gemm.a, self.gemm.b, self.gemm.c)
        for place in range(self.budget.gemm_batch):
            heads = Heads(
                self.queues[2 * LINE * place :], self.queues[2 * LINE * place + LINE :], self.moved
            )
            args = (
                matrices, Routes(table), heads, m, self.gemm.n, self.gemm.k, movers, units,
                self.budget.beside_units, unit, step, depth, sources,
                tile.block_m, tile.block_n, tile.block_k, tile.num_stages, GROUP_M,
                store_splits(tile.block_n), self.world.target,
            )  # fmt: skip
            key = ("beside", unit, step, depth, sources, self.gemm.n, self.gemm.k, tile)
            self.world.launch(
                beside_kernel, self.world.num_wgs, args, key,
                num_warps=tile.num_warps, num_stages=tile.num_stages,
            )  # fmt: skip

    def check(self, kind: Way | Sum) -> None:
        """Runs a batch and compares what was built and what was moved. Collective.

        Raises:
            MeasurementError: on every rank, when an element is wrong on one, or none was moved.
        """
        world, copies = self.world, self.added.copies
        movers = min(CHECK_WGS, world.num_wgs // 2)
        m = self.gemm.whole_rounds_m(world.num_wgs - movers)
        target = copies.target.local.view(torch.int16)
        world.synchronize()
        world.barrier()
        target.fill_(POISON)
        self.gemm.c.fill_(float("nan"))
        self.reset()
        world.synchronize()
        world.barrier()
        self.run(kind, movers, m)
        world.synchronize()
        world.barrier()
        wanted = self.added.wanted(kind) if isinstance(kind, Sum) else copies.wanted(kind, 0)
        target = target[: wanted.numel()]
        there = target != POISON
        wrong = int((target[there] != wanted[there]).sum())
        # A push to this rank was counted where it came from.
        sender = (world.rank - 1) % world.size if kind.direction == "push" else world.rank
        moved = world.all_gather_object(int(self.moved.sum()))[sender]
        missing = min(moved, 1) * self.budget.unit_elements - int(there.sum())
        fault = None
        if wrong or missing > 0:
            fault = f"{wrong} elements are wrong after {kind} beside builders, {missing} missing"
        agree(world, fault)
        self.gemm.compare(m, f"GEMM beside {kind}")

    def rates(self, timer: Timer, kind: Way | Sum, movers: int) -> tuple[float, float]:
        """GB/s of so many movers and TFLOPS of the builders beside them, of the slowest rank."""
        m = self.gemm.whole_rounds_m(self.world.num_wgs - movers)
        times = timer.times(
            lambda: self.run(kind, movers, m),
            self.reset,
            warmup=self.budget.warmup,
            repeats=self.budget.repeats,
        )
        ms = sorted(times)[len(times) // 2]
        # What the last call moved, in the time that it took.
        units = min(self.world.all_gather_object(int(self.moved.sum())))
        moved = units * self.budget.unit_elements * 2
        counted = kind.counted if isinstance(kind, Sum) else 1
        return moved * counted / (times[-1] * 1e6), self.gemm.tflops(ms, m)

    def alone(self, timer: Timer, movers: int) -> float:
        """TFLOPS of as many builders as so many movers leave, without the movers."""
        wgs = self.world.num_wgs - movers
        m = self.gemm.whole_rounds_m(wgs)
        ms = timer.median(
            lambda: self.gemm.batch(wgs, m),
            self.gemm.reset,
            warmup=self.budget.warmup,
            repeats=self.budget.repeats,
        )
        return self.gemm.tflops(ms, m)


def mover_counts(budget: Budget, num_wgs: int) -> list[int]:
    """Crews that stand beside builders: at most half of the machine."""
    return [movers for movers in budget.beside_movers if 2 * movers <= num_wgs]


def num_points(budget: Budget, world_size: int, num_wgs: int) -> int:
    """Points of all curves."""
    counts = len(budget.counts(budget.movers, num_wgs))
    kinds = 1 if world_size == 1 else 3
    added = len(sums(world_size)) * len(budget.sum_variants) * counts
    return added + (kinds + 1) * len(mover_counts(budget, num_wgs))


def measure_beside(
    world: World, timer: Timer, budget: Budget, tick: Callable[[str], None]
) -> dict[str, Any]:
    """Checks and times sums, then transports beside builders. Collective.

    Returns:
        The keys "sums", a curve a variant; "reduce_gbps" (None in a group of one) with the fastest
        of its variants for few movers; and "beside" with GB/s of movers and TFLOPS of builders.

    Raises:
        MeasurementError: a sum is wrong.
    """
    copies = CopyBench(world, budget)
    added = SumBench(copies)
    curves: list[dict[str, Any]] = []
    for kind in sums(world.size):
        for variant in budget.sum_variants:
            tick(f"{kind}: checking {variant}")
            added.check(kind, variant)
            counts = budget.counts(budget.movers, world.num_wgs)
            rate = partial(added.gbps, timer, kind, variant)
            gbps = by_crew(f"{kind}: {variant}", counts, rate, tick)
            curves.append(
                {
                    "direction": kind.direction,
                    "sources": kind.sources,
                    "copy_bytes": added.step_elements(kind, variant) * 2,
                    "num_warps": variant.num_warps,
                    "gbps": gbps,
                }
            )
    reduced = [c["gbps"] for c in curves if c["direction"] == "reduce"]
    bench = BesideBench(added, GemmBench(world, budget))
    crews = mover_counts(budget, world.num_wgs)
    beside: list[dict[str, Any]] = []
    for transport in bench.kinds():
        bench.check(transport)
        rates = {}
        for movers in crews:
            tick(f"{transport}, {movers} movers beside builders")
            rates[str(movers)] = bench.rates(timer, transport, movers)
        beside.append(
            {
                "direction": transport.direction,
                "gbps": {movers: figures(rate[0]) for movers, rate in rates.items()},
                "tflops": {movers: figures(rate[1]) for movers, rate in rates.items()},
            }
        )
    alone = {}
    for movers in crews:
        tick(f"{movers} WGs fewer")
        alone[str(movers)] = figures(bench.alone(timer, movers))
    return {
        "sums": curves,
        "reduce_gbps": max(reduced, key=lambda c: sum(c.values())) if reduced else None,
        "beside": {
            "copy_bytes": budget.beside_step * 2,
            "depth": DEPTHS,
            "num_warps": bench.gemm.tile.num_warps,
            "curves": beside,
            "alone_tflops": alone,
        },
    }
