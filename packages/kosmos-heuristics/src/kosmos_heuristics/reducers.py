"""How many movers reduce beside the GEMM that makes the partial sums (``gemm_rs``)."""

from __future__ import annotations

import math

from kosmos_heuristics.checks import cdiv
from kosmos_heuristics.machine import Machine
from kosmos_heuristics.movers import (
    EXECUTOR_MOVERS_PER_PEER,
    EXTRAPOLATED_MXFP8,
    MoverChoice,
    gemm_ms,
)
from kosmos_heuristics.problems import OUTPUT_BYTES, GemmRsProblem, TpProblem
from kosmos_heuristics.tiles import PAPER_TILE, paper_tiles

# Paper, Table B.3 row 4: (least local K, BF16, MXFP8, MXFP8 from MANY_WAVES on).
B3_LONG_K = ((4096, 4, 5, 5), (3072, 6, 7, 8))
B3_SHORT_K = 768
# Of a short K, by waves: few tiles' worth of GEMM per byte, so the more waves the more reducers.
B3_SHORT_BY_WAVES = ((16, 14), (8, 10), (0, 8))
B3_OTHER = (8, 8, 10)
B3_MANY_WAVES = 16
# Paper, Table A.4: 56 WGs on 7 peers saturate the links when they reduce; 112 are 2 % slower.
SATURATING_PER_PEER = 8

# H200 (docs/decisions/0004-paper-rules.md). Pushed, builders store into the owner's memory and a
# reducer sums what is local: 2 to 16 reducers at the start were best on the shapes measured.
PUSHED_LEAST = 2
PUSHED_MOST = 16
# GB/s that one reducer sums of local memory beside builders, 32 KiB of loads in flight: the crews
# that were best on seven shapes at two ranks (2 to 12 of them, 0.5 % from the best of each).
PUSHED_GBPS_PER_WG = 64.0
# Pulled, GB/s that one reducer brings: 2.6 were measured at 8 KiB a source, and 2 to 4 times that
# at the 32 to 64 KiB that plans have.
PULLED_GBPS_PER_WG = 7.8
PULLED_LEAST = 8


def gemm_rs_reducers(
    problem: GemmRsProblem, machine: Machine, transport: str, cap: int
) -> MoverChoice:
    """Reducers per remote peer for ``gemm_rs``, before the fit to the cap; 0 without peers."""
    if problem.num_peers == 0:
        return MoverChoice(0, "world_size 1: nothing to reduce", "definition")
    if machine.rule_set == "executor":
        rule = "executor: 2 per peer"
        return MoverChoice(EXECUTOR_MOVERS_PER_PEER, rule, "tiny sizes for the CPU")
    if machine.rule_set == "mi350":
        return in_proportion(_paper(problem, cap), cap, machine.num_wgs)
    return in_proportion(_keeping_pace(problem, machine, transport), cap, machine.num_wgs)


def in_proportion(choice: MoverChoice, cap: int, num_wgs: int) -> MoverChoice:
    """Shrink a crew with the cap: reducing kernels shrink both roles in proportion.

    The count per peer is rounded to the nearest, halves up, and at least 1.

    Source: paper section 3.1.2; the rounding is ours.
    """
    scaled = max(1, math.floor(choice.movers_per_peer * cap / num_wgs + 0.5))
    if scaled == choice.movers_per_peer:
        return choice
    rule = f"{choice.rule}; {choice.movers_per_peer} in proportion to cap {cap} of {num_wgs}"
    return MoverChoice(scaled, rule, f"{choice.source}; proportion: paper section 3.1.2")


def saturating_reducers(problem: TpProblem, machine: Machine, transport: str, cap: int) -> int:
    """WGs beyond which no more builders join the reduction, at most the cap; 0 without peers.

    Pushed, sums are of local memory, which any number of WGs serves. On a switch nothing measured
    says that pulling slows down past its peak, so there all join too.
    """
    if problem.num_peers == 0:
        return 0
    if transport == "push" or machine.topology == "switch":
        return cap
    return min(cap, SATURATING_PER_PEER * problem.num_peers)


def _paper(problem: GemmRsProblem, cap: int) -> MoverChoice:
    tiles, _ = paper_tiles(problem)
    waves = tiles / cap
    mxfp8 = problem.dtype == "mxfp8"
    source = (
        f"paper Table B.3; K is the local one, w counts tiles of {PAPER_TILE} over the cap, "
        "unrounded (A10); per peer at any TP (A11)"
    )

    def chosen(crew: int, condition: str) -> MoverChoice:
        rule = f"B.3 row 4: {condition}{', MXFP8' if mxfp8 else ''} (K {problem.k}, w {waves:.2f})"
        return MoverChoice(crew, rule, source)

    many = waves >= B3_MANY_WAVES
    for least, bf16, few, most in B3_LONG_K:
        if problem.k >= least:
            return chosen((most if many else few) if mxfp8 else bf16, f"K >= {least}")
    if problem.k <= B3_SHORT_K:
        least, crew = next(pair for pair in B3_SHORT_BY_WAVES if waves >= pair[0])
        return chosen(crew, f"K <= {B3_SHORT_K}, w >= {least}")
    bf16, few, most = B3_OTHER
    return chosen((most if many else few) if mxfp8 else bf16, "otherwise")


def _keeping_pace(problem: GemmRsProblem, machine: Machine, transport: str) -> MoverChoice:
    """So many reducers as sum what the builders make while they make it."""
    pushed = transport == "push"
    per_wg = PUSHED_GBPS_PER_WG if pushed else PULLED_GBPS_PER_WG
    least, most = (PUSHED_LEAST, PUSHED_MOST) if pushed else (PULLED_LEAST, machine.num_wgs // 2)
    read = problem.chunk_rows * problem.n * OUTPUT_BYTES
    read *= problem.world_size if pushed else problem.num_peers
    gemm = gemm_ms(problem, machine)
    wanted = math.ceil(read / (gemm * 1e6 * per_wg)) if read else least
    crew = max(least, min(wanted, most))
    rule = (
        f"keep pace, {transport}ed: {read / 1e6:.0f} MB in {gemm:.3f} ms at {per_wg:g} GB/s a WG, "
        f"between {least} and {most}: {crew} WGs over {problem.num_peers} peers"
    )
    source = (
        "early gemm_rs kernel on 2 H200 GPUs: 2 to 16 pushed reducers best; GB/s a WG extrapolated "
        "(docs/decisions/0004-paper-rules.md)"
        if pushed
        else "early gemm_rs kernel on 2 H200 GPUs: 2.6 GB/s a WG at 8 KiB a source, 2 to 4 times "
        "that at 32 to 64 KiB (docs/decisions/0004-paper-rules.md)"
    )
    if problem.dtype == "mxfp8":
        source += f"; {EXTRAPOLATED_MXFP8}"
    return MoverChoice(cdiv(crew, problem.num_peers), rule, source)
