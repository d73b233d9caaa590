"""Panels of a measurement: sums, movers and builders beside each other, GEMMs by their size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

from kosmos_core.measure.report import sum_label

BLUE, ORANGE, GREEN, GREY = "#1f4e9c", "#d9601a", "#2a7f62", "#6a6a6a"
COLOURS = {"pull": BLUE, "push": ORANGE, "reduce": GREEN, "local": GREY}


def draw_sums(axes: Axes, data: Mapping[str, Any]) -> None:
    """GB/s of movers that add up, by their number."""
    for curve in data["sums"]:
        remote = curve["direction"] == "reduce"
        _line(axes, curve["gbps"], GREEN if remote else GREY, sum_label(curve), remote)
    axes.set_xlabel("movers (workgroups)")
    axes.set_ylabel("GB/s (reduce: into one GPU)")
    axes.set_yscale("log")
    axes.set_title("Sums, by number of movers")
    _doubling(axes, [int(w) for w in data["sums"][0]["gbps"]])
    _legend(axes)


def draw_beside(movers: Axes, builders: Axes, data: Mapping[str, Any]) -> None:
    """GB/s of movers beside builders, and TFLOPS of the builders beside them."""
    beside = data["beside"]
    for curve in beside["curves"]:
        way = curve["direction"]
        _line(movers, curve["gbps"], COLOURS[way], way, True)
        _line(builders, curve["tflops"], COLOURS[way], f"beside {way}", True)
    _line(builders, beside["alone_tflops"], GREY, "alone", False)
    for axes, unit, title in (
        (movers, "GB/s into one GPU", "Movers beside builders"),
        (builders, "TFLOPS", "Builders beside movers"),
    ):
        axes.set_xlabel("movers (workgroups)")
        axes.set_ylabel(unit)
        axes.set_ylim(bottom=0)
        axes.set_title(title)
        _legend(axes)


def draw_sizes(axes: Axes, data: Mapping[str, Any]) -> None:
    """TFLOPS by contraction and by tiles a workgroup builds in one call."""
    gemm = data["gemm"]
    for key, colour, what in (("contraction", BLUE, "contraction"), ("call", ORANGE, "tiles a WG")):
        _line(axes, gemm[f"{key}_tflops"], colour, f"ours, by {what}", True)
        _line(axes, gemm[f"vendor_{key}_tflops"], colour, f"vendor's, by {what}", False)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("contraction, or tiles a workgroup in a call")
    axes.set_ylabel("TFLOPS")
    axes.set_ylim(bottom=0)
    axes.set_title("GEMM by size")
    _legend(axes)


def _line(axes: Axes, curve: Mapping[str, float], colour: str, label: str, bold: bool) -> None:
    axes.plot(
        [int(count) for count in curve],
        list(curve.values()),
        color=colour,
        linestyle="-" if bold else "--",
        marker="o",
        markersize=3.5,
        label=label,
    )


def _doubling(axes: Axes, counts: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(counts))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.tick_params(axis="x", labelsize=7)


def _legend(axes: Axes) -> None:
    axes.legend(fontsize=7, framealpha=0.9).get_frame().set_linewidth(0)
