"""What the root conftest.py does with tests that need GPUs, for any number of GPUs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Stands in for torch on a machine with as many GPUs as the environment says.
TORCH = """
import os
class cuda:
    device_count = staticmethod(lambda: int(os.environ["GPUS"]))
    is_available = staticmethod(lambda: cuda.device_count() > 0)
"""
SUITE = """
import pytest
def test_plain(): pass
@pytest.mark.gpu
def test_one(): pass
@pytest.mark.multi_gpu(4)
def test_four(): pass
"""


@pytest.mark.parametrize(
    ("num_gpus", "option", "told"),
    [
        (0, [], "1 passed, 2 skipped"),
        (0, ["--require-gpu"], "1 passed, 2 errors"),
        (2, ["--require-gpu"], "2 passed, 1 skipped"),
        (4, ["--require-gpu"], "3 passed"),
    ],
)
def test_outcomes(tmp_path: Path, num_gpus: int, option: list[str], told: str) -> None:
    shutil.copy(ROOT / "conftest.py", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "torch.py").write_text(TORCH)
    (tmp_path / "test_suite.py").write_text(SUITE)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "test_suite.py", *option],
        cwd=tmp_path,
        env={**os.environ, "GPUS": str(num_gpus)},
        capture_output=True,
        text=True,
    )
    assert f"{told} in" in done.stdout
    assert done.returncode == (1 if "errors" in told else 0)


def test_an_unknown_marker_is_an_error(tmp_path: Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "test_suite.py").write_text("import pytest\npytestmark = pytest.mark.gpus\n")
    command = [sys.executable, "-m", "pytest", "test_suite.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert "'gpus' not found in `markers`" in done.stdout
    assert done.returncode != 0
