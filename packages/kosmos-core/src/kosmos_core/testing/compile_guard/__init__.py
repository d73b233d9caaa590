"""Compile guard: kernels compiled for real GPUs without one, and their machine code checked.

A package lists its kernels, in every configuration that its plans can choose, as
:class:`CompileCase` objects returned by a function ``compile_cases()``. The guard compiles each
in a process of its own and fails it if it spills, does not fit one workgroup on a CU or SM, or if
its assembly lacks the order and scope that publishing and consuming data need. See ``CHECKS``.

    python -m kosmos_core.testing.compile_guard my_package.my_module:compile_cases
"""

from kosmos_core.testing.compile_guard.cases import (
    CHECKS,
    Allowance,
    CompileCase,
    CompileReport,
    Expectations,
    Finding,
)
from kosmos_core.testing.compile_guard.covering import covering
from kosmos_core.testing.compile_guard.runner import (
    GuardResult,
    compile_case,
    load_cases,
    run_cases,
)
from kosmos_core.testing.compile_guard.targets import TARGETS, Target

__all__ = [
    "CHECKS",
    "TARGETS",
    "Allowance",
    "CompileCase",
    "CompileReport",
    "Expectations",
    "Finding",
    "GuardResult",
    "Target",
    "compile_case",
    "covering",
    "load_cases",
    "run_cases",
]
