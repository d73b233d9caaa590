"""Closed-form plans for fused communication + GEMM kernels, without torch or triton.

``problem + machine -> plan``: :func:`plan_ag_gemm` and its siblings decide once per shape, on the
host, how a call is launched; :func:`estimate` predicts its time and :func:`can_fuse` declines what
would lose.
"""

from importlib.metadata import PackageNotFoundError, version

from kosmos_heuristics.ag_gemm import plan_ag_gemm, plan_ag_gemm_pair
from kosmos_heuristics.bulk_plans import plan_bulk_ag, plan_bulk_rs
from kosmos_heuristics.curves import machine_from_measurement
from kosmos_heuristics.errors import HeuristicsError, MachineError, PlanError, ProblemError
from kosmos_heuristics.estimate import Decline, Estimate, can_fuse, estimate
from kosmos_heuristics.explain import Reason
from kosmos_heuristics.gemm_rs import plan_gemm_rs
from kosmos_heuristics.load import load_machine
from kosmos_heuristics.machine import Machine
from kosmos_heuristics.moe import plan_moe_backward, plan_moe_forward
from kosmos_heuristics.moe_plans import MoeBackwardPlan, MoeForwardPlan, MoePlan
from kosmos_heuristics.moe_problem import MoeProblem
from kosmos_heuristics.packaged import MACHINE_NAMES
from kosmos_heuristics.parts import Curve, TileShape
from kosmos_heuristics.plans import AgGemmPairPlan, AgGemmPlan
from kosmos_heuristics.problems import (
    AgGemmPairProblem,
    AgGemmProblem,
    BulkAgProblem,
    BulkRsProblem,
    GemmRsProblem,
    TpProblem,
)
from kosmos_heuristics.tp_plans import BulkAgPlan, BulkRsPlan, GemmRsPlan

__all__ = [
    "MACHINE_NAMES",
    "AgGemmPairPlan",
    "AgGemmPairProblem",
    "AgGemmPlan",
    "AgGemmProblem",
    "BulkAgPlan",
    "BulkAgProblem",
    "BulkRsPlan",
    "BulkRsProblem",
    "Curve",
    "Decline",
    "Estimate",
    "GemmRsPlan",
    "GemmRsProblem",
    "HeuristicsError",
    "Machine",
    "MachineError",
    "MoeBackwardPlan",
    "MoeForwardPlan",
    "MoePlan",
    "MoeProblem",
    "PlanError",
    "ProblemError",
    "Reason",
    "TileShape",
    "TpProblem",
    "__version__",
    "can_fuse",
    "estimate",
    "load_machine",
    "machine_from_measurement",
    "plan_ag_gemm",
    "plan_ag_gemm_pair",
    "plan_bulk_ag",
    "plan_bulk_rs",
    "plan_gemm_rs",
    "plan_moe_backward",
    "plan_moe_forward",
]

try:
    __version__ = version("kosmos-heuristics")
except PackageNotFoundError:  # run from a source tree that is on the path but not installed
    __version__ = "0+source"
