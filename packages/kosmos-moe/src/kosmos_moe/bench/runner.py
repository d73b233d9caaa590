"""Times the layers of a list of models against the baseline and against themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from kosmos_core.testing.bench import EventTimer, time_rounds
from kosmos_core.worlds import World

from kosmos_moe.bench.baseline import Baseline
from kosmos_moe.bench.models import TOKENS, Model, Weights, draw, router_of
from kosmos_moe.functions import moe
from kosmos_moe.ops.moe_forward import MoeResult, moe_forward
from kosmos_moe.ops.options import MoeOptions
from kosmos_moe.workspaces import MoEWorkspace

# Both sides round at other places; the baseline rounds the weights to bf16, too.
TOLERANCE = 2e-2


@dataclass(frozen=True)
class Settings:
    """How much is measured.

    Attributes:
        rounds, warmup, calls: of each variant; see `time_rounds`.
        zipf: exponent of skewed routing.
        seed: of all operands.
        variants: choices that are timed besides the plan's own, by name.
        capacity: of the workspace.
        backward: whether forward and backward together are timed, too.
    """

    rounds: int = 3
    warmup: int = 10
    calls: int = 25
    zipf: float = 0.8
    seed: int = 0
    variants: dict[str, MoeOptions] = field(default_factory=dict)
    capacity: float | None = None
    backward: bool = False


@dataclass
class Row:
    """One model under one routing.

    Attributes:
        model, routing: what was timed.
        experts: over all ranks.
        hottest_rank, hottest_expert: their loads over the mean.
        times_ms: median of each variant on the slowest rank.
        spreads: of their rounds.
        ideal_ms: the longer of the GEMMs alone and of the bytes at the peak of the links.
        error: against the baseline.
        repeats: whether the bits before and after timing are equal.
        problem: what is wrong, "" if nothing is.
    """

    model: str
    routing: str
    experts: int
    hottest_rank: float
    hottest_expert: float
    times_ms: dict[str, float]
    spreads: dict[str, float]
    ideal_ms: float
    error: float
    repeats: bool
    problem: str

    @property
    def speedup(self) -> float:
        """Of the plan's own choices over the baseline."""
        return self.times_ms["baseline"] / self.times_ms["fused"]

    @property
    def efficiency(self) -> float:
        """Ideal over fused."""
        return self.ideal_ms / self.times_ms["fused"]

    def to_dict(self) -> dict[str, Any]:
        """All members, for JSON."""
        return {**asdict(self), "speedup": self.speedup, "efficiency": self.efficiency}


def run_model(model: Model, routing: str, world: World, settings: Settings) -> Row:
    """Checks and times one model. Collective."""
    size, device = world.size, world.device
    zipf = settings.zipf if routing == "skewed" else 0.0
    weights = draw(model, world.rank, size, device, zipf, settings.seed)
    router = router_of(model, routing)
    baseline = Baseline(weights, router, world)
    hottest_rank, hottest_expert = baseline.loads()
    with MoEWorkspace(
        world, TOKENS, model.hidden, model.inter, model.experts_on(size), model.topk,
        shared_inter=model.inter * model.shared, capacity=settings.capacity,
        training=settings.backward,
    ) as workspace:  # fmt: skip

        def caller(options: MoeOptions) -> Callable[[], MoeResult]:
            return lambda: moe_forward(
                weights.x, weights.router, weights.w1, weights.w2, workspace, router,
                shared=weights.shared, options=options,
            )  # fmt: skip

        fused = caller(MoeOptions())
        variants: dict[str, Callable[[], object]] = {
            "fused": fused,
            "baseline": baseline,
            "gemms": baseline.gemms(),
            **{name: caller(options) for name, options in settings.variants.items()},
        }
        if settings.backward:
            leaves = weights.requires_grad()
            competitor = Baseline(leaves, router, world)
            dy = torch.randn_like(weights.x)

            def fused_both() -> None:
                out = moe(
                    leaves.x, leaves.router, leaves.w1, leaves.w2, workspace, router,
                    shared=leaves.shared,
                )  # fmt: skip
                torch.autograd.backward(out.y, dy)

            def baseline_both() -> None:
                torch.autograd.backward(competitor(), dy)

            variants["fused both"] = _without_sums(fused_both, leaves)
            variants["baseline both"] = _without_sums(baseline_both, leaves)
        for call in variants.values():
            call()
            workspace.synchronize()
            world.barrier()
        before = fused()
        wanted = baseline()
        workspace.synchronize()
        timings = time_rounds(
            variants, EventTimer(world), rounds=settings.rounds, warmup=settings.warmup,
            calls=settings.calls,
        )  # fmt: skip
        after = fused()
        workspace.synchronize()
        error = _worst(float((before.y.float() - wanted.float()).norm() / wanted.float().norm()))
        repeats = _worst(float(not torch.equal(before.y, after.y))) == 0.0
    times = {name: timing.median_ms for name, timing in timings.items()}
    problem = "" if error <= TOLERANCE else f"error {error:.3g} against the baseline"
    problem = problem or ("" if repeats else "other bits after timing")
    return Row(
        model.name, routing, model.experts_on(size), hottest_rank, hottest_expert, times,
        {name: timing.spread for name, timing in timings.items()},
        max(times["gemms"], _bytes_ms(model, world, workspace)), error, repeats, problem,
    )  # fmt: skip


def _without_sums(run: Callable[[], None], leaves: Weights) -> Callable[[], None]:
    """Runs with fresh gradients: adding them to older ones is no part of the layer."""

    def fresh() -> None:
        for t in (leaves.x, leaves.router, leaves.w1, leaves.w2, *(leaves.shared or ())):
            t.grad = None
        run()

    return fresh


def _worst(value: float) -> float:
    t = torch.tensor([value], dtype=torch.float64, device="cuda")
    dist.all_reduce(t, dist.ReduceOp.MAX)
    return float(t)


def _bytes_ms(model: Model, world: World, workspace: MoEWorkspace) -> float:
    """Rows that leave a rank one way, at the peak of the links; both ways run one after another."""
    if world.size == 1:
        return 0.0
    rows = TOKENS * model.topk * (world.size - 1) / world.size
    peak = workspace.machine.peak_gbps("push", world.size - 1)
    return 2 * rows * model.hidden * 2 / (peak * 1e6)
