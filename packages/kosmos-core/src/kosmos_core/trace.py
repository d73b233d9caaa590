"""Host side of the in-kernel trace: from the event buffer to Perfetto JSON and to a picture."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kosmos_core.device.trace import EVENT_WORDS, KIND_NAMES

COLOURS = {
    "copy_in": "#8c564b",
    "move": "#2ca02c",
    "wait": "#c7dcef",
    "build": "#1f4e9c",
    "keep": "#98df8a",
}


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
    """Writes Chrome trace events: a process a rank, a thread a workgroup; opens in ui.perfetto.dev."""
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
    """How often each (rank, workgroup) changed between moving and building."""
    counts: dict[tuple[int, int], int] = {}
    last: dict[tuple[int, int], str] = {}
    for s in sorted(spans, key=lambda s: s.begin_ns):
        wg = (s.rank, s.wg)
        counts.setdefault(wg, 0)
        if s.kind in ("move", "build"):
            if last.get(wg, s.kind) != s.kind:
                counts[wg] += 1
            last[wg] = s.kind
    return counts


def draw_timeline(spans: Sequence[Span], path: str | Path, title: str, max_wgs: int = 24) -> None:
    """Draws one lane a workgroup, coloured by role, ranks below each other (as the paper's Figure 4).

    Args:
        spans: from `decode`, of all ranks to show.
        path: PNG file.
        title: heading.
        max_wgs: lanes a rank; more workgroups are thinned out evenly.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    start = min(s.begin_ns for s in spans)
    ranks = sorted({s.rank for s in spans})
    lanes = {}
    for rank in ranks:
        wgs = sorted({s.wg for s in spans if s.rank == rank})
        step = max(1, -(-len(wgs) // max_wgs))
        lanes[rank] = {wg: i for i, wg in enumerate(wgs[::step])}
    height = 0.8 + sum(0.16 * len(lanes[r]) + 0.35 for r in ranks)
    figure, axes = plt.subplots(
        len(ranks), 1, figsize=(12, height), sharex=True, squeeze=False, layout="constrained"
    )
    for axis, rank in zip(axes[:, 0], ranks, strict=True):
        for kind, colour in COLOURS.items():
            for wg, lane in lanes[rank].items():
                bars = [
                    ((s.begin_ns - start) / 1000, max(s.end_ns - s.begin_ns, 1) / 1000)
                    for s in spans
                    if s.rank == rank and s.wg == wg and s.kind == kind
                ]
                if bars:
                    axis.broken_barh(bars, (lane - 0.42, 0.84), facecolors=colour, linewidth=0)
        axis.set_ylim(len(lanes[rank]) - 0.5, -0.5)
        axis.set_yticks([])
        axis.set_ylabel(f"rank {rank}", rotation=0, ha="right", va="center")
        axis.spines[["top", "right", "left"]].set_visible(False)
    axes[-1, 0].set_xlabel("time, microseconds of device clock")
    used = [k for k in COLOURS if any(s.kind == k for s in spans)]
    figure.legend(
        handles=[Patch(color=COLOURS[k], label=k.replace("_", " ")) for k in used],
        loc="outside upper right",
        ncols=len(used),
        frameon=False,
    )
    figure.suptitle(title, x=0.01, ha="left")
    figure.savefig(path, dpi=130)
    plt.close(figure)
