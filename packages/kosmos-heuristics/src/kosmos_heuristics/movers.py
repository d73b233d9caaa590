"""How many movers gather: the paper's rules, and the same closed form from measured curves."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from kosmos_heuristics.checks import cdiv
from kosmos_heuristics.machine import Machine
from kosmos_heuristics.problems import AgGemmProblem, TpProblem

# Paper, Table A.3 and Figures A.2, A.3: the best single fixed split is 8 WGs per peer.
FIXED_MOVERS_PER_PEER = 8

# Paper, Table B.3 rows 1 and 2: fewer movers where a BF16 GEMM is wide enough to hide them.
B3_WIDE_N = {"tn": 3584, "nn": 4608}
B3_ROW = {"tn": 1, "nn": 2}
B3_MOVERS_WIDE = 6
B3_MOVERS_NARROW = 8

# Two movers share a tile row, so that counters above 1 are exercised on the CPU too.
EXECUTOR_MOVERS_PER_PEER = 2

# Rules from curves, fitted to ag_gemm on two H200s (fit.py, docs/decisions/0003-h200-rules.md).
# Beside builders, which load the memory system, it takes so many movers to bring the transport's
# peak; of fewer, each brings a little more than its share.
SATURATING_CREW = 24
SHARE_EXPONENT = 1.3
# Tiles that are still built one after the other once the last unit has arrived.
TILES_AFTER_ARRIVAL = 0.6
# Building workgroups that a mover costs: itself, and what its traffic slows the others.
MOVER_WEIGHT = 1.45
# Crews that are considered, in WGs over all peers: from MIN_CREW in steps, up to half the WGs.
MIN_CREW = 8
CREW_QUANTUM = 4
# The smallest crew is taken whose predicted time is this close to the best.
CLOSE = 1.005


class CrewConstants(NamedTuple):
    """Constants of the crew rule, as above."""

    saturating_crew: int = SATURATING_CREW
    share_exponent: float = SHARE_EXPONENT
    mover_weight: float = MOVER_WEIGHT
    tiles_after_arrival: float = TILES_AFTER_ARRIVAL


CREWS = CrewConstants()
EXTRAPOLATED_MXFP8 = "MXFP8 not measured: the BF16 constants with its bytes (extrapolated)"


@dataclass(frozen=True)
class MoverChoice:
    """Movers per peer before the fit to the cap, with the rule that fired and its source."""

    movers_per_peer: int
    rule: str
    source: str


def ag_gemm_movers(problem: AgGemmProblem, machine: Machine, transport: str) -> MoverChoice:
    """Movers per remote peer for ``ag_gemm``, by the machine's rule set; 0 without peers."""
    if problem.num_peers == 0:
        return MoverChoice(0, "world_size 1: nothing to gather", "definition")
    if machine.rule_set == "mi350":
        return _paper(problem)
    if machine.rule_set == "executor":
        return MoverChoice(
            EXECUTOR_MOVERS_PER_PEER, "executor: 2 per peer", "tiny sizes for the CPU"
        )
    measured = "" if problem.dtype == "bf16" else EXTRAPOLATED_MXFP8
    return balanced_crew(problem, machine, transport, measured=measured)


def _paper(problem: AgGemmProblem) -> MoverChoice:
    threshold = B3_WIDE_N[problem.layout]
    if problem.dtype == "mxfp8":
        rule = f"B.3 row {B3_ROW[problem.layout]}: MXFP8"
        return MoverChoice(B3_MOVERS_NARROW, rule, "paper Table B.3, per peer at any TP (A11)")
    wide = problem.n >= threshold
    return MoverChoice(
        B3_MOVERS_WIDE if wide else B3_MOVERS_NARROW,
        f"B.3 row {B3_ROW[problem.layout]}: n {problem.n} {'>=' if wide else '<'} {threshold}",
        "paper Table B.3; n is the GEMM's local width (reading A1), per peer at any TP (A11)",
    )


def gather_ms(
    problem: TpProblem, machine: Machine, way: str, crew: int, constants: CrewConstants = CREWS
) -> float:
    """Milliseconds in which a crew moves everything while others build; 0 without peers."""
    if problem.num_peers == 0:
        return 0.0
    missing = max(0.0, 1.0 - crew / constants.saturating_crew)
    share = 1.0 - math.pow(missing, constants.share_exponent)
    return problem.remote_bytes / (share * machine.peak_gbps(way, problem.num_peers) * 1e6)


def gemm_ms(problem: TpProblem, machine: Machine) -> float:
    """Milliseconds of the GEMM alone on the whole device."""
    rate = machine.tflops.at(machine.num_wgs) * machine.dtype_ratio(problem.dtype)
    return problem.flops / (rate * 1e9)


def crew_ms(
    problem: TpProblem,
    machine: Machine,
    way: str,
    crew: int,
    tiles_after: float | None = None,
    constants: CrewConstants = CREWS,
) -> float:
    """Milliseconds of a call with a crew, as far as the crew decides them.

    The longer of transport, which ``tiles_after`` tiles follow (None: as after a gather), and of
    building, which the crew delays: up to the saturating crew equally much with any.
    """
    if tiles_after is None:
        tiles_after = constants.tiles_after_arrival
    gather = gather_ms(problem, machine, way, crew, constants)
    gemm = gemm_ms(problem, machine)
    tiles = max(1.0, problem.m / machine.tile.block_m * problem.n / machine.tile.block_n)
    tile_ms = gemm * machine.num_wgs / tiles
    most = max(crew, constants.saturating_crew)
    delay = gather_ms(problem, machine, way, most, constants)
    delay *= constants.mover_weight * most / machine.num_wgs
    return max(gather + tiles_after * tile_ms, gemm + delay)


def balanced_crew(
    problem: TpProblem,
    machine: Machine,
    way: str,
    tiles_after: float = TILES_AFTER_ARRIVAL,
    measured: str = "",
) -> MoverChoice:
    """Movers per peer from curves: the smallest crew whose predicted time is close to the best.

    Args:
        problem: Sizes of the call.
        machine: The GPU and its node.
        way: Curve of the transport, ``pull``, ``push`` or ``reduce``.
        tiles_after: Tiles that are still built after the last arrival; 0 where none waits for it.
        measured: What to say of the rule's source, if it was not fitted to this operation.
    """
    crews = range(MIN_CREW, max(MIN_CREW, machine.num_wgs // 2) + 1, CREW_QUANTUM)
    times = {crew: crew_ms(problem, machine, way, crew, tiles_after) for crew in crews}
    crew = next(crew for crew in crews if times[crew] <= CLOSE * min(times.values()))
    gather, gemm = gather_ms(problem, machine, way, crew), gemm_ms(problem, machine)
    decides = "bytes decide" if gather >= gemm else "GEMM decides"
    verb = "reduce" if way == "reduce" else "gather"
    rule = (
        f"curve: {decides} ({verb} {gather:.3f} ms, GEMM {gemm:.3f} ms), "
        f"{crew} WGs over {problem.num_peers} peers"
    )
    source = machine.source(way) + (f"; {measured}" if measured else "")
    return MoverChoice(cdiv(crew, problem.num_peers), rule, source)
