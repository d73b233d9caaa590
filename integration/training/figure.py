"""The loss curve as a picture."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from integration.training.comparison import Comparison
from integration.training.presets import VOCABULARY
from integration.training.report import EDGE, smooth
from integration.training.run import PLAIN, Outcome, Plan

INK, MUTED, PALE = "#1f4e9c", "#5b6673", "#a9c1e6"
OTHERS = ("#c8553d", "#2e9e5b", "#8a6bbd")
SMOOTHED = 5


def draw(path: Path, plan: Plan, outcome: Outcome, ranks: int, launches: int) -> None:
    """Draws losses by step and those of the runs beside it; if compared, the gradients' errors.

    In another precision than BF16 also how far the losses of all runs are from those in BF16.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    compared = bool(outcome.comparisons)
    beside = plan.job.precision != "bf16" and PLAIN["bf16"] in outcome.curves
    more = compared + beside
    figure, axes = plt.subplots(
        1 + more, 1, figsize=(10, 5.6 + 2.2 * more), sharex=True, squeeze=False,
        layout="constrained", gridspec_kw={"height_ratios": [3, *[1.1] * more]},
    )  # fmt: skip
    _losses(axes[0, 0], plan, outcome)
    if beside:
        _apart(axes[1, 0], plan, outcome)
    if compared:
        _errors(axes[-1, 0], outcome.comparisons)
    axes[-1, 0].set_xlabel("optimizer step")
    sizes = plan.job.preset.sizes
    figure.suptitle(
        "A byte-level Llama learns Python's standard library", x=0.012, ha="left", fontsize=15
    )
    fused = f", {launches:,} fused launches a rank" if launches else ""
    axes[0, 0].set_title(
        f"{sizes.layers} layers, hidden {sizes.hidden}, {sizes.tokens:,} tokens a step; "
        f"{plan.backend} backend on {ranks} {'rank' if ranks == 1 else 'ranks'} with tensor and "
        f"sequence parallelism{fused}",
        loc="left", fontsize=9.5, color=MUTED,
    )  # fmt: skip
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _losses(axis: Any, plan: Plan, outcome: Outcome) -> None:
    steps = [s.step + 1 for s in outcome.steps]
    losses = [s.loss for s in outcome.steps]
    uniform = math.log(VOCABULARY)
    axis.axhline(uniform, color=MUTED, linewidth=0.8, linestyle=(0, (1, 2)))
    axis.text(
        steps[-1], uniform, "every byte equally likely", ha="right", va="bottom", fontsize=9,
        color=MUTED,
    )  # fmt: skip
    axis.plot(steps, losses, color=PALE, linewidth=1.2)
    axis.plot(steps, _smooth(losses), color=INK, linewidth=2.4, label=_name(plan))
    for (name, curve), colour in zip(outcome.curves.items(), OTHERS, strict=False):
        style = {"color": colour, "linewidth": 1.4, "linestyle": (0, (4, 3))}
        axis.plot(range(1, len(curve) + 1), _smooth(curve), label=name, **style)
    last = _smooth(losses)[-1]
    axis.text(
        0.985, 0.04, f"at the end {last:.2f} nats = {last / math.log(2):.2f} bits a byte",
        transform=axis.transAxes, ha="right", fontsize=10, color=INK,
    )  # fmt: skip
    axis.set_ylim(bottom=min(losses) - 0.4)
    if outcome.resumed_at:
        axis.axvline(outcome.resumed_at + 0.5, color=MUTED, linewidth=0.8)
        axis.text(outcome.resumed_at + 0.7, uniform * 0.95, "resumed", fontsize=9, color=MUTED)
    axis.set_ylabel("loss, nats a byte")
    axis.set_xlim(1, max(steps[-1], 2))
    if outcome.curves:
        axis.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, 0.93))
    _tidy(axis)


def _apart(axis: Any, plan: Plan, outcome: Outcome) -> None:
    """Losses against those in BF16, each a mean over EDGE steps."""
    bf16 = smooth(outcome.curves[PLAIN["bf16"]])
    runs = {_name(plan): [s.loss for s in outcome.steps], **outcome.curves}
    colours = dict(zip(runs, (INK, *OTHERS), strict=False))
    steps = range(len(outcome.steps) - len(bf16) + 1, len(outcome.steps) + 1)
    for name, curve in runs.items():
        if name != PLAIN["bf16"]:
            difference = [a / b - 1 for a, b in zip(smooth(curve), bf16, strict=True)]
            style = "-" if name == _name(plan) else (0, (4, 3))
            axis.plot(steps, difference, color=colours[name], linestyle=style, linewidth=1.6)
    axis.axhline(0, color=MUTED, linewidth=0.8)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:+.1%}")
    axis.set_ylabel(f"mean loss of {EDGE}\nsteps against BF16")
    _tidy(axis)


def _name(plan: Plan) -> str:
    """The run that is looked at."""
    return f"{plan.backend}, {plan.job.precision.upper()}"


def _errors(axis: Any, comparisons: Sequence[Comparison]) -> None:
    """Errors of the whole gradient against FP32."""
    steps = [c.step + 1 for c in comparisons]
    for i, (name, colour) in enumerate((("this run", INK), ("plain collectives", OTHERS[0]))):
        style = (0, (4, 3)) if i else "-"
        errors = [c.error[i] for c in comparisons]
        axis.plot(steps, errors, color=colour, linestyle=style, linewidth=1.6, label=name)
    axis.set_ylim(bottom=0, top=1.35 * max(max(c.error) for c in comparisons))
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:.1%}")
    axis.set_ylabel("gradient's error\nagainst FP32")
    axis.legend(frameon=False, ncols=2, fontsize=9)
    _tidy(axis)


def _smooth(values: Sequence[float]) -> list[float]:
    """Means over SMOOTHED values around each, fewer at the ends."""
    half = SMOOTHED // 2
    return [statistics.fmean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def _tidy(axis: Any) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color="#e3e6ea", linewidth=0.8)
    axis.set_axisbelow(True)
