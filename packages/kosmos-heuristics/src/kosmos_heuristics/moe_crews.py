"""Crews, burst depth and the way of the column-wise input of the MoE kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kosmos_heuristics.checks import cdiv
from kosmos_heuristics.explain import Reason
from kosmos_heuristics.machine import Machine
from kosmos_heuristics.moe_problem import BACKWARD_FLOPS, MoeProblem
from kosmos_heuristics.movers import EXTRAPOLATED_MXFP8
from kosmos_heuristics.problems import OUTPUT_BYTES, wire_bytes

DECISION = "docs/decisions/0004-paper-rules.md"
CREW_MULTIPLE = 8
# The rules were fitted at EP 8: seven peers.
FITTED_PEERS = 7

# Paper, Table B.3 row 6. BF16: (I below, crew), else B3_DISPATCH_WIDE.
B3_DISPATCH_BF16 = ((1024, 32), (3072, 24))
B3_DISPATCH_WIDE = 16
B3_DISPATCH_MXFP8_WORK = 24576
B3_DISPATCH_MXFP8_RANGE = (16, 48)
# Row 7.
B3_COMBINE_MOST = 128
# Rows 8 and 9; "256 WGs" as printed, whatever the cap.
B3_WGS = 256
B3_BACKWARD_DISPATCH_RANGE = (32, 64)
B3_BACKWARD_COMBINE_RANGE = {"bf16": (24, 128), "mxfp8": (32, 128)}
# Rates of rows 8 and 9 (reading A7): the links saturated at EP 8 (Table A.4, AG), the level of our
# MI350X GEMM on all WGs rounded to 1000 TFLOPS, and 1.9 times that in MXFP8. Constants, not the
# machine's: none of the printed rules depends on the GPU model.
B3_PUSH_GBPS = 424.0
B3_TFLOPS = {"bf16": 1000.0, "mxfp8": 1900.0}
# Row 10: pieces of 512 elements, the BF16 of one 16-byte access of 64 lanes.
B3_BURST_PIECE = 512
B3_BURST_DEPTHS = (8, 7, 6, 4)
BURST_FALLBACK = (8, 7, 6, 5, 4)

# H200: 16 to 48 dispatchers and 32 to 128 dual-role movers were within 3 % of one another.
H200_DISPATCH_RANGE = (16, 48)
H200_BACKWARD_COMBINE_LEAST = 24

_EXTRAPOLATED = f"form of Table B.3, this machine's rates; not measured (extrapolated, {DECISION})"
_MEASURED_FORWARD = (
    "early forward kernel on 2 H200 GPUs: 16 to 48 dispatchers and 32 to 128 dual-role movers "
    f"within 3 % but for the narrowest experts ({DECISION})"
)


@dataclass(frozen=True)
class Crew:
    """WGs of one GPU before the fit to the cap, with the rule that fired and its source."""

    wgs: int
    rule: str
    source: str


def multiple_up(value: float) -> int:
    """``value`` rounded up to a multiple of ``CREW_MULTIPLE``."""
    return CREW_MULTIPLE * math.ceil(value / CREW_MULTIPLE)


def multiple_nearest(value: float) -> int:
    """``value`` rounded to the nearest multiple of ``CREW_MULTIPLE``, halves up."""
    return CREW_MULTIPLE * math.floor(value / CREW_MULTIPLE + 0.5)


def clamp(value: int, bounds: tuple[int, int]) -> int:
    """``value`` kept between two bounds."""
    return max(bounds[0], min(value, bounds[1]))


def choose_column_input(problem: MoeProblem, machine: Machine) -> tuple[str, Reason]:
    """When the column-wise copy of X is sent: ``none`` (BF16), with the forward or the backward.

    wgrad1 reads it in MXFP8. Sent in the backward it travels in link time that the GEMMs leave
    idle, if there is any: where pushing dY, it and dX takes longer than all backward GEMMs, it goes
    with the forward dispatch. Times are those of one row, so that ranks with other token counts,
    and the backward of the same call, come to the same answer.
    """
    name = "column_input"
    if problem.dtype == "bf16":
        return "none", Reason(name, "BF16: wgrad1 reads the dispatched rows", "paper section 3.3.2")
    row_bytes = 2 * OUTPUT_BYTES * problem.hidden + wire_bytes(problem.hidden, problem.dtype)
    remote = problem.num_peers / problem.world_size
    push = remote * row_bytes / _push_rate(problem, machine)
    gemm = BACKWARD_FLOPS * problem.hidden * problem.inter / _gemm_rate(problem, machine)
    forward = push > gemm
    rule = (
        f"backward pushes {push * 1e6:.1f} ns a row {'>' if forward else '<='} its GEMMs "
        f"{gemm * 1e6:.1f} ns: with the {'forward' if forward else 'backward'}"
    )
    source = f"paper section 3.3.2, no threshold printed (reading A6, {DECISION})"
    return "forward" if forward else "backward", Reason(name, rule, source)


def forward_dispatch(problem: MoeProblem, machine: Machine, column_input: str) -> Crew:
    """Dispatch crew of the forward before the fit to the cap."""
    if machine.rule_set == "executor":
        return Crew(1, "executor: one", "tiny sizes for the CPU")
    if machine.rule_set == "mi350":
        return _scaled(_paper_dispatch(problem, column_input), problem, machine)
    sent = problem.dispatch_bytes * (2 if column_input == "forward" else 1)
    push = sent / _push_rate(problem, machine)
    gemm = problem.gemm1_flops / _gemm_rate(problem, machine)
    share = push / (push + gemm) if problem.rows else 0.0
    wgs = clamp(multiple_nearest(machine.num_wgs * share), H200_DISPATCH_RANGE)
    rule = (
        f"share of pushing: {machine.num_wgs} WGs x {push:.3f} / ({push:.3f} + GEMM1 {gemm:.3f} "
        f"ms), a multiple of 8 between {H200_DISPATCH_RANGE[0]} and {H200_DISPATCH_RANGE[1]}"
    )
    extrapolated = "" if problem.dtype == "bf16" else f"; {EXTRAPOLATED_MXFP8}"
    return Crew(wgs, rule, _MEASURED_FORWARD + extrapolated)


def forward_combine(machine: Machine, cap: int) -> Crew:
    """Dual-role movers of the forward's combine before the fit to the cap (row 7)."""
    if machine.rule_set == "executor":
        return Crew(2, "executor: two", "tiny sizes for the CPU")
    wgs = min(B3_COMBINE_MOST, cap)
    wgs = wgs // CREW_MULTIPLE * CREW_MULTIPLE or wgs
    rule = f"B.3 row 7: the smaller of {B3_COMBINE_MOST} and cap {cap}, down to a multiple of 8"
    if machine.rule_set == "mi350":
        return Crew(wgs, rule, "paper Table B.3")
    return Crew(wgs, rule, f"paper Table B.3; {_MEASURED_FORWARD}")


def backward_dispatch(problem: MoeProblem, machine: Machine, column_input: str) -> Crew:
    """Dispatch crew of the backward before the fit to the cap (row 8)."""
    if machine.rule_set == "executor":
        return Crew(1, "executor: one", "tiny sizes for the CPU")
    paper = machine.rule_set == "mi350"
    sent = problem.combine_bytes
    if column_input == "backward":
        sent += problem.dispatch_bytes
    push = sent / _push_rate(problem, machine)
    gemm = problem.backward_flops / _gemm_rate(problem, machine)
    wgs = B3_WGS if paper else machine.num_wgs
    bounds = B3_BACKWARD_DISPATCH_RANGE if paper else H200_DISPATCH_RANGE
    share = push / (push + gemm) if problem.rows else 0.0
    crew = clamp(multiple_up(wgs * share), bounds)
    rule = (
        f"{_form(paper)}B.3 row 8: {wgs} WGs x {push:.3f} / ({push:.3f} + {gemm:.3f} ms), up to a "
        f"multiple of 8, between {bounds[0]} and {bounds[1]}"
    )
    if not paper:
        return Crew(crew, rule, _EXTRAPOLATED)
    return _scaled(Crew(crew, rule, _rates_source(problem)), problem, machine)


def backward_combine(problem: MoeProblem, machine: Machine) -> Crew:
    """Dual-role movers of the backward's combine before the fit to the cap (row 9)."""
    if machine.rule_set == "executor":
        return Crew(2, "executor: two", "tiny sizes for the CPU")
    paper = machine.rule_set == "mi350"
    push = problem.combine_bytes / _push_rate(problem, machine)
    gemm = problem.backward_flops / _gemm_rate(problem, machine)
    wgs = B3_WGS if paper else machine.num_wgs
    bounds = (H200_BACKWARD_COMBINE_LEAST, B3_COMBINE_MOST)
    if paper:
        bounds = B3_BACKWARD_COMBINE_RANGE[problem.dtype]
    share = push / gemm if problem.rows else 0.0
    crew = clamp(multiple_up(wgs * share), bounds)
    rule = (
        f"{_form(paper)}B.3 row 9: {wgs} WGs x {push:.3f} / {gemm:.3f} ms, up to a multiple of 8, "
        f"between {bounds[0]} and {bounds[1]}"
    )
    return Crew(crew, rule, _rates_source(problem) if paper else _EXTRAPOLATED)


def choose_burst_depth(problem: MoeProblem, machine: Machine) -> tuple[int, Reason]:
    """Pieces of a row that a mover has in flight at once (row 10).

    Where no printed depth divides the row, the depth from 4 to 8 whose last burst has the fewest
    empty places, the largest of equals. Rows of fewer than four pieces are one burst.
    """
    pieces = cdiv(problem.hidden, B3_BURST_PIECE)
    whole = problem.hidden % B3_BURST_PIECE == 0
    source = "paper Table B.3"
    if machine.rule_set != "mi350":
        source += f"; not measured on this machine (extrapolated, {DECISION})"
    depth = next((d for d in B3_BURST_DEPTHS if whole and pieces % d == 0), 0)
    if depth:
        rule = f"B.3 row 10: {depth} divides {pieces} pieces of {B3_BURST_PIECE}"
        return depth, Reason("burst_depth", rule, source)
    if pieces < BURST_FALLBACK[-1]:
        depth, rule = pieces, f"{pieces} pieces of {B3_BURST_PIECE}: one burst"
    else:
        depth = min(BURST_FALLBACK, key=lambda d: (-pieces % d, -d))
        rule = (
            f"none of 8, 7, 6, 4 divides {pieces} pieces of {B3_BURST_PIECE}: {depth} leaves "
            f"{-pieces % depth} of the last burst empty"
        )
    return depth, Reason("burst_depth", rule, f"{source}; fallback is ours (A3, {DECISION})")


def _paper_dispatch(problem: MoeProblem, column_input: str) -> Crew:
    width = problem.inter
    if problem.dtype == "bf16":
        for below, wgs in B3_DISPATCH_BF16:
            if width < below:
                return Crew(wgs, f"B.3 row 6: I {width} < {below}", "paper Table B.3")
        least = B3_DISPATCH_BF16[-1][0]
        return Crew(B3_DISPATCH_WIDE, f"B.3 row 6: I {width} >= {least}", "paper Table B.3")
    wgs = clamp(multiple_nearest(B3_DISPATCH_MXFP8_WORK / width), B3_DISPATCH_MXFP8_RANGE)
    least, most = B3_DISPATCH_MXFP8_RANGE
    rule = f"B.3 row 6: MXFP8, {B3_DISPATCH_MXFP8_WORK} / I {width}, between {least} and {most}"
    if column_input == "forward":
        wgs, rule = 2 * wgs, f"{rule}, doubled for the column-wise input"
    return Crew(wgs, rule, "paper Table B.3; nearest multiple of 8, then clamped (A5)")


def _scaled(crew: Crew, problem: MoeProblem, machine: Machine) -> Crew:
    """A dispatch crew for another number of links than the seven that it was fitted to."""
    peers = max(1, problem.num_peers)
    if machine.topology == "switch" or peers == FITTED_PEERS:
        return crew
    wgs = multiple_up(crew.wgs * peers / FITTED_PEERS)
    rule = f"{crew.rule}; {crew.wgs} at {FITTED_PEERS} peers, up to a multiple of 8 for {peers}"
    return Crew(wgs, rule, f"{crew.source}; per link at any EP (A11, {DECISION})")


def _form(paper: bool) -> str:
    return "" if paper else "form of "


def _rates_source(problem: MoeProblem) -> str:
    return (
        f"paper Table B.3; rates {B3_PUSH_GBPS:g} GB/s at {FITTED_PEERS} peers and "
        f"{B3_TFLOPS[problem.dtype]:g} TFLOPS, all backward GEMMs (A7, {DECISION})"
    )


def _push_rate(problem: MoeProblem, machine: Machine) -> float:
    """Bytes a millisecond out of one rank, all links saturated."""
    peers = max(1, problem.num_peers)
    if machine.rule_set == "mi350":
        return B3_PUSH_GBPS * peers / FITTED_PEERS * 1e6
    return machine.peak_gbps("push", peers) * 1e6


def _gemm_rate(problem: MoeProblem, machine: Machine) -> float:
    """Operations a millisecond of the expert GEMMs on the whole GPU."""
    if machine.rule_set == "mi350":
        return B3_TFLOPS[problem.dtype] * 1e9
    return machine.tflops.at(machine.num_wgs) * machine.dtype_ratio(problem.dtype) * 1e9
