"""`explore`: random scenarios on the executor, as many distinct schedules as are wanted."""

from __future__ import annotations

import json
import logging
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import click

from kosmos_moe.cli.scenarios import Found, Scenario

OUTPUT = click.Path(dir_okay=False, writable=True, path_type=Path)
CHECKS = {
    "race": "raise",
    "strict": True,
    "stale": True,
    "weak": "late or random",
    "results": "experts, weights and losses against the reference, rows and gradients against "
    "FP64, equal calls bit by bit",
}


def run_seed(seed: int) -> Found:
    """Runs the scenario of a seed."""
    # Every declined call is announced once; here many overflow on purpose.
    logging.getLogger("kosmos_moe").setLevel(logging.ERROR)
    return Scenario.draw(seed).run()


@contextmanager
def _results(first: int, jobs: int) -> Iterator[Iterator[Found]]:
    if jobs == 1:
        yield map(run_seed, count(first))
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield pool.imap_unordered(run_seed, count(first))


@click.command()
@click.option("--schedules", default=100, show_default=True, type=click.IntRange(1))
@click.option("--seconds", type=float, help="Stop after so long.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0))
@click.option("--jobs", default=1, show_default=True, type=click.IntRange(1))
@click.option("--json", "json_path", type=OUTPUT, help="Write a summary.")
def explore(
    schedules: int, seconds: float | None, seed: int, jobs: int, json_path: Path | None
) -> int:
    """Run random layers under random schedules, race detector and memory model on.

    Exit status: 0 nothing was found; 1 something was.
    """
    begin = time.monotonic()
    hashes: set[str] = set()
    backwards: set[str] = set()
    ranks: Counter[str] = Counter()
    failures: list[Found] = []
    calls = runs = 0
    # More runs than this for so many schedules, and something is wrong with the schedules.
    most = 4 * schedules
    with _results(seed, jobs) as results:
        for found in results:
            runs, calls = runs + 1, calls + found.calls
            hashes |= {found.schedule_hash} - {""}
            if found.backward:
                backwards.add(found.schedule_hash)
            ranks[str(found.ranks)] += 1
            if found.problem:
                failures.append(found)
                click.echo(f"{_replay(found.seed)}\n{found.problem}", err=True)
            late = seconds is not None and time.monotonic() - begin > seconds
            if len(hashes) >= schedules or late or runs >= most:
                break
    took = time.monotonic() - begin
    click.echo(
        f"moe: {len(hashes)} distinct schedules, {len(backwards)} of them with backwards, in "
        f"{runs} runs, {calls} calls by rank, {len(failures)} failures, {took:.0f} s"
    )
    if json_path is not None:
        summary = {
            "op": "moe_forward and moe_backward",
            "schedules": len(hashes),
            "with_backward": len(backwards),
            "runs": runs,
            "calls": calls,
            "ranks": dict(sorted(ranks.items())),
            "failures": [
                {"seed": f.seed, "problem": f.problem, "replay": _replay(f.seed)} for f in failures
            ],
            "checks": CHECKS,
            "first_seed": seed,
            "seconds": round(took, 1),
        }
        json_path.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return 1 if failures else 0


def _replay(seed: int) -> str:
    return f"python -m kosmos_moe explore --seed {seed} --schedules 1"
