"""A user's own unit tests run anywhere: layers in a gloo group of processes without GPUs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parent / "layers_group.py"


def torchrun(ranks: int, program: Path, *arguments: str) -> str:
    """What a program prints that runs in processes without GPUs."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    run = subprocess.run(
        [*command, "--standalone", str(program), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return run.stdout


def test_layers_in_a_gloo_group() -> None:
    found = json.loads(torchrun(2, PROGRAM, "gloo").splitlines()[-1])
    assert found["world"] == "reference"
    assert len(found["errors"]) == 14
    limits = found["limits"]
    assert {case: e for case, e in found["errors"].items() if not e <= limits[case]} == {}
    assert found["problems"] == []


def test_the_example_of_the_documentation_runs(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "layers.md").read_text()
    found = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert found is not None
    program = tmp_path / "example.py"
    told = "print(dist.get_rank(), tuple(y.shape), bool(mlp.down.weight.grad.any()), flush=True)\n"
    program.write_text(found[1] + told)
    printed = torchrun(2, program)
    assert sorted(printed.splitlines()) == [f"{rank} (512, 512) True" for rank in range(2)]
