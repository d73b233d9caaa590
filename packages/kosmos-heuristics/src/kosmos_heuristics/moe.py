"""Planning ``moe_forward`` and ``moe_backward``: problem and machine in, frozen plan out."""

from __future__ import annotations

from kosmos_heuristics.cap import MIN_CAP
from kosmos_heuristics.checks import check_int
from kosmos_heuristics.draft import NOT_PRINTED, TILE_FIELDS, Draft
from kosmos_heuristics.errors import PlanError
from kosmos_heuristics.machine import TRANSPORTS, Machine
from kosmos_heuristics.moe_crews import (
    CREW_MULTIPLE,
    Crew,
    backward_combine,
    backward_dispatch,
    choose_burst_depth,
    choose_column_input,
    forward_combine,
    forward_dispatch,
)
from kosmos_heuristics.moe_plans import MoeBackwardPlan, MoeForwardPlan
from kosmos_heuristics.moe_problem import MoeProblem
from kosmos_heuristics.plan_base import MOE_POLICIES, PUSH_ORDERS

OVERRIDES = (
    *TILE_FIELDS,
    "dispatch_crew",
    "combine_crew",
    "burst_depth",
    "router_block_m",
    "router_block_n",
)
# Paper section 3.4: the router's GEMM has only as many columns as there are experts.
ROUTER_TILE = {"mi350": (64, 128), "h200": (64, 128), "executor": (16, 32)}


def plan_moe_forward(
    problem: MoeProblem,
    machine: Machine,
    *,
    cap: int | None = None,
    smallest_cap: int | None = None,
    transport: str = "push",
    policy: str = "two_way",
    order: str = "destination_minor",
    **overrides: int,
) -> MoeForwardPlan:
    """Plan one MoE forward.

    Args:
        problem: Sizes of the layer.
        machine: The GPU and its node.
        cap: Most WGs that the grid may have; None means all that are resident. Crews are kept and
            builders shrink, as long as every mover runs beside a builder.
        smallest_cap: The smallest cap of any rank, to which the dispatch crew is fitted on all
            ranks; None means that all ranks have this one's.
        transport: ``push`` or ``pull``.
        policy: Switching of the combine, one of ``MOE_POLICIES``.
        order: Order of the push lists, ``destination_minor`` or ``destination_major``.
        **overrides: Any of ``OVERRIDES``, taken as given and validated.

    Returns:
        The plan; ``plan.explain()`` says why.

    Raises:
        PlanError: An argument is out of range, or an override has no such field.
    """
    draft = Draft(machine, overrides, OVERRIDES)
    grid = draft.set_cap(cap)
    column_input = _set_column_input(draft, problem)
    dispatch = forward_dispatch(problem, machine, column_input)
    combine = forward_combine(machine, grid)
    _set_crews(draft, dispatch, combine, grid, smallest_cap)
    _set_rest(draft, problem, transport, policy, order)
    return MoeForwardPlan(**draft.finish())


def plan_moe_backward(
    problem: MoeProblem,
    machine: Machine,
    *,
    cap: int | None = None,
    smallest_cap: int | None = None,
    transport: str = "push",
    policy: str = "two_way",
    order: str = "destination_minor",
    **overrides: int,
) -> MoeBackwardPlan:
    """Plan one MoE backward; arguments, result and errors as for ``plan_moe_forward``."""
    draft = Draft(machine, overrides, OVERRIDES)
    grid = draft.set_cap(cap)
    column_input = _set_column_input(draft, problem)
    dispatch = backward_dispatch(problem, machine, column_input)
    combine = backward_combine(problem, machine)
    _set_crews(draft, dispatch, combine, grid, smallest_cap)
    _set_rest(draft, problem, transport, policy, order)
    return MoeBackwardPlan(**draft.finish())


def fit_crew(wgs: int, cap: int) -> int:
    """A crew fitted to a cap: at most half of it, in multiples of 8 where there is room for one.

    Source: paper Table B.3, caption (reading A12).
    """
    most = cap // 2
    if wgs <= most:
        return wgs
    return most // CREW_MULTIPLE * CREW_MULTIPLE or most


def _set_column_input(draft: Draft, problem: MoeProblem) -> str:
    value, reason = choose_column_input(problem, draft.machine)
    draft.set("column_input", value, reason.rule, reason.source)
    return value


def _set_crews(
    draft: Draft, dispatch: Crew, combine: Crew, cap: int, smallest_cap: int | None
) -> None:
    fit_to = cap
    if smallest_cap is not None:
        remedy = "leave at least one mover and one builder on every rank"
        fit_to = min(cap, check_int(PlanError, "smallest_cap", smallest_cap, MIN_CAP, remedy))
    rules = []
    for name, crew, limit in (
        ("dispatch_crew", dispatch, fit_to),
        ("combine_crew", combine, cap),
    ):
        fitted, rule = fit_crew(crew.wgs, limit), crew.rule
        if fitted != crew.wgs:
            rule += f"; fitted to cap {limit}: {fitted} instead of {crew.wgs}"
            if limit != cap:
                rule += " (minimum over ranks)"
        source = f"{crew.source}; fit: Table B.3, caption (A4, A12)"
        given = draft.set(name, fitted, rule, source)
        rules.append(f"{name.split('_')[0]}: " + (rule if given == fitted else "given"))
    draft.values["rule"] = " | ".join(rules)


def _set_rest(draft: Draft, problem: MoeProblem, transport: str, policy: str, order: str) -> None:
    machine = draft.machine
    depth, reason = choose_burst_depth(problem, machine)
    draft.set("burst_depth", depth, reason.rule, reason.source)
    for name in TILE_FIELDS:
        draft.set(name, getattr(machine.tile, name), "default tile", machine.source("tiles"))
    for name, size in zip(
        ("router_block_m", "router_block_n"), ROUTER_TILE[machine.rule_set], strict=True
    ):
        draft.set(name, size, "router tile", "paper section 3.4")
    draft.set("split_k", 1, "not in Table B.3 for MoE: whole tiles", NOT_PRINTED)
    draft.set_no_bucketing()
    pushed = "push: slightly faster than pull at EP 8"
    draft.choose("transport", transport, "push", TRANSPORTS, pushed, "paper Table A.7")
    two_way = "combine traffic is interleaved with the GEMMs"
    draft.choose("policy", policy, "two_way", MOE_POLICIES, two_way, "paper Table 2")
    minor = "consecutive movers push to different GPUs"
    draft.choose(
        "order", order, "destination_minor", PUSH_ORDERS, minor, "paper section 3.3.1, Table 1"
    )
