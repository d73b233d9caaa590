"""Planning ``bulk_ag`` and ``bulk_rs``: problem and machine in, frozen plan out."""

from __future__ import annotations

from kosmos_heuristics.bulk import bulk_ag_movers, bulk_rs_reducers
from kosmos_heuristics.draft import TILE_FIELDS, Draft, crew_given
from kosmos_heuristics.gemm_rs import UNIT_ROWS, set_unit
from kosmos_heuristics.machine import TRANSPORTS, Machine
from kosmos_heuristics.parts import TileShape
from kosmos_heuristics.problems import (
    MX_BLOCK,
    BulkAgProblem,
    BulkRsProblem,
    TpProblem,
    wire_bytes,
)
from kosmos_heuristics.reducers import saturating_reducers
from kosmos_heuristics.tiles import (
    FULL_WAVE,
    GROUP_M,
    GROUP_M_H200,
    RULES_SOURCE,
    SPLIT_K_FACTORS,
    SPLIT_MIN_K,
    TAIL_SPLIT_K,
    UNIT_BYTES,
    choose_claim_run,
    choose_copy_depth,
    copy_step_elements,
    fit_split,
    paper_split_k,
    tile_grid,
)
from kosmos_heuristics.tp_plans import BulkAgPlan, BulkRsPlan

_COMMON = (
    *TILE_FIELDS,
    "group_m",
    "unit_rows",
    "split_tiles",
    "claim_run",
    "xcd_bucketing",
    "num_xcds",
)
AG_OVERRIDES = (*_COMMON, "copy_elements", "copy_depth")
RS_OVERRIDES = (
    *_COMMON,
    "max_movers",
    "unit_cols",
    "source_unroll",
    "copy_elements",
    "copy_depth",
)
# Paper, Table B.3 row 12: the one factor of bulk RS and the most tiles that have it.
B3_BULK_RS_FACTORS = (4,)
B3_BULK_RS_MAX_TILES = 64
_EXTRAPOLATED = (
    f"{RULES_SOURCE}, fitted to ag_gemm; not measured for bulk operations (extrapolated)"
)


def plan_bulk_ag(
    problem: BulkAgProblem,
    machine: Machine,
    *,
    cap: int | None = None,
    transport: str | None = None,
    policy: str = "one_way",
    movers_per_peer: int | None = None,
    split_k: int | None = None,
    **overrides: int,
) -> BulkAgPlan:
    """Plan one ``bulk_ag`` call. The same arguments give the same plan on every rank.

    Args:
        problem: Sizes of the call.
        machine: The GPU and its node.
        cap: Most WGs that the grid may have; None means all that are resident.
        transport: ``pull`` or ``push``; None means the machine's.
        policy: ``one_way`` (movers become builders and the reverse, when their queue is empty),
            ``two_way``, ``fixed`` (8 per peer unless given) or ``serial``.
        movers_per_peer: Movers for each remote peer, still fitted to the cap.
        split_k: Contraction splits of all tiles, a power of two up to 8.
        **overrides: Any of ``AG_OVERRIDES``, taken as given and validated.

    Returns:
        The plan; ``plan.explain()`` says why.

    Raises:
        PlanError: An argument is out of range, or an override has no such field.
    """
    draft = Draft(machine, overrides, AG_OVERRIDES)
    grid = draft.set_cap(cap)
    draft.set_policy(policy)
    way = draft.set_transport(transport)
    crew = crew_given(problem, policy, machine, movers_per_peer, "movers_per_peer")
    if crew is None:
        crew = bulk_ag_movers(problem, machine, way)
    draft.set_crew("movers_per_peer", problem, crew, grid)
    tile = draft.set_tile(problem, grid)
    _set_sweep(draft)
    _set_copies(draft, problem, way)
    _set_queue(draft, problem, tile, grid, split_k)
    return BulkAgPlan(**draft.finish())


def plan_bulk_rs(
    problem: BulkRsProblem,
    machine: Machine,
    *,
    cap: int | None = None,
    transport: str = "pull",
    policy: str = "one_way",
    reducers_per_peer: int | None = None,
    split_k: int | None = None,
    **overrides: int,
) -> BulkRsPlan:
    """Plan one ``bulk_rs`` call. The same arguments give the same plan on every rank.

    Args:
        problem: Sizes of the call; the tokens are its ``k``.
        machine: The GPU and its node.
        cap: Most WGs that the grid may have; None means all that are resident. Builders and
            reducers shrink in proportion.
        transport: ``pull`` (reducers fetch what every rank has of the rows) or ``push`` (they send
            it to the owner of the rows first, where it need not lie in symmetric memory).
        policy: As for ``plan_bulk_ag``.
        reducers_per_peer: Reducers for each remote peer, still fitted to the cap.
        split_k: Contraction splits of all tiles, a power of two up to 8.
        **overrides: Any of ``RS_OVERRIDES``, taken as given and validated.

    Returns:
        The plan; ``plan.explain()`` says why.

    Raises:
        PlanError: An argument is out of range, or an override has no such field.
    """
    draft = Draft(machine, overrides, RS_OVERRIDES)
    grid = draft.set_cap(cap)
    draft.set_policy(policy)
    rule = "pulled: the input is complete before the call"
    draft.choose("transport", transport, "pull", TRANSPORTS, rule, "paper section 3.2.3")
    crew = crew_given(problem, policy, machine, reducers_per_peer, "reducers_per_peer")
    if crew is None:
        crew = bulk_rs_reducers(problem, machine, grid)
    draft.set_crew("reducers_per_peer", problem, crew, grid)
    # Rows cross the link either way, whoever adds them up.
    most = max(draft.values["num_movers"], saturating_reducers(problem, machine, "pull", grid))
    if policy == "fixed":
        most = draft.values["num_movers"]
    saturation = "builders join up to saturation: 8 per peer on a mesh, else all"
    draft.set("max_movers", most, saturation, "paper section 3.2.3 and Table A.4")
    tile = draft.set_tile(problem, grid)
    _set_sweep(draft)
    set_unit(draft, problem, UNIT_ROWS)
    _set_steps(draft, problem, "push")
    _set_queue(draft, problem, tile, grid, split_k)
    return BulkRsPlan(**draft.finish())


def _set_sweep(draft: Draft) -> None:
    group_m = {"executor": 2, "h200": GROUP_M_H200}.get(draft.machine.rule_set, GROUP_M)
    rule = f"{group_m} row blocks a column"
    draft.set("group_m", group_m, rule, "L2 reuse of a wave of tiles")


def _set_copies(draft: Draft, problem: BulkAgProblem, way: str) -> None:
    machine = draft.machine
    row_bytes = max(1, wire_bytes(problem.n, problem.dtype))
    # Groups of a column-wise copy are moved whole.
    least = MX_BLOCK if problem.dtype == "mxfp8" else 1
    rows = max(machine.tile_row_rows, least)
    while rows > least and rows * row_bytes > 2 * UNIT_BYTES:
        rows //= 2
    rule = f"power of two, at most {UNIT_BYTES >> 9} KiB or a tile row: nothing waits for a unit"
    draft.set("unit_rows", rows, rule, _EXTRAPOLATED)
    _set_steps(draft, problem, way)


def _set_steps(draft: Draft, problem: TpProblem, way: str) -> None:
    machine = draft.machine
    elements = copy_step_elements(problem, machine, way)
    draft.set("copy_elements", elements, "step of the measured curve", machine.source(way))
    depth, why = choose_copy_depth(machine, way, problem.dtype)
    draft.set("copy_depth", depth, why.rule, why.source)


def _set_queue(
    draft: Draft, problem: TpProblem, tile: TileShape, cap: int, split_k: int | None
) -> None:
    machine = draft.machine
    ids = tile_grid(problem, tile.block_m, tile.block_n)
    factors, split_tiles, why, source = _split(problem, machine, ids, cap)
    by_rule = fit_split(problem, machine, tile, ids, factors, split_tiles, why, source)
    draft.set_split(split_k, ids, by_rule)
    run, reason = choose_claim_run(machine, ids, cap)
    draft.set("claim_run", run, reason.rule, reason.source)
    draft.set_no_bucketing()


def _split(
    problem: TpProblem, machine: Machine, ids: int, cap: int
) -> tuple[tuple[int, ...], int, str, str]:
    """``(factors to try, tiles to split, rule, source)``."""
    if machine.rule_set == "executor":
        return (), 0, "no split on the executor", machine.source("rule_set")
    if machine.rule_set == "mi350":
        rs = isinstance(problem, BulkRsProblem)
        factors, why = paper_split_k(
            problem,
            machine,
            12 if rs else 11,
            B3_BULK_RS_FACTORS if rs else SPLIT_K_FACTORS,
            B3_BULK_RS_MAX_TILES if rs else None,
        )
        return factors, ids, why, "paper Table B.3, reading A8 (a)"
    tail = cap // TAIL_SPLIT_K
    if ids <= tail:
        few = SPLIT_K_FACTORS if ids <= cap // SPLIT_K_FACTORS[0] else (TAIL_SPLIT_K,)
        return few, ids, "few tiles", _EXTRAPOLATED
    if problem.k < SPLIT_MIN_K:
        return (), 0, f"k {problem.k} < {SPLIT_MIN_K}: whole tiles", _EXTRAPOLATED
    last = ids / cap % 1.0
    if 0 < last <= FULL_WAVE:
        return (TAIL_SPLIT_K,), tail, f"last wave {last:.2f} full", _EXTRAPOLATED
    return (), 0, f"last wave {last:.2f} full: whole tiles", _EXTRAPOLATED
