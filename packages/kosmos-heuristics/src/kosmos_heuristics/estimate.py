"""Predicted times, and the calls that fusing would slow down.

A closed form of few numbers per machine: transport by crew, GEMM throughput by builders, a fixed
cost per tile, per flag and per launch. It assumes the ``local_first`` order, in which builders have
local tiles to work on while the gather runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from kosmos_heuristics.checks import cdiv
from kosmos_heuristics.errors import PlanError
from kosmos_heuristics.estimate_tp import bulk_ms, gemm_rs_ms, partials_bytes
from kosmos_heuristics.machine import Machine
from kosmos_heuristics.plans import AgGemmPlan
from kosmos_heuristics.problems import (
    DTYPE_BYTES,
    AgGemmPairProblem,
    AgGemmProblem,
    BulkRsProblem,
    GemmRsProblem,
    TpProblem,
)
from kosmos_heuristics.tile_time import TileQueueTime
from kosmos_heuristics.tp_plans import BulkRsPlan, GemmRsPlan, TpPlan

# Descriptors and vector loads need rows that start on 16 bytes.
ROW_ALIGN_BYTES = 16
# Sizes that are the length of some operand's rows.
ROWS = {"ag_gemm": "kn", "ag_gemm_pair": "kn", "gemm_rs": "kn", "bulk_ag": "kn", "bulk_rs": "mn"}


@dataclass(frozen=True)
class Estimate:
    """Predicted times of one call.

    Args:
        time_ms: The fused kernel.
        gemm_ms: The vendor's GEMM alone, on the plan's share of the GPU.
        bytes_ms: The remote bytes at the peak of the plan's transport.
        baseline_ms: The unfused path, collective then GEMM, on the same share: what a cap leaves
            free is in use by something else, whichever path runs.
        efficiency: ``max(gemm_ms, bytes_ms) / time_ms``, 1 when there is nothing to do.
    """

    time_ms: float
    gemm_ms: float
    bytes_ms: float
    baseline_ms: float
    efficiency: float


@dataclass(frozen=True)
class Decline:
    """Why a call is not fused.

    Args:
        reason: One line naming what does not fit or what would be lost.
    """

    reason: str

    def __str__(self) -> str:
        """The reason."""
        return self.reason


def estimate(problem: TpProblem, machine: Machine, plan: TpPlan) -> Estimate:
    """Predict the time of a fused call and of the unfused path.

    Args:
        problem: Sizes of the call.
        machine: The GPU and its node.
        plan: The call's plan on that machine.

    Returns:
        Times in milliseconds; all 0 for an empty problem.
    """
    if problem.OP != plan.OP:
        raise PlanError("plan", plan.OP, f"a plan of {problem.OP}", "plan this problem")
    if problem.tokens == 0:
        return Estimate(0.0, 0.0, 0.0, 0.0, 1.0)
    bytes_ms = 0.0
    if problem.num_peers:
        way = "reduce" if isinstance(plan, BulkRsPlan) else plan.transport
        peak = machine.peak_gbps(way, problem.num_peers)
        bytes_ms = problem.remote_bytes / (peak * 1e6)
    gemm_ms = _vendor_gemm_ms(problem, machine, plan.cap)
    time_ms = _fused_ms(problem, machine, plan)
    baseline_ms = gemm_ms + _vendor_collective_ms(problem, machine)
    return Estimate(time_ms, gemm_ms, bytes_ms, baseline_ms, max(gemm_ms, bytes_ms) / time_ms)


def can_fuse(
    problem: TpProblem, machine: Machine, plan: TpPlan, *, speed: bool = True
) -> Decline | None:
    """Whether a call should take the fused kernel.

    Args:
        problem: Sizes of the call.
        machine: The GPU and its node; the same on all ranks, so that all ranks agree.
        plan: The call's plan on that machine.
        speed: Whether a predicted loss is a reason. Without it only what the kernel cannot do
            counts. The executor and a group of one are never declined for speed.

    Returns:
        None if the call is accepted, else the reason.
    """
    for what in ROWS[problem.OP]:
        elements: int = getattr(problem, what)
        # Of the two sizes that are not the contraction one is a row of the output.
        dtype = problem.dtype if what == "k" else "bf16"
        row_bytes = elements * DTYPE_BYTES[dtype]
        if row_bytes % ROW_ALIGN_BYTES:
            multiple = ROW_ALIGN_BYTES // DTYPE_BYTES[dtype]
            return Decline(
                f"rows of {what} = {elements} {dtype} elements are {row_bytes} bytes, not a "
                f"multiple of {ROW_ALIGN_BYTES}; pad {what} to a multiple of {multiple}"
            )
    if not speed or problem.world_size == 1 or machine.rule_set == "executor":
        return None
    predicted = estimate(problem, machine, plan)
    if predicted.time_ms > predicted.baseline_ms:
        return Decline(
            f"fused is predicted slower than the unfused path on {machine.name}: "
            f"{predicted.time_ms:.3f} ms against {predicted.baseline_ms:.3f} ms for "
            f"m {problem.m}, n {problem.n}, k {problem.k} on {problem.world_size} ranks"
        )
    return None


def _operands_ms(problem: TpProblem, machine: Machine) -> float:
    """What bounds a GEMM of few rows: the weight is read once whatever m is."""
    return problem.operand_bytes / (machine.hbm_gbps * 1e6)


def _vendor_gemm_ms(problem: TpProblem, machine: Machine, cap: int) -> float:
    share = machine.tflops.at(cap) / machine.tflops.at(machine.num_wgs)
    rate = share * machine.baseline.tflops * machine.dtype_ratio(problem.dtype)
    compute_ms = problem.flops / (rate * 1e9)
    launches = 2 if isinstance(problem, AgGemmPairProblem) else 1
    launch_ms = launches * machine.baseline.gemm_us * 1e-3
    return max(_operands_ms(problem, machine), compute_ms) + launch_ms


def _vendor_collective_ms(problem: TpProblem, machine: Machine) -> float:
    if problem.num_peers == 0:
        return 0.0
    # On a mesh the collective, too, has one link per peer.
    share = 1.0 if machine.topology == "switch" else problem.num_peers / machine.curve_peers
    rate = share * machine.baseline.collective_gbps
    collectives = 2 if isinstance(problem, AgGemmPairProblem) else 1
    fixed_ms = collectives * machine.baseline.collective_us * 1e-3
    return problem.remote_bytes / (rate * 1e6) + fixed_ms


def _fused_ms(problem: TpProblem, machine: Machine, plan: TpPlan) -> float:
    fixed_ms = machine.launch_us * 1e-3
    if isinstance(problem, AgGemmProblem) and isinstance(plan, AgGemmPlan):
        fixed_ms += _copies_ms(problem, machine, plan)
        if isinstance(problem, AgGemmPairProblem):
            overlapped = _pair_ms(problem, machine, plan)
        else:
            overlapped = _overlapped_ms(problem, machine, plan)
    else:
        fixed_ms += 2 * partials_bytes(problem, plan) / (machine.hbm_gbps * 1e6)
        if isinstance(problem, GemmRsProblem) and isinstance(plan, GemmRsPlan):
            overlapped = gemm_rs_ms(problem, machine, plan)
        else:
            overlapped = bulk_ms(problem, machine, plan)
    return fixed_ms + max(_operands_ms(problem, machine), overlapped)


def _overlapped_ms(problem: AgGemmProblem, machine: Machine, plan: AgGemmPlan) -> float:
    """From the first unit to the last tile."""
    queue = TileQueueTime(problem, machine, plan)
    if problem.num_peers == 0:
        return queue.from_start_ms(plan.cap)
    crew = plan.cap if plan.policy == "serial" else plan.num_movers
    rate = machine.gbps(plan.transport, crew, problem.num_peers)
    gather_ms = problem.remote_bytes / (rate * 1e6) + machine.flag_latency_us * 1e-3
    if plan.policy == "serial":
        return gather_ms + queue.from_start_ms(plan.cap)
    builders = plan.cap - plan.num_movers
    # With roles kept the movers do not join the builders once the gather is over.
    late = builders if plan.policy == "fixed" else plan.cap
    # The last tile row cannot start before the gather is over.
    last = plan.row_blocks_per_tile_row * cdiv(problem.n, plan.block_n)
    left = max(1.0 - gather_ms / queue.total_ms(builders), min(1.0, last / queue.tiles))
    # WGs are out of step by now: they end within a unit of each other, half a unit on average, and
    # then half of them are idle.
    drain_ms = left * queue.total_ms(late) + 0.5 * queue.last_ms(late / 2)
    busy = min(left * queue.units, late)
    return gather_ms + max(queue.last_ms(busy), drain_ms)


def _pair_ms(problem: AgGemmPairProblem, machine: Machine, plan: AgGemmPlan) -> float:
    """The data gradient beside the gather, then the weight gradient, which needs all of it.

    A few long tiles of the weight gradient do not idle the others: they take tokens as they arrive,
    so theirs is the time of as much work spread over all WGs.
    """
    first_ms = _overlapped_ms(problem.data_gradient, machine, plan)
    if problem.num_peers:
        crew = plan.cap if plan.policy == "serial" else plan.num_movers
        rate = machine.gbps(plan.transport, crew, problem.num_peers)
        first_ms = max(first_ms, problem.remote_bytes / (rate * 1e6))
    # The weight gradient's tokens are its contraction, as in bulk_rs.
    gradient = BulkRsProblem(problem.k, problem.n, problem.m, problem.world_size, dtype="mxfp8")
    late = plan.cap - plan.num_movers if plan.policy == "fixed" else plan.cap
    return first_ms + TileQueueTime(gradient, machine, plan).total_ms(late)


def _copies_ms(problem: AgGemmProblem, machine: Machine, plan: AgGemmPlan) -> float:
    """Local copies and split-K partials, read and written at memory speed."""
    copied = 0
    if problem.num_peers and plan.transport == "pull":
        copied += problem.chunk_bytes
    if problem.keeps_gathered:
        # Pulled rows land in the output itself; only the own chunk is copied into it.
        whole = plan.transport == "push" and problem.num_peers > 0
        copied += problem.world_size * problem.chunk_bytes if whole else problem.chunk_bytes
    return 2 * (copied + partials_bytes(problem, plan)) / (machine.hbm_gbps * 1e6)
