"""Simulating one call, and what a TP+SP call takes as the vendor's collective and GEMM."""

from __future__ import annotations

from dataclasses import dataclass

from kosmos_heuristics.checks import cdiv
from kosmos_heuristics.simulate.model import SimMachine
from kosmos_heuristics.simulate.moe import MoeCase, around_ms, build_moe, moe_bound_ms
from kosmos_heuristics.simulate.native import play
from kosmos_heuristics.simulate.program import (
    BUILDER,
    DOWNSTREAM,
    TILES,
    UPSTREAM,
    Played,
    Program,
)
from kosmos_heuristics.simulate.tpsp import Case, build


@dataclass(frozen=True)
class Outcome:
    """A simulated call.

    Args:
        time_ms: The fused call.
        baseline_ms: The vendor's collective, then its GEMM; None for an MoE layer.
        bound_ms: No schedule is faster: the longer of the work on all workgroups and the bytes at
            the links' limit.
        build_ms: Workgroup-milliseconds spent on tiles.
        move_ms: Workgroup-milliseconds spent on transfers.
        build_wait_ms: Workgroup-milliseconds in which builders waited for data.
        move_wait_ms: The same of movers.
        idle_ms: Workgroup-milliseconds with nothing claimed.
        remote_bytes: Bytes that crossed the fabric into each rank.
        num_movers: Workgroups of the first rank that started as anything but builders.
        played: What the core returned, with its spans if they were asked for.
    """

    time_ms: float
    baseline_ms: float | None
    bound_ms: float
    build_ms: float
    move_ms: float
    build_wait_ms: float
    move_wait_ms: float
    idle_ms: float
    remote_bytes: float
    num_movers: int
    played: Played


def simulate(
    case: Case, machine: SimMachine, *, trace: bool = False, core: str = "auto"
) -> Outcome:
    """Simulate one call.

    Args:
        case: The call.
        machine: The machine, read for the case's dtype.
        trace: Whether to keep every item's span.
        core: ``auto``, ``native`` or ``python``.

    Raises:
        HeuristicsError: Bad input, naming the field.
    """
    around = machine.launch_us * 1e-3
    base, bound = baseline_ms(case, machine), bound_ms(case, machine)
    return _outcome(build(case, machine), case.remote_bytes, around, base, bound, trace, core)


def simulate_moe(
    case: MoeCase, machine: SimMachine, *, trace: bool = False, core: str = "auto"
) -> Outcome:
    """Simulate one call of an MoE layer. Figures are of all played ranks together.

    Args:
        case: The call.
        machine: The machine, read for the case's dtype.
        trace: Whether to keep every item's span.
        core: ``auto``, ``native`` or ``python``.

    Raises:
        HeuristicsError: Bad input, naming the field.
    """
    around = machine.launch_us * 1e-3 + around_ms(case, machine)
    bound = moe_bound_ms(case, machine)
    return _outcome(build_moe(case, machine), case.remote_bytes, around, None, bound, trace, core)


def _outcome(
    program: Program,
    remote_bytes: float,
    around: float,
    base: float | None,
    bound: float,
    trace: bool,
    core: str,
) -> Outcome:
    played = play(program, trace, core)
    end = max(played.end_us)
    busy = [sum(rank[q] for rank in played.busy_us) for q in (TILES, UPSTREAM, DOWNSTREAM)]
    wait = [sum(rank[q] for rank in played.wait_us) for q in (TILES, UPSTREAM, DOWNSTREAM)]
    total = end * sum(len(rank.roles) for rank in program.ranks)
    return Outcome(
        time_ms=end * 1e-3 + around,
        baseline_ms=base,
        bound_ms=bound,
        build_ms=busy[0] * 1e-3,
        move_ms=(busy[1] + busy[2]) * 1e-3,
        build_wait_ms=wait[0] * 1e-3,
        move_wait_ms=(wait[1] + wait[2]) * 1e-3,
        idle_ms=max(0.0, total - sum(busy) - sum(wait)) * 1e-3,
        remote_bytes=remote_bytes,
        num_movers=sum(role != BUILDER for role in program.ranks[0].roles),
        played=played,
    )


def bytes_ms(case: Case, machine: SimMachine) -> float:
    """The remote bytes at the links' limit."""
    peers = case.world_size - 1
    limit = machine.link_gbps * (peers if machine.topology == "mesh" else min(1, peers))
    return case.remote_bytes / (limit * 1e6) if peers else 0.0


def bound_ms(case: Case, machine: SimMachine) -> float:
    """The longer of the work on all workgroups and the bytes at the links' limit."""
    moved = bytes_ms(case, machine)
    tflops = machine.boosted(machine.tflops, case.flops, moved)
    wgs = min(case.cap or machine.num_wgs, machine.num_wgs)
    # So many builders do together, of what the whole grid does.
    share = machine.build_rates()[wgs] * wgs / machine.num_wgs
    return max(case.flops / (tflops * share * 1e9), moved)


def baseline_ms(case: Case, machine: SimMachine) -> float:
    """The vendor's collective, then the vendor's GEMM, in whole waves of tiles."""
    gbps = machine.collective_gbps if case.gathers else machine.reduction_gbps
    gemms = 2 if case.pair else 1
    peers = case.world_size - 1
    if machine.topology == "mesh":
        gbps *= max(1, peers) / machine.curve_peers
    moved = case.remote_bytes / (gbps * 1e6) if peers else 0.0
    fixed_us = gemms * (machine.vendor_gemm_us + (machine.collective_us if peers else 0.0))
    tflops = machine.boosted(machine.vendor_tflops, case.flops, moved)
    tiles = cdiv(case.m, machine.tile_m) * cdiv(case.n, machine.tile_n)
    waves = tiles / machine.num_wgs
    # Vendors split what does not fill the grid, but not the last wave of many.
    stretch = 1.0 + machine.vendor_tail * (cdiv(tiles, machine.num_wgs) / waves - 1.0)
    return moved + case.flops * stretch / (tflops * 1e9) + fixed_us * 1e-3
