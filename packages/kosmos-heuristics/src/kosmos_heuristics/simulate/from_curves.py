"""The simulated machine of a GPU whose curves were measured: no fused call's time is read.

Every number is a curve's own (a rate, a peak, a latency) or the least-squares shape of one. What a
curve does not show stays as assumed in the machine that is started from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kosmos_heuristics.simulate.model import SimMachine

# Movers that share nothing yet: their rates give the rate of one.
FEW_MOVERS = 4
SHARPNESS = tuple(range(1, 33))
# The clock is at its height where it is within this share of the highest.
CLOCK_SHARE = 0.99
# Of the measured collective, over all ranks.
COLLECTIVE_BYTES = 1 << 28
# Grids of the GEMM's fit.
BOOSTS = tuple(0.02 * step for step in range(21))
BOOST_MS = tuple(0.25 * 1.35**step for step in range(12))
TILE_US = tuple(0.25 * step for step in range(33))
TAILS = tuple(0.05 * step for step in range(21))
ASSUMED = ("build_drag", "move_drag", "nt_share", "sum_gbps", "hbm_gbps", "route_us",
           "route_tflops", "reduction_gbps")  # fmt: skip


def simulated_from_curves(
    data: Mapping[str, Any], gemms: Mapping[str, Any], base: SimMachine
) -> dict[str, dict[str, Any]]:
    """The contents of a machine file (BF16).

    Args:
        data: A measurement of two GPUs (``python -m kosmos_core measure``).
        gemms: Times of GEMMs alone, ours and the vendor's.
        base: What is kept where nothing was measured: name, topology, rules, tiles, how it reduces.
    """
    kernel_us, flag_us = data["latency"]["empty_kernel_us"], data["latency"]["local_flag_us"]
    tflops, boost, boost_ms, tile_us = fit_own(gemms["rows"], base, kernel_us)
    vendor, tail = fit_vendor(gemms["rows"], base, kernel_us, boost, boost_ms)
    push, pull = numbers(data["push_gbps"]), numbers(data["pull_gbps"])
    collective = _asymptote(data)
    common = {
        "name": base.name,
        "topology": base.topology,
        "num_wgs": int(data["num_wgs"]),
        "rules": base.rules,
        "tile_m": base.tile_m,
        "tile_n": base.tile_n,
        "clock_wgs": _clock_wgs(data),
        # A claim and its answer; what is flagged between workgroups takes as long.
        "unit_us": flag_us,
        "flag_us": data["flag_latency_us"],
        "launch_us": data["launch_us"],
        "copy_gbps": rate_of_one(push),
        "push_gbps": rate_of_one(push),
        "reduce_gbps": rate_of_one(pull),
        "reduces": base.reduces,
        "sum_gbps": base.sum_gbps,
        "link_gbps": max(push.values()),
        "sharpness": sharpness(push),
        "reduce_sharpness": sharpness(pull),
        "saturating_wgs": int(data["num_wgs"]),
        "curve_peers": 1,
        "hbm_gbps": base.hbm_gbps,
        "route_us": base.route_us,
        "route_tflops": base.route_tflops,
        "collective_gbps": collective,
        "reduction_gbps": collective,
        "collective_us": data["copies"]["collective_us"],
        "vendor_gemm_us": kernel_us,
    }
    bf16 = {
        "tflops": tflops,
        "power_exponent": _power_exponent(data),
        "boost": boost,
        "boost_ms": boost_ms,
        "tile_us": tile_us,
        "acquire_us": flag_us,
        "nt_share": 1.0,
        "sentinel": 0.0,
        "build_drag": 0.0,
        "move_drag": 0.0,
        "vendor_tflops": vendor,
        "vendor_tail": tail,
    }
    sources = {
        "transport, latencies, collectives, power_exponent, clock_wgs": "measured on two of "
        f"{data['machine']}, {data['date']}",
        "tflops, boost, boost_ms, tile_us, vendor_tflops, vendor_tail": "fitted to GEMMs alone on "
        f"{gemms['machine']}, {gemms['date']}",
        ", ".join(ASSUMED): "assumed, not measured",
        "all": "by kosmos_heuristics.fit; no time of a fused call was read",
    }
    return {"common": rounded(common), "bf16": rounded(bf16), "sources": sources}


def _gemm_rows(
    rows: Sequence[Mapping[str, Any]], base: SimMachine, key: str, fixed_us: float
) -> list[tuple[float, float, int, float]]:
    """(milliseconds without the launch, flops, tiles, contraction) of each GEMM."""
    return [
        (
            float(row[key]) - fixed_us * 1e-3,
            2.0 * row["m"] * row["n"] * row["k"],
            math.ceil(row["m"] / base.tile_m) * math.ceil(row["n"] / base.tile_n),
            float(row["k"]),
        )
        for row in rows
    ]


def _gain(ms: float, boost: float, boost_ms: float) -> float:
    return 1.0 + boost / (1.0 + (ms / boost_ms) ** 2)


def fit_own(
    rows: Sequence[Mapping[str, Any]], base: SimMachine, kernel_us: float
) -> tuple[float, float, float, float]:
    """(sustained TFLOPS, boost, its milliseconds, a tile's fixed us) of our GEMM, over a grid.

    A GEMM takes its waves of tiles, each its contraction's share of the whole grid's rate and the
    fixed cost. For each shape of the grid the rate that fits best is the mean one.
    """
    found = _gemm_rows(rows, base, "own_ms", kernel_us)
    wgs = base.num_wgs
    flops = 2.0 * base.tile_m * base.tile_n * wgs
    candidates: Iterator[tuple[float, tuple[float, float, float, float]]] = (
        _mean_rate(
            [
                # Whole waves of the contraction, in the time that fixed costs leave.
                (math.ceil(tiles / wgs) * flops * k, ms - math.ceil(tiles / wgs) * tile_us * 1e-3,
                 _gain(ms, boost, boost_ms))
                for ms, _, tiles, k in found
            ],
            (boost, boost_ms, tile_us),
        )
        for boost in BOOSTS
        for boost_ms in BOOST_MS
        for tile_us in TILE_US
    )  # fmt: skip
    return min(candidates)[1]


def _mean_rate(
    points: Sequence[tuple[float, float, float]], shape: tuple[float, float, float]
) -> tuple[float, tuple[float, float, float, float]]:
    """(mean error, (rate, *shape)) of the rate that fits (flops, ms, gain) best."""
    if min(ms for _, ms, _ in points) <= 0.0:
        return math.inf, (0.0, *shape)
    rates = [math.log(work / (ms * 1e9 * gain)) for work, ms, gain in points]
    mean = math.fsum(rates) / len(rates)
    return math.fsum(abs(rate - mean) for rate in rates) / len(rates), (math.exp(mean), *shape)


def fit_vendor(
    rows: Sequence[Mapping[str, Any]],
    base: SimMachine,
    kernel_us: float,
    boost: float,
    boost_ms: float,
) -> tuple[float, float]:
    """(sustained TFLOPS, tail) of the vendor's GEMM on the same GPU: the same boost."""
    found = _gemm_rows(rows, base, "vendor_ms", kernel_us)

    def stretch(tiles: int, tail: float) -> float:
        waves = tiles / base.num_wgs
        return 1.0 + tail * (math.ceil(waves) / waves - 1.0)

    fitted = (
        _mean_rate(
            [(work * stretch(tiles, tail), ms, _gain(ms, boost, boost_ms))
             for ms, work, tiles, _ in found],
            (tail, 0.0, 0.0),
        )
        for tail in TAILS
    )  # fmt: skip
    return min(fitted)[1][:2]


def rounded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers to five figures, which is more than a measurement's noise."""
    return {
        key: float(f"{value:.5g}") if isinstance(value, float) else value
        for key, value in values.items()
    }


def numbers(curve: Mapping[str, float]) -> dict[int, float]:
    """A curve with its counts as numbers, rising."""
    return {int(count): float(curve[count]) for count in sorted(curve, key=int)}


def rate_of_one(curve: Mapping[int, float]) -> float:
    """GB/s of one mover while movers do not share a limit yet."""
    few = [rate / movers for movers, rate in curve.items() if movers <= FEW_MOVERS]
    return math.fsum(few) / len(few)


def least(candidates: Sequence[float], loss: Callable[[float], float]) -> float:
    """The candidate with the smallest loss, the first of equals."""
    return min(candidates, key=loss)


def sharpness(curve: Mapping[int, float]) -> float:
    """How sharply a curve turns from its slope to its peak."""
    slope, peak = rate_of_one(curve), max(curve.values())

    def loss(s: float) -> float:
        return math.fsum(
            math.log(((slope * movers) ** -s + peak**-s) ** (-1.0 / s) / rate) ** 2
            for movers, rate in curve.items()
        )

    return float(least(SHARPNESS, loss))


def _clock_wgs(data: Mapping[str, Any]) -> int:
    clocks = {wgs: mhz for wgs, mhz in numbers(data["power"]["mhz"]).items() if wgs}
    high = max(clocks.values())
    return max(wgs for wgs, mhz in clocks.items() if mhz >= CLOCK_SHARE * high)


def _power_exponent(data: Mapping[str, Any]) -> float:
    """TFLOPS of b builders under the power cap go as b to this power."""
    rates, wgs = numbers(data["power"]["tflops"]), int(data["num_wgs"])
    capped = [w for w in rates if _clock_wgs(data) <= w <= wgs]
    points = [(math.log(w / wgs), math.log(rates[w] / rates[wgs])) for w in capped]
    # Through the whole grid, where it is 1 by definition.
    return min(
        1.0,
        math.fsum(x * y for x, y in points) / math.fsum(x * x for x, _ in points),
    )


def _asymptote(data: Mapping[str, Any]) -> float:
    """GB/s of the vendor's all-gather without its fixed cost."""
    copies, ranks = data["copies"], int(data["world_size"])
    moved = COLLECTIVE_BYTES * (ranks - 1) / ranks
    us = moved / (float(copies["collective_gbps"]) * 1e3) - float(copies["collective_us"])
    return moved / (us * 1e3)
