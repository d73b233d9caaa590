"""Runs scenarios of consecutive seeds in several processes and sums up what they covered."""

from __future__ import annotations

import concurrent.futures
import contextlib
import datetime
import importlib.metadata
import json
import logging
import multiprocessing
import platform
import sys
import time
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from kosmos_tpsp.cli.scenarios import Found, Scenario

# Scenarios that a process is given at a time: few, so that the end is not waited for.
BATCH = 4
CHECKS = {
    "race": "raise",
    "strict": True,
    "stale": True,
    "weak": "late or random",
    "results": "against FP64, row by row; equal calls bit by bit; bytes between ranks; launches",
}


@dataclass
class Exploration:
    """One exploration.

    Attributes:
        op: the operation.
        dtype: "bf16", or "mxfp8" for operands in it in most calls that can have them.
        schedules: distinct schedules wanted.
        seconds: when to stop at the latest, None for never.
        seed: of the first scenario; the others follow it.
        jobs: processes.
        failures: scenarios that found something.
        interrupted: whether somebody had enough; what was found until then counts.
    """

    op: str
    schedules: int
    seconds: float | None
    seed: int
    jobs: int
    dtype: str = "bf16"
    failures: list[Found] = field(default_factory=list)
    interrupted: bool = False
    _hashes: set[str] = field(default_factory=set)
    _counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    _runs: int = 0
    _calls: int = 0
    _started: datetime.datetime = field(
        default_factory=lambda: datetime.datetime.now(datetime.timezone.utc)
    )
    _took_s: float = 0.0

    def run(self) -> None:
        """Runs scenarios until there are enough distinct schedules, time is up, or an interrupt."""
        begin = time.monotonic()
        columns = (
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
            TimeElapsedColumn(), TimeRemainingColumn(),
        )  # fmt: skip
        with (
            Progress(*columns, console=Console(stderr=True)) as progress,
            contextlib.closing(self._results()) as results,
        ):
            task = progress.add_task(self.op, total=self.schedules)
            try:
                for found in results:
                    self._add(found)
                    if found.problem:
                        text = f"{self.replay(found.seed)}\n{found.problem}"
                        progress.console.print(text, soft_wrap=True, markup=False, highlight=False)
                    text = f"{self.op}, {len(self.failures)} failures"
                    progress.update(task, completed=len(self._hashes), description=text)
                    late = self.seconds is not None and time.monotonic() - begin > self.seconds
                    if len(self._hashes) >= self.schedules or late:
                        break
            except KeyboardInterrupt:
                self.interrupted = True
        self._took_s = time.monotonic() - begin

    def _results(self) -> Generator[Found, None, None]:
        if self.jobs == 1:
            seed = self.seed
            while True:
                yield from run_batch(range(seed, seed + 1), self.op, self.dtype)
                seed += 1
        context = multiprocessing.get_context("spawn")
        pool = concurrent.futures.ProcessPoolExecutor(self.jobs, mp_context=context)
        try:
            yield from self._pooled(pool)
        finally:
            pool.shutdown(cancel_futures=True)

    def _pooled(self, pool: concurrent.futures.ProcessPoolExecutor) -> Generator[Found, None, None]:
        seed = self.seed
        pending: set[concurrent.futures.Future[list[Found]]] = set()
        while True:
            while len(pending) < 2 * self.jobs:
                pending.add(pool.submit(run_batch, range(seed, seed + BATCH), self.op, self.dtype))
                seed += BATCH
            done, pending = concurrent.futures.wait(
                pending, return_when=concurrent.futures.FIRST_COMPLETED
            )
            for future in done:
                yield from future.result()

    def _add(self, found: Found) -> None:
        self._runs += 1
        self._calls += found.calls
        self._counts.update(found.counts)
        if found.schedule_hash:
            self._hashes.add(found.schedule_hash)
        if found.problem:
            self.failures.append(found)

    def replay(self, seed: int) -> str:
        """Command that repeats one scenario."""
        what = f"--op {self.op}" + ("" if self.dtype == "bf16" else f" --dtype {self.dtype}")
        return f"python -m kosmos_tpsp explore {what} --seed {seed} --schedules 1 --jobs 1"

    def summary_line(self) -> str:
        """What was found, in a line."""
        return (
            f"{self.op}: {len(self._hashes)} distinct schedules in {self._runs} runs, "
            f"{self._calls} calls by rank, {len(self.failures)} failures, {self._took_s:.0f} s"
        )

    def summary(self) -> dict[str, Any]:
        """The JSON object."""
        counts: dict[str, dict[str, int]] = {}
        for (dimension, value), count in sorted(self._counts.items()):
            counts.setdefault(dimension, {})[value] = count
        return {
            "op": self.op,
            "dtype": self.dtype,
            "schedules": len(self._hashes),
            "runs": self._runs,
            "calls": self._calls,
            "failures": [
                {"seed": f.seed, "problem": f.problem, "replay": self.replay(f.seed)}
                for f in self.failures
            ],
            "counts": counts,
            "checks": CHECKS,
            "first_seed": self.seed,
            "interrupted": self.interrupted,
            "seconds": round(self._took_s, 1),
            "jobs": self.jobs,
            "started": self._started.isoformat(timespec="seconds"),
            # Without this machine's folders.
            "command": " ".join(
                ["python -m kosmos_tpsp", *(a.rpartition("/")[2] for a in sys.argv[1:])]
            ),
            "versions": _versions(),
        }

    def write(self, path: Path) -> None:
        """Writes the JSON object.

        Raises:
            click.ClickException: the file cannot be written.
        """
        try:
            path.write_text(json.dumps(self.summary(), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise click.ClickException(f"json: cannot write {path}: {error}") from error


def run_batch(seeds: range, op: str, dtype: str = "bf16") -> list[Found]:
    """Runs the scenarios of some seeds."""
    # Every declined call is announced once; here thousands are declined on purpose.
    logging.getLogger("kosmos_tpsp").setLevel(logging.ERROR)
    return [Scenario.draw(seed, op, dtype).run() for seed in seeds]


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("torch", "triton", "numpy", "kosmos-core", "kosmos-tpsp", "kosmos-heuristics"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "source tree"
    return found
