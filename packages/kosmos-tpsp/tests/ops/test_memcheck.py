"""The compiled kernels touch nothing outside of what was allocated: NVIDIA's memcheck."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from kosmos_tpsp.ops.catalog import DRIVERS

TOOL = shutil.which("compute-sanitizer")
MEMCHECK = [str(TOOL), "--tool", "memcheck", "--error-exitcode", "3", sys.executable]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
# Tensors must not lie side by side in one allocation.
UNCACHED = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
PLANTED = """
import torch, triton, triton.language as tl

@triton.jit
def store_past_the_end(x_ptr):
    tl.store(x_ptr + 8, 1.0)

x = torch.zeros(8, device="cuda")
store_past_the_end[(1,)](x)
torch.cuda.synchronize()
"""

pytestmark = [
    pytest.mark.skipif(TOOL is None, reason="compute-sanitizer is not on the path"),
    pytest.mark.timeout(900),
]
every_call = pytest.mark.parametrize(
    ("op", "transport"), [(op, way) for op in DRIVERS for way in ("pull", "push")]
)


def run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=800, env={**os.environ, **environment}
    )


def check(op: str, world: str, transport: str) -> list[str]:
    shape = ["--m", "528", "--n", "264", "--k", "528"]
    return ["-m", "kosmos_tpsp", "check", op, "--world", world, *shape, "--transport", transport]


def nothing_is_found(done: subprocess.CompletedProcess[str], processes: int) -> None:
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-4000:]
    assert said.count("ERROR SUMMARY: 0 errors") == processes


@pytest.mark.gpu
@every_call
def test_memcheck_finds_nothing_in_a_small_run(op: str, transport: str) -> None:
    # Freeing waits for all kernels: the cache stays, or virtual ranks would wait for one another.
    nothing_is_found(run([*MEMCHECK, *check(op, "gpu:2", transport)]), 1)


@pytest.mark.multi_gpu(2)
@every_call
def test_memcheck_finds_nothing_on_two_gpus(op: str, transport: str) -> None:
    command = [*TORCHRUN, "--no-python", "--", *MEMCHECK, *check(op, "group", transport)]
    nothing_is_found(run(command, **UNCACHED), 2)


@pytest.mark.gpu
def test_memcheck_finds_a_store_past_the_end(tmp_path: Path) -> None:
    program = tmp_path / "planted.py"
    program.write_text(PLANTED)
    done = run([*MEMCHECK, str(program)], **UNCACHED)
    assert done.returncode == 3
    assert "Invalid __global__ write" in done.stdout + done.stderr
