"""Runs many cases, a forked process each, a few at a time."""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from kosmos_core.testing.compile_guard.cases import CompileCase, CompileReport, Finding, judge
from kosmos_core.testing.compile_guard.worker import compile_here, warm_up

DEFAULT_JOBS = 2
DEFAULT_TIMEOUT_S = 300.0


@dataclass
class GuardResult:
    """Reports in the order of the cases, and the wall time of the whole run in seconds."""

    reports: list[CompileReport]
    wall_seconds: float

    @property
    def passed(self) -> bool:
        """Whether there was a case and none failed."""
        return bool(self.reports) and all(report.passed for report in self.reports)


def compile_case(case: CompileCase, timeout_s: float = DEFAULT_TIMEOUT_S) -> CompileReport:
    """Compiles `case` for its target in a child process and checks the result.

    Needs no GPU. A crash of the compiler is a finding of the report, never an exception.
    """
    return run_cases([case], jobs=1, timeout_s=timeout_s).reports[0]


def run_cases(
    cases: Sequence[CompileCase],
    jobs: int = DEFAULT_JOBS,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    on_report: Callable[[CompileReport], None] | None = None,
) -> GuardResult:
    """Compiles and checks every case.

    Args:
        cases: Names must be unique within a target.
        jobs: Processes at a time.
        timeout_s: Seconds one case may take.
        on_report: Called with each report as it arrives.

    Raises:
        ValueError: two cases of the same name and target, or fewer than one job.
    """
    if jobs < 1:
        raise ValueError(f"run_cases jobs={jobs} must be 1 or more")
    seen: set[str] = set()
    for case in cases:
        if case.label in seen:
            raise ValueError(f"run_cases got two cases named {case.label}; rename one")
        seen.add(case.label)
    started = time.perf_counter()
    warm_up()
    reports: dict[int, CompileReport] = {}
    waiting = list(enumerate(cases))[::-1]
    running: list[_Child] = []
    with tempfile.TemporaryDirectory(prefix="compile_guard_") as scratch:
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    index, case = waiting.pop()
                    running.append(_Child(index, case, Path(scratch) / str(index), timeout_s))
                patience = min(max(0.0, child.deadline - time.monotonic()) for child in running)
                wait([child.process.sentinel for child in running], timeout=patience)
                for child in [child for child in running if child.finished()]:
                    running.remove(child)
                    report = reports[child.index] = child.report()
                    if on_report is not None:
                        on_report(report)
        finally:
            for child in running:  # only when interrupted: their folders go away with scratch
                child.process.kill()
                child.process.join()
    ordered = [reports[index] for index in range(len(cases))]
    return GuardResult(ordered, time.perf_counter() - started)


class _Child:
    """One forked compilation.

    Forked and not spawned, so that any kernel can be compiled (those defined inside a test too)
    and nothing is imported a second time.
    """

    def __init__(self, index: int, case: CompileCase, folder: Path, timeout_s: float) -> None:
        folder.mkdir()
        self.index = index
        self._case = case
        self._folder = folder
        self._timeout_s = timeout_s
        self.deadline = time.monotonic() + timeout_s
        context: Any = multiprocessing.get_context("fork")
        self.process = context.Process(target=_compile_in_child, args=(case, folder), daemon=True)
        self.process.start()

    def finished(self) -> bool:
        if self.process.is_alive() and time.monotonic() < self.deadline:
            return False
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        return True

    def report(self) -> CompileReport:
        result = self._folder / "report.pickle"
        if result.exists():
            done: CompileReport = pickle.loads(result.read_bytes())
            return done
        report = CompileReport(self._case.name, self._case.target)
        if time.monotonic() >= self.deadline:
            message = f"not done after {self._timeout_s:.0f} s"
        else:
            output = (self._folder / "output.txt").read_text(errors="replace").splitlines()
            said = " | ".join(line.strip() for line in output if line.strip())[-600:]
            message = f"the compiler died (exit code {self.process.exitcode}): {said}"
        report.findings.append(Finding("compile", "", message))
        judge(report, self._case.expect)
        return report


def _compile_in_child(case: CompileCase, folder: Path) -> None:
    with (folder / "output.txt").open("w") as output:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    # A crash is the report's to tell; a test runner's handler would print it on its own terminal.
    faulthandler.disable()
    report = compile_here(case, str(folder / "cache"))
    partial = folder / "report.partial"
    partial.write_bytes(pickle.dumps(report))
    partial.rename(folder / "report.pickle")


def load_cases(names: Iterable[str]) -> list[CompileCase]:
    """Collects the cases of registries named "MODULE:FUNCTION" (FUNCTION: "compile_cases").

    Raises:
        ValueError: a module or function that is not there, or one that returns something else.
    """
    cases: list[CompileCase] = []
    for name in names:
        module_name, _, function_name = name.partition(":")
        function_name = function_name or "compile_cases"
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            raise ValueError(f"{name}: {error}") from error
        function = getattr(module, function_name, None)
        if not callable(function):
            raise ValueError(f"{name}: {module_name} has no function {function_name!r}")
        found = list(function())
        if not found or not all(isinstance(case, CompileCase) for case in found):
            raise ValueError(f"{name}: wanted a non-empty list of CompileCase, got {found!r:.200}")
        cases += found
    return cases
