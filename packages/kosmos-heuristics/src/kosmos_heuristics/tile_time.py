"""How long a plan's tile queue takes, by the number of workgroups that build."""

from __future__ import annotations

from kosmos_heuristics.checks import cdiv
from kosmos_heuristics.machine import Machine
from kosmos_heuristics.problems import TpProblem
from kosmos_heuristics.tiles import tile_grid
from kosmos_heuristics.tp_plans import TpPlan


class TileQueueTime:
    """Time of a plan's tile queue, by how many WGs build at once (they share the power).

    Args:
        problem: Sizes of the call, at least one row.
        machine: The GPU and its node.
        plan: The call's plan.
    """

    def __init__(self, problem: TpProblem, machine: Machine, plan: TpPlan) -> None:
        self._machine = machine
        self._plan = plan
        self._efficiency = 1.0
        self._dtype_ratio = machine.dtype_ratio(problem.dtype)
        for tile in machine.tiles:
            if (tile.block_m, tile.block_n) == (plan.block_m, plan.block_n):
                self._efficiency = tile.efficiency
        self._k = problem.k
        self._part_k = cdiv(problem.k, plan.split_k)
        self.tiles = tile_grid(problem, plan.block_m, plan.block_n)
        self._split = min(plan.split_tiles, self.tiles)
        self.units = self.tiles + self._split * (plan.split_k - 1)

    def unit_ms(self, k: int, builders: float) -> float:
        """Milliseconds of a tile over ``k`` of the contraction while ``builders`` WGs are busy."""
        depth = cdiv(k, self._plan.block_k) * self._plan.block_k
        flops = 2 * self._plan.block_m * self._plan.block_n * depth
        rate = self._machine.tflops.at(builders) * self._efficiency * self._dtype_ratio
        per_wg = rate / builders
        return flops / (per_wg * 1e9) + self._machine.tile_us * 1e-3

    def last_ms(self, builders: float) -> float:
        """Milliseconds of a unit at the queue's end: a part if the tail is split."""
        return self.unit_ms(self._part_k if self._split else self._k, builders)

    def total_ms(self, builders: float) -> float:
        """Milliseconds of the queue if all builders were busy all along."""
        whole = (self.tiles - self._split) * self.unit_ms(self._k, builders)
        parts = self._split * self._plan.split_k * self.unit_ms(self._part_k, builders)
        return (whole + parts) / builders

    def from_start_ms(self, wgs: int) -> float:
        """Milliseconds of the queue on ``wgs`` WGs that start together, in whole waves."""
        waves, rest = divmod(self.tiles - self._split, wgs)
        parts = self._split * self._plan.split_k
        total = waves * self.unit_ms(self._k, wgs)
        if rest:
            total += self.unit_ms(self._k, wgs if parts else rest)
            # Who has no tile in the last wave takes parts meanwhile.
            parts = max(0, parts - (wgs - rest) * self._plan.split_k)
        waves, rest = divmod(parts, wgs)
        total += waves * self.unit_ms(self._part_k, wgs)
        return total + (self.unit_ms(self._part_k, rest) if rest else 0.0)
