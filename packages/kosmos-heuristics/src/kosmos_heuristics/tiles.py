"""Tile shape, split-K, claims, XCD bucketing, sweep groups and mover slices of ``ag_gemm``."""

from __future__ import annotations

from kosmos_heuristics.checks import cdiv
from kosmos_heuristics.explain import Reason
from kosmos_heuristics.machine import Machine
from kosmos_heuristics.movers import SATURATING_CREW, gather_ms, gemm_ms
from kosmos_heuristics.parts import TileShape
from kosmos_heuristics.problems import (
    DTYPE_BYTES,
    AgGemmPairProblem,
    AgGemmProblem,
    TpProblem,
    wire_bytes,
)

# The paper's tile; its rules count these tiles, whatever tile the kernel is compiled for.
PAPER_TILE = 256
FP32_BYTES = 4
# Paper, Table B.3 row 11: the factors that are tried, largest first.
SPLIT_K_FACTORS = (4, 2)
# Paper, Table B.3 row 13.
XCD_MAX_TILES = 1024
XCD_MIN_TILE_ROWS = 5

# The constants below were fitted on two H200s (docs/decisions/0003-h200-rules.md).
# The last tiles are split this many ways: the second part to finish adds the first to its own.
TAIL_SPLIT_K = 2
# A last wave fuller than this is not split: halves would fill the grid more than once.
FULL_WAVE = 0.5
# Beside a gather the tails of the workgroups differ anyway, as movers become builders at their own
# time: what is left pays for the partials only where a tile takes as long as with this k.
SPLIT_MIN_K = 16384
# Tiles of a builder's first claim, the largest run that leaves two waves to single claims: the
# stores of a run overlap its next tiles, and the last tiles decide who finishes last.
CLAIM_RUNS = (8, 4, 2)
WAVES_OF_SINGLES = 2
# A smaller tile shape is considered while the default one fills the grid fewer times than this:
# beyond, the part of the last wave that idles is a few percent and the larger tile is faster.
FEW_WAVES = 2.0
# Row blocks swept together per column: of the 132 tiles in flight, 16 x 128 rows by 8 x 256 columns
# have the fewest operand bytes (the paper's rule set and small tiles: half as many rows).
GROUP_M = 8
GROUP_M_H200 = 16
# A mover's unit is this large or up to twice as large: its claim and its flag cost as much as 60 KB
# of transport.
UNIT_BYTES = 256 * 1024
# A larger step spills registers in kernels that split the contraction (compile guard, sm_90).
MAX_STEP_BYTES = 32 * 1024
# Steps that a mover reads ahead. What it pulls over a link is late more than registers can bridge.
COPY_DEPTH = 2
PULLED_COPY_DEPTH = 3
# Tile rows are swept together only where the gather runs well ahead of the builders: the GEMM
# takes at least this many times as long as the bytes.
SWEEP_AHEAD = 4.0
RULES_SOURCE = "docs/decisions/0003-h200-rules.md"


def tile_grid(problem: TpProblem, block_m: int, block_n: int) -> int:
    """Output tiles, ragged ones included.

    Each rank's chunk is tiled by itself, except in bulk operations: their GEMM has no chunks.
    """
    chunks = problem.world_size if problem.CHUNKED else 1
    return chunks * cdiv(problem.m // chunks, block_m) * cdiv(problem.n, block_n)


def tile_ids(problem: AgGemmProblem, tile: TileShape, tile_row_rows: int, order: str) -> int:
    """Ids in the tile queue, as ``orders.TileQueue`` numbers them.

    Remote chunks count whole tile rows, the own chunk its row blocks (``naive``: tile rows too).
    """
    per_tile_row = max(1, tile_row_rows // tile.block_m)
    padded = cdiv(problem.chunk_rows, tile_row_rows) * per_tile_row
    own = padded if order == "naive" else cdiv(problem.chunk_rows, tile.block_m)
    return (own + problem.num_peers * padded) * cdiv(problem.n, tile.block_n)


def paper_tiles(problem: TpProblem) -> tuple[int, int]:
    """``(tiles, tile rows)`` as Table B.3 counts them: 256 x 256, over all ranks."""
    rows = cdiv(problem.m, PAPER_TILE)
    return rows * cdiv(problem.n, PAPER_TILE), rows


def choose_tile(problem: TpProblem, machine: Machine, cap: int) -> tuple[TileShape, Reason]:
    """The tile shape that fills the grid best, the default one unless the shape has few tiles."""
    default = machine.tile
    waves = tile_grid(problem, default.block_m, default.block_n) / cap
    source = machine.source("tiles")
    if waves >= FEW_WAVES or len(machine.tiles) == 1 or problem.m == 0:
        return default, Reason("block_n", f"default tile ({waves:.1f} waves)", source)

    def cost(tile: TileShape) -> float:
        rounds = cdiv(tile_grid(problem, tile.block_m, tile.block_n), cap)
        return rounds * tile.block_m * tile.block_n / tile.efficiency

    best = min(machine.tiles, key=cost)
    rule = f"few tiles ({waves:.1f} waves of the default tile): least time by whole waves"
    return best, Reason("block_n", rule, source)


def choose_split_k(
    problem: AgGemmProblem,
    machine: Machine,
    tile: TileShape,
    ids: int,
    transport: str,
    crew: int,
    cap: int,
) -> tuple[int, int, tuple[Reason, Reason]]:
    """``(split_k, split_tiles)``: how many parts, and how many tiles at the queue's end have them.

    All partials together fit the machine's workspace bound, and each part has a step of the
    contraction or more. Without such a split, ``(1, 0)``.

    Args:
        problem: Sizes of the call.
        machine: The GPU and its node.
        tile: Tile shape of the plan.
        ids: Ids in the tile queue.
        transport: ``pull`` or ``push``.
        crew: Movers, fitted to the cap.
        cap: WGs in the grid.
    """
    if machine.rule_set == "mi350":
        factors, split_tiles, why = _paper_split(problem, machine, ids)
        source = "paper Table B.3, reading A8 (a)"
    elif machine.rule_set == "h200":
        factors, split_tiles, why = _tail_split(problem, machine, ids, transport, crew, cap)
        source = RULES_SOURCE
    else:
        factors, split_tiles, why = (), 0, "no split on the executor"
        source = machine.source("rule_set")
    return fit_split(problem, machine, tile, ids, factors, split_tiles, why, source)


def fit_split(
    problem: TpProblem,
    machine: Machine,
    tile: TileShape,
    ids: int,
    factors: tuple[int, ...],
    split_tiles: int,
    why: str,
    source: str,
) -> tuple[int, int, tuple[Reason, Reason]]:
    """The first factor whose partials fit and whose parts hold a step of the contraction.

    Args:
        problem: Sizes of the call.
        machine: The GPU and its node.
        tile: Tile shape of the plan.
        ids: Ids in the tile queue.
        factors: Factors to try, in this order.
        split_tiles: Tiles at the end of the queue to split.
        why: The rule that wants them split.
        source: Its source.
    """
    for factor in factors if split_tiles else ():
        partial_bytes = factor * split_tiles * tile.block_m * tile.block_n * FP32_BYTES
        if partial_bytes <= machine.max_split_k_bytes and problem.k >= factor * tile.block_k:
            which = f"{why}: the last {split_tiles} of {ids} tiles in {factor} parts"
            return factor, split_tiles, _split_reasons(which, source)
    if factors and split_tiles:
        why += ": the queue's partials do not fit, or k is short"
    return 1, 0, _split_reasons(why, source)


def _split_reasons(rule: str, source: str) -> tuple[Reason, Reason]:
    return Reason("split_k", rule, source), Reason("split_tiles", rule, source)


def paper_split_k(
    problem: TpProblem, machine: Machine, row: int, candidates: tuple[int, ...], most: int | None
) -> tuple[tuple[int, ...], str]:
    """``(factors that fit, rule)`` of Table B.3, row 11 or 12.

    Args:
        problem: Sizes of the call.
        machine: The GPU and its node.
        row: Row of the table, for the rule's text.
        candidates: Factors, largest first.
        most: Most tiles that are split; None for no bound but the workspace.
    """
    if problem.dtype == "mxfp8":
        return (), f"B.3 row {row}: MXFP8 is not split"
    tiles, _ = paper_tiles(problem)
    if most is not None and tiles > most:
        return (), f"B.3 row {row}: {tiles} tiles, more than {most}"
    bytes_per_part = tiles * PAPER_TILE * PAPER_TILE * FP32_BYTES
    factors = tuple(f for f in candidates if f * bytes_per_part <= machine.max_split_k_bytes)
    verdict = f"{'fit' if factors else 'do not fit'} {machine.max_split_k_bytes >> 20} MiB"
    tried = (factors or candidates[-1:])[0]
    return factors, f"B.3 row {row}: {tried} partials of {tiles} tiles {verdict}"


def _paper_split(
    problem: AgGemmProblem, machine: Machine, ids: int
) -> tuple[tuple[int, ...], int, str]:
    """``(factors to try, tiles to split, rule)``: all tiles, where the paper's partials fit."""
    if problem.layout != "nn":
        return (), 0, "B.3 row 11 covers the row dgrad only"
    factors, rule = paper_split_k(problem, machine, 11, SPLIT_K_FACTORS, None)
    return factors, ids, rule


def _tail_split(
    problem: AgGemmProblem, machine: Machine, ids: int, transport: str, crew: int, cap: int
) -> tuple[tuple[int, ...], int, str]:
    """``(factors to try, tiles to split, rule)``: the tiles that end the call.

    Few tiles are all split, so that they fill the grid. Else at most as many as fill it with their
    parts: nothing can overlap what follows the last arrival, so where the gather is the longer side
    the tiles behind it are halved. Where the GEMM is, that pays only if the last wave is not nearly
    full anyway.
    """
    if isinstance(problem, AgGemmPairProblem):
        return (), 0, "the weight gradient's tiles follow: whole tiles"
    tail = cap // TAIL_SPLIT_K
    if ids <= tail:
        most = cap // SPLIT_K_FACTORS[0]
        return SPLIT_K_FACTORS if ids <= most else (TAIL_SPLIT_K,), ids, "few tiles"
    gather, gemm = gather_ms(problem, machine, transport, crew), gemm_ms(problem, machine)
    if gather >= gemm:
        return (TAIL_SPLIT_K,), tail, "the gather is the longer side"
    # The share of the grid that gathers instead of building lengthens the queue.
    waves = ids / cap * (1.0 + crew * gather / (gemm * machine.num_wgs))
    if problem.num_peers and problem.k < SPLIT_MIN_K:
        return (), 0, f"k {problem.k} < {SPLIT_MIN_K}: whole tiles"
    if 0 < waves % 1.0 <= FULL_WAVE:
        return (TAIL_SPLIT_K,), tail, f"{waves:.2f} waves, the last one not full"
    return (), 0, f"{waves:.2f} waves, the last one nearly full: whole tiles"


def choose_claim_run(machine: Machine, ids: int, cap: int) -> tuple[int, Reason]:
    """Tiles of a builder's first claim: their stores overlap, and one claim pays for all."""
    if machine.rule_set == "mi350":
        return 1, Reason("claim_run", "one tile a claim", "paper section 3.1.1")
    waves = ids / cap
    run = next((r for r in CLAIM_RUNS if waves >= r + WAVES_OF_SINGLES), 1)
    rule = f"{waves:.1f} waves: {run} at first, {WAVES_OF_SINGLES} waves one by one"
    return run, Reason("claim_run", rule, RULES_SOURCE)


def choose_xcd_bucketing(problem: AgGemmProblem, machine: Machine) -> tuple[bool, Reason]:
    """Whether the tile queue is bucketed by XCD."""
    if machine.num_xcds == 1:
        return False, Reason("xcd_bucketing", "one XCD", machine.source("num_xcds"))
    tiles, rows = paper_tiles(problem)
    on = 0 < tiles <= XCD_MAX_TILES and rows >= XCD_MIN_TILE_ROWS
    rule = (
        f"B.3 row 13: {tiles} tiles (limit {XCD_MAX_TILES}), "
        f"{rows} tile rows (at least {XCD_MIN_TILE_ROWS})"
    )
    return on, Reason("xcd_bucketing", rule, "paper Table B.3, tile rows over all ranks (A9 (a))")


def choose_slices(
    problem: AgGemmProblem, machine: Machine, tile_row_rows: int, copy_elements: int, movers: int
) -> tuple[int, Reason]:
    """Mover units per tile row, a power of two that divides the tile row.

    Rule set ``h200``: units of ``UNIT_BYTES`` or somewhat more. Others: a slice for each mover of a
    peer, so that all of them work on one tile row, each slice a copy step or more.

    Args:
        problem: Sizes of the call.
        machine: The GPU and its node.
        tile_row_rows: Rows of a tile row, a power of two.
        copy_elements: Elements that a mover moves per step.
        movers: Movers of a peer by the rule, before the fit to a cap: the count that completes a
            tile row must not depend on a rank's cap.
    """
    row_elements = tile_row_rows * problem.k
    if machine.rule_set == "h200":
        most = wire_bytes(row_elements, problem.dtype) // UNIT_BYTES
        why, source = f"units of about {UNIT_BYTES >> 10} KiB", RULES_SOURCE
    else:
        most = min(movers, row_elements // copy_elements)
        why = f"up to {movers} movers a peer, a copy step or more"
        source = "paper section 3.2: a mover takes one slice of a tile row"
    slices = 1
    while slices * 2 <= min(most, tile_row_rows):
        slices *= 2
    return slices, Reason("slices", f"power of two, {why}", source)


def copy_step_bytes(machine: Machine, transport: str) -> int:
    """Bytes that a mover moves per step: the measured curve's step, as far as registers allow."""
    return min(machine.transport_named(transport).copy_bytes, MAX_STEP_BYTES)


def choose_copy_depth(machine: Machine, transport: str, dtype: str) -> tuple[int, Reason]:
    """Steps that a mover reads ahead, beyond the one that it stores."""
    # Two buffers a step, of elements and of scales, stay in registers.
    pulled = machine.rule_set == "h200" and transport == "pull" and dtype == "bf16"
    rule = "loads in flight against the latency of a loaded link"
    return PULLED_COPY_DEPTH if pulled else COPY_DEPTH, Reason("copy_depth", rule, RULES_SOURCE)


def copy_step_elements(problem: TpProblem, machine: Machine, transport: str) -> int:
    """Elements that a mover moves per step: as many bytes as in BF16, where it only moves them.

    Where it dequantises MXFP8 on arrival, as many elements: they are in registers in both formats.
    """
    dequantises = problem.dtype == "mxfp8" and machine.mxfp8_ratio == 1.0
    element_bytes = DTYPE_BYTES["bf16"] if dequantises else problem.element_bytes
    return copy_step_bytes(machine, transport) // element_bytes


def choose_groups(
    problem: AgGemmProblem, machine: Machine, tile: TileShape, tile_row_rows: int, transport: str
) -> tuple[int, int, tuple[Reason, Reason]]:
    """``(group_m, group_rows)``: sweep groups of the local and of the remote part."""
    group_m = {"executor": 2, "h200": GROUP_M_H200}.get(machine.rule_set, GROUP_M)
    local = Reason("group_m", f"{group_m} row blocks a column", "L2 reuse of a wave of tiles")
    if machine.rule_set != "h200":
        why = "one tile row at a time, in gather order"
        return group_m, 1, (local, Reason("group_rows", why, "paper section 3.2"))
    bytes_ms = gather_ms(problem, machine, transport, SATURATING_CREW)
    ahead = 0 < bytes_ms * SWEEP_AHEAD <= gemm_ms(problem, machine)
    row_blocks = max(1, tile_row_rows // tile.block_m)
    group_rows = max(1, group_m // row_blocks) if ahead else 1
    why = (
        f"GEMM {'is' if ahead else 'is not'} {SWEEP_AHEAD:g} times the bytes: "
        f"{'as many row blocks as group_m' if ahead else 'one tile row at a time'}"
    )
    return group_m, group_rows, (local, Reason("group_rows", why, machine.source("tflops")))
