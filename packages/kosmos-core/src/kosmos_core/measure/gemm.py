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
        longest = max(self.k, *budget.contractions)
        most = max(rows, rows * self.k // min(budget.contractions))
        self.a = world.local("a", rows * self.k, torch.bfloat16).view(rows, self.k)
        self.b_all = world.local("b", self.n * longest, torch.bfloat16)
        self.b = self.b_all[: self.n * self.k].view(self.n, self.k)
        self.c_all = world.local("c", most * self.n, torch.bfloat16).view(most, self.n)
        self.c = self.c_all[:rows]
        # A queue for each GEMM of a batch, on lines of their own: the batch runs without a pause.
        batch = max(budget.gemm_batch, max(budget.call_tiles) // budget.gemm_rounds)
        self.heads = world.local("tile queues", 32 * batch, torch.int32)
        generator = torch.Generator(world.device).manual_seed(1 + world.rank)
        for operand in (self.a, self.b_all):
            operand.normal_(generator=generator)

    def whole_rounds_m(self, wgs: int, rounds: int | None = None) -> int:
        """Rows at which each of `wgs` workgroups builds the same number of tiles.

        A curve over these holds no rounding to whole rounds of tiles: plans add that themselves.
        """
        row_blocks = wgs * (rounds or self.budget.gemm_rounds) // self.columns
        return max(1, row_blocks) * self.tile.block_m

    def reset(self) -> None:
        """Fills the tile queues anew; before every batch."""
        self.heads.zero_()

    def multiply(self, wgs: int, m: int, queue: int = 0, k: int | None = None) -> None:
        """Launches `wgs` workgroups that multiply the first `m` rows, with queue number `queue`.

        k: another contraction, over the same elements in rows of that length.
        """
        t, k = self.tile, k or self.k
        args = (
            self.a, self.b_all, self.c_all, self.heads[32 * queue :], m, self.n, k,
            t.block_m, t.block_n, t.block_k, t.num_stages, GROUP_M, store_splits(t.block_n),
            self.world.target,
        )  # fmt: skip
        key = ("gemm", self.n, k, t)
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
        return self.compare(m, f"GEMM by {wgs} WGs")

    def compare(self, m: int, what: str) -> float:
        """Relative error of the first and last of `m` rows of the product. Collective.

        Raises:
            MeasurementError: on every rank, when it is above MAX_ERROR on one.
        """
        few = min(m, 2 * self.tile.block_m)
        rows = torch.cat([torch.arange(few), torch.arange(m - few, m)]).to(self.world.device)
        wanted = self.a[rows].double() @ self.b.double().T
        error = float((self.c[rows].double() - wanted).norm() / wanted.norm())
        missing = int(torch.isnan(self.c[:m]).sum())
        fault = None
        if missing or not error < MAX_ERROR:
            fault = f"{what}: {missing} elements missing, relative error {error:.2e}"
        agree(self.world, fault)
        return error

    def vendor(self, m: int) -> None:
        """A batch of the vendor's GEMM on the first `m` rows."""
        for _ in range(self.budget.gemm_batch):
            torch.mm(self.a[:m], self.b.T, out=self.c[:m])

    def contraction_m(self, k: int) -> int:
        """Rows of whole rounds with contraction `k`: as many elements as with the usual one."""
        rounds = max(1, self.budget.gemm_rounds * self.k // k)
        return self.whole_rounds_m(self.world.num_wgs, rounds)

    def contract(self, k: int, vendor: bool) -> None:
        """A batch of GEMMs with contraction `k`."""
        m = self.contraction_m(k)
        a, b = self.a.view(-1)[: m * k].view(m, k), self.b_all[: self.n * k].view(self.n, k)
        for queue in range(self.budget.gemm_batch):
            if vendor:
                torch.mm(a, b.T, out=self.c_all[:m])
            else:
                self.multiply(self.world.num_wgs, m, queue, k)

    def call_shape(self, tiles: int) -> tuple[int, int]:
        """Rows of a GEMM, and GEMMs, of a call in which a workgroup builds so many tiles."""
        rounds = min(tiles, self.budget.gemm_rounds)
        return self.whole_rounds_m(self.world.num_wgs, rounds), tiles // rounds

    def call_of(self, tiles: int, vendor: bool) -> None:
        """One call in which a workgroup builds so many tiles."""
        m, gemms = self.call_shape(tiles)
        for queue in range(gemms):
            if vendor:
                torch.mm(self.a[:m], self.b.T, out=self.c[:m])
            else:
                self.multiply(self.world.num_wgs, m, queue)

    def tflops(self, ms: float, m: int, k: int | None = None, gemms: int | None = None) -> float:
        """TFLOPS of a batch of `m` rows each that took `ms` milliseconds."""
        gemms = gemms or self.budget.gemm_batch
        return 2 * m * self.n * (k or self.k) * gemms / (ms * 1e9)


def num_points(budget: Budget, num_wgs: int) -> int:
    """Timed GEMMs."""
    more = 2 * (len(budget.contractions) + len(budget.call_tiles))
    return budget.gemm_orders * (2 * len(budget.cap_counts(num_wgs)) + 2) + more


def _by_size(
    bench: GemmBench, timer: Timer, tick: Callable[[str], None]
) -> dict[str, dict[str, float]]:
    """TFLOPS by contraction, and by the length of a call, of our GEMM and the vendor's."""
    budget = bench.budget
    found: dict[str, dict[str, float]] = {}
    for name, vendor in (("", False), ("vendor_", True)):
        by_k: dict[str, float] = {}
        for k in budget.contractions:
            tick(f"GEMM: {name}contraction {k}")
            call: Callable[[], None] = partial(bench.contract, k, vendor)
            ms = timer.median(call, bench.reset, warmup=budget.warmup, repeats=budget.repeats)
            by_k[str(k)] = figures(bench.tflops(ms, bench.contraction_m(k), k))
        by_call: dict[str, float] = {}
        for tiles in budget.call_tiles:
            tick(f"GEMM: {name}{tiles} tiles a WG")
            m, gemms = bench.call_shape(tiles)
            call = partial(bench.call_of, tiles, vendor)
            ms = timer.median(
                call, bench.reset, warmup=2 * budget.warmup, repeats=2 * budget.repeats
            )
            by_call[str(tiles)] = figures(bench.tflops(ms, m, gemms=gemms))
        found[f"{name}contraction_tflops"] = by_k
        found[f"{name}call_tflops"] = by_call
    return found


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
            **_by_size(bench, timer, tick),
            "max_rel_error": max(errors),
        },
    }
