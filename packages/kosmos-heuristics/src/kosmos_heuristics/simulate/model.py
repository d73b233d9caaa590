"""The simulator's machine: a dozen numbers, and the tables that the core makes of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any

from kosmos_heuristics.checks import check_choice, check_int, check_number
from kosmos_heuristics.errors import MachineError
from kosmos_heuristics.parts import FIX

SIM_MACHINES = ("h200", "mi350x", "mi355x")
TOPOLOGIES = ("mesh", "switch")
RULES = ("table_b3", "saturate")
REDUCES = ("pull", "push")
# Rows at which gathered data is declared ready, and of an expert's row block.
TILE_ROW = 256
# A crew is close to the transport's limit at this share of it.
SATURATED = 0.95
DTYPES = ("bf16", "mxfp8")
_COUNTS = ("num_wgs", "tile_m", "tile_n", "clock_wgs", "saturating_wgs", "curve_peers")
_MAY_BE_ZERO = (
    "boost",
    "tile_us",
    "acquire_us",
    "unit_us",
    "flag_us",
    "sentinel",
    "sum_gbps",
    "launch_us",
    "build_drag",
    "move_drag",
    "collective_us",
    "route_us",
    "vendor_gemm_us",
    "vendor_tail",
)


@dataclass(frozen=True)
class SimMachine:
    """A GPU of a node of equal GPUs, as the simulator sees it, for one dtype.

    Args:
        name: Name for messages.
        topology: ``mesh`` (a link per peer) or ``switch`` (all links serve any peer).
        num_wgs: Workgroups resident at once.
        rules: ``table_b3`` (the paper's crews and split-K) or ``saturate`` (the smallest crew that
            comes close to the transport's limit).
        tile_m: Rows of an output tile; divides a tile row's 256.
        tile_n: Columns of an output tile.
        clock_wgs: Builders below which the clock rises no further: the power cap is out of reach.
        tflops: Sustained TFLOPS of tiles with all workgroups building.
        power_exponent: TFLOPS of b builders go as ``(b / num_wgs) ** power_exponent``.
        boost: How much faster tiles are in calls that end before the power controller reacts.
        boost_ms: Length of a call at which half of the boost is left.
        tile_us: Fixed cost of a tile (claim, prologue, epilogue) with all workgroups building.
        acquire_us: What a tile that waits for gathered rows costs more: an acquire empties caches.
        nt_share: Throughput of NT tiles (weight gradients), relative to TN and NN.
        unit_us: Fixed cost of a transfer (claim, first round trip).
        flag_us: From an item's end to the moment at which others see it.
        launch_us: Fixed cost of one call (launch, start words, last leaver).
        copy_gbps: GB/s that one mover pulls (all-gather).
        push_gbps: GB/s that one mover pushes (dispatch, combine).
        reduce_gbps: GB/s that one mover pulls and sums (reduce-scatter).
        reduces: How a fused reduction gets its partial tiles: movers ``pull`` them, or builders
            ``push`` them to their owner, whose movers add up what lies there.
        sum_gbps: GB/s that one mover reads when it adds up what lies there; 0 where none does.
        sentinel: Share by which polling data and poisoning it anew lengthen a fused reduction.
        link_gbps: GB/s of one link (mesh), or of all of a rank's links (switch).
        sharpness: How sharply copies saturate: ``(a^-s + b^-s)^(-1/s)`` of both limits.
        reduce_sharpness: The same of reductions.
        saturating_wgs: Most workgroups that transfer at once when builders join.
        curve_peers: Peers among which the transport was measured.
        build_drag: Share of their rate that builders lose beside a transport at its limit.
        move_drag: Share of their rate that movers lose beside a grid of builders.
        hbm_gbps: Local memory bandwidth, GB/s (the fold of an expert layer reads and writes).
        route_us: Fixed cost of routing and planning an expert layer.
        route_tflops: TFLOPS of the router's GEMM.
        collective_gbps: GB/s into one rank of the vendor's all-gather.
        reduction_gbps: GB/s into one rank of the vendor's reduce-scatter.
        collective_us: Fixed cost of a vendor's collective.
        vendor_tflops: Sustained TFLOPS of the vendor's GEMM.
        vendor_gemm_us: Fixed cost of a vendor's GEMM.
        vendor_tail: Share of the last wave's empty places that costs a vendor's GEMM time.
    """

    name: str
    topology: str
    num_wgs: int
    rules: str
    tile_m: int
    tile_n: int
    clock_wgs: int
    tflops: float
    power_exponent: float
    boost: float
    boost_ms: float
    tile_us: float
    acquire_us: float
    nt_share: float
    unit_us: float
    flag_us: float
    launch_us: float
    copy_gbps: float
    push_gbps: float
    reduce_gbps: float
    reduces: str
    sum_gbps: float
    sentinel: float
    link_gbps: float
    sharpness: float
    reduce_sharpness: float
    saturating_wgs: int
    curve_peers: int
    build_drag: float
    move_drag: float
    hbm_gbps: float
    route_us: float
    route_tflops: float
    collective_gbps: float
    reduction_gbps: float
    collective_us: float
    vendor_tflops: float
    vendor_gemm_us: float
    vendor_tail: float

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise MachineError("name", self.name, "a name", FIX)
        check_choice(MachineError, "topology", self.topology, TOPOLOGIES, FIX)
        check_choice(MachineError, "rules", self.rules, RULES, FIX)
        check_choice(MachineError, "reduces", self.reduces, REDUCES, FIX)
        for item in fields(self):
            if item.name in ("name", "topology", "rules", "reduces"):
                continue
            value = getattr(self, item.name)
            if item.name in _COUNTS:
                check_int(MachineError, item.name, value, 1, FIX)
            else:
                positive = item.name not in _MAY_BE_ZERO
                check_number(MachineError, item.name, value, FIX, positive=positive)
        if TILE_ROW % self.tile_m:
            raise MachineError("tile_m", self.tile_m, f"a divisor of {TILE_ROW}", FIX)
        for name in ("build_drag", "move_drag", "power_exponent"):
            if getattr(self, name) > 1.0:
                raise MachineError(name, getattr(self, name), "at most 1", FIX)

    def tile_us_per_k(self, tflops: float) -> float:
        """Microseconds of a tile per unit of contraction with all workgroups building."""
        return 2.0 * self.tile_m * self.tile_n * self.num_wgs / (tflops * 1e6)

    def saturating_crew(self, wg_gbps: float, limit_gbps: float, quantum: int = 4) -> int:
        """The smallest crew, a multiple of ``quantum``, close to a transport's limit."""
        table = self.share_table(wg_gbps, limit_gbps)
        peak = max(wgs * rate for wgs, rate in enumerate(table))
        crews = range(quantum, max(quantum, self.num_wgs // 2) + 1, quantum)
        return next((c for c in crews if c * table[c] >= SATURATED * peak), crews[-1])

    def build_rates(self) -> list[float]:
        """Progress of one builder by how many build, 1 with the whole grid."""
        rates = [0.0]
        for builders in range(1, self.num_wgs + 1):
            share = max(builders, self.clock_wgs) / self.num_wgs
            rates.append(share ** (self.power_exponent - 1.0))
        return rates

    def share_table(
        self, wg_gbps: float, limit_gbps: float, sharpness: float | None = None, ranks: int = 1
    ) -> list[float]:
        """Bytes per microsecond of one mover by how many, of so many ranks, share a limit."""
        table = [0.0]
        s = self.sharpness if sharpness is None else sharpness
        for movers in range(1, ranks * self.num_wgs + 1):
            both = ((movers * wg_gbps) ** -s + limit_gbps**-s) ** (-1.0 / s)
            table.append(both / movers * 1e3)
        return table

    def build_drags(self, limit_gbps: float, wg_gbps: float) -> list[float]:
        """Factor on builders by how many workgroups transfer: the loss follows their bytes."""
        drags = []
        for movers in range(self.num_wgs + 1):
            drags.append(1.0 - self.build_drag * min(1.0, movers * wg_gbps / limit_gbps))
        return drags

    def move_drags(self) -> list[float]:
        """Factor on movers by how many workgroups build."""
        return [1.0 - self.move_drag * b / self.num_wgs for b in range(self.num_wgs + 1)]

    def boosted(self, sustained_tflops: float, flops: float, bytes_ms: float) -> float:
        """TFLOPS in a call of this much work: calls shorter than ``boost_ms`` run faster."""
        ideal_ms = max(flops / (sustained_tflops * 1e9), bytes_ms)
        left = 1.0 / (1.0 + (ideal_ms / self.boost_ms) ** 2)
        return sustained_tflops * (1.0 + self.boost * left)


def sim_machine(name: str, dtype: str = "bf16") -> SimMachine:
    """A packaged machine, or one in a file of the user's.

    Raises:
        MachineError: Naming the field at fault.
    """
    check_choice(MachineError, "dtype", dtype, DTYPES, "simulate a known dtype")
    if name in SIM_MACHINES:
        path = resources.files("kosmos_heuristics") / "data" / "simulate" / f"{name}.json"
        text = path.read_text("utf-8")
    else:
        try:
            text = Path(name).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            wanted = "one of " + ", ".join(SIM_MACHINES) + " or a readable JSON file"
            raise MachineError("machine", name, wanted, "check the name or path") from error
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise MachineError("machine", name, f"JSON ({error})", FIX) from error
    return from_data(data, dtype)


def from_data(data: object, dtype: str) -> SimMachine:
    """Read ``{"common": {...}, "bf16": {...}, ...}``: common numbers and those of a dtype.

    ``sources`` may say where the numbers came from; it is for readers.

    Raises:
        MachineError: A field is missing, unknown, of the wrong kind or out of range.
    """
    if not isinstance(data, Mapping):
        raise MachineError("machine", data, "an object", FIX)
    for name in sorted(str(key) for key in set(data) - {"common", "sources", *DTYPES}):
        raise MachineError(name, data[name], "common, a dtype, or sources", FIX)
    merged: dict[str, Any] = {}
    for part in ("common", dtype):
        section = data.get(part)
        if not isinstance(section, Mapping):
            raise MachineError(part, section, "an object", f"add it: {FIX}")
        merged.update(section)
    wanted = {item.name for item in fields(SimMachine)}
    for name in sorted(wanted - set(merged)):
        raise MachineError(name, None, "a value", f"add it: {FIX}")
    for name in sorted(str(key) for key in set(merged) - wanted):
        raise MachineError(name, merged[name], "no such field", FIX)
    return SimMachine(**merged)
