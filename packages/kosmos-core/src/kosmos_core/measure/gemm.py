"""TFLOPS of the builders' GEMM by the number of workgroups, beside the vendor's GEMM."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from kosmos_core.device.gemm import store_splits
from kosmos_core.kernels.measure import gemm_kernel
from kosmos_core.measure.budget import GEMM_TILES, GROUP_M, Budget
from kosmos_core.measure.timing import Timer, agree, figures
from kosmos_core.worlds.base import World

# A product that is rounded once to bf16 has a relative error (Frobenius norm) below 2^-9 = 2e-3.
MAX_ERROR = 3e-3


class GemmBench:
    """Operands of one rank, and the GEMM on them.

    Args:
        world: ranks; each multiplies on its own.
        budget: sizes.
    """

    def __init__(self, world: World, budget: Budget) -> None:
        self.world = world
        self.budget = budget
        self.tile = budget.tile or GEMM_TILES[world.target]
        m, self.n, self.k = budget.gemm
        self.columns = self.n // self.tile.block_n
        rows = max(m, self.whole_rounds_m(world.num_wgs))
        self.a = world.local("a", rows * self.k, torch.bfloat16).view(rows, self.k)
        self.b = world.local("b", self.n * self.k, torch.bfloat16).view(self.n, self.k)
        self.c = world.local("c", rows * self.n, torch.bfloat16).view(rows, self.n)
        # A queue for each GEMM of a batch, on lines of their own: the batch runs without a pause.
        self.heads = world.local("tile queues", 32 * budget.gemm_batch, torch.int32)
        generator = torch.Generator(world.device).manual_seed(1 + world.rank)
        for operand in (self.a, self.b):
            operand.normal_(generator=generator)

    def whole_rounds_m(self, wgs: int) -> int:
        """Rows at which each of `wgs` workgroups builds the same number of tiles.

        A curve over these holds no rounding to whole rounds of tiles: plans add that themselves.
        """
        row_blocks = wgs * self.budget.gemm_rounds // self.columns
        return max(1, row_blocks) * self.tile.block_m

    def reset(self) -> None:
        """Fills the tile queues anew; before every batch."""
        self.heads.zero_()

    def multiply(self, wgs: int, m: int, queue: int = 0) -> None:
        """Launches `wgs` workgroups that multiply the first `m` rows, with queue number `queue`."""
        t = self.tile
        args = (
            self.a, self.b, self.c, self.heads[32 * queue :], m, self.n, self.k,
            t.block_m, t.block_n, t.block_k, t.num_stages, GROUP_M, store_splits(t.block_n),
            self.world.target,
        )  # fmt: skip
        key = ("gemm", self.n, self.k, t)
        self.world.launch(
            gemm_kernel, wgs, args, key, num_warps=t.num_warps, num_stages=t.num_stages
        )

    def batch(self, wgs: int, m: int) -> None:
        """As many GEMMs as there are queues, back to back: the GPU stays at its power limit."""
        for queue in range(self.budget.gemm_batch):
            self.multiply(wgs, m, queue)

    def check(self, wgs: int) -> float:
        """Relative error against FP64 of the first and last rows, once. Collective.

        Raises:
            MeasurementError: on every rank, when it is above MAX_ERROR on one.
        """
        m = self.whole_rounds_m(wgs)
        self.c.fill_(float("nan"))
        self.reset()
        self.multiply(wgs, m)
        self.world.synchronize()
        few = min(m, 2 * self.tile.block_m)
        rows = torch.cat([torch.arange(few), torch.arange(m - few, m)]).to(self.world.device)
        wanted = self.a[rows].double() @ self.b.double().T
        error = float((self.c[rows].double() - wanted).norm() / wanted.norm())
        missing = int(torch.isnan(self.c[:m]).sum())
        fault = None
        if missing or not error < MAX_ERROR:
            fault = f"GEMM by {wgs} WGs: {missing} elements missing, relative error {error:.2e}"
        agree(self.world, fault)
        return error

    def vendor(self, m: int) -> None:
        """A batch of the vendor's GEMM on the first `m` rows."""
        for _ in range(self.budget.gemm_batch):
            torch.mm(self.a[:m], self.b.T, out=self.c[:m])

    def tflops(self, ms: float, m: int) -> float:
        """TFLOPS of a batch of `m` rows each that took `ms` milliseconds."""
        return 2 * m * self.n * self.k * self.budget.gemm_batch / (ms * 1e9)


def num_points(budget: Budget, num_wgs: int) -> int:
    """Timed GEMMs."""
    return budget.gemm_orders * (2 * len(budget.cap_counts(num_wgs)) + 2)


def measure_gemm(
    world: World, timer: Timer, budget: Budget, tick: Callable[[str], None]
) -> dict[str, Any]:
    """Checks the GEMM, then times it under every cap, in shuffled order. Collective.

    Returns:
        The key "tflops" (whole rounds of tiles) and "gemm" with the fixed shape and the vendor's.

    Raises:
        MeasurementError: a product is wrong.
    """
    bench = GemmBench(world, budget)
    caps = budget.cap_counts(world.num_wgs)
    errors = [bench.check(wgs) for wgs in (caps[0], caps[-1])]
    m = budget.gemm[0]
    full = bench.whole_rounds_m(world.num_wgs)
    kinds: dict[tuple[str, int], tuple[Callable[[], None], int]] = {
        ("vendor", m): (partial(bench.vendor, m), m),
        ("vendor", full): (partial(bench.vendor, full), full),
    }
    for wgs in caps:
        rows = bench.whole_rounds_m(wgs)
        kinds["rounds", wgs] = (partial(bench.batch, wgs, rows), rows)
        kinds["fixed", wgs] = (partial(bench.batch, wgs, m), m)
    taken: dict[tuple[str, int], list[float]] = {kind: [] for kind in kinds}
    # The clock sinks while the GPU is warm and near its power limit: every cap meets every state.
    shuffled = random.Random(0)
    for _ in range(budget.gemm_orders):
        order = list(kinds)
        shuffled.shuffle(order)
        for kind in order:
            tick(f"GEMM: {kind[0]} {kind[1]}")
            call, _ = kinds[kind]
            taken[kind] += timer.times(
                call, bench.reset, warmup=budget.warmup, repeats=budget.repeats
            )
    rate = {
        kind: figures(bench.tflops(statistics.median(times), kinds[kind][1]))
        for kind, times in taken.items()
    }
    t = bench.tile
    return {
        "tflops": {str(wgs): rate["rounds", wgs] for wgs in caps},
        "gemm": {
            "shape": [m, bench.n, bench.k],
            "tile": [t.block_m, t.block_n, t.block_k],
            "num_warps": t.num_warps,
            "num_stages": t.num_stages,
            "tiles_a_wg": budget.gemm_rounds,
            "fixed_shape_tflops": {str(wgs): rate["fixed", wgs] for wgs in caps},
            "vendor_tflops": rate["vendor", m],
            "vendor_whole_rounds_tflops": rate["vendor", full],
            "max_rel_error": max(errors),
        },
    }
