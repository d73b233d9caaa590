"""Tile shape, split-K, XCD bucketing, sweep groups and mover slices of ``ag_gemm``."""

from __future__ import annotations

from kosmos_heuristics.checks import cdiv
from kosmos_heuristics.explain import Reason
from kosmos_heuristics.machine import Machine
from kosmos_heuristics.movers import gather_ms, gemm_ms
from kosmos_heuristics.parts import TileShape
from kosmos_heuristics.problems import AgGemmProblem

# The paper's tile; its rules count these tiles, whatever tile the kernel is compiled for.
PAPER_TILE = 256
FP32_BYTES = 4
# Paper, Table B.3 row 11: the factors that are tried, largest first.
SPLIT_K_FACTORS = (4, 2)
# A last, partial wave is split this many ways: the second part to finish adds the first to its own.
TAIL_SPLIT_K = 2
# A last wave fuller than this is not split.
FULL_WAVE = 0.6
# Tiles claimed at once, in queues of at least so many waves.
CLAIM_RUN = 2
MIN_WAVES_FOR_RUNS = 3
# Paper, Table B.3 row 13.
XCD_MAX_TILES = 1024
XCD_MIN_TILE_ROWS = 5
# A smaller tile shape is considered while the default one fills the grid fewer times than this:
# beyond, the part of the last wave that idles is a few percent and the larger tile is faster.
FEW_WAVES = 2.0
# Row blocks swept together per column of the local part: 8 x 128 rows by 16 columns of tiles in
# flight keep operand reads of a 132-WG wave within a 50 MB L2.
GROUP_M = 8
# A mover's unit is about this many bytes: its claim and its flag cost as much as 60 KB of transport.
UNIT_BYTES = 512 * 1024
# Tile rows are swept together only where the gather runs well ahead of the builders: the GEMM
# takes at least this many times as long as the bytes.
SWEEP_AHEAD = 4.0


def tile_grid(problem: AgGemmProblem, block_m: int, block_n: int) -> int:
    """Output tiles: each rank's chunk is tiled by itself, its last row block may be ragged."""
    return problem.world_size * cdiv(problem.chunk_rows, block_m) * cdiv(problem.n, block_n)


def paper_tiles(problem: AgGemmProblem) -> tuple[int, int]:
    """``(tiles, tile rows)`` as Table B.3 counts them: 256 x 256, over all ranks."""
    rows = cdiv(problem.m, PAPER_TILE)
    return rows * cdiv(problem.n, PAPER_TILE), rows


def choose_tile(problem: AgGemmProblem, machine: Machine, cap: int) -> tuple[TileShape, Reason]:
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


def tile_ids(problem: AgGemmProblem, machine: Machine, tile: TileShape) -> int:
    """Ids in the local-first tile queue: whole tile rows of the peers, row blocks of the own chunk."""
    per_row = max(1, machine.tile_row_rows // tile.block_m)
    remote = problem.num_peers * cdiv(problem.chunk_rows, machine.tile_row_rows) * per_row
    return (cdiv(problem.chunk_rows, tile.block_m) + remote) * cdiv(problem.n, tile.block_n)


def choose_split_k(
    problem: AgGemmProblem, machine: Machine, tile: TileShape, transport: str, crew: int, cap: int
) -> tuple[int, int, tuple[Reason, Reason]]:
    """``(split_k, split_tiles)``. The partials of all splits must fit the machine's workspace bound."""
    if machine.rule_set == "mi350":
        factor, rule, source = _paper_split_k(problem, machine, tile)
        ids = tile_ids(problem, machine, tile)
        factor, split_tiles = (factor, ids) if factor > 1 and ids else (1, 0)
        which = "all tiles" if split_tiles else "no split"
        return (
            factor,
            split_tiles,
            (Reason("split_k", rule, source), Reason("split_tiles", which, source)),
        )
    factor, split_tiles, rule = 1, 0, "no split under this rule set"
    if machine.rule_set == "h200":
        factor, split_tiles, rule = _tail_split(problem, machine, tile, transport, crew, cap)
    source = "closed form of tiles and cap"
    return (
        factor,
        split_tiles,
        (Reason("split_k", rule, source), Reason("split_tiles", rule, source)),
    )


def _paper_split_k(
    problem: AgGemmProblem, machine: Machine, tile: TileShape
) -> tuple[int, str, str]:
    if problem.layout != "nn":
        return 1, "B.3 row 11 covers the row dgrad only", "paper Table B.3"
    tiles, _ = paper_tiles(problem)
    partial_bytes = tiles * PAPER_TILE * PAPER_TILE * FP32_BYTES
    limit = f"{machine.max_split_k_bytes >> 20} MiB"
    source = "paper Table B.3, reading A8 (a)"
    for factor in SPLIT_K_FACTORS:
        if factor * partial_bytes <= machine.max_split_k_bytes and _splits(problem, tile, factor):
            return factor, f"B.3 row 11: {factor} partials of {tiles} tiles fit {limit}", source
    return 1, f"B.3 row 11: 2 partials of {tiles} tiles do not fit {limit}, or k is short", source


def _tail_split(
    problem: AgGemmProblem, machine: Machine, tile: TileShape, transport: str, crew: int, cap: int
) -> tuple[int, int, str]:
    """Few tiles are split so that they fill the grid; else the last half wave, where that shortens the end.

    Nothing can overlap what follows the last arrival, so where the gather is the longer side the tiles behind
    it are halved. Where the GEMM is, a last wave that would be more than `FULL_WAVE` full is left whole: the
    partials would cost more than they save.
    """
    ids = tile_ids(problem, machine, tile)
    gemm = gemm_ms(problem, machine)
    gather = gather_ms(problem, machine, transport, crew)
    if ids <= cap // TAIL_SPLIT_K:
        wanted = ids
    else:
        waves = ids / cap * (1.0 + crew * gather / (gemm * machine.num_wgs)) if gemm else 0.0
        wanted = cap // 2 if gather >= gemm or waves % 1.0 <= FULL_WAVE else 0
    factors = SPLIT_K_FACTORS if ids <= cap // SPLIT_K_FACTORS[0] else (TAIL_SPLIT_K,)
    for factor in factors if wanted else ():
        partial_bytes = factor * wanted * tile.block_m * tile.block_n * FP32_BYTES
        if partial_bytes <= machine.max_split_k_bytes and _splits(problem, tile, factor):
            return factor, wanted, f"{wanted} of {ids} tiles in {factor} parts each"
    return 1, 0, f"{ids} tiles fill their waves, or k is short: whole tiles"


def gather_over_gemm(problem: AgGemmProblem, machine: Machine, transport: str) -> float:
    """Time of the bytes at the transport's peak over time of the GEMM on the whole device."""
    gemm = gemm_ms(problem, machine)
    if problem.num_peers == 0 or gemm == 0:
        return 0.0
    return problem.remote_bytes / (machine.peak_gbps(transport, problem.num_peers) * 1e6) / gemm


def choose_claim_run(
    problem: AgGemmProblem, machine: Machine, tile: TileShape, cap: int
) -> tuple[int, Reason]:
    """Tiles a builder claims at once: two while the queue is deep, so that a claim is paid once for both."""
    if machine.rule_set == "mi350":
        return 1, Reason("claim_run", "one tile a claim", "paper section 3.1.1")
    deep = tile_ids(problem, machine, tile) >= MIN_WAVES_FOR_RUNS * cap
    rule = f"{'at least' if deep else 'under'} {MIN_WAVES_FOR_RUNS} waves of {cap}"
    return (CLAIM_RUN if deep else 1), Reason("claim_run", rule, "claim latency over tile time")


def _splits(problem: AgGemmProblem, tile: TileShape, factor: int) -> bool:
    # Every split needs at least one whole step of the contraction.
    return problem.k >= factor * tile.block_k


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

    From curves: units of about ``UNIT_BYTES``. Paper's rule set and the executor: a slice for each mover of a
    peer, so that all of them work on one tile row, each slice a copy step or more.
    """
    row_bytes = tile_row_rows * problem.k * problem.element_bytes
    if machine.rule_set == "h200":
        most, why = max(1, row_bytes // UNIT_BYTES), f"units of about {UNIT_BYTES >> 10} KiB"
        source = "docs/benchmarking.md"
    else:
        steps = row_bytes // problem.element_bytes // copy_elements
        most, why = max(1, min(movers, steps)), f"up to {movers} movers a peer, a copy step or more"
        source = "paper section 3.2: a mover takes one slice of a tile row"
    slices = 1
    while slices * 2 <= min(most, tile_row_rows):
        slices *= 2
    return slices, Reason("slices", f"power of two, {why}", source)


def choose_groups(
    problem: AgGemmProblem, machine: Machine, tile: TileShape, transport: str
) -> tuple[int, int, tuple[Reason, Reason]]:
    """``(group_m, group_rows)``: sweep groups of the local and of the remote part."""
    group_m = 2 if machine.rule_set == "executor" else GROUP_M
    local = Reason("group_m", f"{group_m} row blocks a column", "L2 reuse of a wave of tiles")
    row_blocks = machine.tile_row_rows // tile.block_m
    if machine.rule_set != "h200":
        why = "one tile row at a time, in gather order"
        return group_m, 1, (local, Reason("group_rows", why, "paper section 3.2"))
    ratio = gather_over_gemm(problem, machine, transport)
    ahead = 0 < ratio * SWEEP_AHEAD <= 1.0
    group_rows = max(1, group_m // row_blocks) if ahead else 1
    why = (
        f"GEMM {'is' if ahead else 'is not'} {SWEEP_AHEAD:g} times the bytes: "
        f"{'as many row blocks as group_m' if ahead else 'one tile row at a time'}"
    )
    return group_m, group_rows, (local, Reason("group_rows", why, machine.source("tflops")))
