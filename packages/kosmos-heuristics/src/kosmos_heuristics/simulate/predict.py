"""Predictions for more GPUs than were measured: to be committed, and held against a run.

The TP+SP kernels take the crews of the plans that would run. Nothing of the paper is read but the
shapes and configurations; no time of any fused call went into the machine (``from_curves``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kosmos_heuristics.ag_gemm import plan_ag_gemm
from kosmos_heuristics.bulk_plans import plan_bulk_ag, plan_bulk_rs
from kosmos_heuristics.gemm_rs import plan_gemm_rs
from kosmos_heuristics.load import load_machine
from kosmos_heuristics.problems import (
    AgGemmProblem,
    BulkAgProblem,
    BulkRsProblem,
    GemmRsProblem,
)
from kosmos_heuristics.shapes import llama3
from kosmos_heuristics.simulate.model import SimMachine
from kosmos_heuristics.simulate.moe import MoeCase
from kosmos_heuristics.simulate.simulate import simulate, simulate_moe
from kosmos_heuristics.simulate.tables import MOE_MODELS, MOE_TOKENS, PAPER_SKEW
from kosmos_heuristics.simulate.tpsp import Case

SCHEMA = 1
# Kernel of the simulator: operation, layout, problem, planner and the plan's crew for each peer.
KERNELS: dict[str, tuple[str, str, Callable[..., Any], Callable[..., Any], str]] = {
    "ag_gemm_tn": ("ag_gemm", "tn", AgGemmProblem, plan_ag_gemm, "movers_per_peer"),
    "gemm_rs": ("gemm_rs", "tn", GemmRsProblem, plan_gemm_rs, "reducers_per_peer"),
    "ag_gemm_nn": ("ag_gemm", "nn", AgGemmProblem, plan_ag_gemm, "movers_per_peer"),
    "bulk_ag": ("bulk_ag", "nn", BulkAgProblem, plan_bulk_ag, "movers_per_peer"),
    "bulk_rs": ("bulk_rs", "nt", BulkRsProblem, plan_bulk_rs, "reducers_per_peer"),
}
Tick = Callable[[int, int], None]


def tp_cases(ranks: int, machine: str) -> list[tuple[str, Case]]:
    """The 24 shapes of each kernel in a group of so many ranks, with their plans' crews."""
    planned = load_machine(machine)
    cases = []
    for kernel, (op, layout, problem, planner, crew) in KERNELS.items():
        for shape in llama3(op, layout):
            given = {"layout": layout} if op == "ag_gemm" else {}
            plan = planner(problem(shape.m, shape.n, shape.k, ranks, **given), planned)
            case = Case(
                kernel, shape.m, shape.n, shape.k, world_size=ranks, crew=getattr(plan, crew)
            )
            cases.append((shape.name, case))
    return cases


def ep_cases(ranks: int) -> list[tuple[str, str, MoeCase]]:
    """The nine expert layers, balanced and skewed, with as many experts a rank as eight have."""
    cases = []
    for model, (hidden, inter, experts, topk) in MOE_MODELS.items():
        for routing in ("balanced", "skewed"):
            skew = min(PAPER_SKEW, float(ranks)) if routing == "skewed" else 1.0
            for direction in ("forward", "backward"):
                case = MoeCase(
                    direction, MOE_TOKENS, hidden, inter, experts * ranks // 8, topk,
                    world_size=ranks, skew=skew,
                )  # fmt: skip
                cases.append((model, routing, case))
    return cases


def predict_tp(cases: Sequence[tuple[str, Case]], machine: SimMachine) -> list[dict[str, Any]]:
    """Milliseconds of TP+SP calls, fused and unfused, and the bound."""
    rows = []
    for name, case in cases:
        found = simulate(case, machine)
        rows.append(
            {
                "kernel": case.kernel,
                "shape": name,
                **{key: getattr(case, key) for key in ("m", "n", "k", "world_size")},
                "movers": found.num_movers,
                "fused_ms": _short(found.time_ms),
                "unfused_ms": _short(found.baseline_ms),
                "bound_ms": _short(found.bound_ms),
            }
        )
    return rows


def predict_ep(
    cases: Sequence[tuple[str, str, MoeCase]],
    machine: SimMachine,
    tick: Tick = lambda done, total: None,
) -> list[dict[str, Any]]:
    """Milliseconds of expert layers, fused, and the bound."""
    rows = []
    for index, (model, routing, case) in enumerate(cases):
        found = simulate_moe(case, machine)
        rows.append(
            {
                "kernel": f"moe_{case.direction}",
                "model": model,
                "routing": routing,
                "skew": case.skew,
                "experts": case.experts,
                "fused_ms": _short(found.time_ms),
                "bound_ms": _short(found.bound_ms),
            }
        )
        tick(index + 1, len(cases))
    return rows


def _short(value: float | None) -> float | None:
    """Four figures: no prediction is better than that."""
    return None if value is None else float(f"{value:.4g}")
