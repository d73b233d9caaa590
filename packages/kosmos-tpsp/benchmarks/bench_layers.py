"""MLP and attention layers, forward and whole step, against NCCL and cuBLAS and torch's async-TP.

    python bench_layers.py [--layers mlp,attention] [--models 8B,70B] [--tokens 8192,16384]
        [--mxfp8] [--json FILE]

Runs on every GPU of this machine unless torchrun has started it. A step is forward and backward
with the gradients of the input and of all weights. With --mxfp8 the layers in MXFP8 are measured,
too, both ways of taking dY; their steps quantise the weights, their forwards find them quantised.
The exit status is 1 if a result is wrong.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kosmos_core.testing.bench import (
    EventTimer,
    environment,
    geomean,
    host_microseconds,
    time_rounds,
)
from kosmos_core.worlds import World
from kosmos_tpsp import (
    MXFP8,
    ColumnParallelLinear,
    LinearCall,
    ParallelAttention,
    ParallelMLP,
    RowParallelLinear,
    destroy_workspaces,
)
from kosmos_tpsp.bench.report import console
from kosmos_tpsp.bench.rivals import RIVALS, with_rivals
from kosmos_tpsp.bench.session import process_group
from kosmos_tpsp.cli.layer_check import LAYER_TOLERANCE, MX_TOLERANCE, distance, linears
from kosmos_tpsp.cli.relaunch import under_torchrun
from kosmos_tpsp.sharing import world_of
from rich.table import Table
from torch import nn

# Hidden size, intermediate size, query heads, key and value heads of Llama 3.
MODELS = {"8B": (4096, 14336, 32, 8), "70B": (8192, 28672, 64, 8), "405B": (16384, 53248, 128, 8)}
LAYERS = ("mlp", "attention")
OWN = "kosmos"
QUANTISED = {"mxfp8": MXFP8(), "mxfp8 derived": MXFP8(column_dy="derive")}
# Small enough that the host, not the GPU, sets the pace.
HOST_TOKENS, HOST_FEATURES = 512, 1024
HOST_CALLS = 200
# The batch is the second dimension; attention costs little beside the linears at this length.
SEQUENCE = 2048


def build(kind: str, model: str, tokens: int, world: World) -> nn.Module:
    """A layer of a model. Collective."""
    hidden, intermediate, heads, kv_heads = MODELS[model]
    common: dict[str, Any] = {"group": world, "max_tokens": tokens, "seed": 1, "force": True}
    if kind == "mlp":
        return ParallelMLP(hidden, intermediate, **common)
    return ParallelAttention(hidden, heads, num_kv_heads=kv_heads, **common)


def in_mxfp8(layer: nn.Module, recipe: MXFP8) -> nn.Module:
    """The same layer with the same weights in MXFP8."""
    for part in linears(layer):
        part.call = LinearCall(part.call.workspace, force=True, precision=recipe)
    return layer


def calls(layer: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """What is timed of a layer."""
    quantised = [part.call.mx for part in linears(layer) if part.call.mx is not None]
    wanted = (x, *layer.parameters())

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return layer(x)  # type: ignore[no-any-return]

    def step() -> tuple[torch.Tensor, ...]:
        if quantised:
            quantised[0].weights_changed()
        y = layer(x)
        return (y.detach(), *torch.autograd.grad(y, wanted, dy))

    return {"forward": forward, "step": step}


def bench_case(
    kind: str, model: str, tokens: int, world: World, settings: argparse.Namespace
) -> dict[str, Any]:
    """One layer at one size: times, speed-ups, the largest difference from the baseline."""
    layer = build(kind, model, tokens, world)
    hidden = MODELS[model][0]
    sequence = min(SEQUENCE, tokens)
    data = torch.Generator(world.device).manual_seed(world.rank)
    shape = (sequence // world.size, tokens // sequence, hidden)
    x, dy = (torch.randn(shape, device=world.device, generator=data).bfloat16() for _ in range(2))
    x.requires_grad_()
    contenders = {OWN: calls(layer, x, dy)}
    unavailable: dict[str, str] = {}
    for name in RIVALS:
        rival = with_rivals(copy.deepcopy(layer), name, world.group)  # type: ignore[attr-defined]
        mine = calls(rival, x, dy)
        try:
            mine["step"]()
            world.synchronize()
            problem = ""
        except Exception as error:
            problem = f"{type(error).__name__}: {error}".splitlines()[0]
        problems = [p for p in world.all_gather_object(problem) if p]
        if problems:
            unavailable[name] = problems[0]
        else:
            contenders[name] = mine
    if settings.mxfp8:
        for name, recipe in QUANTISED.items():
            contenders[name] = calls(in_mxfp8(copy.deepcopy(layer), recipe), x, dy)
    errors = [apart(contenders)]
    timings = {}
    for what in ("forward", "step"):
        timings[what] = time_rounds(
            {name: of[what] for name, of in contenders.items()},
            EventTimer(world), rounds=settings.rounds, calls=settings.calls,
        )  # fmt: skip
    errors.append(apart(contenders))
    every = [error for of in world.all_gather_object(errors) for error in of]
    found = {name: max(error[name] for error in every) for name in contenders}
    limits = {name: MX_TOLERANCE[kind] if name in QUANTISED else LAYER_TOLERANCE for name in found}
    row: dict[str, Any] = {
        "layer": kind, "model": model, "tokens": tokens, "ranks": world.size,
        "unavailable": unavailable, "error": max(found.values()), "errors": found,
        "correct": all(found[name] <= limits[name] for name in found),
    }  # fmt: skip
    for what, times in timings.items():
        own = times[OWN].median_ms
        row[what] = {
            "ms": {name: asdict(timing) for name, timing in times.items()},
            "speedup": {n: t.median_ms / own for n, t in times.items() if n != OWN},
        }
    return row


def apart(contenders: dict[str, dict[str, Callable[[], Any]]]) -> dict[str, float]:
    """Largest relative difference of each contender's results from the plain path's."""
    wanted = contenders["plain"]["step"]()
    return {
        name: max(distance(a, b) for a, b in zip(of["step"](), wanted, strict=True))
        for name, of in contenders.items()
    }


def host_cost(world: World) -> dict[str, float]:
    """Host microseconds of warm calls of single layers on the slowest rank."""
    common: dict[str, Any] = {
        "group": world,
        "max_tokens": HOST_TOKENS,
        "bias": False,
        "force": True,
    }
    entries: dict[str, Callable[[], object]] = {}
    for name, layer, rows in (
        ("column", ColumnParallelLinear(HOST_FEATURES, HOST_FEATURES, **common), world.size),
        ("row", RowParallelLinear(HOST_FEATURES, HOST_FEATURES, **common), 1),
    ):
        features = HOST_FEATURES if name == "column" else HOST_FEATURES // world.size
        x = torch.randn(HOST_TOKENS // rows, features, device=world.device).bfloat16()
        x.requires_grad_()
        dy = torch.randn_like(layer(x))
        of = calls(layer, x, dy)
        entries |= {
            f"{name} forward, no_grad": of["forward"],
            f"{name} forward": partial(layer, x),
            f"{name} forward and backward": of["step"],
        }
    mine = {name: host_microseconds(fn, world, calls=HOST_CALLS) for name, fn in entries.items()}
    every = world.all_gather_object(mine)
    return {name: max(of[name] for of in every) for name in entries}


def show(report: dict[str, Any]) -> None:
    """Prints a table and the host's cost."""
    table = Table(title=f"layers, {report['machine']['ranks']} ranks: ms (speed-up of {OWN}, bf16)")
    table.add_column("layer")
    names = (OWN, *report["geomean"]["step"])
    for name in names:
        for what in ("forward", "step"):
            table.add_column(f"{name} {what}", justify="right")
    for row in report["rows"]:
        cells = [f"{row['model']} {row['layer']} {row['tokens']}"]
        for name in names:
            for what in ("forward", "step"):
                timing = row[what]["ms"].get(name)
                ratio = row[what]["speedup"].get(name)
                cell = "-" if timing is None else f"{timing['median_ms']:.3f}"
                cells.append(cell + ("" if ratio is None else f" ({ratio:.2f}x)"))
        table.add_row(*cells, style="" if row["correct"] else "red")
    screen = console()
    screen.print(table)
    for what, means in report["geomean"].items():
        told = ", ".join(f"{name} {mean:.2f}x" for name, mean in means.items() if mean is not None)
        screen.print(f"geomean {what}: {told}", markup=False, soft_wrap=True)
    for entry, us in report["host_us"].items():
        screen.print(f"host time of a warm call, {entry}: {us:.1f} us", markup=False)
    for row in report["rows"]:
        for name, reason in row["unavailable"].items():
            screen.print(f"not measured: {name}: {reason}", markup=False, soft_wrap=True)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", default=",".join(LAYERS))
    parser.add_argument("--models", default="8B,70B", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--tokens", default="8192,16384", help="over all ranks, of one call")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--calls", type=int, default=25)
    parser.add_argument("--mxfp8", action="store_true", help="measure the layers in MXFP8, too")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    given.layers, given.models = given.layers.split(","), given.models.split(",")
    given.tokens = [int(tokens) for tokens in given.tokens.split(",")]
    for name, values, known in (("layers", given.layers, LAYERS), ("models", given.models, MODELS)):
        for value in values:
            if value not in known:
                parser.error(f"--{name}: got {value}, wanted some of {', '.join(known)}")
    return given


def main() -> int:
    """Measures on the ranks of this process's group."""
    given = arguments()
    with process_group():
        world = world_of(None)
        rows = []
        for model in given.models:
            for tokens in given.tokens:
                for kind in given.layers:
                    row = bench_case(kind, model, tokens, world, given)
                    rows.append(row)
                    if world.rank == 0:
                        print(f"{kind} {model} {tokens}: error {row['error']:.1e}", file=sys.stderr)
        others = (*RIVALS, *QUANTISED) if given.mxfp8 else tuple(RIVALS)
        report = {
            "schema": 1,
            "benchmark": "layers",
            **environment(world),
            "settings": {"rounds": given.rounds, "calls": given.calls, "sequence": SEQUENCE},
            "host_us": host_cost(world),
            "geomean": {
                what: {n: geomean(r[what]["speedup"].get(n) for r in rows) for n in others}
                for what in ("forward", "step")
            },
            "rows": rows,
        }
        destroy_workspaces()
        if dist.get_rank() == 0:
            show(report)
            if given.json is not None:
                given.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0 if all(row["correct"] for row in rows) else 1


def start() -> int:
    """Runs this program on every GPU, unless it already does."""
    if under_torchrun():
        return main()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus < 2:
        print("bench_layers: wanted two or more GPUs in this machine", file=sys.stderr)
        return 2
    launcher = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(min(gpus, 8)),
    ]
    command = [sys.executable, *launcher, __file__, *sys.argv[1:]]
    return subprocess.call(command, env={"OMP_NUM_THREADS": "1", **os.environ})


if __name__ == "__main__":
    sys.exit(start())
