"""Planning ``ag_gemm``: problem and machine in, frozen plan out, in closed form."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kosmos_heuristics.cap import fit_movers, resolve_cap
from kosmos_heuristics.checks import check_choice, check_int
from kosmos_heuristics.errors import PlanError
from kosmos_heuristics.explain import Reason, given
from kosmos_heuristics.machine import TRANSPORTS, Machine
from kosmos_heuristics.movers import FIXED_MOVERS_PER_PEER, MoverChoice, ag_gemm_movers
from kosmos_heuristics.plans import (
    ORDERS,
    POLICIES,
    AgGemmPairPlan,
    AgGemmPlan,
    check_field,
)
from kosmos_heuristics.problems import AgGemmPairProblem, AgGemmProblem
from kosmos_heuristics.tiles import (
    choose_claim_run,
    choose_copy_depth,
    choose_groups,
    choose_slices,
    choose_split_k,
    choose_tile,
    choose_xcd_bucketing,
    copy_step_elements,
    tile_ids,
)

TILE_FIELDS = ("block_m", "block_n", "block_k", "num_warps", "num_stages")
OVERRIDES = (
    *TILE_FIELDS,
    "tile_row_rows",
    "slices",
    "group_m",
    "group_rows",
    "split_tiles",
    "claim_run",
    "xcd_bucketing",
    "num_xcds",
    "copy_elements",
    "copy_depth",
)


def plan_ag_gemm(
    problem: AgGemmProblem,
    machine: Machine,
    *,
    cap: int | None = None,
    transport: str | None = None,
    policy: str = "one_way",
    order: str = "local_first",
    movers_per_peer: int | None = None,
    split_k: int | None = None,
    **overrides: int,
) -> AgGemmPlan:
    """Plan one ``ag_gemm`` call. The same arguments give the same plan on every rank.

    Args:
        problem: Sizes of the call.
        machine: The GPU and its node.
        cap: Most WGs that the grid may have; None means all that are resident.
        transport: ``pull`` or ``push``; None means the machine's.
        policy: ``one_way`` (movers become builders), ``two_way``, ``fixed`` (8 movers per peer
            unless given, roles kept) or ``serial`` (gather first, then the GEMM).
        order: Queue order, ``local_first``, ``chunk_major`` or ``naive``.
        movers_per_peer: Movers for each remote peer, still fitted to the cap.
        split_k: Contraction splits, a power of two up to 8, of all tiles unless ``split_tiles`` is
            given too.
        **overrides: Any of ``OVERRIDES``, taken as given and validated.

    Returns:
        The plan; ``plan.explain()`` says why.

    Raises:
        PlanError: An argument is out of range, or an override has no such field.
    """
    check_choice(PlanError, "policy", policy, POLICIES, "choose a policy")
    check_choice(PlanError, "order", order, ORDERS, "choose an order")
    for name, value in overrides.items():
        if name not in OVERRIDES:
            wanted = "one of " + ", ".join(OVERRIDES)
            raise PlanError("override", name, wanted, "check the name")
        check_field(name, value)
    grid = resolve_cap(cap, machine.num_wgs)
    reasons = [
        Reason("cap", "all resident WGs", machine.source("num_wgs"))
        if cap is None
        else given("cap"),
        Reason("policy", "demand of a gather is monotonic", "paper Table 2")
        if policy == "one_way"
        else given("policy"),
        Reason("order", "local tiles first, then peers in gather order", "paper Table A.2")
        if order == "local_first"
        else given("order"),
    ]
    way, reason = _choose_transport(machine, transport)
    reasons.append(reason)

    crew = _choose_crew(problem, machine, way, policy, movers_per_peer)
    fitted, num_movers = fit_movers(crew.movers_per_peer, problem.num_peers, grid)
    rule = crew.rule
    if fitted != crew.movers_per_peer:
        rule += f"; fitted to cap {grid}: {fitted} instead of {crew.movers_per_peer}"
    reasons.append(Reason("movers_per_peer", rule, crew.source))
    fit = "movers_per_peer x peers, at most half the cap"
    reasons.append(Reason("num_movers", fit, "paper Table B.3, caption (reading A12)"))

    tile, reason = choose_tile(problem, machine, grid)
    reasons.append(reason)
    for name in TILE_FIELDS:
        if name != "block_n":
            reasons.append(Reason(name, "goes with block_n", machine.source("tiles")))
    # What follows counts the tiles that the call really has.
    tile = replace(tile, **{name: overrides[name] for name in TILE_FIELDS if name in overrides})
    tile_row_rows = overrides.get("tile_row_rows", machine.tile_row_rows)
    reasons.append(Reason("tile_row_rows", "the machine's", machine.source("tile_row_rows")))
    ids = tile_ids(problem, tile, tile_row_rows, order)

    if split_k is None:
        splits, split_tiles, both = choose_split_k(
            problem, machine, tile, ids, way, num_movers, grid
        )
    else:
        check_field("split_k", split_k)
        splits, split_tiles = (split_k, ids) if split_k > 1 and ids else (1, 0)
        both = (given("split_k"), Reason("split_tiles", "all tiles", "follows a given split_k"))
    reasons.extend(both)
    claim_run, reason = choose_claim_run(machine, ids - split_tiles, grid)
    reasons.append(reason)
    bucketing, reason = choose_xcd_bucketing(problem, machine)
    reasons.append(reason)
    # The override of the switch alone means the machine's own XCDs.
    num_xcds = machine.num_xcds if overrides.get("xcd_bucketing", bucketing) else 1
    rule_xcds = "the machine's with xcd_bucketing"
    reasons.append(Reason("num_xcds", rule_xcds, machine.source("num_xcds")))
    group_m, group_rows, both = choose_groups(problem, machine, tile, tile_row_rows, way)
    reasons.extend(both)

    copy_elements = overrides.get("copy_elements", copy_step_elements(problem, machine, way))
    reasons.append(Reason("copy_elements", "step of the measured curve", machine.source(way)))
    copy_depth, reason = choose_copy_depth(machine, way, problem.dtype)
    reasons.append(reason)
    slices, reason = choose_slices(
        problem, machine, tile_row_rows, copy_elements, crew.movers_per_peer
    )
    reasons.append(reason)

    chosen: dict[str, Any] = {
        **{name: getattr(tile, name) for name in TILE_FIELDS},
        "tile_row_rows": tile_row_rows,
        "slices": slices,
        "group_m": group_m,
        "group_rows": group_rows,
        "split_tiles": split_tiles,
        "claim_run": claim_run,
        "xcd_bucketing": bucketing,
        "num_xcds": num_xcds,
        "copy_elements": copy_elements,
        "copy_depth": copy_depth,
        **overrides,
    }
    final = [given(item.field) if item.field in overrides else item for item in reasons]
    return AgGemmPlan(
        cap=grid,
        movers_per_peer=fitted,
        num_movers=num_movers,
        split_k=splits,
        transport=way,
        policy=policy,
        order=order,
        rule=rule,
        reasons=tuple(final),
        **chosen,
    )


def plan_ag_gemm_pair(
    problem: AgGemmPairProblem,
    machine: Machine,
    *,
    cap: int | None = None,
    transport: str | None = None,
    policy: str = "one_way",
    order: str = "local_first",
    movers_per_peer: int | None = None,
    **overrides: int,
) -> AgGemmPairPlan:
    """Plan one ``ag_gemm_pair`` call: as ``ag_gemm`` with both copies' bytes and both GEMMs' work.

    Arguments and errors as for ``plan_ag_gemm``; tiles are not split.
    """
    plan = plan_ag_gemm(
        problem,
        machine,
        cap=cap,
        transport=transport,
        policy=policy,
        order=order,
        movers_per_peer=movers_per_peer,
        **overrides,
    )
    return AgGemmPairPlan(**vars(plan))


def _choose_transport(machine: Machine, transport: str | None) -> tuple[str, Reason]:
    if transport is not None:
        check_choice(PlanError, "transport", transport, TRANSPORTS, "choose a transport")
        return transport, given("transport")
    rule = f"the machine's: {machine.transport}"
    return machine.transport, Reason("transport", rule, machine.source("transport"))


def _choose_crew(
    problem: AgGemmProblem,
    machine: Machine,
    transport: str,
    policy: str,
    movers_per_peer: int | None,
) -> MoverChoice:
    if movers_per_peer is not None:
        least = 0 if problem.num_peers == 0 else 1
        check_int(PlanError, "movers_per_peer", movers_per_peer, least, "pass a crew of at least 1")
        reason = given("movers_per_peer")
        return MoverChoice(movers_per_peer if problem.num_peers else 0, reason.rule, reason.source)
    if policy == "fixed" and problem.num_peers and machine.rule_set != "executor":
        why = f"policy fixed: {FIXED_MOVERS_PER_PEER} WGs per peer"
        return MoverChoice(FIXED_MOVERS_PER_PEER, why, "paper Figures A.2 and A.3")
    return ag_gemm_movers(problem, machine, transport)
