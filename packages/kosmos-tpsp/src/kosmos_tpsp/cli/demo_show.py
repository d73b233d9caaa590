"""What the demonstration shows: a table, a trace, a picture, and where they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kosmos_core.trace import Span, draw_timeline, save_perfetto
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kosmos_tpsp.cli.demo_layer import Layer
from kosmos_tpsp.cli.demo_run import BASELINE, FUSED, Outcome

# A picture of more lanes would not fit a screen.
MOST_LANES = 64
VIEWER = "https://ui.perfetto.dev"


def introduce(screen: Console, layer: Layer, world: str, world_size: int) -> None:
    """What is about to run."""
    lines = (
        f"ag_gemm: the all-gather and the GEMM of a column projection in one kernel, on {world}",
        f"{layer.label}",
        f"m = {layer.tokens} tokens (bytes of Python's standard library), n = {layer.local_width} "
        f"columns a rank, k = {layer.hidden}; each of {world_size} ranks holds "
        f"{layer.tokens // world_size} tokens",
    )
    for line in lines:
        screen.print(line, soft_wrap=True, markup=False)


def show(
    screen: Console, outcomes: Sequence[Outcome], layer: Layer, folder: Path, *, simulated: bool
) -> bool:
    """Prints the table, writes the files, says what to look at; returns whether all was right."""
    screen.print(f"plan: {_plan(outcomes[0])}", soft_wrap=True, markup=False)
    screen.print(_table(outcomes))
    for line in _remarks(outcomes, simulated):
        screen.print(line, soft_wrap=True, markup=False)
    # One clock for all virtual ranks; clocks of two GPUs need not agree.
    spans = [s for o in outcomes for s in (o.spans if simulated else _from_zero(o.spans))]
    trace, picture = folder / "trace.json", folder / "timeline.png"
    save_perfetto(spans, trace)
    size = f"m {layer.tokens}, n {layer.local_width}, k {layer.hidden}"
    draw_timeline(
        [s for s in spans if s.kind != "call"],
        picture,
        f"AG+GEMM, one kernel on {len(outcomes)} ranks ({size}): movers turn into builders",
        max_wgs=min(24, MOST_LANES // len(outcomes)),
        clock="simulated" if simulated else "device",
    )
    screen.print(f"timeline: {picture.resolve()}", soft_wrap=True, markup=False)
    screen.print(
        f"trace:    {trace.resolve()}  (open it at {VIEWER})", soft_wrap=True, markup=False
    )
    right = all(o.right for o in outcomes)
    screen.print(
        "the fused result is right" if right else "THE FUSED RESULT IS WRONG", markup=False
    )
    return right


def _table(outcomes: Sequence[Outcome]) -> Table:
    """A table that fits 80 columns."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 0, 0, 1))
    for heading in (
        "rank", "error", "unfused", "wrong", "tiles", "units", "bytes", "switched", "waiting",
    ):  # fmt: skip
        table.add_column(heading, justify="right", no_wrap=True)
    for o in outcomes:
        table.add_row(
            str(o.rank), f"{o.rel_err:.2e}", f"{o.rel_err_reference:.2e}", str(o.wrong),
            str(o.count("build")), str(o.count("move")), _bytes(o.count("move") * o.unit_bytes),
            _switches(o.switches), f"{o.share('wait'):.1%}",
            style="" if o.right else "red",
        )  # fmt: skip
    return table


def _bytes(count: int) -> str:
    """Four digits at most, in binary units."""
    if count < 1 << 20:
        return f"{count / (1 << 10):.0f} KiB"
    return f"{count / (1 << 20):.1f} MiB"


def _switches(counts: Sequence[int]) -> str:
    """How many workgroups changed their role."""
    return f"{sum(n > 0 for n in counts)} of {len(counts)}"


def _plan(outcome: Outcome) -> str:
    plan = outcome.plan
    return (
        f"{plan.cap} WGs a rank, {plan.num_movers} start as movers ({plan.transport}, "
        f"{plan.policy}), tiles of {plan.block_m} x {plan.block_n}, order {plan.order}"
    )


def _remarks(outcomes: Sequence[Outcome], simulated: bool) -> list[str]:
    remarks = [
        "error and unfused: relative errors of the fused and the unfused path against FP64; "
        "wrong: elements in which the two differ beyond rounding; tiles built, units and bytes "
        "moved; switched: workgroups that changed from mover to builder; waiting: share of the "
        "workgroups' time"
    ]
    lost = sum(o.lost_spans for o in outcomes)
    if lost:
        remarks.append(f"{lost} spans did not fit into the trace: counts are too low by that much")
    if simulated:
        remarks.append(
            "every memory access was checked for races, with stores delayed until their release: "
            "none found; times are simulated and predict nothing"
        )
    times = outcomes[0].times_ms
    if times:
        remarks.append(
            f"fused {times[FUSED]:.3f} ms, NCCL then cuBLAS {times[BASELINE]:.3f} ms: "
            f"speed-up {times[BASELINE] / times[FUSED]:.2f}x"
        )
    return remarks


def _from_zero(spans: Sequence[Span]) -> list[Span]:
    """The same spans with time counted from the first of them."""
    start = min((s.begin_ns for s in spans), default=0)
    return [replace(s, begin_ns=s.begin_ns - start, end_ns=s.end_ns - start) for s in spans]
