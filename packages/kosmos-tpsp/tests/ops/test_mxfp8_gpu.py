"""MXFP8 gathers on GPUs: eight virtual ranks on one, and two real ones; soak, delays, bits."""

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
from kosmos_tpsp.__main__ import main
from kosmos_tpsp.cli.calls import Call
from kosmos_tpsp.cli.rig import Rig, run_on_devices
from kosmos_tpsp.ops.ag_gemm import AgGemmOptions
from kosmos_tpsp.ops.bulk_ag import BulkAgOptions
from kosmos_tpsp.ops.catalog import DRIVERS, driver_of

HERE = Path(__file__).parent
# (tokens, n, the third of m, n, k) for eight ranks: whole tiles, ragged everywhere, few rows.
SHAPES = ((4096, 1024, 1024), (8 * 301, 520, 1032), (8, 8, 8), (1024, 256, 2048))
CHOICES: tuple[Any, ...] = (
    AgGemmOptions(transport="pull"),
    AgGemmOptions(transport="push"),
    AgGemmOptions(transport="push", layout="nn", policy="two_way"),
    AgGemmOptions(transport="pull", layout="nn", keep_gathered=True, split_k=2),
    AgGemmOptions(transport="push", policy="serial"),
    BulkAgOptions(transport="pull", dx_to="tensor"),
    BulkAgOptions(transport="push", dx_to="tensor", policy="two_way"),
)
DATA = 3
MAX_SLEEP = 1 << 22


def sleep(rank: int, index: int) -> None:
    """One of the ranks sleeps on its stream before the call."""
    rng = random.Random(index)
    if rng.randrange(8) == rank:
        torch.cuda._sleep(rng.randrange(MAX_SLEEP))


@pytest.mark.gpu
def test_200_calls_of_eight_virtual_ranks_are_right_and_repeat_bit_by_bit() -> None:
    calls = []
    for i in range(200):
        chosen = CHOICES[i % len(CHOICES)]
        shape = driver_of(chosen).shape_of(*SHAPES[i % len(SHAPES)])
        call = Call(*shape, i // 7 % DATA, chosen)
        # One call in five in bf16, on the same memory.
        calls.append(call.in_mxfp8(8) if i % 5 else call)
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    with gpu_world(8) as world:
        run = run_on_devices(world, Rig(calls, timeout_s=30.0, keep=64, delay=sleep))
    assert run.problems == []
    assert {verdict.path for verdict in run.verdicts} == {"fused"}
    repeats = [v.repeated for v in run.verdicts if v.repeated is not None]
    assert len(repeats) == 8 * (200 - len(set(calls))) > 0
    assert all(repeats)


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["ag_gemm", "bulk_ag", "gemm_rs", "bulk_rs"])
@pytest.mark.parametrize("size", [1, 2, 8])
def test_check_passes(op: str, size: int, capsys: pytest.CaptureFixture[str]) -> None:
    m, n, k = DRIVERS[op].shape_of(2048, 520, 520)
    arguments = ["check", op, "--world", f"gpu:{size}", "--m", str(m), "--n", str(n), "--k", str(k)]
    assert main([*arguments, "--dtype", "mxfp8", "--delay", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert all(case["path"] == "fused" and case["passed"] for case in report["cases"])


@pytest.mark.multi_gpu(2)
@pytest.mark.parametrize("op", ["ag_gemm", "bulk_ag"])
def test_1000_calls_of_two_ranks_are_right_and_repeat_bit_by_bit(op: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    run = subprocess.run(
        [*command, str(HERE / "soak_group.py"), "1000", op, "mxfp8"],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr[-4000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["problems"] == []
    assert (found["calls"], found["paths"]) == (1000, ["fused"])
    assert found["repeated"] == found["equal"] == 2 * (1000 - found["different"]) > 0
