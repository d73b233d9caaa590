"""Predicted times of ``gemm_rs``, ``bulk_ag`` and ``bulk_rs``: what overlaps, without the launch.

The same closed form as for ``ag_gemm`` and with the same numbers; nothing here was fitted to
measured times of these operations (docs/decisions/0004-paper-rules.md).
"""

from __future__ import annotations

from kosmos_heuristics.machine import Machine
from kosmos_heuristics.problems import OUTPUT_BYTES, GemmRsProblem, TpProblem
from kosmos_heuristics.reducers import PULLED_GBPS_PER_WG, PUSHED_GBPS_PER_WG
from kosmos_heuristics.tile_time import TileQueueTime
from kosmos_heuristics.tiles import FP32_BYTES, tile_grid
from kosmos_heuristics.tp_plans import BulkRsPlan, GemmRsPlan, TpPlan


def partials_bytes(problem: TpProblem, plan: TpPlan) -> int:
    """Bytes of the FP32 partials of the tiles that are split."""
    tiles = min(plan.split_tiles, tile_grid(problem, plan.block_m, plan.block_n))
    return tiles * plan.split_k * plan.block_m * plan.block_n * FP32_BYTES


def gemm_rs_ms(problem: GemmRsProblem, machine: Machine, plan: GemmRsPlan) -> float:
    """From the first tile to the last reduced row.

    Reducers have nothing to do before the first band of every chunk; the last band is reduced after
    the last tile, by all the WGs that join.
    """
    queue = TileQueueTime(problem, machine, plan)
    if problem.num_peers == 0:
        return queue.from_start_ms(plan.cap)
    flag_ms = machine.flag_latency_us * 1e-3
    work = _reduced_bytes(problem, plan)
    if plan.policy == "serial":
        reduce_ms = work / _reduce_rate(problem, machine, plan, plan.cap)
        return queue.from_start_ms(plan.cap) + reduce_ms + flag_ms
    builders = plan.cap - plan.num_movers
    build_ms = max(queue.total_ms(builders), queue.last_ms(min(queue.units, builders)))
    if plan.transport == "push":
        peak = machine.peak_gbps("push", problem.num_peers)
        build_ms = max(build_ms, problem.remote_bytes / (peak * 1e6))
    bands = max(1.0, problem.chunk_rows / plan.band_rows)
    if plan.order == "row_major":
        # The last chunk is complete only at the end: its owner has reduced nothing of it before.
        bands = 1.0
    early = _reduce_rate(problem, machine, plan, plan.num_movers) * build_ms * (1.0 - 1.0 / bands)
    left = max(work / bands, work - early)
    late_rate = _reduce_rate(problem, machine, plan, max(plan.num_movers, plan.max_movers))
    # WGs end within a tile of each other: half of one on average.
    return build_ms + 0.5 * queue.last_ms(builders) + left / late_rate + flag_ms


def bulk_ms(problem: TpProblem, machine: Machine, plan: TpPlan) -> float:
    """From the first unit to the last of both queues: neither waits for the other."""
    queue = TileQueueTime(problem, machine, plan)
    if problem.num_peers == 0:
        return queue.from_start_ms(plan.cap)
    way = "reduce" if isinstance(plan, BulkRsPlan) else plan.transport

    def moved_ms(remote_bytes: float, movers: int) -> float:
        return remote_bytes / (machine.gbps(way, movers, problem.num_peers) * 1e6)

    if plan.policy == "serial":
        return moved_ms(problem.remote_bytes, plan.cap) + queue.from_start_ms(plan.cap)
    builders = plan.cap - plan.num_movers
    move_ms = moved_ms(problem.remote_bytes, plan.num_movers)
    build_ms = max(queue.total_ms(builders), queue.last_ms(min(queue.units, builders)))
    drain_ms = 0.5 * queue.last_ms(builders)
    if plan.policy == "fixed":
        return max(move_ms, build_ms + drain_ms)
    if move_ms >= build_ms:
        # Builders that find no tile left become movers.
        left = problem.remote_bytes * (1.0 - build_ms / move_ms)
        most = max(plan.num_movers, _best_crew(machine, way, plan.cap, problem.num_peers))
        return max(build_ms + drain_ms, build_ms + moved_ms(left, most))
    left_ms = (1.0 - move_ms / build_ms) * queue.total_ms(plan.cap)
    return move_ms + left_ms + drain_ms


def _best_crew(machine: Machine, way: str, cap: int, peers: int) -> int:
    """The movers up to the cap that move fastest; past saturation a curve falls."""
    return max(range(1, cap + 1), key=lambda crew: (machine.gbps(way, crew, peers), -crew))


def _reduced_bytes(problem: GemmRsProblem, plan: GemmRsPlan) -> float:
    """Bytes that the reducers read: of peers when pulled, all sources' when pushed."""
    sources = problem.world_size if plan.transport == "push" else problem.num_peers
    return problem.chunk_rows * problem.n * OUTPUT_BYTES * float(sources)


def _reduce_rate(problem: GemmRsProblem, machine: Machine, plan: GemmRsPlan, wgs: int) -> float:
    """Bytes a millisecond that so many reducers sum."""
    if plan.transport == "push":
        return min(wgs * PUSHED_GBPS_PER_WG, machine.hbm_gbps) * 1e6
    rate = machine.gbps("reduce", wgs, problem.num_peers)
    if machine.reduce is None:
        rate = min(rate, wgs * PULLED_GBPS_PER_WG)
    return rate * 1e6
