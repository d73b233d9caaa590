"""What `--record` keeps of a run of tests."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = """
import pytest

@pytest.fixture
def broken():
    yield
    raise ValueError

def test_good(): pass
def test_bad(): raise ValueError
def test_skipped(): pytest.skip("why")
def test_bad_teardown(broken): pass
def test_kills(): __import__("os").kill(__import__("os").getpid(), 9)
def test_never(): pass
"""


def test_every_outcome_so_far_is_kept_when_the_run_is_killed(tmp_path: Path) -> None:
    shutil.copy(ROOT / "conftest.py", tmp_path)
    (tmp_path / "test_some.py").write_text(TESTS, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "--record", "out.json", "test_some.py"]
    subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=120, check=False)
    record = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert {name: test["outcome"] for name, test in record["tests"].items()} == {
        "test_some.py::test_good": "passed",
        "test_some.py::test_bad": "failed",
        "test_some.py::test_skipped": "skipped",
        "test_some.py::test_bad_teardown": "failed",
    }
    assert record["command"] == "python -m pytest -q --record out.json test_some.py"
    assert set(record["versions"]) == {"python", "torch", "triton", "pytest"}
