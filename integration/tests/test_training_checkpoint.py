"""A run that is killed goes on where it was; a checkpoint is whole or is not there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from kosmos_core.worlds import World, cpu_world, reference_world

from integration.training import checkpoint
from integration.training.__main__ import main
from integration.training.run import BACKENDS, NoWatcher, Plan, train
from integration.training.trainer import Job

ROOT = Path(__file__).resolve().parents[2]
STEPS = 10


def arguments(out: Path, *more: str) -> list[str]:
    options = ["--world", "cpu:2", "--layers", "1", "--steps", str(STEPS), "--backend", "reference"]
    return [*options, "--out", str(out), *more]


def losses(out: Path) -> list[float]:
    return [step["loss"] for step in json.loads((out / "report.json").read_text())["steps"]]


def test_a_run_killed_in_the_middle_loses_no_whole_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert main(arguments(whole)) == 0
    command = [sys.executable, "-m", "integration.training", *arguments(killed)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    seen = 0
    for line in process.stdout:
        seen += "training: step" in line
        if "step 4 of" in line:
            # The next step is on its way, or its checkpoint half written.
            os.kill(process.pid, signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL
    assert 4 <= seen < STEPS
    capsys.readouterr()
    assert main(arguments(killed)) == 0
    resumed = json.loads((killed / "report.json").read_text())["summary"]["resumed_at"]
    assert seen <= resumed <= seen + 1
    assert f"resumed after step {resumed} of {STEPS}" in capsys.readouterr().out
    assert losses(killed) == losses(whole)


def test_a_finished_run_runs_no_step_again_and_fresh_starts_over(tmp_path: Path) -> None:
    for more, resumed in (((), 0), ((), STEPS), (("--fresh",), 0)):
        assert main(arguments(tmp_path, *more)) == 0
        report = json.loads((tmp_path / "report.json").read_text())
        assert report["summary"]["resumed_at"] == resumed
        assert len(report["steps"]) == STEPS


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_resumed_run_goes_on_bit_by_bit(
    backend: str, tmp_path: Path, make_job: Callable[..., Job]
) -> None:
    job = make_job(6)
    steps = []
    for folder, stops in ((tmp_path / "one", (6,)), (tmp_path / "two", (2, 5, 6))):
        for stop in stops:
            with cpu_world(2) as world:
                # The peers of the rank that stops wait for it in vain, which the executor sees.
                world.executor.spmd(
                    lambda rank: train_until(job, backend, folder, world, stop),  # noqa: B023
                    return_exceptions=True,
                )
        with cpu_world(2) as world:
            plan = Plan(job, backend, folder, 1, False)
            outcome = world.spmd(lambda rank: train(plan, world, NoWatcher()))[0]  # noqa: B023
        assert outcome.resumed_at == 6
        steps.append([(s.loss, s.grad_norm) for s in outcome.steps])
    assert steps[0] == steps[1]


class Stop(Exception):
    """Ends a run."""


def train_until(job: Job, backend: str, folder: Path, world: World, stop: int) -> None:
    class Watcher(NoWatcher):
        def stepped(self, step: Any, comparison: Any) -> None:
            if step.step + 1 == stop:
                raise Stop

    train(Plan(job, backend, folder, 1, False), world, Watcher())


def test_what_was_not_renamed_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = reference_world()
    checkpoint.save(tmp_path, 1, {"identity": {"a": 1}, "x": torch.ones(3)}, world)

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, 2, {"identity": {"a": 1}, "x": torch.zeros(3)}, world)
    monkeypatch.undo()
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert found.name == "step-000001"
    assert checkpoint.load(found, {"a": 1}, world)["x"].tolist() == [1, 1, 1]
    # What was left half written is in nobody's way.
    checkpoint.save(tmp_path, 2, {"identity": {"a": 1}, "x": torch.zeros(3)}, world)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000002"]


def test_two_are_kept_and_nothing_else_is_touched(tmp_path: Path) -> None:
    other = tmp_path / "step-by-step.txt"
    other.write_text("notes")
    for step in range(1, 5):
        checkpoint.save(tmp_path, step, {"identity": {}}, reference_world())
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step-000003", "step-000004", other.name]
    (tmp_path / "step-000005.partial").mkdir()
    checkpoint.remove_all(tmp_path)
    assert list(tmp_path.iterdir()) == [other]
    assert checkpoint.latest(tmp_path) is None
    assert checkpoint.latest(tmp_path / "not there") is None


def test_a_run_does_not_go_on_with_the_other_backend(
    tmp_path: Path, make_job: Callable[..., Job]
) -> None:
    job, world = make_job(1), reference_world()
    first, other = (Plan(job, backend, tmp_path, 1, False).identity(1) for backend in BACKENDS)
    path = checkpoint.save(tmp_path, 1, {"identity": first}, world)
    assert checkpoint.load(path, first, world) == {"identity": first}
    with pytest.raises(
        click.UsageError, match=f"backend {BACKENDS[0]}, this one has {BACKENDS[1]}"
    ):
        checkpoint.load(path, other, world)


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    world = reference_world()
    path = checkpoint.save(tmp_path, 7, {"identity": {"seed": 1}}, world)
    with pytest.raises(click.UsageError, match=r"seed 1, this one has 2; .*--fresh"):
        checkpoint.load(path, {"seed": 2}, world)
    with cpu_world(2) as two:
        refused = two.executor.spmd(
            lambda rank: checkpoint.load(path, {"seed": 1}, two), return_exceptions=True
        )
    assert all("ranks 1, this one has 2" in str(error) for error in refused)
