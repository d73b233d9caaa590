"""Figures of a benchmark: what is derived from the times, per shape and as geometric means."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kosmos_core.testing.bench import Timing, geomean

from kosmos_tpsp.bench import variants as v
from kosmos_tpsp.bench.cases import Case
from kosmos_tpsp.ops.catalog import DRIVERS

# An accepted row is slower when the median falls below this share of the baseline's speed.
NEVER_SLOWER = 0.99
# A fixed split may beat the one-way policy by this much before it counts.
ONE_WAY_HOLDS = 0.99


@dataclass(frozen=True)
class Row:
    """One shape: times of all variants and what follows from them.

    Attributes:
        case: the shape.
        world_size: ranks.
        timings: variant to times.
        plan: of the fused variant.
        decline: why an ordinary call would not run fused; None if it would.
        unavailable: variant to the reason it was not run.
        wrong: variants whose output was wrong, with how.
        rel_err: fused output against FP64 on sampled rows.
        peak_gbps: of the transport that the plan uses; 0 with one rank.
    """

    case: Case
    world_size: int
    timings: dict[str, Timing]
    plan: Any
    decline: str | None = None
    unavailable: dict[str, str] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
    rel_err: float | None = None
    peak_gbps: float = 0.0

    def ms(self, name: str) -> float | None:
        """Median of a variant; None if it was not measured."""
        timing = self.timings.get(name)
        return None if timing is None else timing.median_ms

    def _over_fused(self, name: str | None) -> float | None:
        other, fused = self.ms(name) if name else None, self.ms(v.FUSED)
        return None if other is None or fused is None else other / fused

    @property
    def best_fixed(self) -> str | None:
        """The fastest fixed split of the sweep."""
        fixed = [name for name in self.timings if name.startswith(v.FIXED_PREFIX)]
        return min(fixed, key=lambda name: self.timings[name].median_ms, default=None)

    @property
    def bytes_ms(self) -> float:
        """Remote bytes at the transport's peak."""
        remote = self.case.remote_bytes(self.world_size)
        return remote / (self.peak_gbps * 1e6) if self.peak_gbps else 0.0

    @property
    def efficiency(self) -> float | None:
        """max(vendor's GEMM, remote bytes at the transport's peak) / fused."""
        gemm, fused = self.ms(v.GEMM_VENDOR), self.ms(v.FUSED)
        return None if gemm is None or fused is None else max(gemm, self.bytes_ms) / fused

    @property
    def gather_bound(self) -> bool | None:
        """Whether bytes at the transport's peak take longer than the vendor's GEMM."""
        gemm = self.ms(v.GEMM_VENDOR)
        return None if gemm is None else self.bytes_ms > gemm

    @property
    def gemm_ratio(self) -> float | None:
        """Speed of the own GEMM as a share of the vendor's."""
        own, vendor = self.ms(v.GEMM_OWN), self.ms(v.GEMM_VENDOR)
        return None if own is None or vendor is None else vendor / own

    @property
    def speedups(self) -> dict[str, float | None]:
        """Time of each rival over the fused kernel's."""
        return {
            "nccl_cublas": self._over_fused(v.BASELINE),
            "async_tp": self._over_fused(v.ASYNC_TP),
            "serial": self._over_fused(v.SERIAL),
            "fused_bf16": self._over_fused(v.FUSED_BF16),
            "two_way": self._over_fused(v.TWO_WAY),
            "best_fixed": self._over_fused(self.best_fixed),
        }

    @property
    def accepted(self) -> bool:
        """Whether an ordinary call would run fused."""
        return self.decline is None

    @property
    def loses(self) -> bool:
        """Whether the fused kernel was slower than the baseline, by whatever little."""
        ratio = self.speedups["nccl_cublas"]
        return ratio is not None and ratio < 1

    @property
    def too_slow(self) -> bool:
        """Whether it was accepted, and slower than the baseline beyond what counts as equal."""
        ratio = self.speedups["nccl_cublas"]
        return self.accepted and ratio is not None and ratio < NEVER_SLOWER

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        remote = self.case.remote_bytes(self.world_size)
        measured = {}
        for name, timing in self.timings.items():
            measured[name] = {
                **timing.to_dict(),
                "tflops": self.case.flops / (timing.median_ms * 1e9),
                "gbps": None if name.startswith("gemm_") else remote / (timing.median_ms * 1e6),
            }
        return {
            "shape": self.case.name,
            "m": self.case.m,
            "n": self.case.n,
            "k": self.case.k,
            "layout": self.case.layout,
            "dtype": self.case.dtype,
            "accepted": self.accepted,
            "decline": self.decline,
            "plan": None if self.plan is None else self.plan.to_dict(),
            "remote_bytes": remote,
            "bytes_ms": self.bytes_ms,
            "gather_bound": self.gather_bound,
            "rel_err_fp64": self.rel_err,
            "variants": measured,
            "unavailable": self.unavailable,
            "wrong": self.wrong,
            "speedup": self.speedups,
            "best_fixed": self.best_fixed,
            "efficiency": self.efficiency,
            "gemm_ratio": self.gemm_ratio,
            "loses": self.loses,
        }


@dataclass(frozen=True)
class Report:
    """All rows of a run.

    Attributes:
        rows: the shapes, measured against everything.
        orders: the shapes of the queue-order ablation.
        host_us: host time of a warm call, by entry point.
        peak_gbps: GB/s into a rank at each transport's best.
        settings: how it was measured.
        environment: machine, versions, commit, date.
    """

    rows: tuple[Row, ...]
    orders: tuple[Row, ...] = ()
    host_us: dict[str, float] = field(default_factory=dict)
    peak_gbps: dict[str, float] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def op(self) -> str:
        """The operation; one without rows has none."""
        return next((row.case.op for row in (*self.rows, *self.orders)), "")

    @property
    def geomeans(self) -> dict[str, float | None]:
        """Geometric means over the rows, accepted or not."""
        keys = ("nccl_cublas", "async_tp", "serial", "fused_bf16", "two_way", "best_fixed")
        means = {f"speedup_{key}": geomean(r.speedups[key] for r in self.rows) for key in keys}
        means["efficiency"] = geomean(r.efficiency for r in self.rows)
        means["gemm_ratio"] = geomean(r.gemm_ratio for r in self.rows)
        return means

    @property
    def slower(self) -> list[str]:
        """Accepted rows whose fused kernel lost to the baseline."""
        return [r.case.name for r in self.rows if r.too_slow]

    @property
    def beaten_by_fixed(self) -> list[str]:
        """Rows on which some fixed split of the sweep was faster than the policy measured."""
        found = []
        for row in self.rows:
            ratio = row.speedups["best_fixed"]
            if ratio is not None and ratio < ONE_WAY_HOLDS:
                found.append(row.case.name)
        return found

    @property
    def wrong(self) -> list[str]:
        """`shape: variant: how` of every wrong output."""
        every = (*self.rows, *self.orders)
        return [f"{r.case.name}: {name}: {how}" for r in every for name, how in r.wrong.items()]

    def order_ratios(self) -> list[dict[str, Any]]:
        """Per shape of the ablation, the time of each queue order over that of the default one."""
        found = []
        for row in self.orders:
            times = {
                name.removeprefix(v.ORDER_PREFIX): timing.median_ms
                for name, timing in row.timings.items()
                if name.startswith(v.ORDER_PREFIX)
            }
            shipped = times.get(DRIVERS[row.case.op].orders[0])
            if shipped is not None:
                ratios = {order: ms / shipped for order, ms in times.items()}
                found.append({"shape": row.case.name, "layout": row.case.layout, "ratio": ratios})
        return found

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            "schema": 1,
            "benchmark": self.op,
            **self.environment,
            "settings": self.settings,
            "peak_gbps": self.peak_gbps,
            "host_us": self.host_us,
            "geomean": self.geomeans,
            "verdict": {
                "correct": not self.wrong,
                "never_slower": not self.slower,
                "slower": self.slower,
                "beaten_by_fixed": self.beaten_by_fixed,
            },
            "rows": [row.to_dict() for row in self.rows],
            "orders": [row.to_dict() for row in self.orders],
            "order_ratio": self.order_ratios(),
        }
