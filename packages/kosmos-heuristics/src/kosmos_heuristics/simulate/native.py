"""The native core where it was built, else the Python one, with a notice."""

from __future__ import annotations

import importlib
import warnings
from types import ModuleType

from kosmos_heuristics.checks import check_choice
from kosmos_heuristics.errors import PlanError
from kosmos_heuristics.simulate import engine
from kosmos_heuristics.simulate.program import CORE_VERSION, Played, Program, Span

CORES = ("auto", "native", "python")


def load_native() -> ModuleType | None:
    """The native module, or None where it was not built, or from an older source."""
    try:
        module = importlib.import_module("kosmos_heuristics.simulate._core")
    except ImportError:
        return None
    return module if getattr(module, "VERSION", None) == CORE_VERSION else None


def play(program: Program, trace: bool = False, core: str = "auto") -> Played:
    """Run a program.

    Args:
        program: What to run.
        trace: Whether to keep every item's span.
        core: ``auto`` (native if it was built), ``native`` or ``python``.

    Raises:
        PlanError: The native core is asked for and was not built.
        Stalled: The program cannot end.
    """
    check_choice(PlanError, "core", core, CORES, "choose a core")
    module = None if core == "python" else load_native()
    if module is None:
        if core == "native":
            wanted = "a built native core"
            raise PlanError("core", core, wanted, "install with a C++20 compiler and pybind11")
        if core == "auto":
            _notice()
        return engine.play(program, trace)
    try:
        end, busy, wait, events, spans = module.play(program, trace)
    except module.Stalled as error:
        raise engine.Stalled(str(error)) from error
    return Played(end, busy, wait, events, [Span(*span) for span in spans])


_noticed = False


def _notice() -> None:
    global _noticed
    if not _noticed:
        _noticed = True
        warnings.warn(
            "kosmos_heuristics.simulate: the native core was not built; the Python core gives the "
            "same times more slowly",
            RuntimeWarning,
            stacklevel=3,
        )
