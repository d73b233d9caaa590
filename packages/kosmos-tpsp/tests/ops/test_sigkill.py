"""A rank that is killed with SIGKILL, in a process group that torchrun does not watch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kosmos_tpsp.ops.catalog import DRIVERS

PROGRAM = Path(__file__).parent / "sigkill_group.py"
# The program's bound of a wait, and what raising and leaving may take beside it.
TIMEOUT_S, GRACE_S = 3.0, 5.0


def kill(
    victim: int, size: int, op: str, folder: Path, when: str = "before", **environment: str
) -> list[dict[str, Any]]:
    """What each rank that is left printed before it ended by itself."""
    group = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(rank), str(size), str(folder / "store"),
             str(victim), op, when],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        ended = [process.communicate(timeout=180) for process in group]
    finally:
        for process in group:
            process.kill()
    assert group[victim].returncode == -signal.SIGKILL
    found = []
    for rank, (process, (out, err)) in enumerate(zip(group, ended, strict=True)):
        if rank != victim:
            assert process.returncode == 0, err[-4000:]
            found.append(json.loads(out.splitlines()[-1]))
    return found


def test_the_others_raise_and_end_in_a_gloo_group(tmp_path: Path) -> None:
    for found in kill(1, 3, "ag_gemm", tmp_path, CUDA_VISIBLE_DEVICES=""):
        assert found["world"] == "reference"
        # What gloo raises where a connection ends.
        assert found["error"]
        assert found["seconds"] < TIMEOUT_S + GRACE_S


@pytest.mark.multi_gpu(2)
@pytest.mark.parametrize(("victim", "when"), [(1, "before"), (0, "during")])
@pytest.mark.parametrize("op", DRIVERS)
def test_the_other_raises_within_the_bound_and_ends(
    op: str, victim: int, when: str, tmp_path: Path
) -> None:
    (found,) = kill(victim, 2, op, tmp_path, when)
    assert found["world"] == "group"
    assert found["error"] == "PeerTimeoutError"
    assert f"for rank {victim}" in found["text"]
    assert TIMEOUT_S - 1 < found["seconds"] < TIMEOUT_S + GRACE_S
