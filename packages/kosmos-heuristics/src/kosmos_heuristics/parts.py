"""The parts of a machine: measured curves, tile shapes, transports, the unfused path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kosmos_heuristics.checks import check_int, check_number, check_power_of_two
from kosmos_heuristics.errors import MachineError

FIX = "correct the machine file"
# Of a WG count: far above any GPU's.
MAX_DIGITS = 6


def _wg_count(key: object) -> int:
    """The WG count that a key of a curve holds, 0 if it holds none."""
    if isinstance(key, str) and len(key) <= MAX_DIGITS and key.isascii() and key.isdigit():
        return int(key)
    if isinstance(key, int) and not isinstance(key, bool) and 0 < key < 10**MAX_DIGITS:
        return key
    return 0


@dataclass(frozen=True)
class Curve:
    """A measured quantity by number of WGs: piecewise linear from (0, 0), flat past the last point.

    Args:
        points: ``(wgs, value)`` pairs, WG counts strictly rising, values above 0.
    """

    points: tuple[tuple[int, float], ...]

    @classmethod
    def from_mapping(cls, name: str, data: object) -> Curve:
        """Read ``{"8": 325.0, ...}``; JSON has no integer keys, so digits in strings count.

        Raises:
            MachineError: ``data`` is not such a mapping; the message names ``name``.
        """
        if not isinstance(data, Mapping) or not data:
            raise MachineError(name, data, "an object of WG count to value, not empty", FIX)
        points: dict[int, float] = {}
        for key, value in data.items():
            wgs = _wg_count(key)
            if wgs < 1:
                raise MachineError(f"{name} key", key, "a WG count of at least 1", FIX)
            if wgs in points:
                raise MachineError(f"{name} key", key, "each WG count once", FIX)
            points[wgs] = check_number(MachineError, f"{name}[{wgs}]", value, FIX)
        return cls(tuple(sorted(points.items())))

    def to_mapping(self) -> dict[str, float]:
        """The inverse of ``from_mapping``."""
        return {str(wgs): value for wgs, value in self.points}

    def at(self, wgs: float) -> float:
        """Value at ``wgs`` WGs (a fraction is allowed: WGs per link need not be whole)."""
        if wgs <= 0:
            return 0.0
        left_wgs, left = 0, 0.0
        for right_wgs, right in self.points:
            if wgs <= right_wgs:
                return left + (right - left) * (wgs - left_wgs) / (right_wgs - left_wgs)
            left_wgs, left = right_wgs, right
        return left

    @property
    def peak(self) -> float:
        """Largest measured value."""
        return max(value for _, value in self.points)


@dataclass(frozen=True)
class TileShape:
    """A GEMM tile as the kernels are compiled for it.

    Args:
        block_m: Rows of the output tile.
        block_n: Columns of the output tile.
        block_k: Contraction step.
        num_warps: Warps (NVIDIA) or waves (AMD) of a WG.
        num_stages: Depth of the software pipeline.
        efficiency: Throughput relative to the machine's ``tflops`` curve.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    efficiency: float = 1.0

    def __post_init__(self) -> None:
        for name in ("block_m", "block_n", "block_k"):
            check_power_of_two(MachineError, name, getattr(self, name), 16, FIX)
        check_power_of_two(MachineError, "num_warps", self.num_warps, 1, FIX)
        check_int(MachineError, "num_stages", self.num_stages, 1, FIX)
        check_number(MachineError, "efficiency", self.efficiency, FIX)


@dataclass(frozen=True)
class Transport:
    """One way of moving bytes between ranks.

    Args:
        gbps: GB/s (10^9 bytes) into one rank by number of mover WGs.
        copy_bytes: Bytes that a mover moves per step in that measurement.
    """

    gbps: Curve
    copy_bytes: int

    def __post_init__(self) -> None:
        check_power_of_two(MachineError, "copy_bytes", self.copy_bytes, 16, FIX)


@dataclass(frozen=True)
class Baseline:
    """The unfused path: the vendor's collective, then the vendor's GEMM.

    Args:
        collective_gbps: Rate of a large all-gather, GB/s into one rank.
        collective_us: Fixed cost of a collective, microseconds.
        tflops: BF16 throughput of the vendor's GEMM.
        gemm_us: Fixed cost of a GEMM launch, microseconds.
    """

    collective_gbps: float
    collective_us: float
    tflops: float
    gemm_us: float

    def __post_init__(self) -> None:
        for name in ("collective_gbps", "tflops"):
            check_number(MachineError, f"baseline.{name}", getattr(self, name), FIX)
        for name in ("collective_us", "gemm_us"):
            check_number(MachineError, f"baseline.{name}", getattr(self, name), FIX, positive=False)
