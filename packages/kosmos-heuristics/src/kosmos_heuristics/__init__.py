"""Closed-form plans for fused communication + GEMM kernels, without torch or triton.

``problem + machine -> plan``: :func:`plan_ag_gemm` decides once per shape, on the host, how a call
is launched; :func:`estimate` predicts its time and :func:`can_fuse` declines what would lose.
"""

from importlib.metadata import PackageNotFoundError, version

from kosmos_heuristics.ag_gemm import plan_ag_gemm
from kosmos_heuristics.curves import machine_from_measurement
from kosmos_heuristics.errors import HeuristicsError, MachineError, PlanError, ProblemError
from kosmos_heuristics.estimate import Decline, Estimate, can_fuse, estimate
from kosmos_heuristics.explain import Reason
from kosmos_heuristics.load import load_machine
from kosmos_heuristics.machine import Machine
from kosmos_heuristics.packaged import MACHINE_NAMES
from kosmos_heuristics.parts import Curve, TileShape
from kosmos_heuristics.plans import AgGemmPlan
from kosmos_heuristics.problems import AgGemmProblem

__all__ = [
    "MACHINE_NAMES",
    "AgGemmPlan",
    "AgGemmProblem",
    "Curve",
    "Decline",
    "Estimate",
    "HeuristicsError",
    "Machine",
    "MachineError",
    "PlanError",
    "ProblemError",
    "Reason",
    "TileShape",
    "__version__",
    "can_fuse",
    "estimate",
    "load_machine",
    "machine_from_measurement",
    "plan_ag_gemm",
]

try:
    __version__ = version("kosmos-heuristics")
except PackageNotFoundError:  # run from a source tree that is on the path but not installed
    __version__ = "0+source"
