"""Compiles one case in this process and checks the result; the runner forks a process for it."""

from __future__ import annotations

import contextlib
import io
import os
import time
from typing import Any

import triton
import triton.compiler.code_generator
from triton import knobs
from triton.runtime import cache

from kosmos_core.testing.compile_guard import amdgcn, clocks, ordering, ptx, resources, ttir
from kosmos_core.testing.compile_guard.cases import CompileCase, CompileReport, Finding, judge
from kosmos_core.testing.compile_guard.listing import Listing
from kosmos_core.testing.compile_guard.signature import build_source
from kosmos_core.testing.compile_guard.targets import TARGETS, Target, use_target


def warm_up() -> None:
    """Does here, once, what every child process would else do for itself.

    Triton hashes all of its own files for the cache key: half a second, and most of the time a
    small kernel takes.
    """
    cache.triton_key()


def compile_here(case: CompileCase, cache_dir: str) -> CompileReport:
    """Compiles and checks `case` in this process, which then believes in the case's target.

    Args:
        case: What to compile.
        cache_dir: Triton's cache for this compilation; never the user's, whose entries would be
            of another driver.
    """
    target = TARGETS[case.target]
    report = CompileReport(case.name, case.target)
    use_target(target)
    os.environ["TRITON_CACHE_DIR"] = cache_dir
    knobs.cache.dir = cache_dir
    # ptxas is run with -v, triton throws its report away unless told to print it.
    knobs.nvidia.dump_ptxas_log = True
    log = io.StringIO()
    started = time.perf_counter()
    try:
        source = build_source(case)
        with contextlib.redirect_stdout(log):
            kernel = triton.compile(
                source, target=target.triton_target(), options=dict(case.options)
            )
    except Exception as error:  # whatever a compiler raises is the finding
        report.compile_seconds = time.perf_counter() - started
        report.findings.append(Finding("compile", "", _explain(error, log.getvalue())))
        judge(report, case.expect)
        return report
    report.compile_seconds = time.perf_counter() - started
    _inspect(case, target, kernel, log.getvalue(), report)
    judge(report, case.expect)
    return report


def _explain(error: Exception, log: str) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    errors = [line.strip() for line in log.splitlines() if "error" in line and "ptxas" in line]
    kept = list(dict.fromkeys(errors))[:3] or lines[:1] + lines[-1:]
    return f"{type(error).__name__}: " + " | ".join(dict.fromkeys(kept))[:600]


def _inspect(
    case: CompileCase, target: Target, kernel: Any, log: str, report: CompileReport
) -> None:
    found = resources.read_resources(kernel, target, log)
    report.registers = found.registers
    report.spills = found.spills
    report.shared_bytes = found.shared_bytes
    report.occupancy = found.occupancy
    report.resources = found.other
    report.notes += found.notes
    module = ttir.parse(kernel.asm["ttir"])
    listing = _parse(target, kernel, module.scalar_writes())
    report.counts = listing.counts()
    findings = resources.check_resources(found, target, case.expect.allow_spills)
    findings += check_counts(case, report.counts)
    findings += ordering.check_order(listing, target.is_amd)
    findings += ordering.check_atomics(module, listing, target.is_amd)
    findings += ordering.check_polls(module, listing)
    findings += ttir.check_loops(module, int(kernel.metadata.num_stages))
    findings += ttir.check_warp_specialize(module, kernel.asm["ttgir"], target.is_amd)
    findings += clocks.check_clocks(kernel.asm["ttir"])
    if target.is_amd:
        findings += amdgcn.check_divergence(kernel.asm["amdgcn"])
    if case.expect.keeps_subnormals:
        findings += (
            amdgcn.check_subnormals(kernel.asm["amdgcn"])
            if target.is_amd
            else ptx.check_subnormals(kernel.asm["ptx"])
        )
    report.findings = findings


def _parse(target: Target, kernel: Any, scalar_writes: ttir.ScalarWrites) -> Listing:
    num_warps = int(kernel.metadata.num_warps)
    if target.is_amd:
        return amdgcn.parse_amdgcn(kernel.asm["amdgcn"], scalar_writes, num_warps)
    return ptx.parse_ptx(kernel.asm["ptx"], scalar_writes, num_warps)


def check_counts(case: CompileCase, counts: dict[str, int]) -> list[Finding]:
    """The case's minimum number of instructions per pattern."""
    return [
        Finding("expectation", "", f"{name}: wanted at least {wanted}, found {counts.get(name, 0)}")
        for name, wanted in case.expect.minimums().items()
        if counts.get(name, 0) < wanted
    ]
