"""What the workgroups of all ranks do in one training step: a trace and a picture."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from kosmos_core.trace import Span, decode, draw_timeline, role_switches, save_perfetto
from kosmos_core.worlds import World
from kosmos_heuristics import Machine, load_machine
from kosmos_tpsp import TpSpWorkspace
from kosmos_tpsp.ops.catalog import DRIVERS

from integration.training.comparison import Comparison, Witnesses
from integration.training.linears import KosmosLinears
from integration.training.trainer import Job, Trainer

VIEWER = "https://ui.perfetto.dev"
EVENTS = 4096  # that a workgroup may record
# Workgroups of a virtual rank: some movers, more builders.
WGS = 8
# The tiles are far smaller than a GPU's; rates are scaled down with them, so that a tile and a move
# take as long beside a flag as they do there.
COST: dict[str, Any] = {"local_gbps": 50.0, "remote_gbps": 0.7, "tflops": 0.012}
MOST_LANES = 64  # that a picture has room for


class RecordingWorkspace(TpSpWorkspace):
    """A workspace that keeps what is launched on it, as error messages show it, in order."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.operations: list[str] = []
        super().__init__(*args, **options)

    def begin(self, op: str, call_hash: int, *, checks: bool = True) -> None:
        """See `Workspace.begin`."""
        self.operations.append(op)
        super().begin(op, call_hash, checks=checks)


@dataclass(frozen=True)
class Traced:
    """One rank's part of a traced step.

    Attributes:
        spans: what its workgroups did, by its own clock.
        operations: launched, in their order, with their shapes.
        lost: spans that did not fit into the trace.
        comparison: the step beside the plain path and FP32.
    """

    spans: tuple[Span, ...]
    operations: tuple[str, ...]
    lost: int
    comparison: Comparison


def executor_machine() -> Machine:
    """The executor's machine model with as many workgroups as the traced ranks have."""
    return replace(load_machine("executor"), num_wgs=WGS)


def trace_step(job: Job, world: World, machine: Machine | None = None) -> Traced:
    """Forward and backward of one block's first step. Collective.

    Args:
        job: what is trained; the trace is of a model with one of its blocks.
        world: where fused kernels run.
        machine: for the plans; None takes the world's.
    """
    job = replace(job, preset=job.preset.changed(1, None))
    sizes = job.preset.sizes
    with RecordingWorkspace(
        world, sizes.tokens, sizes.hidden, machine=machine, trace_events=EVENTS
    ) as workspace:
        linears = KosmosLinears(workspace, job.precision, traced=True)
        trainer = Trainer(job, linears, world, torch.bfloat16, world.device)
        if world.device.type == "cuda":
            # The first step compiles, which is nothing to look at.
            trainer.gradients(0)
            workspace.synchronize()
            workspace.trace_buffer.zero_()
            workspace.operations.clear()
        world.barrier()
        loss, _ = trainer.gradients(0)
        workspace.synchronize()
        counts = workspace.trace_buffer.view(-1, len(workspace.trace_buffer) // world.num_wgs)[:, 0]
        return Traced(
            tuple(decode(workspace.trace_buffer, EVENTS, world.rank)),
            tuple(workspace.operations),
            int((counts - EVENTS).clamp(min=0).sum()),
            Witnesses(job, world).compare(trainer, 0, loss),
        )


def show(ranks: Sequence[Traced], folder: Path, *, simulated: bool) -> list[str]:
    """Writes trace and picture; returns lines that say what is in them.

    Args:
        ranks: of all ranks.
        folder: where the files go.
        simulated: whether all ranks have one clock, of simulated time.
    """
    spans = [s for rank in ranks for s in (rank.spans if simulated else _from_zero(rank.spans))]
    trace, picture = folder / "trace.json", folder / "timeline.png"
    save_perfetto(spans, trace)
    operations = ranks[0].operations
    draw_timeline(
        [s for s in spans if s.kind != "call"],
        picture,
        f"One training step of one block on {len(ranks)} ranks: every launch moves and builds",
        max_wgs=min(24, MOST_LANES // len(ranks)),
        clock="simulated" if simulated else "device",
        marks=list(zip(_beginnings(spans), (op.split()[0] for op in operations), strict=False)),
    )
    switched = sum(n > 0 for n in role_switches(spans).values())
    lines = [
        f"timeline: one block, forward and backward: {len(operations)} launches a rank; {switched} "
        f"of {len(role_switches(spans))} workgroups changed their role: {picture.resolve()}"
    ]
    mine, plain = ranks[0].comparison.error
    wrong = "" if ranks[0].comparison.right else "  WRONG"
    lines.append(
        f"          error of its gradients against FP32: {mine:.2e} fused, {plain:.2e} plain{wrong}"
    )
    lines += table(ranks)
    lost = sum(rank.lost for rank in ranks)
    if lost:
        lines.append(f"{lost} spans did not fit into the trace")
    if simulated:
        lines.append("          times in it are simulated and predict nothing")
    lines.append(f"trace:    {trace.resolve()}  (open it at {VIEWER})")
    return lines


def table(ranks: Sequence[Traced]) -> list[str]:
    """Each operation's launches, tiles, bytes that a rank gets from peers, and changes of roles.

    The last two columns count workgroups of all ranks: those that changed their role, of those that
    there were.
    """
    rows: dict[str, Counter[str]] = {}
    for op in ranks[0].operations:
        rows.setdefault(op, Counter())["launches"] += 1
    for traced in ranks:
        by_launch: dict[int, list[Span]] = {}
        windows = _windows(traced.spans)
        for span in traced.spans:
            by_launch.setdefault(bisect_right(windows, span.begin_ns) - 1, []).append(span)
        for launch, op in enumerate(traced.operations):
            spans = by_launch.get(launch, [])
            changes = role_switches(spans).values()
            rows[op]["tiles"] += sum(span.kind == "build" for span in spans)
            rows[op]["switched"] += sum(count > 0 for count in changes)
            rows[op]["wgs"] += len(changes)
    lines = [f"{'operation':<32} launches  tiles  from peers  changed role, of WGs"]
    for op, row in rows.items():
        kib = _bytes_from_peers(op, len(ranks)) / 1024
        lines.append(
            f"{op:<32} {row['launches']:8d} {row['tiles']:6d} {kib:7.1f} KiB "
            f"{row['switched']:13d} of {row['wgs']}"
        )
    return lines


def _windows(spans: Sequence[Span]) -> list[int]:
    """When each launch of a rank began; the next begins when all workgroups of one have left."""
    begins: list[int] = []
    end = -1
    for span in sorted((s for s in spans if s.kind == "call"), key=lambda s: s.begin_ns):
        if not begins or span.begin_ns >= end:
            begins.append(span.begin_ns)
        end = max(end, span.end_ns)
    return begins


def _bytes_from_peers(operation: str, ranks: int) -> int:
    """Bytes that one launch brings to a rank, by its name and shape."""
    driver = DRIVERS[operation.split()[0]]
    m, n, k = (int(size) for size in re.findall(r" [mnk]=(\d+)", operation))
    return driver.remote_bytes((m, n, k), ranks)


def _beginnings(spans: Sequence[Span]) -> list[int]:
    """When each launch began, as the first workgroup of rank 0 saw it."""
    return sorted(s.begin_ns for s in spans if s.kind == "call" and (s.rank, s.wg) == (0, 0))


def _from_zero(spans: Sequence[Span]) -> list[Span]:
    """The same spans with time counted from the first of them: clocks of GPUs need not agree."""
    start = min((s.begin_ns for s in spans), default=0)
    return [replace(s, begin_ns=s.begin_ns - start, end_ns=s.end_ns - start) for s in spans]
