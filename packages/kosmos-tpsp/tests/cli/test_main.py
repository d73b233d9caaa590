"""The command group: found by name, whole without one of its commands, errors in a line."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from kosmos_tpsp.__main__ import COMMANDS, main

MODULE = "kosmos_tpsp.cli.explore"


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {name} " in shown for name in COMMANDS)


def without(name: str, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes importing `name` fail for want of `missing`."""
    real = importlib.import_module

    def fake(wanted: str, package: str | None = None) -> ModuleType:
        if wanted == name:
            raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)
        return real(wanted, package)

    monkeypatch.setattr(importlib, "import_module", fake)


def test_a_command_without_a_module_is_no_command_and_the_others_stay(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without(MODULE, MODULE, monkeypatch)
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "\n  check " in shown
    assert "\n  explore " not in shown
    assert main(["explore"]) == 2
    assert "No such command 'explore'" in capsys.readouterr().err


def test_a_command_that_lacks_something_else_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    without(MODULE, "numpy", monkeypatch)
    with pytest.raises(ModuleNotFoundError, match="numpy"):
        main(["explore"])


@pytest.mark.parametrize("arguments", [["nothing"], ["check", "--m", "x"], []])
def test_bad_arguments_are_one_line_and_exit_status_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert ("see --help" in err) == (not arguments)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["check", "--world", "group"], "start with torchrun"),
        (["bench", "ag_gemm", "--shapes", "8,8,8"], "no GPU is visible"),
    ],
)
def test_groups_need_no_greenlet(arguments: list[str], says: str) -> None:
    code = (
        "import sys; sys.modules['greenlet'] = None\n"
        "import torch; torch.cuda.is_available = lambda: False\n"
        "from kosmos_tpsp.__main__ import main\n"
        f"status = main({arguments!r})\n"
        "assert 'kosmos_core.executor' not in sys.modules\n"
        "sys.exit(status)"
    )
    variables = {name: value for name, value in os.environ.items() if name != "WORLD_SIZE"}
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, env=variables)
    assert run.returncode == 2, run.stderr
    assert says in run.stderr


def test_a_check_runs_through_on_a_group_without_greenlet(tmp_path: Path) -> None:
    (tmp_path / "greenlet.py").write_text("raise ImportError('blocked')\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    variables = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    check = ["check", "--world", "group", "--m", "16", "--n", "8", "--k", "8", "--allow-decline"]
    command = [sys.executable, *launcher, "-m", "kosmos_tpsp", "--", *check]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, env=variables)
    assert run.returncode == 0, run.stderr[-4000:]
    assert ": passed: declined: " in run.stdout


def test_the_module_runs_as_a_program() -> None:
    command = [sys.executable, "-m", "kosmos_tpsp", "check", "--m", "10"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 2
    assert run.stdout == ""
    assert "m: got 10" in run.stderr
    assert run.stderr.count("\n") == 1
