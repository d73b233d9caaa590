"""What a run tells: a summary, a JSON report, and how it stands to what was wanted."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from integration.training.run import Outcome, Plan

EDGE = 10  # steps at either end whose mean losses are compared
WARMUP = 3  # steps of this process that its times leave out: they compile and allocate


def summary(plan: Plan, outcome: Outcome, ranks: int) -> dict[str, Any]:
    """The run in figures; what was not measured is None."""
    losses = [s.loss for s in outcome.steps]
    edge = min(EDGE, len(losses) // 2) or 1
    timed = [s.ms for s in outcome.steps[outcome.resumed_at :]][WARMUP:]
    ms = statistics.median(timed) if timed else None
    sizes = plan.job.preset.sizes
    ran = len(outcome.steps) - outcome.resumed_at
    launches = sum(outcome.launches.values())
    first, last = statistics.fmean(losses[:edge]), statistics.fmean(losses[-edge:])
    return {
        "steps": len(losses),
        "resumed_at": outcome.resumed_at,
        "first_losses": first,
        "last_losses": last,
        "loss_ratio": last / first,
        "averaged_steps": edge,
        "step_ms": ms,
        "tokens_per_s": None if ms is None else sizes.tokens / ms * 1e3,
        "tflops": None if ms is None else sizes.flops / ms * 1e-9,
        "tflops_per_rank": None if ms is None else sizes.flops / ms * 1e-9 / ranks,
        "fused_launches": launches,
        "fused_launches_per_step": launches / ran if ran else None,
        "precision": plan.job.precision,
        "compared_steps": len(outcome.comparisons),
        "wrong_steps": [c.step for c in outcome.comparisons if not c.right],
    }


def smooth(values: Sequence[float]) -> list[float]:
    """Means over EDGE values, or all where there are fewer."""
    width = min(EDGE, len(values))
    return [statistics.fmean(values[i - width : i]) for i in range(width, len(values) + 1)]


def drift(losses: Sequence[float], curve: Sequence[float]) -> float:
    """Largest relative difference between two runs' losses, each a mean over EDGE steps."""
    return max(abs(a - b) / b for a, b in zip(smooth(losses), smooth(curve), strict=True))


def save(
    path: Path, plan: Plan, outcome: Outcome, ranks: int, environment: dict[str, Any]
) -> dict[str, Any]:
    """Writes the report and returns it."""
    report = {
        "schema": 1,
        **environment,
        "preset": plan.job.preset.identity(),
        "backend": plan.backend,
        "seed": plan.job.seed,
        "summary": summary(plan, outcome, ranks),
        "launches": outcome.launches,
        "steps": [asdict(s) for s in outcome.steps],
        "comparisons": [{**asdict(c), "right": c.right} for c in outcome.comparisons],
        "curves": outcome.curves,
    }
    path.write_text(json.dumps(report, indent=1) + "\n")
    return report
