"""What the simulator plays is what the kernels do: claim orders and role switches, replayed.

Each kernel runs traced on the executor; the simulator plays the same call. A tile row of the
executor's machine stands for one of the simulator's, so that sizes are counted in tile rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from kosmos_core.device.tiles import Grid, scattered_tile
from kosmos_core.executor import Random
from kosmos_core.trace import Span, decode
from kosmos_core.worlds import World, cpu_world
from kosmos_heuristics import load_machine
from kosmos_heuristics.simulate.model import TILE_ROW, SimMachine, sim_machine
from kosmos_heuristics.simulate.native import play
from kosmos_heuristics.simulate.program import DOWNSTREAM, TILES, UPSTREAM, Program
from kosmos_heuristics.simulate.tpsp import Case, build
from kosmos_tpsp.ops.catalog import DRIVERS
from kosmos_tpsp.workspaces import TpSpWorkspace

WGS, EVENTS, RANKS = 6, 600, 3
MACHINE = replace(load_machine("executor"), num_wgs=WGS)
ROW, BLOCK_M, BLOCK_N = MACHINE.tile_row_rows, MACHINE.tile.block_m, MACHINE.tile.block_n
CHUNK_ROWS, COLUMNS = 2, 2
KINDS = {TILES: "build", UPSTREAM: "move", DOWNSTREAM: "reduce"}


@dataclass(frozen=True)
class Traced:
    """A traced call of one rank: its spans in order of time, and each WG's arrival ticket."""

    spans: tuple[Span, ...]
    tickets: dict[int, int]
    max_rows: int

    def of_kind(self, kind: str) -> list[Span]:
        """Spans of one kind in order of the work they name."""
        return sorted((s for s in self.spans if s.kind == kind), key=lambda s: s.argument)

    def roles(self) -> dict[int, str]:
        """By ticket, the kinds of a WG's work in order, each once where it repeats."""
        found: dict[int, list[str]] = defaultdict(list)
        for span in self.spans:
            if span.kind in KINDS.values():
                found[self.tickets[span.wg]].append(span.kind)
        return {ticket: runs(kinds) for ticket, kinds in found.items()}


def runs(kinds: Sequence[str]) -> str:
    """Initials of consecutive kinds, each run once: "MB" moves, then builds."""
    return "".join(
        kind[0].upper() for at, kind in enumerate(kinds) if at == 0 or kinds[at - 1] != kind
    )


def simulated_machine(speed: float) -> SimMachine:
    """A machine of as many WGs, whose links are so much faster."""
    h200 = sim_machine("h200")
    return replace(
        h200,
        num_wgs=WGS,
        tile_m=TILE_ROW * BLOCK_M // ROW,
        tile_n=BLOCK_N,
        clock_wgs=1,
        saturating_wgs=WGS,
        # Pulled: a tile is counted where it is built, which tells its place.
        reduces="pull",
        tile_us=1.0,
        unit_us=0.05,
        copy_gbps=speed * h200.copy_gbps,
        reduce_gbps=speed * h200.reduce_gbps,
        link_gbps=speed * h200.link_gbps,
    )


def simulate(
    kernel: str, sizes: tuple[int, int, int], crew: int, order: str = "", speed: float = 1.0
) -> Program:
    """The simulator's program of a call whose tokens are counted in the executor's rows."""
    tokens = 2 if kernel == "bulk_rs" else 0
    scaled = [size * TILE_ROW // ROW if at == tokens else size for at, size in enumerate(sizes)]
    case = Case(kernel, *scaled, world_size=RANKS, crew=crew, order=order)
    return build(case, simulated_machine(speed))


def simulated_roles(program: Program) -> dict[int, str]:
    """By arrival, what each WG of the simulated rank did."""
    found: dict[int, list[str]] = defaultdict(list)
    for span in sorted(play(program, trace=True).spans, key=lambda s: s.start_us):
        found[span.wg].append(KINDS[span.queue])
    return {wg: runs(kinds) for wg, kinds in found.items()}


def traced(op: str, sizes: tuple[int, int, int], **choices: Any) -> list[Traced]:
    """Runs one traced call on every rank."""
    driver = DRIVERS[op]
    options = driver.options(traced=True, force=True, **choices)

    def host(rank: int, world: World) -> Traced:
        shapes = driver.operand_shapes(sizes, world.size, options)
        given = {n: torch.ones(shapes[n], dtype=torch.bfloat16) for n in driver.operands}
        with TpSpWorkspace(
            world,
            driver.num_tokens(sizes),
            max(sizes),
            machine=MACHINE,
            trace_events=EVENTS,
            reduce_transports=(choices["transport"],) if op == "gemm_rs" else None,
        ) as workspace:
            driver.call(given, workspace, {}, options)
            workspace.synchronize()
            spans = decode(workspace.trace_buffer, EVENTS, rank)
            rows = workspace.max_tile_rows
        spans.sort(key=lambda s: s.begin_ns)
        tickets = {s.wg: s.argument for s in spans if s.kind == "call"}
        return Traced(tuple(spans), tickets, rows)

    with cpu_world(RANKS, wgs=WGS, policy=Random(1), seed=1) as world:
        return world.spmd(host, world)


def awaited(call: Traced, rank: int) -> list[tuple[int, int]]:
    """For each tile in queue order, (peer, tile row) that its builder last waited for, or (-1, -1).

    A builder waits once for the tiles of a tile row. Peers are counted from the one after the rank.
    """
    found = {}
    for wg in call.tickets:
        latest = None
        for span in (s for s in call.spans if s.wg == wg):
            if span.kind == "wait":
                latest = span.argument
            elif span.kind == "build":
                found[span.argument] = latest
    places = []
    for place in range(len(found)):
        word = found[place]
        if word is None:
            places.append((-1, -1))
        else:
            source, row = divmod(word, call.max_rows)
            places.append(((source - rank - 1) % RANKS, row))
    return places


def simulated_waits(program: Program) -> list[tuple[int, int]]:
    """The same of the simulated rank, from the counters that its tiles wait for."""
    tiles, units = program.ranks[0].queues[TILES], program.ranks[0].queues[UPSTREAM]
    counters = list(dict.fromkeys(units.sig_lo))
    rows = {c: (at % (RANKS - 1), at // (RANKS - 1)) for at, c in enumerate(counters)}
    return [
        (-1, -1) if low == high else rows[low]
        for low, high in zip(tiles.need_lo, tiles.need_hi, strict=True)
    ]


GATHERED = (RANKS * CHUNK_ROWS * ROW, COLUMNS * BLOCK_N, 32)


@pytest.mark.parametrize(
    ("order", "transport"),
    [("local_first", "push"), ("chunk_major", "pull"), ("naive", "push")],
)
def test_ag_gemm_claims_tiles_and_units_as_simulated(order: str, transport: str) -> None:
    choices = {"order": order, "transport": transport, "movers_per_peer": 1, "split_k": 1}
    calls = traced("ag_gemm", GATHERED, **choices)
    program = simulate("ag_gemm_tn", GATHERED, 1, order)
    wanted = simulated_waits(program)
    # In naive order the last rank is played, whose own chunk comes last and is not waited for.
    remote = len(wanted) if order != "naive" else wanted.index((-1, -1))
    for rank in range(RANKS) if order != "naive" else [RANKS - 1]:
        places = awaited(calls[rank], rank)
        assert len(places) == len(wanted)
        assert places[:remote] == wanted[:remote]
    units = program.ranks[0].queues[UPSTREAM]
    rows = [at // (RANKS - 1) for at in range(units.claims)]
    for call in calls:
        moved = [s.argument for s in call.spans if s.kind == "move"]
        assert sorted(moved) == rows
        # Claims are in this order; units of neighbouring claims may begin the other way round.
        assert max(abs(a - b) for a, b in zip(moved, rows, strict=True)) <= 1


def follows(done: dict[int, str], simulated: Sequence[dict[int, str]]) -> bool:
    """Whether every WG, by arrival, took up roles in the order of one of the simulated runs.

    One that comes last to a queue finds it empty, and goes on to the next.
    """

    def within(roles: str, run: str) -> bool:
        left = iter(run)
        return all(role in left for role in roles)

    return all(
        any(within(roles, run.get(ticket, "")) for run in simulated)
        for ticket, roles in done.items()
    )


@pytest.mark.parametrize(
    ("op", "sizes", "seen"),
    [
        ("ag_gemm", (192, 64, 32), "MB"),
        ("bulk_ag", (192, 256, 32), "MB"),
        ("bulk_ag", (288, 32, 32), "BM"),
        ("bulk_rs", (32, 64, 192), "BM"),
        ("bulk_rs", (128, 128, 96), "MB"),
    ],
)
def test_movers_build_and_builders_join_as_simulated(
    op: str, sizes: tuple[int, int, int], seen: str
) -> None:
    kernel = "ag_gemm_tn" if op == "ag_gemm" else op
    # With slow links builders end first, with fast ones movers.
    simulated = [simulated_roles(simulate(kernel, sizes, 1, speed=s)) for s in (0.1, 10.0)]
    crew = {"reducers_per_peer" if op == "bulk_rs" else "movers_per_peer": 1}
    switched = set()
    for call in traced(op, sizes, split_k=1, **crew):
        done = {t: runs.replace("R", "M") for t, runs in call.roles().items()}
        assert follows(done, simulated)
        switched.update(done.values())
    assert seen in switched
    assert seen in {roles for run in simulated for roles in run.values()}
    # Only what the simulator does, too: nobody who builds beside a gather moves afterwards.
    assert not follows({0: "BM"}, simulated)
    assert follows({WGS - 1: "BM"}, simulated) == (op != "ag_gemm" and seen == "BM")


@triton.jit
def owners_kernel(out_ptr, grid, rank, tiles, ORDER: tl.constexpr, WORLD: tl.constexpr,
                  ROWS: tl.constexpr, BLOCK: tl.constexpr, BAND: tl.constexpr):  # fmt: skip
    """Where each place of the queue lies: owner, row block, column."""
    index = rank * 0
    while index < tiles:
        tile = scattered_tile(index, grid, rank, ORDER, WORLD, ROWS, BLOCK, BAND)
        tl.store(out_ptr + 3 * index, tile.src_rank)
        tl.store(out_ptr + 3 * index + 1, tile.row_block)
        tl.store(out_ptr + 3 * index + 2, tile.column)
        index += 1


def scattered_order(rank: int, tiles: int, order: str) -> list[tuple[int, int]]:
    """(row block within its owner's chunk, column) of the kernel's queue, by its own mapping."""
    out = torch.zeros(3 * tiles, dtype=torch.int32)

    def host(_: int, world: World) -> None:
        grid = Grid(CHUNK_ROWS * ROW, CHUNK_ROWS, COLUMNS)
        args = (out, grid, rank, tiles, int(order == "row_major"), RANKS, ROW, BLOCK_M, 1)
        world.launch(owners_kernel, 1, args, "owners", num_warps=4, num_stages=1)
        world.synchronize()

    with cpu_world(1) as world:
        world.spmd(host, world)
    return [(row, column) for _, row, column in out.view(-1, 3).tolist()]


@pytest.mark.parametrize(
    ("order", "transport"), [("band_major", "push"), ("band_major", "pull"), ("row_major", "push")]
)
def test_gemm_rs_claims_and_switches_as_simulated(order: str, transport: str) -> None:
    choices = {"order": order, "transport": transport, "reducers_per_peer": 1, "split_k": 1}
    calls = traced("gemm_rs", GATHERED, **choices)
    program = simulate("gemm_rs", GATHERED, 1, order)
    tiles = program.ranks[0].queues[TILES]
    blocks = CHUNK_ROWS * ROW // BLOCK_M
    places = [divmod(counter, COLUMNS) for counter in tiles.sig_lo]
    wanted = scattered_order(RANKS - 1, tiles.claims, order)
    assert places == wanted
    assert len(set(places)) == blocks * COLUMNS
    simulated = [
        simulated_roles(simulate("gemm_rs", GATHERED, 1, order, speed)) for speed in (0.1, 10.0)
    ]
    switched = set()
    for call in calls:
        assert [s.argument for s in call.of_kind("build")] == list(range(tiles.claims))
        rows = [s.argument for s in sorted(call.of_kind("reduce"), key=lambda s: s.argument)]
        assert rows == list(range(len(rows)))
        # The last to arrive reduce; the others build, and join them when no tile is left.
        assert follows(latest_first(call.roles()), simulated)
        switched.update(call.roles().values())
    assert switched <= {"R", "B", "BR"}
    assert {"R", "BR"} <= {runs for run in simulated for runs in run.values()}
    assert "R" in switched


def latest_first(roles: dict[int, str]) -> dict[int, str]:
    """Roles by arrival as the simulator counts: reducers, who arrive last, first."""
    return {WGS - 1 - ticket: done for ticket, done in roles.items()}
