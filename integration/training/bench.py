"""``python -m integration.training.bench``: whole training steps against other implementations.

Kosmos against NCCL and cuBLAS in sequence, against the same with Megatron-core's overlap, and
against torch's async tensor parallelism; forward, backward and optimizer. All start from the same
weights; what stands between the linear layers is the same code, so that only the layers differ.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from kosmos_core.testing.bench import EventTimer, Timer, Timing, environment, time_rounds
from kosmos_core.worlds import World, group_world
from kosmos_tpsp import TpSpWorkspace
from kosmos_tpsp.bench.report import console
from kosmos_tpsp.bench.rivals import RIVALS
from kosmos_tpsp.bench.session import process_group
from kosmos_tpsp.cli.entry import run_command
from kosmos_tpsp.cli.relaunch import gpus_to_use, relaunch, under_torchrun
from kosmos_tpsp.precision import with_scales
from rich.table import Table

from integration.training.linears import KosmosLinears, RivalLinears
from integration.training.presets import PRESETS, Preset, Sizes
from integration.training.text import Batches
from integration.training.trainer import Job, Trainer, initial_weights

MODULE = "integration.training.bench"
OWN, QUANTISED = "kosmos", "kosmos mxfp8"
STEPS = 1000  # of the learning rate's schedule, in which every timed step is the first
# Two BF16 paths to the same gradients: each is off by half of that at most.
LIMITS = 2e-3, 3e-2
# Of MXFP8 from BF16: operands are off by 2.6e-2 each, through four blocks.
MX_LIMITS = 1e-2, 0.1


@dataclass
class Result:
    """A benchmark of training steps.

    Attributes:
        sizes: of the model.
        timings: by implementation.
        apart: of each from the plain path: of the loss, of the gradient of all weights.
        unavailable: why others do not run here.
        launches: fused launches of one step, by operation.
    """

    sizes: Sizes
    timings: dict[str, Timing] = field(default_factory=dict)
    apart: dict[str, tuple[float, float]] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)
    launches: dict[str, int] = field(default_factory=dict)

    @property
    def wrong(self) -> list[str]:
        """Implementations whose loss or gradients are not those of the plain path."""
        # Written so that a NaN is wrong.
        return [
            name
            for name, found in self.apart.items()
            if not all(a <= most for a, most in zip(found, limits_of(name), strict=True))
        ]

    def tokens_per_s(self, name: str) -> float:
        """Tokens of all ranks a second."""
        return self.sizes.tokens / self.timings[name].median_ms * 1e3

    def speedup(self, name: str) -> float:
        """Of kosmos over another."""
        return self.timings[name].median_ms / self.timings[OWN].median_ms


def limits_of(name: str) -> tuple[float, float]:
    """Most by which loss and gradient of an implementation may be off the plain path's."""
    return MX_LIMITS if name == QUANTISED else LIMITS


def measure(
    job: Job,
    world: World,
    group: dist.ProcessGroup,
    timer: Timer,
    *,
    rounds: int,
    calls: int,
    warmup: int = 3,
    compiled: bool = False,
    mxfp8: bool = False,
) -> Result:
    """Times steps of every implementation that runs here. Collective.

    Args:
        job: what is trained.
        world: the ranks.
        group: their process group.
        timer: measures.
        rounds: how often each is measured.
        calls: timed steps of a round.
        warmup: steps before them.
        compiled: fuse what stands between the linear layers with torch.compile.
        mxfp8: measure the fused layers in MXFP8, too.
    """
    sizes = job.preset.sizes
    result = Result(sizes)
    hidden = with_scales(sizes.hidden) if mxfp8 else sizes.hidden
    with TpSpWorkspace(world, sizes.tokens, hidden) as workspace:
        own = KosmosLinears(workspace)
        makers: dict[str, Any] = {name: RivalLinears(own, name, group) for name in RIVALS}
        trainers: dict[str, Trainer] = {}
        initial = initial_weights(job, world.rank, world.size)
        plain: tuple[float, torch.Tensor] | None = None
        if mxfp8:
            makers[QUANTISED] = KosmosLinears(workspace, "mxfp8")
        for name, linears in {**makers, OWN: own}.items():
            trainer = Trainer(job, linears, world, torch.bfloat16, world.device, compiled, initial)
            before = Counter(workspace.launches)
            problem, loss = _first(trainer, world)
            if problem is not None:
                result.unavailable[name] = problem
                continue
            if name == OWN:
                result.launches = dict(workspace.launches - before)
            grad = trainer.optimizer.grad
            if plain is None:
                plain = loss, grad.clone()
            result.apart[name] = _apart(loss, grad, plain, world)
            trainers[name] = trainer
        del plain
        steps: dict[str, Callable[[], object]] = {
            name: partial(trainer.step, 0) for name, trainer in trainers.items()
        }
        result.timings = time_rounds(steps, timer, rounds=rounds, warmup=warmup, calls=calls)
        workspace.synchronize()
    return result


def _first(trainer: Trainer, world: World) -> tuple[str | None, float]:
    """(why it does not run on some rank, loss of the first batch). Collective."""
    problem, loss = "", 0.0
    try:
        loss = float(trainer.gradients(0)[0])
    except Exception as error:
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
    problems = [p for p in world.all_gather_object(problem) if p]
    return (problems[0] if problems else None), loss


def _apart(
    loss: float, grad: torch.Tensor, plain: tuple[float, torch.Tensor], world: World
) -> tuple[float, float]:
    """Relative differences of loss and gradient, of the worst rank."""
    differs = float((grad - plain[1]).norm() / plain[1].norm())
    mine = abs(loss - plain[0]) / abs(plain[0]), differs
    every = world.all_gather_object(mine)
    # A maximum of Python's would lose a NaN.
    return tuple(torch.tensor(every).amax(0).tolist())


def report_of(result: Result, preset: Preset, about: dict[str, Any]) -> dict[str, Any]:
    """The JSON report."""
    return {
        "schema": 1,
        "benchmark": "training step",
        **about,
        "preset": preset.identity(),
        "flops": result.sizes.flops,
        "timings": {name: timing.to_dict() for name, timing in result.timings.items()},
        "tokens_per_s": {name: result.tokens_per_s(name) for name in result.timings},
        "speedup": {name: result.speedup(name) for name in result.timings if name != OWN},
        "apart": result.apart,
        "wrong": result.wrong,
        "unavailable": result.unavailable,
        "launches": result.launches,
    }


def table_of(result: Result, ranks: int) -> Table:
    """The table on the screen."""
    sizes = result.sizes
    table = Table(
        title=f"training step: {sizes.layers} blocks of hidden {sizes.hidden}, "
        f"{sizes.tokens} tokens, {ranks} ranks"
    )
    for heading in ("layers", "ms", "p20", "p80", "tokens/s", "TFLOPS a rank", "kosmos is faster"):
        table.add_column(heading, justify="left" if heading == "layers" else "right")
    for name, timing in sorted(result.timings.items(), key=lambda item: item[1].median_ms):
        tflops = sizes.flops / timing.median_ms * 1e-9 / ranks
        table.add_row(
            name, f"{timing.median_ms:.2f}", f"{timing.p20_ms:.2f}", f"{timing.p80_ms:.2f}",
            f"{result.tokens_per_s(name):,.0f}", f"{tflops:.0f}",
            "" if name == OWN else f"{result.speedup(name):.3f}x",
            style="red" if name in result.wrong else "",
        )  # fmt: skip
    return table


@click.command()
@click.option("--preset", type=click.Choice(list(PRESETS)), default="8b-layer", show_default=True)
@click.option("--layers", type=click.IntRange(1), help="Blocks.  [default: the preset's]")
@click.option("--gpus", type=click.IntRange(2, 8), help="[default: all, up to 8]")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--calls", type=click.IntRange(1), default=10, show_default=True)
@click.option(
    "--compile/--eager",
    "compiled",
    default=True,
    show_default=True,
    help="Fuse SwiGLU and the rotary embedding with torch.compile, for all alike.",
)
@click.option("--mxfp8", is_flag=True, help="Measure the fused layers in MXFP8, too.")
@click.option("--json", "path", type=click.Path(dir_okay=False, path_type=Path))
def bench(
    preset: str,
    layers: int | None,
    gpus: int | None,
    rounds: int,
    calls: int,
    compiled: bool,
    mxfp8: bool,
    path: Path | None,
) -> int:
    """Time training steps of kosmos and of other implementations, on GPUs.

    Exit status: 0; 1 if a loss or gradient was wrong; 2 for bad arguments.
    """
    chosen = PRESETS[preset].changed(layers, None)
    if not under_torchrun():
        found = gpus or gpus_to_use()
        if not gpus_to_use() or found > torch.cuda.device_count():
            raise click.UsageError(
                "gpus: fewer are visible than asked for; two or more are needed in this machine"
            )
        return relaunch(MODULE, sys.argv[1:], found)
    with process_group():
        world = group_world()
        chosen.sizes.check(world.size)
        batches = Batches.of_library(chosen.sizes.batch, chosen.sizes.seq, 0)
        job = Job(chosen, batches, STEPS, 0)
        default: Any = dist.group.WORLD
        result = measure(
            job, world, default, EventTimer(world), rounds=rounds, calls=calls,
            compiled=compiled, mxfp8=mxfp8,
        )  # fmt: skip
        if world.rank == 0:
            report = report_of(result, chosen, environment(world))
            _show(result, report, world.size, path)
    return 1 if result.wrong else 0


def _show(result: Result, report: dict[str, Any], ranks: int, path: Path | None) -> None:
    screen = console()
    screen.print(table_of(result, ranks))
    for name, (loss, grad) in result.apart.items():
        verdict = "  WRONG" if name in result.wrong else ""
        screen.print(
            f"{name}: loss {loss:.1e} and gradient {grad:.1e} from the plain path{verdict}"
        )
    for name, reason in result.unavailable.items():
        screen.print(f"not measured: {name}: {reason}", markup=False, soft_wrap=True)
    launches = ", ".join(f"{count} {name}" for name, count in sorted(result.launches.items()))
    screen.print(f"fused launches of a step: {launches}", markup=False)
    if path is not None:
        path.write_text(json.dumps(report, indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    return run_command(bench, MODULE, argv)


if __name__ == "__main__":
    sys.exit(main())
