"""What is measured, and how much of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kosmos_core.device.target import AMD, NVIDIA


@dataclass(frozen=True)
class CopyVariant:
    """How a mover copies.

    Attributes:
        step_elements: bf16 elements of a step.
        num_warps: warps (AMD: waves) of the workgroup.
        depth: further steps whose loads are in flight (the request depth).
    """

    step_elements: int
    num_warps: int
    depth: int

    def __str__(self) -> str:
        return f"{self.step_elements // 512} KiB a step, {self.depth} ahead, {self.num_warps} warps"


@dataclass(frozen=True)
class SumVariant:
    """How a mover adds up.

    Attributes:
        step_elements: bf16 elements of all sources in a step.
        num_warps: warps of the workgroup.
    """

    step_elements: int
    num_warps: int

    def __str__(self) -> str:
        return f"{self.step_elements // 512} KiB a step, {self.num_warps} warps"


@dataclass(frozen=True)
class GemmTile:
    """Tile of the measured GEMM, and how it is compiled."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


# The tiles that plans use, by vendor (the first tile of the packaged machines h200 and mi350x).
GEMM_TILES = {
    int(NVIDIA.value): GemmTile(128, 256, 64, 8, 4),
    int(AMD.value): GemmTile(128, 256, 64, 8, 2),
}
GROUP_M = 8

# 32768 elements a step with 4 warps are left out: they do not fit into 255 registers a thread.
COPY_VARIANTS = (
    *(
        CopyVariant(step, warps, depth)
        for step, warps in ((16384, 8), (32768, 8), (16384, 4))
        for depth in (1, 2)
    ),
    CopyVariant(16384, 8, 3),
)
# Fused kernels run with this many warps: their curve is the one that plans read.
PLAN_WARPS = 8
SUM_VARIANTS = (SumVariant(16384, 8), SumVariant(32768, 8), SumVariant(16384, 4))
# Steps that fused kernels have in flight, by where they read: a peer's memory or their own.
DEPTHS = {"pull": 3, "push": 2, "local": 2}


@dataclass(frozen=True)
class Budget:
    """Sizes and repetitions of one measurement.

    Attributes:
        movers: workgroup counts of the copy curves; those that the machine has not are left out,
            and all that it has are added.
        variants: how movers copy.
        sum_variants: how movers add up; the first is that of movers beside builders.
        beside_step: elements of a mover's step beside builders, as in fused kernels.
        beside_units: units of a mover beside builders, at most; far more than it has time for.
        beside_movers: crews beside builders, up to half of the machine.
        unit_elements: bf16 elements that a mover claims at once, a multiple of every step.
        copy_elements: bf16 elements of a copy by one or two movers and by many.
        caps: workgroup counts of the GEMM curve, likewise; shares of the machine are added to them.
        gemm: m, n, k of the GEMM.
        gemm_rounds: tiles that each workgroup builds in the GEMM of the curve.
        gemm_batch: GEMMs that are timed as one, without a pause.
        gemm_orders: times that the caps are gone through, in another order each time.
        contractions: contractions by which a tile's fixed cost shows, multiples of the tile's.
        call_tiles: tiles that each workgroup builds in one timed call, powers of two.
        tile: replaces the vendor's tile.
        power_wgs: workgroup counts under which power and clock are read, likewise.
        power_seconds: how long each of them runs.
        flag_rounds: flags there and back in one launch.
        oversubscribed_wgs: workgroups of the start order beyond what is resident.
        warmup: calls before the timed ones.
        repeats: timed calls.
    """

    movers: tuple[int, ...] = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
    variants: tuple[CopyVariant, ...] = COPY_VARIANTS
    sum_variants: tuple[SumVariant, ...] = SUM_VARIANTS
    beside_step: int = 16384
    beside_units: int = 1 << 14
    beside_movers: tuple[int, ...] = (4, 8, 12, 16, 24, 32, 48)
    unit_elements: int = 1 << 17
    copy_elements: tuple[int, int] = (1 << 25, 1 << 27)
    caps: tuple[int, ...] = (124, 116, 112, 100, 96, 84, 64, 32)
    gemm: tuple[int, int, int] = (8192, 4096, 4096)
    gemm_rounds: int = 8
    gemm_batch: int = 8
    gemm_orders: int = 3
    contractions: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384)
    call_tiles: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    tile: GemmTile | None = None
    power_wgs: tuple[int, ...] = (16, 32, 64, 84, 96, 112, 124)
    power_seconds: float = 1.0
    flag_rounds: int = 1000
    oversubscribed_wgs: int = 1024
    warmup: int = 2
    repeats: int = 7
    shares: tuple[float, ...] = field(default=(0.9375, 0.875, 0.75, 0.625))

    def counts(self, wanted: tuple[int, ...], num_wgs: int) -> list[int]:
        """Those of `wanted` that the machine has, and all of its workgroups, rising."""
        return sorted({*(w for w in wanted if w < num_wgs), num_wgs})

    def cap_counts(self, num_wgs: int) -> list[int]:
        """Workgroup counts of the GEMM curve; on large machines shares of them are added."""
        more = () if num_wgs <= 2 * max(self.caps, default=0) - 100 else self.shares
        return self.counts((*self.caps, *(int(num_wgs * s) for s in more)), num_wgs)


FULL = Budget()
QUICK = replace(
    FULL,
    movers=(2, 4, 8, 16, 32, 64),
    variants=COPY_VARIANTS[1:3],
    sum_variants=SUM_VARIANTS[:1],
    beside_movers=(8, 24),
    contractions=(1024, 4096),
    call_tiles=(2, 8, 64),
    caps=(112, 96, 64),
    gemm_orders=2,
    power_wgs=(32, 64, 96),
    power_seconds=0.5,
    repeats=5,
)
