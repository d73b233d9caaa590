"""Programs of the MoE layer's forward and backward, balanced or skewed.

The forward's queue is expert-major, GEMM1 before GEMM2; the backward's interleaves the gradients of
the second GEMM with the weight gradients of the expert before, then the first GEMM's likewise (in
MXFP8 all data gradients first). Dispatch units are (expert, slice of rows, rank) in the order in
which tiles consume them; combine units return an expert's rows to their owners.

With balanced routing one rank is played for all; with skewed routing every rank is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kosmos_heuristics.checks import cdiv, check_choice, check_int, check_number
from kosmos_heuristics.errors import PlanError, ProblemError
from kosmos_heuristics.simulate.crews import moe_backward_crews, moe_forward_crews
from kosmos_heuristics.simulate.model import DTYPES, SimMachine
from kosmos_heuristics.simulate.model import TILE_ROW as TILE
from kosmos_heuristics.simulate.program import (
    BUILDER,
    DOWNSTREAM,
    DUAL,
    MOVER,
    NO_COUNTER,
    PLANNED,
    REDUCER,
    TILES,
    UPSTREAM,
    Flow,
    Program,
    Queue,
    Rank,
)

DIRECTIONS = ("forward", "backward")
POLICIES = ("two_way", "dedicated_combine", "planned_split", "fixed")
PUSH_ORDERS = ("destination_minor", "destination_major")
# Rows of a dispatch or combine unit.
SLICE_ROWS = 64
# Experts up to this width send the column-wise copy of X with the forward (the paper: "narrow").
NARROW = 1024
BF16_BYTES, MXFP8_BYTES = 2.0, 33.0 / 32.0
Range = tuple[int, int]


@dataclass(frozen=True)
class MoeCase:
    """One call of the MoE layer's forward or backward, routed experts only.

    Args:
        direction: ``forward`` or ``backward``.
        tokens: Tokens of each rank.
        hidden: Width of the model.
        inter: Width of an expert.
        experts: Experts over all ranks, divisible by ``world_size``.
        topk: Experts of a token.
        dtype: ``bf16`` or ``mxfp8``.
        world_size: Ranks, 1 to 8.
        skew: Load of the busiest rank over the mean; the others share the rest evenly.
        policy: ``two_way``, ``dedicated_combine``, ``planned_split`` or ``fixed``.
        push_order: ``destination_minor`` or ``destination_major``.
        crew: Workgroups of the fixed, dedicated and planned crews.
    """

    direction: str
    tokens: int
    hidden: int
    inter: int
    experts: int
    topk: int
    dtype: str = "bf16"
    world_size: int = 8
    skew: float = 1.0
    policy: str = "two_way"
    push_order: str = "destination_minor"
    crew: int = 32

    def __post_init__(self) -> None:
        check_choice(ProblemError, "direction", self.direction, DIRECTIONS, "choose a direction")
        check_choice(ProblemError, "dtype", self.dtype, DTYPES, "simulate a known dtype")
        check_choice(PlanError, "policy", self.policy, POLICIES, "choose a policy")
        check_choice(PlanError, "push_order", self.push_order, PUSH_ORDERS, "choose an order")
        for name in ("tokens", "hidden", "inter", "experts", "topk", "world_size", "crew"):
            check_int(ProblemError, name, getattr(self, name), 1, "pass a positive number")
        if self.world_size > 8:
            raise ProblemError("world_size", self.world_size, "at most 8", "use a smaller group")
        if self.experts % self.world_size:
            wanted = f"a multiple of world_size {self.world_size}"
            raise ProblemError("experts", self.experts, wanted, "deal experts out evenly")
        if self.topk > self.experts:
            raise ProblemError("topk", self.topk, f"at most experts {self.experts}", "lower it")
        check_number(ProblemError, "skew", self.skew, "pass a load over the mean")
        if not 1.0 <= self.skew <= self.world_size:
            wanted = f"1 to world_size {self.world_size}"
            raise ProblemError("skew", self.skew, wanted, "pass a load over the mean")

    @property
    def local_experts(self) -> int:
        """Experts of a rank."""
        return self.experts // self.world_size

    @property
    def flops(self) -> float:
        """Floating-point operations of a rank with the mean load."""
        forward = 6.0 * self.tokens * self.topk * self.hidden * self.inter
        return forward if self.direction == "forward" else 2.0 * forward

    @property
    def column_wise(self) -> bool:
        """Whether this direction also sends the column-wise copy of X."""
        narrow = self.inter <= NARROW
        return self.dtype == "mxfp8" and narrow == (self.direction == "forward")

    @property
    def dispatch_bytes(self) -> float:
        """Bytes of one dispatched row, without the column-wise copy."""
        row_wise = self.dtype == "mxfp8" and self.direction == "forward"
        return self.hidden * (MXFP8_BYTES if row_wise else BF16_BYTES)

    @property
    def remote_bytes(self) -> float:
        """Bytes dispatched and combined across the fabric by a rank with the mean load."""
        rows = self.tokens * self.topk * (self.world_size - 1) / self.world_size
        copy = self.hidden * MXFP8_BYTES if self.column_wise else 0.0
        return rows * (self.dispatch_bytes + copy + self.hidden * BF16_BYTES)

    def rows_to(self, rank: int) -> float:
        """Rows from each rank to each expert of ``rank``."""
        mean = self.tokens * self.topk / self.experts
        if self.world_size == 1:
            return mean
        rest = (self.world_size - self.skew) / (self.world_size - 1)
        return mean * (self.skew if rank == 0 else rest)


class _Arena:
    """One rank's receive arena: its experts' rows, row blocks and counters.

    Args:
        case: The call.
        rank: The rank.
        counters: The program's counters, appended to.
    """

    def __init__(self, case: MoeCase, rank: int, counters: list[int]) -> None:
        world, experts = case.world_size, case.local_experts
        exact = case.rows_to(rank)
        # Whole rows that add up: source by source the rounding error is carried on.
        self.rows = [
            [
                int((e * world + s + 1) * exact + 1e-9) - int((e * world + s) * exact + 1e-9)
                for s in range(world)
            ]
            for e in range(experts)
        ]
        self._counters = counters
        self.arrivals = len(counters)
        counters.extend([0] * (experts * world))
        self.copies = len(counters)
        counters.extend([0] * (experts * world))
        self.blocks = [cdiv(sum(rows), TILE) for rows in self.rows]
        self.first_block = [sum(self.blocks[:e]) for e in range(experts)]
        self.world = world

    def per_block(self, value: int) -> int:
        """Counters of ``value`` for every row block; the first one's index."""
        first = len(self._counters)
        self._counters.extend([value] * sum(self.blocks))
        return first

    def sources(self, expert: int, block: int) -> Range:
        """Counters of the sources whose rows a row block reads."""
        low, high = block * TILE, (block + 1) * TILE
        start, touched = 0, []
        for source, rows in enumerate(self.rows[expert]):
            if start < high and start + rows > low:
                touched.append(source)
            start += rows
        base = self.arrivals + expert * self.world
        return (base + touched[0], base + touched[-1] + 1) if touched else NO_COUNTER

    def expert_blocks(self, expert: int, first: int) -> Range:
        """An expert's part of counters made by ``per_block``."""
        low = first + self.first_block[expert]
        return low, low + self.blocks[expert]

    def slice_blocks(self, expert: int, source: int, top: int, rows: int, first: int) -> Range:
        """Row blocks that hold rows ``top .. top + rows`` of a source, as counters."""
        start = sum(self.rows[expert][:source]) + top
        low = first + self.first_block[expert]
        return low + start // TILE, low + (start + rows - 1) // TILE + 1


class MoeBuilder:
    """Builds the program of one case.

    Args:
        case: The call.
        machine: The machine, of the case's dtype.
    """

    def __init__(self, case: MoeCase, machine: SimMachine) -> None:
        self._case = case
        self._machine = machine
        self._counters: list[int] = []
        self._world = case.world_size
        # Ranks that are played.
        self._played = 1 if case.skew == 1.0 else self._world
        self._arenas = [_Arena(case, rank, self._counters) for rank in range(self._played)]
        self._queues = [[Queue(), Queue(), Queue()] for _ in range(self._played)]
        self._limit = machine.link_gbps
        if machine.topology == "mesh":
            self._limit *= max(1, self._world - 1)
        peak_ms = case.remote_bytes / (self._limit * 1e6)
        tflops = machine.boosted(machine.tflops, case.flops * case.skew, peak_ms)
        self._us_per_k = machine.tile_us_per_k(tflops)
        self._second = [0] * self._played

    def program(self) -> Program:
        """The program."""
        case, machine = self._case, self._machine
        self._dispatch(self._case.dispatch_bytes, copies=False)
        if case.column_wise:
            self._dispatch(case.hidden * MXFP8_BYTES, copies=True)
        for rank in range(self._played):
            if case.direction == "forward":
                self._forward(rank)
            else:
                self._backward(rank)
        flows, groups = self._flows()
        return Program(
            ranks=[self._rank(rank) for rank in range(self._played)],
            flows=flows,
            tables=[
                machine.share_table(machine.push_gbps, machine.link_gbps, ranks=self._played),
                machine.share_table(machine.push_gbps, machine.hbm_gbps / 2),
            ],
            groups=groups,
            build_rate=machine.build_rates(),
            build_drag=machine.build_drags(self._limit, machine.push_gbps),
            move_drag=machine.move_drags(),
            counters=self._counters,
            flag_us=machine.flag_us,
        )

    def _columns(self, width: int) -> int:
        """Tiles of a row block."""
        return cdiv(width, self._machine.tile_n) * (TILE // self._machine.tile_m)

    def _flows(self) -> tuple[list[Flow], int]:
        """A flow for each played rank and destination; the own one is a local copy."""
        mesh = self._machine.topology == "mesh"
        flows: list[Flow] = []
        for rank in range(self._played):
            for other in range(self._world):
                if other == rank:
                    flows.append(Flow(rank, (1, len(flows))))
                elif mesh:
                    flows.append(Flow(rank, (0, len(flows))))
                else:
                    sends = self._world * self._played + rank
                    receives = sends + self._played + other
                    flows.append(Flow(rank, (0, sends), (0, receives)))
        return flows, len(flows) + 2 * self._played + self._world

    def _target(self, rank: int, other: int) -> tuple[int, int]:
        """Rank whose counters a unit signals, and the source it is counted for.

        Where one rank stands for all, what it sends to a peer is what the peer sends to it.
        """
        return (other, rank) if self._played > 1 else (0, other)

    def _dispatch(self, row_bytes: float, copies: bool) -> None:
        case = self._case
        for rank in range(self._played):
            units = [
                (expert, top, step)
                for expert in range(case.local_experts)
                for top in range(0, self._most_rows(expert), SLICE_ROWS)
                for step in range(self._world)
            ]
            if case.push_order == "destination_major":
                units.sort(key=lambda unit: unit[2])
            for expert, top, step in units:
                other = (rank + step) % self._world
                owner, source = self._target(rank, other)
                rows = min(SLICE_ROWS, self._arenas[owner].rows[expert][source] - top)
                if rows > 0:
                    arena = self._arenas[owner]
                    base = arena.copies if copies else arena.arrivals
                    counter = base + expert * self._world + source
                    self._counters[counter] += 1
                    self._push(rank, UPSTREAM, rows * row_bytes, other, NO_COUNTER, counter)

    def _most_rows(self, expert: int) -> int:
        return max(max(arena.rows[expert]) for arena in self._arenas)

    def _push(
        self, rank: int, queue: int, size: float, other: int, need: Range, counter: int | None
    ) -> None:
        signal = NO_COUNTER if counter is None else (counter, counter + 1)
        size += self._machine.unit_us * self._machine.push_gbps * 1e3
        self._queues[rank][queue].add(size, rank * self._world + other, need, signal)

    def _tiles(
        self, rank: int, count: int, k: int, need: Range, signal: Range, weights: bool = False
    ) -> None:
        cost = k * self._us_per_k
        if weights:
            cost /= self._machine.nt_share
        cost += self._machine.tile_us
        if need != NO_COUNTER:
            cost += self._machine.acquire_us
        queue = self._queues[rank][TILES]
        for _ in range(count):
            queue.add(cost, 0, need, signal)

    def _forward(self, rank: int) -> None:
        case, arena = self._case, self._arenas[rank]
        wide, narrow = (self._columns(x) for x in (2 * case.inter, case.hidden))
        first, second = arena.per_block(wide), arena.per_block(narrow)
        for expert in range(case.local_experts):
            for block in range(arena.blocks[expert]):
                done = first + arena.first_block[expert] + block
                need = arena.sources(expert, block)
                self._tiles(rank, wide, case.hidden, need, (done, done + 1))
        self._second[rank] = self._queues[rank][TILES].claims
        for expert in range(case.local_experts):
            for block in range(arena.blocks[expert]):
                ready = first + arena.first_block[expert] + block
                done = second + arena.first_block[expert] + block
                self._tiles(rank, narrow, case.inter, (ready, ready + 1), (done, done + 1))
        self._combine(rank, second)

    def _backward(self, rank: int) -> None:
        case, arena = self._case, self._arenas[rank]
        narrow, wide, hidden = (self._columns(x) for x in (case.inter, 2 * case.inter, case.hidden))
        outputs = cdiv(case.hidden, TILE)
        first, second = arena.per_block(narrow), arena.per_block(hidden)
        experts = range(case.local_experts)

        def weights(expert: int, columns: int, need: Range) -> None:
            depth = arena.blocks[expert] * TILE
            self._tiles(rank, columns * outputs, depth, need, NO_COUNTER, weights=True)

        for expert in experts:
            for block in range(arena.blocks[expert]):
                done = first + arena.first_block[expert] + block
                need = arena.sources(expert, block)
                self._tiles(rank, narrow, case.hidden, need, (done, done + 1))
            if expert:
                weights(expert - 1, narrow, arena.expert_blocks(expert - 1, first))
        weights(experts[-1], narrow, arena.expert_blocks(experts[-1], first))
        self._second[rank] = self._queues[rank][TILES].claims
        late = case.dtype == "mxfp8"
        for expert in experts:
            for block in range(arena.blocks[expert]):
                ready = first + arena.first_block[expert] + block
                done = second + arena.first_block[expert] + block
                self._tiles(rank, hidden, 2 * case.inter, (ready, ready + 1), (done, done + 1))
            if not late and expert:
                weights(expert - 1, wide, arena.expert_blocks(expert - 1, first))
        for expert in experts if late else experts[-1:]:
            base = arena.copies + expert * self._world
            copied = (base, base + self._world)
            need = copied if case.column_wise else arena.expert_blocks(expert, first)
            weights(expert, wide, need)
        self._combine(rank, second)

    def _combine(self, rank: int, done: int) -> None:
        case, arena = self._case, self._arenas[rank]
        units = [
            (expert, top, step)
            for expert in range(case.local_experts)
            for top in range(0, max(arena.rows[expert]), SLICE_ROWS)
            for step in range(self._world)
        ]
        if case.push_order == "destination_major":
            units.sort(key=lambda unit: unit[0] * self._world + unit[2])
        for expert, top, step in units:
            other = (rank + step) % self._world
            rows = min(SLICE_ROWS, arena.rows[expert][other] - top)
            if rows > 0:
                need = arena.slice_blocks(expert, other, top, rows, done)
                size = rows * case.hidden * BF16_BYTES
                self._push(rank, DOWNSTREAM, size, other, need, None)

    def _rank(self, rank: int) -> Rank:
        case, machine = self._case, self._machine
        wgs = machine.num_wgs
        if case.policy == "two_way":
            push_ms = case.remote_bytes / 2 / (self._limit * 1e6)
            gemm_ms = case.flops / (machine.tflops * 1e9)
            if case.direction == "forward":
                dispatch, combine = moe_forward_crews(case.dtype, case.inter, case.column_wise, wgs)
            else:
                dispatch, combine = moe_backward_crews(case.dtype, push_ms, gemm_ms, wgs)
            dual = max(0, combine - dispatch)
            roles = [MOVER] * dispatch + [DUAL] * dual + [BUILDER] * (wgs - dispatch - dual)
            after = [DUAL if wg < combine else BUILDER for wg in range(wgs)]
            return Rank(self._queues[rank], [0.0] * wgs, roles, after, join=wgs)
        crew = min(case.crew, wgs // 2)
        roles = [MOVER] * crew + [BUILDER] * (wgs - crew)
        kept = REDUCER if case.policy == "fixed" else PLANNED
        spec = Rank(self._queues[rank], [0.0] * wgs, roles, [kept] * wgs)
        if case.policy == "dedicated_combine":
            spec.join, spec.steal, spec.switch_at = wgs, 1 << 30, self._second[rank]
        elif case.policy == "planned_split":
            spec.join, spec.steal = wgs, self._planned_tiles(rank, crew)
        return spec

    def _planned_tiles(self, rank: int, crew: int) -> int:
        """Tiles that a planned mover builds after dispatch, by a cost model on the rank's counts.

        As many as leave the crew just the time that the combine needs if everything runs at its
        calibrated rate: then transport and GEMM are to end together.
        """
        machine, queues = self._machine, self._queues[rank]
        work_us = sum(queues[TILES].cost)
        rate = machine.share_table(machine.push_gbps, self._limit)[crew] * crew
        sent_us = sum(queues[UPSTREAM].cost) / rate
        back_us = sum(queues[DOWNSTREAM].cost) / rate
        builders = machine.num_wgs - crew
        # While the crew moves, the others build at the rate that so many have.
        moving_us = sent_us + back_us
        done_us = moving_us * builders * machine.build_rates()[builders]
        together_us = max(0.0, work_us - done_us) / machine.num_wgs
        return math.floor(together_us / (work_us / queues[TILES].claims))


def build_moe(case: MoeCase, machine: SimMachine) -> Program:
    """The program of a case on a machine."""
    return MoeBuilder(case, machine).program()


def around_ms(case: MoeCase, machine: SimMachine) -> float:
    """What comes before and after the queues: routing and planning (forward), and the fold."""
    elements = case.tokens * case.hidden * BF16_BYTES
    fold = elements * (case.topk + 1) / (machine.hbm_gbps * 1e6)
    if case.direction == "backward":
        return fold
    router = 2.0 * case.tokens * case.hidden * case.experts / (machine.route_tflops * 1e9)
    return fold + router + machine.route_us * 1e-3


def moe_bound_ms(case: MoeCase, machine: SimMachine) -> float:
    """The longer of the busiest rank's work on all workgroups and its bytes at the links' limit."""
    peers = case.world_size - 1
    limit = machine.link_gbps * (peers if machine.topology == "mesh" else min(1, peers))
    moved = case.remote_bytes / (limit * 1e6) if peers else 0.0
    flops = case.flops * case.skew
    return max(flops / (machine.boosted(machine.tflops, flops, moved) * 1e9), moved)
