"""On the reference path too nobody waits for a rank that does not make its call: gloo, 3 ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

RANKS = 3
PROGRAM = """
    import json, sys
    import torch
    import torch.distributed as dist
    from kosmos_core.errors import KosmosError
    from kosmos_core.worlds import group_world
    from kosmos_tpsp import TpSpWorkspace, ag_gemm

    trouble, victim = sys.argv[1], 1
    dist.init_process_group("gloo")
    world = group_world()
    torch.manual_seed(world.rank)
    x, w = torch.randn(8, 16).bfloat16(), torch.randn(24, 16).bfloat16()
    mine = world.rank == victim

    def call(rows=8, features=24, dtype=torch.bfloat16):
        return ag_gemm(x[:rows].to(dtype), w[:features], workspace)

    def attempt(*arguments, **keywords):
        try:
            return ["", list(call(*arguments, **keywords).shape)]
        except KosmosError as error:
            return [type(error).__name__, str(error)]

    workspace = TpSpWorkspace(world, 24, 16)
    found = [attempt()]
    if trouble == "dtype":
        found.append(attempt(dtype=torch.float32) if mine else attempt())
    elif trouble == "shape":
        found.append(attempt(features=16) if mine else attempt())
    elif trouble == "no rows":
        found.append(attempt(rows=0) if mine else attempt())
    found.append(attempt())
    workspace.reset()
    found.append(attempt())
    workspace.destroy()
    with open(f"{world.rank}.json", "w") as f:
        json.dump(found, f)
    dist.barrier()
    dist.destroy_process_group()
"""


def run(trouble: str, folder: Path) -> list[list[list[Any]]]:
    """What each rank's calls gave: ["", shape] or [name of the exception, its text]."""
    program = folder / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}"]
    done = subprocess.run(
        [*command, "--standalone", str(program), trouble],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize(
    ("trouble", "own", "told", "text"),
    [
        ("dtype", "ArgumentError", "PeerFaultError", "rank 1 refused its call before launch: bad"),
        ("shape", "PeerMismatchError", "PeerMismatchError", "another call than rank"),
        ("no rows", "PeerMismatchError", "PeerMismatchError", "another call than rank"),
    ],
)
def test_all_ranks_hear_of_a_call_that_one_does_not_make(
    trouble: str, own: str, told: str, text: str, tmp_path: Path
) -> None:
    for rank, (before, failed, later, after) in enumerate(run(trouble, tmp_path)):
        assert before == ["", [24, 24]]
        assert failed[0] == (own if rank == 1 else told)
        if rank != 1:
            assert text in failed[1]
            # No kernel ran that could have left NaN.
            assert "Nothing was computed and no output written; call reset()" in failed[1]
        # Sticky, also on the rank that went wrong, until the reset.
        assert later[0] == told
        assert after == ["", [24, 24]]
