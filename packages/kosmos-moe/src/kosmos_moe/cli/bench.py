"""`bench`: the fused forward against NCCL all-to-all and torch's grouped GEMM, under torchrun."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import click
import torch
import torch.distributed as dist
from kosmos_core.testing.bench import environment, geomean
from kosmos_core.worlds import World, group_world

from kosmos_moe.bench.models import MODELS, ROUTINGS
from kosmos_moe.bench.runner import Row, Settings, run_model
from kosmos_moe.ops.options import MoeOptions

OUTPUT = click.Path(dir_okay=False, writable=True, path_type=Path)
POLICIES = {
    "dedicated": MoeOptions(policy="dedicated_combine"),
    "fixed": MoeOptions(policy="fixed"),
    "major": MoeOptions(order="destination_major"),
}
HEAD = (
    f"{'model':17} {'routing':9} {'experts':>7} {'hot rank':>8} {'hot exp':>7} {'fused':>8} "
    f"{'baseline':>8} {'gemms':>8} {'ideal':>8} {'speedup':>7} {'effic.':>6}"
)


def _crews(text: str) -> dict[str, MoeOptions]:
    """Variants of the crews: "16,64;32,128" is dispatchers and combiners of each."""
    found = {}
    for pair in filter(None, text.split(";")):
        parts = pair.split(",")
        if len(parts) != 2 or not all(part.isdecimal() for part in parts):
            raise click.UsageError(f"crews: got {pair!r}, wanted two numbers with a comma between")
        crew = MoeOptions(dispatch_crew=int(parts[0]), combine_crew=int(parts[1]))
        found[f"crew {pair}"] = crew
    return found


@click.command()
@click.option("--models", default="all", show_default=True, help="Names, commas between.")
@click.option("--routings", default=",".join(ROUTINGS), show_default=True)
@click.option("--zipf", default=0.8, show_default=True, help="Exponent of skewed routing.")
@click.option("--crews", default="", help="Also these: dispatchers,combiners;...")
@click.option("--ablations", is_flag=True, help="Also other switching and push order.")
@click.option(
    "--direction",
    type=click.Choice(("fwd", "both")),
    default="fwd",
    show_default=True,
    help="Also forward and backward together.",
)
@click.option("--capacity", type=float, help="Of the arena, in balanced loads.  [default: worst]")
@click.option("--rounds", type=click.IntRange(1), help="[default: 3]")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0))
@click.option("--quick", is_flag=True, help="One short round: for a look, not for a record.")
@click.option("--json", "json_path", type=OUTPUT, help="Write everything measured.")
def bench(
    models: str,
    routings: str,
    zipf: float,
    crews: str,
    ablations: bool,
    direction: str,
    capacity: float | None,
    rounds: int | None,
    seed: int,
    quick: bool,
    json_path: Path | None,
) -> int:
    """Time layers of nine models, 8192 tokens a GPU, experts scaled to the ranks.

    Exit status: 0 all results were right; 1 one was not; 2 bad arguments.
    """
    names = list(MODELS) if models == "all" else models.split(",")
    for name in names:
        if name not in MODELS:
            raise click.UsageError(f"models: got {name!r}, wanted some of {', '.join(MODELS)}")
    wanted = routings.split(",")
    if set(wanted) - set(ROUTINGS):
        raise click.UsageError(f"routings: got {routings}, wanted some of {', '.join(ROUTINGS)}")
    variants = {**_crews(crews), **(POLICIES if ablations else {})}
    both = direction == "both"
    settings = Settings(zipf=zipf, seed=seed, variants=variants, capacity=capacity, backward=both)
    if quick:
        settings = replace(settings, rounds=1, warmup=3, calls=8)
    if rounds is not None:
        settings = replace(settings, rounds=rounds)
    if "WORLD_SIZE" not in os.environ or not torch.cuda.is_available():
        raise click.UsageError("bench: got no GPUs or no torchrun, wanted one process a GPU")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl")
    try:
        with group_world() as world:
            return _run(names, wanted, world, settings, json_path)
    finally:
        dist.destroy_process_group()


def _run(
    names: list[str], routings: list[str], world: World, settings: Settings, path: Path | None
) -> int:
    rows: list[Row] = []
    if world.rank == 0:
        click.echo(HEAD)
    for name in names:
        for routing in routings:
            row = run_model(MODELS[name], routing, world, settings)
            torch.cuda.empty_cache()
            rows.append(row)
            if world.rank == 0:
                click.echo(_line(row))
    if world.rank != 0:
        return 0
    for routing in routings:
        own = [row for row in rows if row.routing == routing]
        speedup = geomean(row.speedup for row in own) or 0.0
        efficiency = geomean(row.efficiency for row in own) or 0.0
        click.echo(f"{routing}: speed-up {speedup:.3f}, efficiency {efficiency:.3f} (geomeans)")
    if path is not None:
        members = {
            **environment(world),
            "op": "moe_forward",
            "zipf": settings.zipf,
            "seed": settings.seed,
            "rows": [row.to_dict() for row in rows],
        }
        path.write_text(json.dumps(members, indent=1) + "\n", encoding="utf-8")
    return 0 if all(row.problem == "" for row in rows) else 1


def _line(row: Row) -> str:
    t = row.times_ms
    others = [f"{n} {ms:.3f}" for n, ms in t.items() if n not in ("fused", "baseline", "gemms")]
    return (
        f"{row.model:17} {row.routing:9} {row.experts:7} {row.hottest_rank:8.2f} "
        f"{row.hottest_expert:7.2f} {t['fused']:8.3f} {t['baseline']:8.3f} {t['gemms']:8.3f} "
        f"{row.ideal_ms:8.3f} {row.speedup:7.2f} {row.efficiency:6.2f}"
        + (f"  {', '.join(others)}" if others else "")
        + (f"  {row.problem}" if row.problem else "")
    )
