"""Ops on GPUs, `ag_gemm` between them: virtual ranks and real ones; soak, delays, a killed rank."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kosmos_core.worlds import gpu_world
from kosmos_tpsp import (
    AgGemmOptions,
    BulkAgOptions,
    BulkColumnOptions,
    BulkRsOptions,
    GemmRsOptions,
)
from kosmos_tpsp.__main__ import main
from kosmos_tpsp.cli.calls import Call
from kosmos_tpsp.cli.rig import Rig, run_on_devices
from kosmos_tpsp.ops.catalog import DRIVERS, driver_of

HERE = Path(__file__).parent
# (tokens, n, the third of m, n, k) for eight ranks: whole tiles, ragged everywhere, one row a rank,
# few tiles.
SHAPES = ((4096, 1024, 1024), (8 * 301, 520, 1032), (8, 8, 8), (1024, 256, 2048))
# Pushed rows of `ag_gemm` land where the rows and partial sums of the others do.
OPTIONS: dict[str, tuple[Any, ...]] = {
    "gemm_rs": (
        GemmRsOptions(),
        GemmRsOptions(policy="serial"),
        GemmRsOptions(policy="fixed", order="row_major"),
        AgGemmOptions(transport="push"),
        GemmRsOptions(split_k=2),
        GemmRsOptions(transport="pull"),
        GemmRsOptions(transport="pull", policy="serial", order="row_major"),
    ),
    "bulk_ag": (
        BulkAgOptions(transport="pull"),
        BulkAgOptions(transport="push", policy="serial"),
        BulkAgOptions(policy="fixed", dx_to="tensor"),
        AgGemmOptions(transport="push"),
        BulkAgOptions(split_k=2, transport="push"),
        BulkAgOptions(policy="two_way", transport="pull"),
        BulkAgOptions(policy="two_way", transport="push", dx_to="tensor"),
    ),
    "bulk_rs": (
        BulkRsOptions(),
        BulkRsOptions(transport="push"),
        BulkRsOptions(policy="serial"),
        AgGemmOptions(transport="push"),
        BulkRsOptions(split_k=2),
        BulkRsOptions(transport="push", policy="fixed"),
        BulkRsOptions(policy="fixed", split_k=4),
        BulkRsOptions(policy="two_way"),
        BulkRsOptions(transport="push", policy="two_way"),
    ),
    "bulk_column": (
        BulkColumnOptions(transport="pull"),
        BulkColumnOptions(transport="push"),
        BulkColumnOptions(transport="pull", policy="serial"),
        AgGemmOptions(transport="push"),
        BulkColumnOptions(transport="pull", split_k=2),
        BulkRsOptions(),
        BulkColumnOptions(transport="pull", policy="fixed"),
    ),
}
every_op = pytest.mark.parametrize("op", OPTIONS)
DATA = 3
MAX_SLEEP = 1 << 22


def sleep(rank: int, index: int) -> None:
    """One of the ranks sleeps on its stream before the call."""
    rng = random.Random(index)
    if rng.randrange(8) == rank:
        torch.cuda._sleep(rng.randrange(MAX_SLEEP))


@pytest.mark.gpu
@every_op
def test_200_calls_of_eight_virtual_ranks_are_right_and_repeat_bit_by_bit(op: str) -> None:
    options = OPTIONS[op]
    calls = []
    for i in range(200):
        chosen = options[i % len(options)]
        shape = driver_of(chosen).shape_of(*SHAPES[i % len(SHAPES)])
        calls.append(Call(*shape, i // 7 % DATA, chosen))
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    with gpu_world(8) as world:
        run = run_on_devices(world, Rig(calls, timeout_s=30.0, keep=64, delay=sleep))
    assert run.problems == []
    assert {verdict.path for verdict in run.verdicts} == {"fused"}
    repeats = [v.repeated for v in run.verdicts if v.repeated is not None]
    assert len(repeats) == 8 * (200 - len(set(calls))) > 8 * 80
    assert all(repeats)


@pytest.mark.gpu
@pytest.mark.parametrize("transport", ["pull", "push"])
@pytest.mark.parametrize("size", [1, 2, 8])
@every_op
def test_check_passes(
    op: str, size: int, transport: str, capsys: pytest.CaptureFixture[str]
) -> None:
    m, n, k = DRIVERS[op].shape_of(2048, 520, 520)
    arguments = ["check", op, "--world", f"gpu:{size}", "--m", str(m), "--n", str(n), "--k", str(k)]
    assert main([*arguments, "--transport", transport, "--delay", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert all(case["path"] == "fused" and case["passed"] for case in report["cases"])


@pytest.mark.gpu
@pytest.mark.parametrize("transport", ["pull", "push"])
@every_op
def test_a_killed_rank_is_named_within_the_bound(
    op: str, transport: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["check", op, "--world", "gpu:8", "--m", "1024", "--n", "256", "--k", "256"]
    arguments += ["--transport", transport]
    assert main([*arguments, "--kill-rank", "3", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert all("for rank 3" in text for text in report["errors"])


def torchrun(*arguments: str) -> Any:
    """The JSON object that a program or module on two GPUs prints last."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    run = subprocess.run(
        [*command, *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout.splitlines()[-1])


def nothing_is_left(found: list[dict[str, dict[str, int]]]) -> None:
    for rank in found:
        before, after = rank["before"], rank["after"]
        assert after["tensors"] <= before["tensors"]
        # Threads that count have one open each; a file a workspace would be 200.
        assert after["files"] <= before["files"] + 20
        # 200 workspaces take some 800 MB; the driver keeps a little for itself.
        assert after["device"] <= before["device"] + (32 << 20)


@pytest.mark.gpu
def test_nothing_is_left_of_200_workspaces_of_virtual_ranks() -> None:
    command = [sys.executable, str(HERE / "cycles.py"), "gpu:2"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-4000:]
    nothing_is_left(json.loads(run.stdout.splitlines()[-1]))


@pytest.mark.multi_gpu(2)
def test_nothing_is_left_of_200_workspaces_of_two_gpus() -> None:
    nothing_is_left(torchrun(str(HERE / "cycles.py"), "group"))


@pytest.mark.multi_gpu(2)
@every_op
def test_1000_calls_of_two_ranks_are_right_and_repeat_bit_by_bit(op: str) -> None:
    found = torchrun(str(HERE / "soak_group.py"), "1000", op)
    assert found["problems"] == []
    assert (found["calls"], found["paths"]) == (1000, ["fused"])
    assert found["repeated"] == found["equal"] == 2 * (1000 - found["different"]) > 2 * 800


@pytest.mark.multi_gpu(2)
@every_op
def test_check_passes_on_two_ranks(op: str) -> None:
    shape = ["--m", "4096", "--n", "1032", "--k", "1032"]
    arguments = ["check", op, "--world", "group", *shape, "--calls", "4", "--delay"]
    for policy in ("one_way", "two_way", "serial"):
        found = torchrun("-m", "kosmos_tpsp", "--", *arguments, "--policy", policy, "--json")
        assert found["passed"] is True


@pytest.mark.multi_gpu(2)
@every_op
def test_a_killed_rank_is_named_by_the_other(op: str) -> None:
    shape = ["--m", "1024", "--n", "256", "--k", "256", "--kill-rank", "1"]
    found = torchrun("-m", "kosmos_tpsp", "--", "check", op, "--world", "group", *shape, "--json")
    assert found["passed"] is True
    assert all("for rank 1" in text for text in found["errors"])
