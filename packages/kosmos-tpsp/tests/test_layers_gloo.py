"""A user's own unit tests run anywhere: layers in a gloo group of processes without GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kosmos_tpsp.cli.layer_check import LAYER_TOLERANCE

PROGRAM = Path(__file__).parent / "layers_group.py"


@pytest.mark.parametrize("ranks", [2, 4])
def test_layers_in_a_gloo_group(ranks: int) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    run = subprocess.run(
        [*command, "--standalone", str(PROGRAM), "gloo"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert run.returncode == 0, run.stderr[-4000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["world"] == "reference"
    assert len(found["errors"]) == 12
    assert {case: e for case, e in found["errors"].items() if not e <= LAYER_TOLERANCE} == {}
