"""How many movers gather: the paper's rules, and the same closed form from measured curves."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

from kosmos_heuristics.checks import cdiv
from kosmos_heuristics.machine import Machine
from kosmos_heuristics.problems import AgGemmProblem

# Paper, Table A.3 and Figures A.2, A.3: the best single fixed split is 8 WGs per peer.
FIXED_MOVERS_PER_PEER = 8

# Paper, Table B.3 rows 1 and 2 (BF16): fewer movers where the GEMM is wide enough to hide them.
B3_WIDE_N = {"tn": 3584, "nn": 4608}
B3_ROW = {"tn": 1, "nn": 2}
B3_MOVERS_WIDE = 6
B3_MOVERS_NARROW = 8

# Two movers share a tile row, so that counters above 1 are exercised on the CPU too.
EXECUTOR_MOVERS_PER_PEER = 2

# Rules from curves, fitted to ag_gemm on two H200s (docs/benchmarking.md).
# Beside builders, which load the memory system, c movers bring 1 - exp(-c / LOADED_CREW) of the peak.
LOADED_CREW = 7.5
# Crews that are considered, in WGs over all peers.
MIN_CREW = 8
CREW_QUANTUM = 4
# Where the GEMM is the longer side by far, the gather is over within this share of it.
GATHER_SHARE = 0.5
# Crews whose predicted time is this close to the best are as good: the smallest is taken whose gather keeps
# ahead of the builders, which is to end within SLACK of the predicted time.
CLOSE = 1.045
SLACK = 0.95


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
    return _from_curves(problem, machine, transport)


def _paper(problem: AgGemmProblem) -> MoverChoice:
    threshold = B3_WIDE_N[problem.layout]
    wide = problem.n >= threshold
    return MoverChoice(
        B3_MOVERS_WIDE if wide else B3_MOVERS_NARROW,
        f"B.3 row {B3_ROW[problem.layout]}: n {problem.n} {'>=' if wide else '<'} {threshold}",
        "paper Table B.3; n is the GEMM's local width (reading A1), per peer at any TP (A11)",
    )


def crew_gbps(problem: AgGemmProblem, machine: Machine, transport: str, crew: int) -> float:
    """GB/s that a crew brings while the others build."""
    peak = machine.peak_gbps(transport, problem.num_peers)
    return peak * (1.0 - exp(-crew / LOADED_CREW))


def gather_ms(problem: AgGemmProblem, machine: Machine, transport: str, crew: int) -> float:
    """Milliseconds in which a crew gathers everything; 0 without peers."""
    if problem.num_peers == 0:
        return 0.0
    return problem.remote_bytes / (crew_gbps(problem, machine, transport, crew) * 1e6)


def predicted_ms(problem: AgGemmProblem, machine: Machine, transport: str, crew: int) -> float:
    """Milliseconds of a call with so many movers: the longer of transport and building.

    Transport ends with the last tile row and one more tile; building has all WGs less what the movers spend.
    """
    gather = gather_ms(problem, machine, transport, crew)
    gemm = gemm_ms(problem, machine)
    tile = machine.tile
    tiles = max(1.0, problem.m / tile.block_m * problem.n / tile.block_n)
    tile_ms = gemm * machine.num_wgs / tiles
    return max(gather + tile_ms, gemm + crew * gather / machine.num_wgs)


def gemm_ms(problem: AgGemmProblem, machine: Machine) -> float:
    """Milliseconds of the GEMM alone on the whole device."""
    return problem.flops / (machine.tflops.at(machine.num_wgs) * 1e9)


def _from_curves(problem: AgGemmProblem, machine: Machine, transport: str) -> MoverChoice:
    peers = problem.num_peers
    crews = range(MIN_CREW, machine.num_wgs // 2 + 1, CREW_QUANTUM)
    times = {crew: predicted_ms(problem, machine, transport, crew) for crew in crews}
    best = min(times.values())
    good = [crew for crew in crews if times[crew] <= CLOSE * best]
    gemm = gemm_ms(problem, machine)
    limit = max(GATHER_SHARE * gemm, SLACK * best - gemm / 8)
    ahead = [c for c in good if gather_ms(problem, machine, transport, c) <= limit]
    bytes_bound = gather_ms(problem, machine, transport, crews[-1]) >= gemm
    total = good[0] if bytes_bound or not ahead else ahead[0]
    gather = gather_ms(problem, machine, transport, total)
    decides = "bytes decide" if gather >= gemm else "GEMM decides"
    rule = f"curve: {decides} (gather {gather:.3f} ms, GEMM {gemm:.3f} ms), {total} WGs over {peers} peers"
    return MoverChoice(cdiv(total, peers), rule, machine.source(transport))
