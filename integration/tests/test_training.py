"""Losses and gradients of every backend beside an unsharded FP32 model's."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kosmos_core.executor import Random
from kosmos_core.worlds import cpu_world, reference_world

from integration.training import comparison, linears, session
from integration.training.comparison import Comparison, Witnesses
from integration.training.model import Llama
from integration.training.optimizer import Optimizer, Schedule
from integration.training.presets import PRESETS
from integration.training.report import drift
from integration.training.run import EXACT, PLAIN, NoWatcher, Outcome, Plan, make_trainer, train
from integration.training.text import Batches
from integration.training.trainer import Job, reference_trainer, unsharded_trainer
from integration.training.weights import weights_of


def compare(job: Job, ranks: int, backend: str, **checks: Any) -> list[list[Comparison]]:
    """Comparisons of every step, by rank."""
    with cpu_world(ranks, **checks) as world:

        def on_rank(rank: int) -> list[Comparison]:
            found: list[Comparison] = []
            with make_trainer(job, backend, world) as (trainer, _):
                witnesses = Witnesses(job, world)
                for step in range(job.steps):
                    trainer.step(
                        step,
                        lambda loss: found.append(witnesses.compare(trainer, step, loss)),  # noqa: B023
                    )
            return found

        return world.spmd(on_rank)


def run(job: Job, ranks: int, folder: Path, backend: str, verify: bool = False) -> Outcome:
    plan = Plan(job, backend, folder, 0, verify)
    with cpu_world(ranks) as world:
        outcomes = world.spmd(lambda rank: train(plan, world, NoWatcher()))
    for outcome in outcomes[1:]:
        assert [s.loss for s in outcome.steps] == [s.loss for s in outcomes[0].steps]
    return outcomes[0]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_plain_path_has_the_losses_and_gradients_of_an_unsharded_model(
    ranks: int, make_job: Callable[..., Job]
) -> None:
    by_rank = compare(make_job(), ranks, "reference")
    assert all(rank == by_rank[0] for rank in by_rank)
    for c in by_rank[0]:
        assert c.right
        assert c.apart == 0
        # BF16 rounds to 8 bits: neither exact nor far off.
        assert 1e-4 < c.error[0] < 1e-2


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_fused_layers_have_the_losses_and_gradients_of_an_unsharded_model(
    ranks: int, make_job: Callable[..., Job]
) -> None:
    by_rank = compare(make_job(2), ranks, "kosmos", **session.CHECKS)
    assert all(rank == by_rank[0] for rank in by_rank)
    for c in by_rank[0]:
        assert c.right
        assert 1e-4 < c.error[0] < 1e-2
        # Of their own making, not the plain path once more.
        assert ranks == 1 or c.apart > 0


@pytest.mark.parametrize("backend", ["reference", "kosmos"])
def test_mxfp8_is_as_near_as_its_operands(backend: str, make_job: Callable[..., Job]) -> None:
    job = replace(make_job(1), precision="mxfp8")
    checks = session.CHECKS if backend == "kosmos" else {}
    by_rank = compare(job, 2, backend, **checks)
    assert all(rank == by_rank[0] for rank in by_rank)
    for c in by_rank[0]:
        assert c.right
        assert c.loss_error <= comparison.MX_LOSS_LIMIT
        # Well off what BF16 gives, and both paths by the same.
        assert 1e-2 < c.error[0] < 8e-2
        assert c.apart < 1e-2
        assert (c.apart == 0) == (backend == "reference")


def test_mxfp8_learns_as_bf16(make_job: Callable[..., Job]) -> None:
    world, curves = reference_world(), {}
    for backend, precision in (("kosmos", "mxfp8"), ("reference", "mxfp8"), ("reference", "bf16")):
        job = replace(make_job(20), precision=precision)
        with make_trainer(job, backend, world) as (trainer, _):
            curves[backend, precision] = [float(trainer.step(n)[0]) for n in range(job.steps)]
    ours, plain, bf16 = curves.values()
    # Into `main_grad` ours adds unrounded.
    assert drift(ours, plain) < 0.002
    assert 0 < drift(ours, bf16) < 0.01
    assert sum(bf16[-5:]) <= 0.8 * sum(bf16[:5])


def test_schedules_change_no_bit(make_job: Callable[..., Job]) -> None:
    job, found = make_job(2), []
    for seed in range(3):
        policy = Random(seed) if seed else None
        checks = {**session.CHECKS, "weak": "random" if seed else "late"}
        with cpu_world(2, policy=policy, seed=seed, **checks) as world:

            def on_rank(rank: int) -> torch.Tensor:
                with make_trainer(job, "kosmos", world) as (trainer, _):
                    for step in range(job.steps):
                        trainer.step(step)
                    return trainer.optimizer.master

            found.append(world.spmd(on_rank))
    for rank in range(2):
        assert torch.equal(found[0][rank], found[1][rank])
        assert torch.equal(found[0][rank], found[2][rank])


def no_sum(self: Optimizer, loss: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return loss.detach(), self.grad.square().sum().sqrt()


def halved(dx: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    shard, dw = whole_bulk_rs(dx, *rest)
    return shard, dw / 2


def lost_rank(x: torch.Tensor, w: torch.Tensor, world: Any) -> torch.Tensor:
    return whole_gemm_rs(x * (world.rank > 0), w, world)


whole_bulk_rs, whole_gemm_rs = linears.reference.bulk_rs, linears.reference.gemm_rs


@pytest.mark.parametrize(
    ("target", "name", "defect", "shows"),
    [
        (Optimizer, "reduce", no_sum, "norm.weight embedding.weight head.weight"),
        (linears.reference, "bulk_rs", halved, "qkv.weight gate_up.weight"),
        (linears.reference, "gemm_rs", lost_rank, ""),
    ],
)
def test_a_planted_defect_is_found(
    target: Any,
    name: str,
    defect: Any,
    shows: str,
    make_job: Callable[..., Job],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only in the run that is looked at: the witnesses are made with the defect taken out again."""
    job, whole = make_job(1), getattr(target, name)
    with cpu_world(2) as world:

        def on_rank(rank: int) -> Comparison:
            trainer, witnesses = reference_trainer(job, world), Witnesses(job, world)
            world.barrier()
            monkeypatch.setattr(target, name, defect)
            loss, _ = trainer.gradients(0)
            world.barrier()
            monkeypatch.setattr(target, name, whole)
            world.barrier()
            return witnesses.compare(trainer, 0, loss)

        found = world.spmd(on_rank)[0]
    assert not found.right
    worst = found.worst.split(".", 2)[-1] if found.worst.startswith("blocks") else found.worst
    assert not shows or any(worst.endswith(weight) for weight in shows.split())


def test_nan_is_wrong() -> None:
    right = Comparison(0, (1.0, 1.0, 1.0), (0.0, 0.0), 0.0, "w", (0.0, 0.0))
    assert right.right
    nan = float("nan")
    assert not Comparison(0, (nan, 1.0, 1.0), (0.0, 0.0), 0.0, "w", (0.0, 0.0)).right
    assert not Comparison(0, (1.0, 1.0, 1.0), (nan, 0.0), nan, "w", (nan, 0.0)).right
    assert comparison.limit(nan) == comparison.GRADIENT_FLOOR


def test_runs_of_their_own_stay_together(tmp_path: Path, make_job: Callable[..., Job]) -> None:
    outcome = run(make_job(20), 2, tmp_path, "reference", verify=True)
    losses = [s.loss for s in outcome.steps]
    assert losses == outcome.curves[PLAIN["bf16"]]
    assert drift(losses, outcome.curves[EXACT]) < 0.01
    assert drift(losses, [loss * 1.05 for loss in outcome.curves[EXACT]]) > 0.04
    assert len(outcome.comparisons) == 20
    assert all(c.right for c in outcome.comparisons)


def test_the_tiny_preset_learns(tmp_path: Path) -> None:
    preset = PRESETS["tiny"]
    batches = Batches.of_library(preset.sizes.batch, preset.sizes.seq, 0)
    job = Job(preset, batches, preset.steps, 0)
    trainer = unsharded_trainer(job, torch.device("cpu"))
    losses = [float(trainer.step(step)[0]) for step in range(job.steps)]
    assert sum(losses[-10:]) <= 0.75 * sum(losses[:10])


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_weights_are_shared_and_put_together_again(
    ranks: int, make_job: Callable[..., Job]
) -> None:
    sizes = make_job(layers=2).preset.sizes
    with cpu_world(ranks) as world:
        made = linears.ReferenceLinears(world)
        model = Llama(sizes, ranks, made, torch.bfloat16, torch.device("cpu"))
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    for weight in weights_of(sizes):
        whole = weight.initial(seed=1)
        shards = [weight.shard(whole, rank, ranks) for rank in range(ranks)]
        assert torch.equal(weight.whole(shards), whole)
        assert {tuple(shard.shape) for shard in shards} == {shapes.pop(weight.name)}
    assert shapes == {}


def test_a_rank_has_the_queries_of_its_keys(make_job: Callable[..., Job]) -> None:
    sizes = make_job().preset.sizes
    qkv = next(w for w in weights_of(sizes) if w.name == "blocks.0.qkv.weight")
    rows = torch.arange(qkv.shape[0])[:, None].float()
    mine = qkv.shard(rows, 1, 4).flatten().tolist()
    # 8 heads of 8 features over 4 ranks: two query heads, one key head, one value head.
    assert mine == [*range(16, 32), *range(72, 80), *range(104, 112)]


def test_data_depend_on_seed_and_step_alone() -> None:
    batches = Batches(torch.arange(200, dtype=torch.uint8), 3, 10, 5)
    tokens, targets = batches(7)
    assert torch.equal(tokens + 1, targets)
    assert torch.equal(tokens, batches(7)[0])
    assert not torch.equal(tokens, batches(8)[0])
    other = Batches(batches.text, 3, 10, 6)
    assert not torch.equal(tokens, other(7)[0])
    assert batches.fingerprint == other.fingerprint
    changed = batches.text.clone()
    changed[0] = 1
    assert batches.fingerprint != Batches(changed, 3, 10, 5).fingerprint


def test_weights_depend_on_seed_and_name(make_job: Callable[..., Job]) -> None:
    weights = [w for w in weights_of(make_job().preset.sizes) if w.std is not None]
    starts = [w.initial(seed).flatten()[:64] / w.std for w in weights for seed in (0, 1)]  # type: ignore[operator]
    assert len({tuple(start.tolist()) for start in starts}) == 2 * len(weights)


def test_rates_rise_and_fall() -> None:
    schedule = Schedule(1.0, 4, 20)
    rates = [schedule(step) for step in range(25)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert all(a > b for a, b in itertools.pairwise(rates[4:21]))
    assert rates[20:] == pytest.approx([0.1] * 5)


def test_the_executor_that_trains_is_checked() -> None:
    assert session.CHECKS["race"] == "raise"
    assert session.CHECKS["strict"] is True
