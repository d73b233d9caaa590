"""Layers on two GPUs: results, exact launches, graphs, other work beside them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
FORWARD = {
    "column": {"ag_gemm_kernel": 1},
    "row": {"gemm_rs_kernel": 1},
    "mlp": {"ag_gemm_kernel": 1, "gemm_rs_kernel": 1},
    "attention": {"ag_gemm_kernel": 1, "gemm_rs_kernel": 1},
}
BACKWARD = {
    "column": {"bulk_ag_kernel": 1, "bulk_rs_kernel": 1},
    "row": {"ag_gemm_kernel": 1},
    "mlp": {"ag_gemm_kernel": 1, "bulk_ag_kernel": 1, "bulk_rs_kernel": 1},
    "attention": {"ag_gemm_kernel": 1, "bulk_ag_kernel": 1, "bulk_rs_kernel": 1},
}
# The whole step of the single layers, whose backward has at most a GEMM, in two kernels where it is
# split, beside the fused ones.
MOST = {"column": (1, 2), "row": (1, 3)}


def torchrun(program: str, *arguments: str, ranks: int = 2) -> Any:
    """The JSON object that a program of this folder printed last."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    run = subprocess.run(
        [*command, "--standalone", str(HERE / program), *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1", "NCCL_NVLS_ENABLE": "0"},
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.multi_gpu(2)
def test_outputs_and_gradients_are_right_on_two_gpus() -> None:
    found = torchrun("layers_group.py", "nccl")
    assert found["world"] == "group"
    assert len(found["errors"]) >= 20
    limits = found["limits"]
    assert {case: e for case, e in found["errors"].items() if not e <= limits[case]} == {}
    assert found["problems"] == []


def ours(kernels: dict[str, int]) -> dict[str, int]:
    """Launches of this package's kernels."""
    names = ("ag_gemm_kernel", "gemm_rs_kernel", "bulk_ag_kernel", "bulk_rs_kernel")
    return {name: count for name, count in kernels.items() if name in names}


@pytest.mark.multi_gpu(2)
def test_a_fused_op_is_one_launch_without_nccl_or_a_host_wait() -> None:
    found = torchrun("layers_profile.py")
    assert found["alike"]
    assert len(found["kernels"]) == 8
    for label, directions in found["kernels"].items():
        name = label.split()[0]
        assert ours(directions["forward"]) == FORWARD[name], label
        assert ours(directions["backward"]) == BACKWARD[name], label
        for kernels in directions.values():
            assert not [k for k in kernels if "nccl" in k.lower() or "memcpy" in k.lower()], label
        if name in MOST:
            forward, backward = (sum(directions[d].values()) for d in ("forward", "backward"))
            assert forward == MOST[name][0], label
            assert backward <= MOST[name][1], label


@pytest.mark.multi_gpu(2)
@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
def test_a_captured_training_step_replays_with_changing_contents(precision: str) -> None:
    found = torchrun("layers_graph.py", "10", precision)
    assert found == {"wrong": [], "refused_unprepared": True, "replays": 10}


@pytest.mark.multi_gpu(2)
def test_layers_beside_other_work() -> None:
    for found in torchrun("layers_beside.py"):
        assert found["reserved"] == 32
        assert found["all_reduce"]["wrong"] == 0
        # The bound: 40 all-reduces of 256 MiB and 80 small steps take a fraction of this.
        assert found["all_reduce"]["seconds"] < 20
        assert found["half"]["wrong"] == 0
        # The layers ended while the other half was still held.
        assert found["half"]["layers_ms"] < found["half"]["held_ms"]
