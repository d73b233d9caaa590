"""What the simulator plays of an expert layer is what its kernels do: queues and role switches.

A row block of the executor's machine stands for one of the simulator's.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, replace

import pytest
import torch
from kosmos_core.executor import Random
from kosmos_core.trace import Span, decode
from kosmos_core.worlds import World, cpu_world
from kosmos_heuristics import load_machine
from kosmos_heuristics.simulate.model import TILE_ROW, sim_machine
from kosmos_heuristics.simulate.moe import MoeCase, build_moe
from kosmos_heuristics.simulate.native import play
from kosmos_heuristics.simulate.program import DOWNSTREAM, TILES, UPSTREAM, Program
from kosmos_moe.ops.moe_backward import moe_backward
from kosmos_moe.ops.moe_forward import Inputs, run_forward
from kosmos_moe.router import RouterOptions
from kosmos_moe.workspaces import MoEWorkspace

RANKS, WGS, EVENTS = 2, 4, 600
DISPATCHERS, COMBINERS = 2, 2
TOKENS, HIDDEN, INTER, EXPERTS, TOPK = 64, 128, 32, 4, 1
MACHINE = replace(load_machine("executor"), num_wgs=WGS)
BLOCK_M, BLOCK_N = MACHINE.tile.block_m, MACHINE.tile.block_n
INITIALS = {"move": "M", "build": "B", "combine": "C"}
QUEUES = {TILES: "B", UPSTREAM: "M", DOWNSTREAM: "C"}
# Dispatches first and never again; builds and combines in turns.
ROLES = re.compile(r"M?(BC|CB|B|C)*")


@dataclass(frozen=True)
class Traced:
    """A traced call of one rank: its spans in order of time, and each WG's arrival ticket."""

    spans: tuple[Span, ...]
    tickets: dict[int, int]

    def roles(self) -> dict[int, str]:
        """By ticket, a WG's roles in order, each once where it repeats."""
        found: dict[int, str] = defaultdict(str)
        for span in self.spans:
            role = INITIALS.get(span.kind, "")
            if role and not found[self.tickets[span.wg]].endswith(role):
                found[self.tickets[span.wg]] += role
        return found


def simulate(direction: str) -> Program:
    """The simulator's program of the layer, its rows counted in row blocks."""
    machine = replace(
        sim_machine("h200"), num_wgs=WGS, tile_m=TILE_ROW, tile_n=BLOCK_N, clock_wgs=1
    )
    tokens = TOKENS * TILE_ROW // BLOCK_M
    return build_moe(
        MoeCase(direction, tokens, HIDDEN, INTER, EXPERTS, TOPK, world_size=RANKS), machine
    )


def simulated_roles(program: Program) -> dict[int, str]:
    """By arrival, the roles of the simulated rank's WGs."""
    found: dict[int, str] = defaultdict(str)
    for span in sorted(play(program, trace=True).spans, key=lambda s: s.start_us):
        if not found[span.wg].endswith(QUEUES[span.queue]):
            found[span.wg] += QUEUES[span.queue]
    return found


@pytest.fixture(scope="module")
def traced() -> dict[str, list[Traced]]:
    """A traced forward and backward of one layer, on every rank."""

    def taken(workspace: MoEWorkspace, rank: int) -> Traced:
        workspace.synchronize()
        spans = decode(workspace.trace_buffer, EVENTS, rank)
        workspace.trace_buffer.zero_()
        spans.sort(key=lambda s: s.begin_ns)
        return Traced(tuple(spans), {s.wg: s.argument for s in spans if s.kind == "call"})

    def host(rank: int, world: World) -> tuple[Traced, Traced]:
        local = EXPERTS // RANKS
        x, dy = (torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16) for _ in range(2))
        router_weight = torch.zeros(EXPERTS, HIDDEN, dtype=torch.bfloat16)
        w1 = torch.ones(local, 2 * INTER, HIDDEN, dtype=torch.bfloat16)
        w2 = torch.ones(local, HIDDEN, INTER, dtype=torch.bfloat16)
        router = RouterOptions(topk=TOPK, forced="uniform")
        crews = {"dispatch_crew": DISPATCHERS, "combine_crew": COMBINERS}
        with MoEWorkspace(
            world, TOKENS, HIDDEN, INTER, EXPERTS, TOPK,
            training=True, machine=MACHINE, trace_events=EVENTS,
        ) as workspace:  # fmt: skip
            given = Inputs(x, router_weight, w1, w2, None, None, None, None)
            options = {"save": True, "traced": True, **crews}
            _, saved = run_forward(given, workspace, router, None, options)
            forward = taken(workspace, rank)
            moe_backward(dy, saved, workspace, traced=True, **crews)
            return forward, taken(workspace, rank)

    with cpu_world(RANKS, wgs=WGS, policy=Random(2), seed=2) as world:
        results = world.spmd(host, world)
    return {d: [r[at] for r in results] for at, d in enumerate(("forward", "backward"))}


def test_the_forward_claims_tiles_as_simulated(traced: dict[str, list[Traced]]) -> None:
    queues = simulate("forward").ranks[0].queues
    tiles = queues[TILES]
    signals = list(dict.fromkeys(tiles.sig_lo))
    blocks = len(signals) // 2
    assert blocks == TOKENS * TOPK // BLOCK_M
    # Simulated: which GEMM, and which row block, in queue order.
    wanted = [divmod(signals.index(low), blocks) for low in tiles.sig_lo]
    wide, narrow = 2 * INTER // BLOCK_N, HIDDEN // BLOCK_N
    for call in traced["forward"]:
        builds = sorted((s for s in call.spans if s.kind == "build"), key=lambda s: s.argument)
        assert [s.argument for s in builds] == list(range(tiles.claims))
        ends: dict[int, int] = defaultdict(int)
        for index, span in enumerate(builds):
            gemm, block = wanted[index]
            second = index >= blocks * wide
            place = (index - blocks * wide) // narrow if second else index // wide
            assert (gemm, block) == (int(second), place)
            if second:
                # The second GEMM starts when the first has finished the row block.
                assert span.begin_ns >= ends[block]
            else:
                ends[block] = max(ends[block], span.end_ns)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_roles_change_as_simulated(direction: str, traced: dict[str, list[Traced]]) -> None:
    simulated = simulated_roles(simulate(direction))
    for roles in (simulated, *(call.roles() for call in traced[direction])):
        for ticket, done in roles.items():
            assert ROLES.fullmatch(done), (ticket, done)
            assert "M" not in done or ticket < DISPATCHERS
    # Both ways: somebody builds after it has combined.
    assert any("CB" in done for done in simulated.values())
    assert any("CB" in done for call in traced[direction] for done in call.roles().values())
