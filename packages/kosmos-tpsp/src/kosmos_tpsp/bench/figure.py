"""The benchmark's picture: speed-up a shape, how far from ideal, and the queue-order ablation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kosmos_tpsp.bench.results import Report, Row
from kosmos_tpsp.ops.catalog import DRIVERS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# One hue a model; within it, larger microbatches are darker.
HUES = ("Blues", "Greens", "Oranges", "Purples", "Greys")
RIVAL_STYLES = {
    "async_tp": ("D", "#c0392b", "torch async TP"),
    "serial": ("_", "#444444", "own kernels in sequence"),
    "best_fixed": ("x", "#8e44ad", "best fixed split"),
}
ORDER_COLOURS = ("#1f4e9c", "#7fa7d6", "#c9c9c9")


def draw(report: Report, path: Path) -> None:
    """Writes a PNG with the panels that the report has data for.

    Raises:
        ValueError: it has none.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in report.rows if row.speedups["nccl_cublas"] is not None]
    if not rows and not report.orders:
        raise ValueError("report: got no measured row, wanted at least one to draw")
    heights = [3.4, 1.9] * bool(rows) + [2.6] * bool(report.orders)
    width = max(7.0, 2.4 + 0.4 * len(rows))
    figure, axes = plt.subplots(
        len(heights), 1, figsize=(width, 0.9 + sum(heights)), squeeze=False, layout="constrained",
        gridspec_kw={"height_ratios": heights},
    )  # fmt: skip
    panels = list(axes[:, 0])
    if rows:
        panels[0].sharex(panels[1])
        _speedups(panels.pop(0), rows, report)
        _efficiency(panels.pop(0), rows, report)
    if report.orders:
        _orders(panels.pop(0), report.order_ratios(), DRIVERS[report.op].orders)
    figure.suptitle(_title(report), x=0.01, ha="left", fontsize=11)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _title(report: Report) -> str:
    machine = report.environment.get("machine", {})
    row = (report.rows or report.orders)[0]
    where = f"{row.world_size} x {machine.get('gpu', machine.get('model', 'unknown machine'))}"
    layouts = "+".join(sorted({r.case.layout.upper() for r in (*report.rows, *report.orders)}))
    title = DRIVERS[report.op].title
    return f"{title} {layouts}, {row.case.dtype}, {where}: one fused kernel against NCCL and cuBLAS"


def _family(row: Row) -> str:
    return row.case.name.rsplit("-MBS", 1)[0]


def _arranged(rows: Sequence[Row]) -> tuple[list[Row], list[float]]:
    """Rows grouped by layer, small microbatches first, and where their bars stand."""
    families = list(dict.fromkeys(map(_family, rows)))
    ordered = sorted(rows, key=lambda row: (families.index(_family(row)), row.case.m))
    places: list[float] = []
    for i, row in enumerate(ordered):
        gap = 0.7 if i and _family(row) != _family(ordered[i - 1]) else 0.0
        places.append((places[-1] + 1 + gap) if places else 0.0)
    return ordered, places


def _colours(rows: Sequence[Row]) -> list[Any]:
    import matplotlib

    models = list(dict.fromkeys(row.case.name.split("-")[0] for row in rows))
    colours = []
    for row in rows:
        model = row.case.name.split("-")[0]
        hue = matplotlib.colormaps[HUES[models.index(model) % len(HUES)]]
        sizes = sorted({r.case.m for r in rows if r.case.name.split("-")[0] == model})
        share = sizes.index(row.case.m) / max(1, len(sizes) - 1)
        colours.append(hue(0.4 + 0.45 * share))
    return colours


def _speedups(axis: Axes, rows: Sequence[Row], report: Report) -> None:
    ordered, places = _arranged(rows)
    heights = [row.speedups["nccl_cublas"] or 0.0 for row in ordered]
    edges = ["#c0392b" if row.loses else "none" for row in ordered]
    hatches = ["" if row.accepted else "//" for row in ordered]
    axis.bar(
        places, heights, width=0.86, color=_colours(ordered), edgecolor=edges, hatch=hatches, lw=1.4
    )
    for place, row, height in zip(places, ordered, heights, strict=True):
        # At the foot of the bar, where no rival's marker stands.
        axis.annotate(
            f"{height:.2f}", (place, 0), (0, 4), textcoords="offset points", ha="center",
            fontsize=7, color="#c0392b" if row.loses else "#111111",
            bbox={"boxstyle": "round,pad=0.15", "fc": "#ffffff", "ec": "none", "alpha": 0.85},
        )  # fmt: skip
    if any(hatches):
        axis.bar([0], [0], color="#ffffff", edgecolor="#444444", hatch="//", label="declined")
    if any(row.loses for row in ordered):
        axis.bar([0], [0], color="#ffffff", edgecolor="#c0392b", label="slower than baseline")
    for rival, (marker, colour, label) in RIVAL_STYLES.items():
        _rival(axis, places, ordered, rival, marker, colour, label)
    axis.axhline(1, color="#222222", lw=0.9)
    mean = report.geomeans["speedup_nccl_cublas"]
    if mean is not None:
        axis.axhline(mean, color="#222222", lw=0.9, ls=(0, (4, 3)), label=f"geomean {mean:.2f}x")
    axis.set_ylabel("speed-up over\nNCCL + cuBLAS")
    axis.set_ylim(0, 1.16 * max([*heights, 1.0]))
    axis.tick_params(labelbottom=False)
    _tidy(axis)
    axis.legend(fontsize=7, frameon=False, ncols=6, loc="lower right", bbox_to_anchor=(1, 1))


def _rival(
    axis: Axes,
    places: Sequence[float],
    rows: Sequence[Row],
    rival: str,
    marker: str,
    colour: str,
    label: str,
) -> None:
    """How fast a rival is in the same units: its own speed-up over NCCL and cuBLAS."""
    points = []
    for place, row in zip(places, rows, strict=True):
        over, base = row.speedups[rival], row.speedups["nccl_cublas"]
        if over is not None and base is not None:
            points.append((place, base / over))
    if points:
        x, y = zip(*points, strict=True)
        axis.scatter(x, y, marker=marker, s=26, color=colour, lw=1.3, zorder=3, label=label)


def _efficiency(axis: Axes, rows: Sequence[Row], report: Report) -> None:
    ordered, places = _arranged(rows)
    families = list(dict.fromkeys(map(_family, ordered)))
    means = report.geomeans
    for key, colour, label in (
        ("efficiency", "#1f4e9c", "max(GEMM, bytes) / fused"),
        ("gemm_ratio", "#e08214", "own GEMM / cuBLAS"),
    ):
        mean = means[key]
        if mean is None:
            continue
        for i, family in enumerate(families):
            points = [
                (place, 100 * value)
                for place, row in zip(places, ordered, strict=True)
                if _family(row) == family and (value := getattr(row, key)) is not None
            ]
            if points:
                x, y = zip(*points, strict=True)
                name = f"{label}, geomean {mean:.1%}" if i == 0 else None
                axis.plot(x, y, marker="o", ms=3.5, lw=1.4, color=colour, label=name)
    axis.axhline(100, color="#222222", lw=0.9)
    axis.set_ylabel("% of ideal")
    axis.set_ylim(bottom=min(60, axis.get_ylim()[0]), top=max(106, axis.get_ylim()[1]))
    axis.set_xticks(places, [_tick(row) for row in ordered], fontsize=6.5)
    axis.margins(x=0.02)
    for family in families:
        at = [place for place, row in zip(places, ordered, strict=True) if _family(row) == family]
        axis.annotate(
            family, (sum(at) / len(at), 0), (0, -24), xycoords=("data", "axes fraction"),
            textcoords="offset points", ha="center", va="top", fontsize=8,
        )  # fmt: skip
    _tidy(axis)
    axis.legend(fontsize=7, frameon=False, ncols=2, loc="lower right")


def _tick(row: Row) -> str:
    name = row.case.name
    return "MBS " + name.rsplit("-MBS", 1)[1] if "-MBS" in name else ""


def _orders(axis: Axes, ratios: Sequence[dict[str, Any]], orders: Sequence[str]) -> None:
    for i, entry in enumerate(ratios):
        for j, order in enumerate(orders):
            value = entry["ratio"].get(order)
            if value is None:
                continue
            place = i + (j - 1) * 0.27
            axis.bar(
                place,
                value,
                width=0.25,
                color=ORDER_COLOURS[j],
                label=order if i == 0 else None,
            )
            axis.annotate(
                f"{value:.2f}", (place, value), (0, 2), textcoords="offset points", ha="center",
                fontsize=6.5,
            )  # fmt: skip
    axis.axhline(1, color="#222222", lw=0.9)
    names = [f"{entry['shape']} {entry['layout'].upper()}" for entry in ratios]
    axis.set_xticks(range(len(names)), names, fontsize=8)
    axis.set_ylabel(f"time over\n{orders[0]}")
    axis.margins(y=0.12)
    _tidy(axis)
    axis.legend(fontsize=7, frameon=False, ncols=3, loc="lower right", bbox_to_anchor=(1, 1))


def _tidy(axis: Axes) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", lw=0.4, color="#dddddd")
    axis.set_axisbelow(True)
