"""Skips tests that need more GPUs than there are, and can make their absence a failure.

Also keeps what the tests of a machine gave: `--record FILE` leaves a JSON object for docs/results.
"""

from __future__ import annotations

import datetime
import functools
import json
import platform
import shlex
from collections.abc import Generator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that the GPU sessions of noxfile.py pass."""
    parser.addoption(
        "--require-gpu",
        action="store_true",
        help="a test marked gpu or multi_gpu fails, and is not skipped, where no GPU is found",
    )
    parser.addoption(
        "--record",
        metavar="FILE",
        type=Path,
        help="write machine, command and every test's outcome and seconds to FILE, as JSON",
    )


class _Recorder:
    """Writes the record anew after each test: a run that is cut short keeps what it had."""

    def __init__(self, path: Path, config: pytest.Config) -> None:
        import torch

        self._path = path
        self._tests: dict[str, dict[str, Any]] = {}
        versions = {name: metadata.version(name) for name in ("torch", "triton", "pytest")}
        self._record: dict[str, Any] = {
            "command": shlex.join(["python", "-m", "pytest", *config.invocation_params.args]),
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "gpus": [torch.cuda.get_device_name(i) for i in range(_num_gpus())],
            "versions": {"python": platform.python_version(), **versions},
            "tests": self._tests,
        }

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        test = self._tests.setdefault(report.nodeid, {"outcome": "passed", "seconds": 0.0})
        test["seconds"] = round(test["seconds"] + report.duration, 2)
        if report.outcome != "passed":
            test["outcome"] = report.outcome
        if report.when == "teardown":
            self._path.write_text(json.dumps(self._record, indent=1) + "\n", encoding="utf-8")
        return report


def pytest_configure(config: pytest.Config) -> None:
    """Start the record that `--record` asks for."""
    if config.getoption("--record") is not None:
        config.pluginmanager.register(_Recorder(config.getoption("--record"), config))


@functools.cache
def _num_gpus() -> int:
    # Imported late: the suite of kosmos-heuristics runs where torch is not installed.
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _wanted_gpus(item: pytest.Item) -> int:
    multi = item.get_closest_marker("multi_gpu")
    if multi is not None:
        return int(multi.args[0])
    return 1 if item.get_closest_marker("gpu") is not None else 0


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip `item` for want of GPUs; under --require-gpu, fail it where there is none at all."""
    wanted = _wanted_gpus(item)
    if wanted == 0 or _num_gpus() >= wanted:
        return
    reason = f"needs {wanted} GPUs, found {_num_gpus()}"
    if item.config.getoption("--require-gpu") and _num_gpus() == 0:
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)
