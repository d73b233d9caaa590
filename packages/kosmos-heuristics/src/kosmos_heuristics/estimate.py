"""Predicted times, and the calls that fusing would slow down.

A closed form of few numbers per machine: transport by crew, GEMM throughput by builders, a fixed
cost per tile, per flag and per launch. It assumes the ``local_first`` order, in which builders have
local tiles to work on while the gather runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from kosmos_heuristics.checks import cdiv
from kosmos_heuristics.machine import Machine
from kosmos_heuristics.plans import AgGemmPlan
from kosmos_heuristics.problems import AgGemmProblem
from kosmos_heuristics.tiles import FP32_BYTES, tile_grid

# Descriptors and vector loads need rows that start on 16 bytes.
ROW_ALIGN_BYTES = 16


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


def estimate(problem: AgGemmProblem, machine: Machine, plan: AgGemmPlan) -> Estimate:
    """Predict the time of a fused call and of the unfused path.

    Args:
        problem: Sizes of the call.
        machine: The GPU and its node.
        plan: The call's plan on that machine.

    Returns:
        Times in milliseconds; all 0 for an empty problem.
    """
    if problem.m == 0:
        return Estimate(0.0, 0.0, 0.0, 0.0, 1.0)
    bytes_ms = 0.0
    if problem.num_peers:
        peak = machine.peak_gbps(plan.transport, problem.num_peers)
        bytes_ms = problem.remote_bytes / (peak * 1e6)
    gemm_ms = _vendor_gemm_ms(problem, machine, plan.cap)
    time_ms = _fused_ms(problem, machine, plan)
    baseline_ms = gemm_ms + _vendor_gather_ms(problem, machine)
    return Estimate(time_ms, gemm_ms, bytes_ms, baseline_ms, max(gemm_ms, bytes_ms) / time_ms)


def can_fuse(
    problem: AgGemmProblem, machine: Machine, plan: AgGemmPlan, *, speed: bool = True
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
    for what, elements in (("k", problem.k), ("n", problem.n)):
        row_bytes = elements * problem.element_bytes
        if row_bytes % ROW_ALIGN_BYTES:
            multiple = ROW_ALIGN_BYTES // problem.element_bytes
            return Decline(
                f"rows of {what} = {elements} {problem.dtype} elements are {row_bytes} bytes, not "
                f"a multiple of {ROW_ALIGN_BYTES}; pad {what} to a multiple of {multiple}"
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


def _vendor_gemm_ms(problem: AgGemmProblem, machine: Machine, cap: int) -> float:
    # Few rows: the weight is read once whatever m is, so memory bounds the time.
    operands = problem.m * problem.k + problem.n * problem.k + problem.m * problem.n
    memory_ms = operands * problem.element_bytes / (machine.hbm_gbps * 1e6)
    share = machine.tflops.at(cap) / machine.tflops.at(machine.num_wgs)
    compute_ms = problem.flops / (share * machine.baseline.tflops * 1e9)
    return max(memory_ms, compute_ms) + machine.baseline.gemm_us * 1e-3


def _vendor_gather_ms(problem: AgGemmProblem, machine: Machine) -> float:
    if problem.num_peers == 0:
        return 0.0
    # On a mesh the collective, too, has one link per peer.
    share = 1.0 if machine.topology == "switch" else problem.num_peers / machine.curve_peers
    rate = share * machine.baseline.collective_gbps
    return problem.remote_bytes / (rate * 1e6) + machine.baseline.collective_us * 1e-3


def _fused_ms(problem: AgGemmProblem, machine: Machine, plan: AgGemmPlan) -> float:
    fixed_ms = machine.launch_us * 1e-3 + _copies_ms(problem, machine, plan)
    tiles = tile_grid(problem, plan.block_m, plan.block_n) * plan.split_k
    tile = _TileTime(problem, machine, plan)
    if problem.num_peers == 0:
        return fixed_ms + tile.rounds_ms(tiles, plan.cap)
    crew = plan.cap if plan.policy == "serial" else plan.num_movers
    rate = machine.gbps(plan.transport, crew, problem.num_peers)
    gather_ms = problem.remote_bytes / (rate * 1e6) + machine.flag_latency_us * 1e-3
    if plan.policy == "serial":
        return fixed_ms + gather_ms + tile.rounds_ms(tiles, plan.cap)
    builders = plan.cap - plan.num_movers
    # With roles kept the movers do not join the builders once the gather is over.
    late = builders if plan.policy == "fixed" else plan.cap
    # The last tile row cannot start before the gather is over.
    last = plan.row_blocks_per_tile_row * cdiv(problem.n, plan.block_n) * plan.split_k
    left = max(tiles - gather_ms / tile.ms(builders) * builders, min(tiles, last))
    # WGs are out of step by now: they end within a tile of each other, half a tile on average, and
    # then half of them are idle.
    drain_ms = left / late * tile.ms(late) + 0.5 * tile.ms(late / 2)
    return fixed_ms + gather_ms + max(tile.ms(min(left, late)), drain_ms)


class _TileTime:
    """Time of a tile of one split, by how many WGs build at once (they share the power)."""

    def __init__(self, problem: AgGemmProblem, machine: Machine, plan: AgGemmPlan) -> None:
        shape = (plan.block_m, plan.block_n)
        self._efficiency = 1.0
        for tile in machine.tiles:
            if (tile.block_m, tile.block_n) == shape:
                self._efficiency = tile.efficiency
        depth = cdiv(cdiv(problem.k, plan.split_k), plan.block_k) * plan.block_k
        self._flops = 2 * plan.block_m * plan.block_n * depth
        self._machine = machine

    def ms(self, builders: float) -> float:
        """Milliseconds of a tile while ``builders`` WGs are busy."""
        per_wg = self._machine.tflops.at(builders) * self._efficiency / builders
        return self._flops / (per_wg * 1e9) + self._machine.tile_us * 1e-3

    def rounds_ms(self, tiles: int, wgs: int) -> float:
        """Milliseconds of ``tiles`` tiles on ``wgs`` WGs that start together."""
        rounds, rest = divmod(tiles, wgs)
        return rounds * self.ms(wgs) + (self.ms(rest) if rest else 0.0)


def _copies_ms(problem: AgGemmProblem, machine: Machine, plan: AgGemmPlan) -> float:
    """Local copies and split-K partials, read and written at memory speed."""
    copied = 0
    if problem.num_peers and plan.transport == "pull":
        copied += problem.chunk_bytes
    if problem.keeps_gathered:
        # Pulled rows land in the output itself; only the own chunk is copied into it.
        whole = plan.transport == "push" and problem.num_peers > 0
        copied += problem.world_size * problem.chunk_bytes if whole else problem.chunk_bytes
    partials = problem.m * problem.n * FP32_BYTES * plan.split_k if plan.split_k > 1 else 0
    return 2 * (copied + partials) / (machine.hbm_gbps * 1e6)
