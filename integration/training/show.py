"""What a run shows on the screen while it goes and when it is done."""

from __future__ import annotations

import math
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from integration.training.comparison import Comparison
from integration.training.run import Plan, Step
from integration.training.weights import weights_of

LINES = 10  # that a run prints where there is no terminal to draw a bar on


class Screen:
    """A progress bar, and a line a step where steps are compared.

    Args:
        console: to print on.
        plan: the run.
        drawn: whether there is a bar; of several processes at one terminal only one has it.
    """

    def __init__(self, console: Console, plan: Plan, *, drawn: bool = True) -> None:
        self._console = console
        self._plan = plan
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("step {task.completed:.0f} of {task.total:.0f}  {task.fields[figures]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not (drawn and console.is_terminal),
        )
        self._task: TaskID | None = None
        self._name = ""

    def __enter__(self) -> Screen:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def started(self, task: str, done: int, total: int) -> None:
        """See `run.Watcher`."""
        self._name = task
        self._task = self._bar.add_task(task, completed=done, total=total, figures="")
        if task == "training":
            self.say(self._introduction())
        if done:
            self.say(f"resumed after step {done} of {total}")
        if task == "training" and self._plan.verify:
            self.say(
                "step: losses of this run, the plain path, FP32 | gradient's error against FP32 of "
                "this run, the plain path | of the weight closest to its limit"
            )

    def _introduction(self) -> str:
        """What is about to be trained."""
        s, job = self._plan.job.preset.sizes, self._plan.job
        weights = sum(math.prod(w.shape) for w in weights_of(s))
        return (
            f"a byte-level Llama of {number(weights)} weights ({s.layers} blocks, hidden "
            f"{s.hidden}, MLP {s.intermediate}, {s.heads} heads, {s.kv_heads} for keys) on "
            f"{number(len(job.batches.text))}B of Python's standard library, {s.batch} x {s.seq} "
            f"bytes a step, backend {self._plan.backend}, {job.precision.upper()}"
        )

    def stepped(self, step: Step, comparison: Comparison | None) -> None:
        """See `run.Watcher`."""
        total = self._plan.job.steps
        rate = self._plan.job.preset.sizes.tokens / step.ms * 1e3
        figures = f"loss {step.loss:.3f}  {number(rate)} tokens/s"
        if self._task is not None:
            self._bar.update(self._task, advance=1, figures=figures)
        if comparison is not None:
            self.say(line(comparison))
        elif not self._console.is_terminal and (step.step + 1) % max(1, total // LINES) == 0:
            self.say(f"{self._name}: step {step.step + 1} of {total}  {figures}")

    def say(self, text: str) -> None:
        """Prints a line."""
        self._console.print(text, soft_wrap=True, markup=False)


def line(c: Comparison) -> str:
    """A comparison in a line."""
    losses = " ".join(f"{loss:.4f}" for loss in c.losses)
    verdict = "" if c.right else "  WRONG"
    return (
        f"{c.step + 1:4d}: {losses} | {c.error[0]:.2e} {c.error[1]:.2e} | "
        f"{c.worst_error[0]:.2e} {c.worst_error[1]:.2e} {c.worst}{verdict}"
    )


def number(value: float) -> str:
    """Three digits and a unit: 12.3 k."""
    for unit, size in ((" T", 1e12), (" G", 1e9), (" M", 1e6), (" k", 1e3)):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def milliseconds(value: float) -> str:
    """Three digits and more: 12.3 ms, 4,940 ms."""
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms"


def closing(summary: dict[str, Any], ranks: int, launches: dict[str, int]) -> list[str]:
    """The lines at the end of a run."""
    edge = summary["averaged_steps"]
    lines = [
        f"loss: {summary['first_losses']:.3f} over the first {edge} steps, "
        f"{summary['last_losses']:.3f} over the last {edge}: {summary['loss_ratio']:.2f} of it"
    ]
    if summary["step_ms"] is not None:
        flops = summary["tflops"] * 1e12
        lines.append(
            f"step: {milliseconds(summary['step_ms'])}, "
            f"{number(summary['tokens_per_s'])} tokens/s, "
            f"{number(flops)}FLOP/s ({number(flops / ranks)}FLOP/s a rank)"
        )
    if launches:
        kinds = ", ".join(f"{count} {name}" for name, count in sorted(launches.items()))
        lines.append(
            f"fused launches of a rank: {summary['fused_launches']} "
            f"({summary['fused_launches_per_step']:.3g} a step): {kinds}"
        )
    if summary["compared_steps"]:
        wrong, precision = summary["wrong_steps"], summary["precision"].upper()
        right = f"losses and gradients within {precision} tolerance"
        lines.append(
            f"{summary['compared_steps']} steps compared: "
            + (f"WRONG at steps {wrong}" if wrong else right)
        )
    return lines
