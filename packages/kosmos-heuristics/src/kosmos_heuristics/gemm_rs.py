"""Planning ``gemm_rs``: problem and machine in, frozen plan out, in closed form."""

from __future__ import annotations

from kosmos_heuristics.checks import cdiv
from kosmos_heuristics.draft import NOT_PRINTED, TILE_FIELDS, Draft, crew_given
from kosmos_heuristics.explain import Reason
from kosmos_heuristics.machine import Machine
from kosmos_heuristics.plan_base import RS_ORDERS
from kosmos_heuristics.problems import GemmRsProblem, TpProblem
from kosmos_heuristics.reducers import gemm_rs_reducers, saturating_reducers
from kosmos_heuristics.tp_plans import GemmRsPlan

OVERRIDES = (
    *TILE_FIELDS,
    "max_movers",
    "band_rows",
    "unit_rows",
    "unit_cols",
    "source_unroll",
    "split_tiles",
    "claim_run",
    "xcd_bucketing",
    "num_xcds",
)
# A band of all chunks is so many waves of the whole device's WGs, at least: shorter bands let
# reducers start sooner, but the last tiles of a band wait for one another.
BAND_WAVES = 1
# A band is at most so many tile rows: later bands would all be one.
MAX_BAND_TILE_ROWS = 4
# A reducer's unit, rows x columns: what one step of 8 waves holds in FP32 without spilling. On
# NVIDIA wider, since units of 8 KiB a source are latency-bound (docs/decisions/0004).
UNIT_ROWS = 16
UNIT_COLS = {"mi350": 256, "h200": 1024, "executor": 32}
SOURCE_UNROLL = {"mi350": 4, "h200": 2, "executor": 2}
PUSH_SOURCE = (
    "early gemm_rs kernel on 2 H200 GPUs: 1.43x over the unfused path pushed, 1.32x pulled "
    "(docs/decisions/0004-paper-rules.md)"
)


def plan_gemm_rs(
    problem: GemmRsProblem,
    machine: Machine,
    *,
    cap: int | None = None,
    transport: str | None = None,
    policy: str = "one_way",
    order: str = "band_major",
    reducers_per_peer: int | None = None,
    split_k: int | None = None,
    **overrides: int,
) -> GemmRsPlan:
    """Plan one ``gemm_rs`` call. The same arguments give the same plan on every rank.

    Args:
        problem: Sizes of the call.
        machine: The GPU and its node.
        cap: Most WGs that the grid may have; None means all that are resident. Builders and
            reducers shrink in proportion.
        transport: ``pull`` or ``push``; None means the machine's.
        policy: ``one_way`` (builders become reducers), ``two_way``, ``fixed`` (8 reducers per peer
            unless given, roles kept) or ``serial`` (GEMM first, then the reduction).
        order: ``band_major`` or ``row_major``.
        reducers_per_peer: Reducers for each remote peer, still fitted to the cap.
        split_k: Contraction splits of all tiles, a power of two up to 8.
        **overrides: Any of ``OVERRIDES``, taken as given and validated.

    Returns:
        The plan; ``plan.explain()`` says why.

    Raises:
        PlanError: An argument is out of range, or an override has no such field.
    """
    draft = Draft(machine, overrides, OVERRIDES)
    grid = draft.set_cap(cap)
    draft.set_policy(policy)
    why = "every rank's reducers start after one step"
    draft.choose("order", order, "band_major", RS_ORDERS, why, "paper Table A.3")
    way = draft.set_transport(transport, PUSH_SOURCE if machine.rule_set == "h200" else None)

    crew = crew_given(problem, policy, machine, reducers_per_peer, "reducers_per_peer")
    if crew is None:
        crew = gemm_rs_reducers(problem, machine, way, grid)
    draft.set_crew("reducers_per_peer", problem, crew, grid)
    most = max(draft.values["num_movers"], saturating_reducers(problem, machine, way, grid))
    if policy == "fixed":
        most = draft.values["num_movers"]
    saturation = "builders join up to saturation: 8 per peer on a mesh, else all"
    draft.set("max_movers", most, saturation, "paper section 3.2.2 and Table A.4")

    # Not by the cap, which may differ between ranks: an owner counts the tiles of every source.
    tile = draft.set_tile(problem, machine.num_wgs)
    band, rule = _band_rows(problem, machine, tile.block_m, tile.block_n)
    draft.set("band_rows", band, rule, f"paper section 3.1.1; size: {NOT_PRINTED}")
    set_unit(draft, problem, min(UNIT_ROWS, band))
    # The queue numbers whole tile rows of every owner.
    tile_rows = cdiv(problem.chunk_rows, machine.tile_row_rows) if problem.m else 0
    per_row = max(1, machine.tile_row_rows // tile.block_m) * cdiv(problem.n, tile.block_n)
    ids = problem.world_size * tile_rows * per_row
    whole = "not in Table B.3 for GEMM+RS: whole tiles"
    unsplit = (Reason("split_k", whole, NOT_PRINTED), Reason("split_tiles", whole, NOT_PRINTED))
    draft.set_split(split_k, ids, (1, 0, unsplit))
    one = "one tile a claim: a run would hold back the tiles that reducers wait for"
    draft.set("claim_run", 1, one, "paper section 3.1.1")
    draft.set_no_bucketing()
    return GemmRsPlan(**draft.finish())


def set_unit(draft: Draft, problem: TpProblem, rows: int) -> None:
    """Set a reducer's unit: so many rows by a power of two of columns, and the sources unrolled."""
    rule_set = draft.machine.rule_set
    cols = UNIT_COLS[rule_set]
    while cols > 16 and cols >= 2 * problem.n:
        cols //= 2
    source = NOT_PRINTED if rule_set != "h200" else f"{PUSH_SOURCE}: 16 x 1024"
    rule = f"what a step sums in registers, at most {UNIT_COLS[rule_set]} columns"
    draft.set("unit_rows", rows, rule, source)
    draft.set("unit_cols", cols, rule, source)
    unroll = SOURCE_UNROLL[rule_set]
    while unroll > 1 and unroll > problem.world_size:
        unroll //= 2
    why = f"loads of {SOURCE_UNROLL[rule_set]} sources in flight, at most all"
    draft.set("source_unroll", unroll, why, NOT_PRINTED)


def _band_rows(
    problem: GemmRsProblem, machine: Machine, block_m: int, block_n: int
) -> tuple[int, str]:
    """Rows of a band: the fewest tile rows that give every WG of the device a tile a step.

    The cap plays no part: ranks with different caps have to agree on the band.
    """
    unit = max(machine.tile_row_rows, block_m)
    per_tile_row = problem.world_size * (unit // block_m) * -(-problem.n // block_n)
    wanted = -(-BAND_WAVES * machine.num_wgs // per_tile_row)
    in_chunk = max(1, -(-problem.chunk_rows // unit))
    tile_rows = min(wanted, in_chunk, MAX_BAND_TILE_ROWS)
    rule = (
        f"{tile_rows} tile rows of {unit}: {tile_rows * per_tile_row} tiles a step for "
        f"{machine.num_wgs} WGs"
    )
    return tile_rows * unit, rule
