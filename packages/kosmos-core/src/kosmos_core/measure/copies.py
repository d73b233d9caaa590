"""GB/s of movers by their number: pull and push, one peer and all peers, and what else copies."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kosmos_core.device.layout import MAX_RANKS
from kosmos_core.kernels.measure import Routes, copy_kernel
from kosmos_core.measure.budget import PLAN_WARPS, Budget, CopyVariant
from kosmos_core.measure.timing import Timer, agree, by_crew, figures
from kosmos_core.worlds.base import World

POISON = -1
CHECK_WGS = 5
SMALL_GATHER_BYTES = 16 << 10
# Movers whose rates decide which variant is the best: above, all variants saturate the link.
FEW_MOVERS = 32


@dataclass(frozen=True)
class Way:
    """Where bytes go.

    Attributes:
        direction: "pull", "push", or "local" within one rank's memory.
        peers: ranks on the other side at once.
    """

    direction: str
    peers: int

    @property
    def routes(self) -> int:
        """Pairs of buffers that workgroups copy between, in turns."""
        return max(1, self.peers)

    def __str__(self) -> str:
        if self.direction == "local":
            return "local copy"
        return f"{self.direction}, {self.peers} peer{'s' if self.peers > 1 else ''}"


def ways(world_size: int) -> list[Way]:
    """What is measured in a group of this size: one peer, and where there are more, all at once."""
    if world_size == 1:
        return [Way("local", 0)]
    peers = sorted({1, world_size - 1})
    return [Way(direction, p) for p in peers for direction in ("pull", "push")]


def pattern(num_elements: int, rank: int, device: torch.device) -> torch.Tensor:
    """int16 [num_elements] that differs between ranks and places; finite as bf16, never POISON."""
    index = torch.arange(num_elements, dtype=torch.int32, device=device)
    return ((index * 1103515245 + (rank * 12345 + 1)) >> 13).bitwise_and_(0x3FFF).to(torch.int16)


class CopyBench:
    """Buffers of one rank, and copies between them. Collective.

    Args:
        world: ranks.
        budget: sizes.
    """

    def __init__(self, world: World, budget: Budget) -> None:
        self.world = world
        self.budget = budget
        self.num_elements = budget.copy_elements[1]
        self.source = world.symmetric("copy source", self.num_elements, torch.bfloat16)
        self.target = world.symmetric("copy target", self.num_elements, torch.bfloat16)
        self.head = world.local("copy queue", 32, torch.int32)
        self.source.local.view(torch.int16).copy_(
            pattern(self.num_elements, world.rank, world.device)
        )
        self._tables = {way: self._table(way) for way in ways(world.size)}
        world.barrier()

    def _slot_elements(self, way: Way) -> int:
        return (
            self.num_elements // way.routes // self.budget.unit_elements * self.budget.unit_elements
        )

    def _table(self, way: Way) -> torch.Tensor:
        """int64 [2 * MAX_RANKS]: source and target address of each route; slots are its own."""
        ranks = int(MAX_RANKS.value)
        own, size = self.world.rank, self.world.size
        table = torch.zeros(2, ranks, dtype=torch.int64)
        for route in range(way.routes):
            peer = own if way.direction == "local" else (own + 1 + route) % size
            src, dst = (own, peer) if way.direction == "push" else (peer, own)
            slot = 2 * self._slot_elements(way) * route
            table[0, route] = self.source.addresses[src] + slot
            table[1, route] = self.target.addresses[dst] + slot
        placed = self.world.local(f"routes of {way}", 2 * ranks, torch.int64)
        placed.copy_(table.flatten())
        return placed

    def table(self, way: Way) -> torch.Tensor:
        """Source and target address of each route."""
        return self._tables[way]

    def reset(self) -> None:
        """Fills the queue anew; before every copy."""
        self.head.zero_()

    def copy(self, way: Way, variant: CopyVariant, wgs: int, units: int) -> None:
        """Launches `wgs` workgroups that copy `units` units, routes in turns."""
        args = (
            Routes(self.table(way)),
            self.head,
            way.routes,
            units,
            self.budget.unit_elements,
            variant.step_elements,
            variant.depth,
        )
        key = ("copy", self.budget.unit_elements, variant)
        self.world.launch(copy_kernel, wgs, args, key, num_warps=variant.num_warps, num_stages=1)

    def units(self, way: Way, wgs: int) -> int:
        """Units of a timed copy: fewer by few workgroups, and the same number for every route."""
        elements = self.budget.copy_elements[0 if wgs <= 2 else 1]
        per_route = (
            min(elements // way.routes, self._slot_elements(way)) // self.budget.unit_elements
        )
        return max(1, per_route) * way.routes

    def check(self, way: Way, variant: CopyVariant) -> None:
        """Copies everything once and compares every element. Collective.

        Raises:
            MeasurementError: on every rank, when an element is wrong on one.
        """
        world = self.world
        target = self.target.local.view(torch.int16)
        # A peer's pushes of the copies before must be over.
        world.synchronize()
        world.barrier()
        target.fill_(POISON)
        self.reset()
        world.synchronize()
        world.barrier()
        slot = self._slot_elements(way)
        units = slot // self.budget.unit_elements * way.routes
        self.copy(way, variant, min(CHECK_WGS, world.num_wgs), units)
        world.synchronize()
        world.barrier()
        wrong = 0
        for route in range(way.routes):
            part = slice(route * slot, (route + 1) * slot)
            wrong += int((target[part] != self.wanted(way, route)[part]).sum())
        wrong += int((target[way.routes * slot :] != POISON).sum())
        fault = (
            f"{wrong} of {target.numel()} elements are wrong after {way}, {variant}"
            if wrong
            else None
        )
        agree(world, fault)

    def wanted(self, way: Way, route: int) -> torch.Tensor:
        """int16 [num_elements]: what lies behind a route; a copy brings its slot of it."""
        # Pushed, slot j was written by the rank that has this one as its peer j.
        step = {"pull": 1 + route, "push": -1 - route, "local": 0}[way.direction]
        world = self.world
        return pattern(self.num_elements, (world.rank + step) % world.size, world.device)

    def gbps(self, timer: Timer, way: Way, variant: CopyVariant, wgs: int) -> float:
        """GB/s (10^9 bytes) into one rank, of the slowest rank."""
        units = self.units(way, wgs)
        ms = timer.median(
            lambda: self.copy(way, variant, wgs, units),
            self.reset,
            warmup=self.budget.warmup,
            repeats=self.budget.repeats,
        )
        return units * self.budget.unit_elements * 2 / (ms * 1e6)

    def engine_gbps(self, timer: Timer) -> float | None:
        """GB/s of a copy by the driver, from one peer or within local memory; None without one."""
        src = self.source.local
        if self.world.size > 1:
            get_buffer = getattr(self.source.handle, "get_buffer", None)
            if get_buffer is None:
                return None
            peer = (self.world.rank + 1) % self.world.size
            src = get_buffer(peer, (self.num_elements,), torch.bfloat16)
        ms = timer.median(
            lambda: self.target.local.copy_(src), warmup=2, repeats=self.budget.repeats
        )
        return self.num_elements * 2 / (ms * 1e6)

    def collective(self, timer: Timer, call: Callable[[torch.Tensor], Any]) -> tuple[float, float]:
        """A vendor's collective: GB/s into one rank of a large one, us of a small one."""
        peers = self.world.size - 1
        ms = {}
        for elements in (self.num_elements, SMALL_GATHER_BYTES // 2 * self.world.size):
            whole = self.source.local[: elements // self.world.size * self.world.size]
            ms[elements] = timer.median(partial(call, whole), warmup=2, repeats=self.budget.repeats)
        large, small = ms.values()
        return peers * self.num_elements // self.world.size * 2 / (large * 1e6), small * 1e3

    def gather(self, whole: torch.Tensor) -> torch.Tensor:
        """The vendor's all-gather to as many elements."""
        return self.world.all_gather_tensor(whole[: whole.numel() // self.world.size])


def num_points(budget: Budget, world_size: int, num_wgs: int) -> int:
    """Points of all curves."""
    counts = len(budget.counts(budget.movers, num_wgs))
    return len(ways(world_size)) * len(budget.variants) * counts


def measure_copies(
    world: World, timer: Timer, budget: Budget, tick: Callable[[str], None]
) -> dict[str, Any]:
    """Checks every way of copying, then times it. Collective.

    Returns:
        The keys pull_gbps, push_gbps (None in a group of one), pull_copy, push_copy, and "copies"
        with every curve.

    Raises:
        MeasurementError: a copy went wrong.
    """
    bench = CopyBench(world, budget)
    curves: list[dict[str, Any]] = []
    for way in ways(world.size):
        for variant in budget.variants:
            tick(f"{way}: checking {variant}")
            bench.check(way, variant)
            counts = budget.counts(budget.movers, world.num_wgs)
            rate = partial(bench.gbps, timer, way, variant)
            gbps = by_crew(f"{way}: {variant}", counts, rate, tick)
            curves.append(
                {
                    "direction": way.direction,
                    "peers": way.peers,
                    "copy_bytes": variant.step_elements * 2,
                    "depth": variant.depth,
                    "num_warps": variant.num_warps,
                    "gbps": gbps,
                }
            )
    engine = bench.engine_gbps(timer)
    copies: dict[str, Any] = {
        "curves": curves,
        "engine_gbps": None if engine is None else figures(engine),
        "checked": True,
    }
    if world.size > 1:
        calls = {"collective": bench.gather, "reduction": world.reduce_scatter_tensor}
        for name, call in calls.items():
            gbps_large, us_small = bench.collective(timer, call)
            copies[f"{name}_gbps"] = figures(gbps_large)
            copies[f"{name}_us"] = figures(us_small)
    out: dict[str, Any] = {"pull_gbps": None, "push_gbps": None, "copies": copies}
    for direction in ("pull", "push"):
        best = best_curve(curves, direction, 1)
        if best is not None:
            out[f"{direction}_gbps"] = best["gbps"]
            out[f"{direction}_copy"] = {k: best[k] for k in ("copy_bytes", "depth", "num_warps")}
    return out


def best_curve(curves: list[dict[str, Any]], direction: str, peers: int) -> dict[str, Any] | None:
    """The curve on which few movers with the warps of fused kernels are fastest, or None."""

    def score(curve: dict[str, Any]) -> float:
        few = [v for wgs, v in curve["gbps"].items() if int(wgs) <= FEW_MOVERS]
        return math.fsum(math.log(v) for v in few or curve["gbps"].values())

    fitting = [
        c
        for c in curves
        if (c["direction"], c["peers"], c["num_warps"]) == (direction, peers, PLAN_WARPS)
    ]
    return max(fitting, key=score, default=None)
