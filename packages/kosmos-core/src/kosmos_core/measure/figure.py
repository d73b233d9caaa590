"""A measurement as one picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter, ScalarFormatter

from kosmos_core.measure.budget import PLAN_WARPS
from kosmos_core.measure.figure_beside import draw_beside, draw_sizes, draw_sums
from kosmos_core.measure.report import singles

BLUE, ORANGE, GREEN = "#1f4e9c", "#d9601a", "#2a7f62"
INK, FAINT, QUIET = "#333333", "#9a9a9a", "#6a6a6a"
# Points nearer to each other than this share of the axis get one label.
CLOSE = 0.07
# One colour a copy step and depth.
VARIANT_COLOURS = ("#8db3de", BLUE, "#f0a868", ORANGE, "#8fc7a9", GREEN)
TITLES = {
    "pull": "Pull from a peer",
    "push": "Push to a peer",
    "local": "Copies within local memory",
}


def draw(data: Mapping[str, Any], path: str | Path) -> None:
    """Draws bandwidth, sums, throughput, movers beside builders, start order, power and clock.

    Args:
        data: from `measure`, or read back from its JSON.
        path: PNG file.
    """
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style: Any = {
        "font.size": 9.5, "axes.spines.top": False, "axes.spines.right": False,
        "axes.edgecolor": FAINT, "axes.grid": True, "grid.color": "#e6e6e6", "axes.axisbelow": True,
        "axes.titlelocation": "left", "axes.titleweight": "bold", "axes.titlesize": 10.5,
        "text.color": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK,
    }  # fmt: skip
    with plt.rc_context(style):
        figure = plt.figure(figsize=(13.5, 13.6), layout="constrained")
        rows: Any = figure.subfigures(3, 1, height_ratios=(1.08, 0.9, 1))
        top, middle, bottom = rows
        directions = list(dict.fromkeys(c["direction"] for c in data["copies"]["curves"]))
        *bandwidth, throughput = top.subplots(1, len(directions) + 1)
        sums, movers, builders, sizes = middle.subplots(1, 4)
        draw_sums(sums, data)
        draw_beside(movers, builders, data)
        draw_sizes(sizes, data)
        persistent, crowded, power = bottom.subplots(1, 3, width_ratios=(1, 1, 1.5))
        for axes, direction in zip(bandwidth, directions, strict=True):
            _bandwidth(axes, data, direction)
        _throughput(throughput, data)
        order = data["start_order"]
        _start_order(persistent, order["persistent"], "Start order, one WG per SM")
        _start_order(crowded, order["oversubscribed"], "More WGs than fit, uneven work")
        _power(power, data)
        figure.suptitle(_heading(data), x=0.01, ha="left", fontsize=10)
        figure.savefig(path, dpi=130)
        plt.close(figure)


def _heading(data: Mapping[str, Any]) -> str:
    plural = "s" if data["world_size"] > 1 else ""
    name = f"{data['world_size']} x {data['machine']}, {data['num_wgs']} workgroups a GPU"
    figures = [f"{what} {value}" for what, value in singles(data)]
    half = -(-len(figures) // 2)
    lines = ["    ".join(figures[:half]), "    ".join(figures[half:])]
    return f"{name}, measured on the GPU{plural} {data['date'][:10]}\n" + "\n".join(lines)


def _bandwidth(axes: Axes, data: Mapping[str, Any], direction: str) -> None:
    copies = data["copies"]
    curves = [c for c in copies["curves"] if c["direction"] == direction]
    steps = list(dict.fromkeys((c["copy_bytes"], c["depth"]) for c in curves))
    counts = sorted({int(w) for c in curves for w in c["gbps"]})
    chosen = data.get(f"{direction}_copy")
    for curve in curves:
        read = chosen is not None and all(curve[key] == chosen[key] for key in chosen)
        several = curve["peers"] > 1
        # All peers at once: the variant that plans read, or there would be twice as many lines.
        if several and not read:
            continue
        bold = read and not several
        place = steps.index((curve["copy_bytes"], curve["depth"]))
        label = (
            f"{curve['copy_bytes'] // 1024} KiB x {curve['depth'] + 1}, {curve['num_warps']} warps"
        )
        if several:
            label += f", {curve['peers']} peers at once"
        axes.plot(
            [int(w) for w in curve["gbps"]],
            list(curve["gbps"].values()),
            color=INK if several else VARIANT_COLOURS[place % len(VARIANT_COLOURS)],
            linestyle="-" if curve["num_warps"] >= PLAN_WARPS else "--",
            linewidth=2.8 if bold else 1.4,
            marker="o" if bold else ("s" if several else None),
            markersize=4.5,
            label=label + (" (plans read this)" if bold else ""),
        )
    lines = [
        ("driver's copy", copies["engine_gbps"]),
        ("vendor's all-gather", copies.get("collective_gbps")),
    ]
    for name, value in lines:
        if value is not None:
            axes.axhline(value, color=FAINT, linewidth=1, linestyle=(0, (4, 3)))
            axes.annotate(
                f"{name} {value:.0f}", (counts[0], value), (0, 3), textcoords="offset points",
                color=QUIET, fontsize=8.5,
            )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(counts))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.tick_params(axis="x", labelsize=8)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("movers (workgroups)")
    axes.set_ylabel("GB/s copied" if direction == "local" else "GB/s into one GPU")
    axes.set_title(f"{TITLES[direction]}, by number of movers")
    legend = axes.legend(
        fontsize=7.5,
        loc="lower right",
        title="step x steps in flight",
        title_fontsize=8,
        framealpha=0.9,
    )
    legend.get_frame().set_linewidth(0)


def _throughput(axes: Axes, data: Mapping[str, Any]) -> None:
    full = data["num_wgs"]
    curve = {int(w): v for w, v in data["tflops"].items()}
    best = curve[full]
    wgs = sorted(curve)
    kept = [curve[w] / best for w in wgs]
    axes.plot([0, full], [0, 1], color=FAINT, linewidth=1.2, linestyle="--")
    axes.annotate(
        "in proportion",
        (0.36 * full, 0.345),
        rotation=33,
        rotation_mode="anchor",
        color=QUIET,
        fontsize=8.5,
    )
    axes.fill_between(wgs, [w / full for w in wgs], kept, color=BLUE, alpha=0.12, linewidth=0)
    axes.plot(wgs, kept, color=BLUE, linewidth=2.4, marker="o", markersize=5)
    last = 0
    for w, share in zip(wgs, kept, strict=True):
        if w == full or (w - last >= CLOSE * full and full - w >= CLOSE * full):
            last = w
            axes.annotate(
                f"{100 * share:.0f}",
                (w, share),
                (0, 8),
                textcoords="offset points",
                ha="center",
                fontsize=8.5,
            )
    vendor = data["gemm"]["vendor_whole_rounds_tflops"] / best
    axes.axhline(vendor, color=ORANGE, linewidth=1.2)
    axes.annotate(
        f"vendor's GEMM, {data['gemm']['vendor_whole_rounds_tflops']:.0f} TFLOPS", (0, vendor),
        (4, 4), textcoords="offset points", color=ORANGE, fontsize=8.5,
    )  # fmt: skip
    axes.set_xlim(0, full * 1.03)
    axes.set_ylim(0, max(1.14, 1.1 * vendor))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("builders (workgroups)")
    axes.set_ylabel(f"throughput kept (100 % = {best:.0f} TFLOPS)")
    axes.set_title("GEMM under a cap: throughput kept")


def _start_order(axes: Axes, order: Mapping[str, Any], title: str) -> None:
    tickets = order["tickets"]
    micros = [t / 1e3 for t in order["start_ns"]]
    axes.plot([0, len(tickets)], [0, len(tickets)], color=FAINT, linewidth=1, linestyle="--")
    points = axes.scatter(
        range(len(tickets)),
        tickets,
        c=micros,
        cmap="viridis_r",
        s=900 / (len(tickets) + 60) + 2,
        linewidths=0,
    )
    bar = axes.figure.colorbar(points, ax=axes, location="bottom", shrink=0.9, aspect=30, pad=0.02)
    bar.set_label("start, us after the first", fontsize=8)
    bar.ax.tick_params(labelsize=7.5)
    bar.outline.set_visible(False)
    axes.set_xlabel("workgroup id (dashed: started in order of id)")
    axes.set_ylabel("place in the order of arrival")
    axes.set_title(title)


def _power(axes: Axes, data: Mapping[str, Any]) -> None:
    power = data["power"]
    axes.set_title("Power and clock by active workgroups")
    if "watts" not in power:
        axes.text(
            0.5,
            0.5,
            power["note"],
            transform=axes.transAxes,
            ha="center",
            va="center",
            wrap=True,
            color=INK,
        )
        axes.set_axis_off()
        return
    clock = axes.twinx()
    clock.grid(False)
    clock.spines["right"].set_visible(True)
    for target, key, colour, unit in ((axes, "watts", ORANGE, "W"), (clock, "mhz", BLUE, "MHz")):
        wgs = [int(w) for w in power[key]]
        values = list(power[key].values())
        target.plot(wgs, values, color=colour, linewidth=2.2, marker="o", markersize=4.5)
        target.set_ylim(0, 1.18 * max(values))
        target.set_ylabel(unit, color=colour)
        target.tick_params(axis="y", colors=colour)
        target.annotate(
            "power" if key == "watts" else "SM clock", (wgs[1], values[1]), (0, 9),
            textcoords="offset points", color=colour, ha="center",
        )  # fmt: skip
    axes.set_xlabel("workgroups building tiles (0: idle)")
