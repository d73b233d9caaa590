"""Host side of the in-kernel trace: from the event buffer to Perfetto JSON and to a picture."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kosmos_core.device.trace import EVENT_WORDS, KIND_NAMES

# As in the paper's Figure 4, blue works and light blue waits; moving stands apart in green.
COLOURS = {
    "build": "#1f4e9c",
    "move": "#2e9e5b",
    "copy_in": "#8c6d31",
    "keep": "#8fd1a8",
    "reduce": "#b5651d",
    "route": "#7b4fa3",
    "plan": "#c2a5d6",
    "combine": "#d98e4a",
    "fold": "#a33b5a",
    "wait": "#c3d9ee",
}
LABELS = {
    "build": "building tiles",
    "move": "moving data",
    "copy_in": "copying in",
    "keep": "keeping the gathered input",
    "reduce": "adding up partial sums",
    "route": "routing tokens",
    "plan": "planning the layout",
    "combine": "returning rows",
    "fold": "adding up returned rows",
    "wait": "waiting for data",
}


# Whose work it is; what any workgroup does is left out.
ROLES = {"move": "mover", "reduce": "mover", "combine": "mover", "build": "builder"}


@dataclass(frozen=True)
class Span:
    """What one workgroup did over a stretch of time.

    Attributes:
        rank: rank of the workgroup.
        wg: workgroup id (program id).
        kind: role or step (`kosmos_core.device.trace.KIND_NAMES`).
        argument: tile row, unit or tile, by kind.
        begin_ns: device time.
        end_ns: device time.
    """

    rank: int
    wg: int
    kind: str
    argument: int
    begin_ns: int
    end_ns: int


def decode(buffer: torch.Tensor, events: int, rank: int) -> list[Span]:
    """Spans in a trace buffer of `events` events a workgroup, in order of workgroup and time."""
    words = int(EVENT_WORDS.value)
    rows = buffer.cpu().view(-1, 1 + words * events)
    spans = []
    for wg, row in enumerate(rows.tolist()):
        for i in range(min(row[0], events)):
            kind, argument, begin, end = row[1 + i * words : 1 + (i + 1) * words]
            spans.append(Span(rank, wg, KIND_NAMES[kind], argument, begin, end))
    return spans


def save_perfetto(spans: Iterable[Span], path: str | Path) -> None:
    """Writes Chrome trace events, a process a rank, a thread a workgroup, for ui.perfetto.dev."""
    spans = list(spans)
    start = min((s.begin_ns for s in spans), default=0)
    events: list[dict[str, object]] = []
    for rank in sorted({s.rank for s in spans}):
        events.append(
            {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
        )
    for rank, wg in sorted({(s.rank, s.wg) for s in spans}):
        events.append(
            {"name": "thread_name", "ph": "M", "pid": rank, "tid": wg, "args": {"name": f"WG {wg}"}}
        )
    for s in spans:
        events.append(
            {
                "name": s.kind,
                "ph": "X",
                "pid": s.rank,
                "tid": s.wg,
                "ts": (s.begin_ns - start) / 1000,
                "dur": max(s.end_ns - s.begin_ns, 1) / 1000,
                "args": {"argument": s.argument},
            }
        )
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}))


def role_switches(spans: Sequence[Span]) -> dict[tuple[int, int], int]:
    """How often each (rank, workgroup) changed between mover and builder."""
    counts: dict[tuple[int, int], int] = {}
    last: dict[tuple[int, int], str] = {}
    for s in sorted(spans, key=lambda s: s.begin_ns):
        wg = (s.rank, s.wg)
        counts.setdefault(wg, 0)
        role = ROLES.get(s.kind)
        if role is not None:
            if last.get(wg, role) != role:
                counts[wg] += 1
            last[wg] = role
    return counts


def draw_timeline(
    spans: Sequence[Span],
    path: str | Path,
    title: str,
    max_wgs: int = 24,
    clock: str = "device",
    marks: Sequence[tuple[int, str]] = (),
) -> None:
    """Draws a lane a workgroup, coloured by role (as the paper's Figure 4), and counts of roles.

    Args:
        spans: from `decode`, of all ranks to show.
        path: PNG file.
        title: heading.
        max_wgs: lanes a rank; of more workgroups, movers and builders are thinned out evenly.
        clock: what the time axis is called by: "device" or "simulated".
        marks: (device time, text) above the lanes, such as where calls begin.

    Raises:
        ValueError: there are no spans.
    """
    if not spans:
        raise ValueError("spans: got none, wanted those of a traced call; pass traced=True to it")
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    by_wg: dict[tuple[int, int], list[Span]] = {}
    for s in spans:
        by_wg.setdefault((s.rank, s.wg), []).append(s)
    start = min(s.begin_ns for s in spans)
    length = (max(s.end_ns for s in spans) - start) / 1000
    ranks = sorted({s.rank for s in spans})
    lanes = {rank: _lanes(by_wg, rank, max_wgs) for rank in ranks}
    heights = [0.17 * len(lanes[rank]) + 0.12 for rank in ranks] + [1.5]
    figure, axes = plt.subplots(
        len(heights), 1, figsize=(13, 1.2 + sum(heights)), sharex=True, squeeze=False,
        layout="constrained", gridspec_kw={"height_ratios": heights},
    )  # fmt: skip
    figure.get_layout_engine().set(h_pad=0.03, hspace=0.02)  # type: ignore[union-attr, call-arg]
    for axis, rank in zip(axes[:, 0], ranks, strict=False):
        for lane, wg in enumerate(lanes[rank]):
            _draw_lane(axis, lane, by_wg[rank, wg], start)
        axis.set_ylim(len(lanes[rank]) - 0.4, -0.6)
        axis.set_yticks([])
        wgs = sum(r == rank for r, _ in by_wg)
        thinned = f"\n{len(lanes[rank])} of {wgs} WGs" if wgs > len(lanes[rank]) else ""
        axis.set_ylabel(f"rank {rank}{thinned}", rotation=0, ha="right", va="center", fontsize=10)
        axis.spines[:].set_visible(False)
        axis.tick_params(bottom=False)
        axis.set_facecolor("#f6f6f6")
    for time_ns, text in marks:
        axes[0, 0].annotate(
            text, ((time_ns - start) / 1000, 1), xycoords=("data", "axes fraction"),
            xytext=(0, 3), textcoords="offset points", fontsize=9, color="#5b6673",
        )  # fmt: skip
    _draw_counts(axes[-1, 0], spans, start)
    axes[-1, 0].set_xlim(0, length)
    axes[-1, 0].set_xlabel(f"microseconds of {clock} time")
    used = [kind for kind in COLOURS if any(s.kind == kind for s in spans)]
    handles = [Patch(color=COLOURS[kind], label=LABELS[kind]) for kind in used]
    figure.legend(handles=handles, loc="outside lower right", ncols=len(used), frameon=False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    figure.savefig(path, dpi=140)
    plt.close(figure)


def _lanes(by_wg: dict[tuple[int, int], list[Span]], rank: int, most: int) -> list[int]:
    """Workgroups to show, those that moved first; thinned out alike among them and the others."""
    movers: list[int] = []
    others: list[int] = []
    for r, wg in sorted(by_wg):
        if r == rank:
            (movers if any(s.kind == "move" for s in by_wg[r, wg]) else others).append(wg)
    total = len(movers) + len(others)
    if total <= most:
        return movers + others
    kept = round(most * len(movers) / total)
    return _thinned(movers, max(kept, min(1, len(movers)))) + _thinned(others, most - kept)


def _thinned(items: Sequence[int], count: int) -> list[int]:
    return [items[i * len(items) // count] for i in range(min(count, len(items)))]


def _draw_lane(axis: Any, lane: int, spans: Sequence[Span], start: int) -> None:
    for kind, colour in COLOURS.items():
        bars = [
            ((s.begin_ns - start) / 1000, max(s.end_ns - s.begin_ns, 1) / 1000)
            for s in spans
            if s.kind == kind
        ]
        if bars:
            # A hairline in the background's colour tells neighbours apart.
            axis.broken_barh(
                bars, (lane - 0.43, 0.86), facecolors=colour, edgecolors="#f6f6f6", linewidth=0.25
            )


def _draw_counts(axis: Any, spans: Sequence[Span], start: int) -> None:
    """How many workgroups of all ranks are in each role, over time."""
    import numpy as np

    edges = np.linspace(0, max(s.end_ns for s in spans) - start, 161)
    width = edges[1] - edges[0]
    layers, colours = [], []
    for kind, colour in COLOURS.items():
        begin = np.array([s.begin_ns - start for s in spans if s.kind == kind], dtype=float)
        end = np.array([s.end_ns - start for s in spans if s.kind == kind], dtype=float)
        if not len(begin):
            continue
        # From busy time before each edge to the mean number of spans between two edges.
        busy = [(np.clip(end, None, e) - np.clip(begin, None, e)).sum() for e in edges]
        layers.append(np.diff(busy) / width)
        colours.append(colour)
    middle = (edges[:-1] + edges[1:]) / 2000
    axis.stackplot(middle, *layers, colors=colours, linewidth=0)
    axis.set_ylabel("workgroups\nby role", rotation=0, ha="right", va="center", fontsize=9)
    axis.set_ylim(0, len({(s.rank, s.wg) for s in spans}))
    axis.spines[["top", "right"]].set_visible(False)
