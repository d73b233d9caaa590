"""Crews of the bulk operations: a collective beside a GEMM that neither feeds nor waits for it."""

from __future__ import annotations

from kosmos_heuristics.machine import Machine
from kosmos_heuristics.movers import (
    EXECUTOR_MOVERS_PER_PEER,
    EXTRAPOLATED_MXFP8,
    MoverChoice,
    balanced_crew,
)
from kosmos_heuristics.problems import BulkAgProblem, BulkRsProblem, TpProblem
from kosmos_heuristics.reducers import in_proportion

# Paper, Table B.3 row 3: (least contraction K, movers per peer), else B3_BULK_OTHER.
B3_BULK_AG = {
    "bf16": ((7168, 2), (3584, 4), (2304, 6)),
    "mxfp8": ((3584, 2), (1792, 4)),
}
# Row 5, by output width n.
B3_BULK_RS_BF16 = ((8192, 2), (3584, 4))
B3_BULK_RS_MXFP8_WIDE = (5120, 8191, 8)
B3_BULK_RS_MXFP8_OTHER = 4
B3_BULK_OTHER = 8

_UNMEASURED = (
    "not measured for bulk operations: ag_gemm's constants (extrapolated, "
    "docs/decisions/0004-paper-rules.md)"
)
_PER_PEER = "per peer at any TP (A11)"


def bulk_ag_movers(problem: BulkAgProblem, machine: Machine, transport: str) -> MoverChoice:
    """Movers per remote peer for ``bulk_ag``, before the fit to the cap; 0 without peers."""
    simple = _simple(problem, machine, "gather")
    if simple is not None:
        return simple
    if machine.rule_set != "mi350":
        return _balanced(problem, machine, transport)
    dtype = "" if problem.dtype == "bf16" else ", MXFP8"
    source = f"paper Table B.3; K is the local width; {_PER_PEER}"
    for least, crew in B3_BULK_AG[problem.dtype]:
        if problem.k >= least:
            return MoverChoice(crew, f"B.3 row 3: K {problem.k} >= {least}{dtype}", source)
    least = B3_BULK_AG[problem.dtype][-1][0]
    return MoverChoice(B3_BULK_OTHER, f"B.3 row 3: K {problem.k} < {least}{dtype}", source)


def bulk_rs_reducers(problem: BulkRsProblem, machine: Machine, cap: int) -> MoverChoice:
    """Reducers per remote peer for ``bulk_rs``, before the fit to the cap; 0 without peers."""
    simple = _simple(problem, machine, "reduce")
    if simple is not None:
        return simple
    if machine.rule_set != "mi350":
        return in_proportion(_balanced(problem, machine, "reduce"), cap, machine.num_wgs)
    source = f"paper Table B.3; n is the layer's local output width, our m (A2); {_PER_PEER}"
    return in_proportion(_paper_bulk_rs(problem, source), cap, machine.num_wgs)


def _simple(problem: TpProblem, machine: Machine, verb: str) -> MoverChoice | None:
    if problem.num_peers == 0:
        return MoverChoice(0, f"world_size 1: nothing to {verb}", "definition")
    if machine.rule_set == "executor":
        rule = "executor: 2 per peer"
        return MoverChoice(EXECUTOR_MOVERS_PER_PEER, rule, "tiny sizes for the CPU")
    return None


def _balanced(problem: TpProblem, machine: Machine, way: str) -> MoverChoice:
    """From curves; no tile waits for the collective, so nothing follows its end."""
    why = _UNMEASURED if problem.dtype == "bf16" else f"{_UNMEASURED}; {EXTRAPOLATED_MXFP8}"
    return balanced_crew(problem, machine, way, tiles_after=0.0, measured=why)


def _paper_bulk_rs(problem: BulkRsProblem, source: str) -> MoverChoice:
    width = problem.m
    if problem.dtype == "mxfp8":
        least, most, crew = B3_BULK_RS_MXFP8_WIDE
        inside = least <= width <= most
        rule = f"B.3 row 5: n {width} {'in' if inside else 'not in'} {least}..{most}, MXFP8"
        return MoverChoice(crew if inside else B3_BULK_RS_MXFP8_OTHER, rule, source)
    for least, crew in B3_BULK_RS_BF16:
        if width >= least:
            return MoverChoice(crew, f"B.3 row 5: n {width} >= {least}", source)
    least = B3_BULK_RS_BF16[-1][0]
    return MoverChoice(B3_BULK_OTHER, f"B.3 row 5: n {width} < {least}", source)
