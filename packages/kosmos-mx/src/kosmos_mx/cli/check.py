"""`check`: every kernel against torchao's results and FP64."""

from __future__ import annotations

import json
from typing import Any

import click
import torch
from kosmos_core.worlds import cpu_world

from kosmos_mx.cli import vectors
from kosmos_mx.cli.checking import PATHS, Case, works


@click.command()
@click.option(
    "--world", type=click.Choice(("cpu", "gpu")), default="cpu", show_default=True,
    help="The CPU executor, or this GPU.",
)  # fmt: skip
@click.option(
    "--values", type=int, default=vectors.COUNTS[-1], show_default=True,
    help=f"Size of the corpus, one of {', '.join(map(str, vectors.COUNTS))}.",
)  # fmt: skip
@click.option("--seed", default=0, show_default=True, help="Of random numbers.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object and nothing else.")
def check(world: str, values: int, seed: int, as_json: bool) -> int:
    """Compare casts with torchao's, bit by bit, and everything else with FP64.

    Elements are rounded in two ways, by NVIDIA's conversion and by integers; both run where they
    can. Exit status: 0 all passed; 1 something differs; 2 bad arguments.
    """
    if values not in vectors.COUNTS:
        known = ", ".join(map(str, vectors.COUNTS))
        raise click.UsageError(f"values: got {values}, wanted one of {known}")
    if world == "gpu" and not torch.cuda.is_available():
        raise click.UsageError("world: no GPU is visible; use cpu, which runs anywhere")
    if world == "gpu":
        paths = tuple(PATHS) if torch.version.hip is None else ("integer",)
        found = _run(values, paths, torch.device("cuda"), seed, as_json)
    else:

        def host(rank: int) -> list[Case]:
            return _run(values, tuple(PATHS), torch.device("cpu"), seed, as_json)

        with cpu_world(1) as executor:
            (found,) = executor.spmd(host)
    passed = all(case.passed for case in found)
    if as_json:
        made = vectors.committed()
        told: dict[str, Any] = {
            "world": world,
            "torchao": made["torchao"],
            "cases": [case.as_dict() for case in found],
            "passed": passed,
        }
        click.echo(json.dumps(told))
    else:
        failed = sum(not case.passed for case in found)
        click.echo(f"{len(found) - failed} passed, {failed} failed")
    return 0 if passed else 1


def _run(
    values: int, paths: tuple[str, ...], device: torch.device, seed: int, quiet: bool
) -> list[Case]:
    found = []
    for work in works(values, paths, device, seed):
        found.append(work())
        if not quiet:
            click.echo(str(found[-1]))
    return found
