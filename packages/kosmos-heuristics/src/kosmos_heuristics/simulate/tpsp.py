"""Programs of the TP+SP kernels: a kernel's queues, crews and flows for the core.

Ranks are alike in these kernels (equal chunks, the same plan, queues relative to the own rank), so
one rank is played and what peers would send or finish is taken from it at the same moment.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kosmos_heuristics.checks import cdiv, check_choice, check_int
from kosmos_heuristics.errors import PlanError, ProblemError
from kosmos_heuristics.simulate.crews import FIXED_PER_PEER, per_peer, split_k
from kosmos_heuristics.simulate.model import DTYPES, SimMachine
from kosmos_heuristics.simulate.model import TILE_ROW as TILE
from kosmos_heuristics.simulate.program import (
    BUILDER,
    DOWNSTREAM,
    DUAL,
    GONE,
    MOVER,
    NO_COUNTER,
    REDUCER,
    TILES,
    UPSTREAM,
    Flow,
    Program,
    Queue,
    Rank,
)

KERNELS = ("ag_gemm_tn", "ag_gemm_nn", "gemm_rs", "bulk_ag", "bulk_rs")
POLICIES = ("one_way", "two_way", "fixed", "serial")
AG_ORDERS = ("local_first", "chunk_major", "naive")
RS_ORDERS = ("band_major", "row_major")
# A reducer's unit: so many rows of a tile, from every rank.
REDUCE_ROWS = 64
# Tile rows of a band: the smallest fits Tables C.5 and C.6 best.
BAND_ROWS = 1
# Least bytes of a mover's unit where the rules are not the paper's, whose units follow the crew.
UNIT_BYTES = 1 << 18
# Waits, each with its acquire, in a contraction over tokens that arrive meanwhile.
WEIGHT_STEPS = 4
# Bytes of an MXFP8 element with its share of the scale, against BF16's two.
BF16_BYTES, MXFP8_BYTES = 2.0, 33.0 / 32.0


@dataclass(frozen=True)
class Case:
    """One call of a TP+SP kernel.

    Args:
        kernel: One of ``KERNELS``; ``ag_gemm_nn`` in MXFP8 is the pair of GEMMs.
        m: Rows of the GEMM, as in the paper's tables.
        n: Columns.
        k: Contraction.
        dtype: ``bf16`` or ``mxfp8``.
        world_size: Ranks, 1 to 8.
        policy: ``one_way``, ``two_way``, ``fixed`` or ``serial``.
        order: Queue order of the kernel; empty for its default.
        crew: Movers or reducers per peer; None for the rules'.
        cap: Workgroups; None for all.
    """

    kernel: str
    m: int
    n: int
    k: int
    dtype: str = "bf16"
    world_size: int = 8
    policy: str = "one_way"
    order: str = ""
    crew: int | None = None
    cap: int | None = None

    def __post_init__(self) -> None:
        check_choice(ProblemError, "kernel", self.kernel, KERNELS, "simulate a known kernel")
        check_choice(ProblemError, "dtype", self.dtype, DTYPES, "simulate a known dtype")
        check_choice(PlanError, "policy", self.policy, POLICIES, "choose a policy")
        for name in ("m", "n", "k", "world_size"):
            check_int(ProblemError, name, getattr(self, name), 1, "pass a positive size")
        if self.world_size > 8:
            raise ProblemError("world_size", self.world_size, "at most 8", "use a smaller group")
        if self.tokens % self.world_size:
            what = "k" if self.kernel == "bulk_rs" else "m"
            wanted = f"a multiple of world_size {self.world_size}"
            raise ProblemError(what, self.tokens, wanted, "pad it")
        if self.order:
            orders = AG_ORDERS if self.gathers else RS_ORDERS
            check_choice(PlanError, "order", self.order, orders, "choose an order of the kernel")
        if self.crew is not None:
            check_int(PlanError, "crew", self.crew, 1, "give each peer a mover")
        if self.cap is not None:
            check_int(PlanError, "cap", self.cap, 2, "leave a mover and a builder")

    @property
    def gathers(self) -> bool:
        """Whether the collective is an all-gather."""
        return self.kernel not in ("gemm_rs", "bulk_rs")

    @property
    def tokens(self) -> int:
        """Rows that the ranks share out."""
        return self.k if self.kernel == "bulk_rs" else self.m

    @property
    def pair(self) -> bool:
        """Whether two GEMMs and two gathers run in one launch."""
        return self.kernel == "ag_gemm_nn" and self.dtype == "mxfp8"

    @property
    def element_bytes(self) -> float:
        """Bytes on the link of one element; reductions are BF16 in both dtypes."""
        return MXFP8_BYTES if self.dtype == "mxfp8" and self.gathers else BF16_BYTES

    @property
    def width(self) -> int:
        """Columns of the gathered or reduced tensor."""
        return self.k if self.kernel in ("ag_gemm_tn", "ag_gemm_nn") else self.n

    @property
    def remote_bytes(self) -> float:
        """Bytes that cross the fabric into each rank."""
        peers = self.world_size - 1
        total = self.tokens // self.world_size * peers * self.width * self.element_bytes
        return total * (2 if self.pair else 1)

    @property
    def flops(self) -> float:
        """Floating-point operations of one rank."""
        return 2.0 * self.m * self.n * self.k * (2 if self.pair else 1)

    def num_movers(self, machine: SimMachine) -> int:
        """Workgroups that start as movers or reducers: at most half of the grid."""
        cap = min(self.cap or machine.num_wgs, machine.num_wgs)
        peers = self.world_size - 1
        if peers == 0:
            return 0
        wanted = self.crew
        if wanted is None and machine.rules == "saturate":
            limit = machine.link_gbps * (peers if machine.topology == "mesh" else 1)
            wg_gbps = machine.copy_gbps if self.gathers else machine.reduce_gbps
            wanted = cdiv(machine.saturating_crew(wg_gbps, limit), peers)
        elif wanted is None and self.policy == "fixed":
            wanted = FIXED_PER_PEER
        elif wanted is None:
            wanted = per_peer(self.kernel, self.dtype, self.m, self.n, self.k, cap)
        most = cap // 2
        return min(max(1, min(wanted, most // peers)) * peers, most)


class Builder:
    """Builds the program of one case.

    Args:
        case: The call.
        machine: The machine, of the case's dtype.
    """

    def __init__(self, case: Case, machine: SimMachine) -> None:
        self._case = case
        self._machine = machine
        self._counters: list[int] = []
        self._queues = [Queue(), Queue(), Queue()]
        self._flows: list[Flow] = []
        self._tables: list[list[float]] = []
        self._peers = case.world_size - 1
        self._wgs = min(case.cap or machine.num_wgs, machine.num_wgs)
        self._movers = case.num_movers(machine)
        self._limit = machine.link_gbps
        if machine.topology == "mesh":
            self._limit *= max(1, self._peers)
        peak_ms = case.remote_bytes / (self._limit * 1e6)
        tflops = machine.boosted(machine.tflops, case.flops, peak_ms)
        # Microseconds of a tile per unit of contraction while the whole grid builds.
        self._us_per_k = machine.tile_us_per_k(tflops)
        if case.kernel == "bulk_rs":
            self._us_per_k /= machine.nt_share

    def program(self) -> Program:
        """The program."""
        case = self._case
        {
            "ag_gemm_tn": self._gather,
            "ag_gemm_nn": self._gather,
            "gemm_rs": self._reduce,
            "bulk_ag": self._bulk,
            "bulk_rs": self._bulk,
        }[case.kernel]()
        wg_gbps = self._machine.copy_gbps if case.gathers else self._machine.reduce_gbps
        return Program(
            ranks=[self._rank()],
            flows=self._flows,
            tables=self._tables,
            groups=max(1, len(self._flows)),
            build_rate=self._machine.build_rates(),
            build_drag=self._machine.build_drags(self._limit, wg_gbps),
            move_drag=self._machine.move_drags(),
            counters=self._counters,
            flag_us=self._machine.flag_us,
        )

    def _rank(self) -> Rank:
        case, movers = self._case, self._movers
        upstream = self._queues[UPSTREAM].claims > 0
        role, after, join = MOVER, BUILDER, 0
        if not upstream:
            role = DUAL if case.policy == "two_way" else REDUCER
        if case.policy == "fixed":
            after = GONE
        elif case.policy == "serial":
            movers = self._wgs if upstream else 0
            join = self._wgs
        elif case.kernel in ("gemm_rs", "bulk_rs", "bulk_ag"):
            # Builders that find no tile join what is left to transfer, up to saturation.
            join = max(0, self._machine.saturating_wgs - (0 if upstream else movers))
        roles = [role] * movers + [BUILDER] * (self._wgs - movers)
        alternate = upstream and case.policy == "two_way"
        starts = [0.0] * self._wgs
        return Rank(self._queues, starts, roles, [after] * self._wgs, alternate, join)

    def _columns(self, width: int) -> int:
        """Tiles of a tile row."""
        return cdiv(width, self._machine.tile_n) * (TILE // self._machine.tile_m)

    def _parts(self, tiles: int) -> int:
        if self._machine.rules == "saturate":
            return 1
        return split_k(self._case.kernel, self._case.dtype, tiles)

    def _counter(self, value: int) -> int:
        self._counters.append(value)
        return len(self._counters) - 1

    def _flow(self, wg_gbps: float, limit_gbps: float) -> None:
        machine = self._machine
        sharpness = machine.sharpness if self._case.gathers else machine.reduce_sharpness
        self._tables.append(machine.share_table(wg_gbps, limit_gbps, sharpness))
        index = len(self._flows)
        self._flows.append(Flow(0, (index, index)))

    def _copy_flows(self) -> None:
        """One flow per peer on a mesh; on a switch all peers share one."""
        if self._machine.topology == "mesh":
            for _ in range(self._peers):
                self._flow(self._machine.copy_gbps, self._machine.link_gbps)
        elif self._peers:
            self._flow(self._machine.copy_gbps, self._machine.link_gbps)

    def _copy_flow(self, peer: int) -> int:
        return peer if self._machine.topology == "mesh" else 0

    def _unit_bytes(self, size: float, wg_gbps: float) -> float:
        return size + self._machine.unit_us * wg_gbps * 1e3

    def _tile(
        self,
        k: int,
        need: tuple[int, int],
        signal: tuple[int, int],
        parts: int = 1,
        after_us: float = 0.0,
    ) -> None:
        fixed = self._machine.tile_us + after_us
        if need != NO_COUNTER:
            fixed += self._machine.acquire_us
        for _ in range(parts):
            cost = k / parts * self._us_per_k + fixed
            self._queues[TILES].add(cost, 0, need, signal)

    def _gather_units(self, width: int, rows: int, done: int | None) -> list[int]:
        """Upstream transfers of one gathered tensor, and each (peer, tile row)'s first counter."""
        chunk = self._case.tokens // self._case.world_size
        slices = max(1, self._movers // max(1, self._peers))
        if self._machine.rules == "saturate":
            slices = max(1, int(TILE * width * self._case.element_bytes) // UNIT_BYTES)
        first: list[int] = []
        for row in range(rows):
            height = min(TILE, chunk - row * TILE)
            size = self._unit_bytes(
                height * width * self._case.element_bytes / slices, self._machine.copy_gbps
            )
            base = len(self._counters)
            if done is None:
                self._counters.extend([slices] * self._peers)
            first.append(base)
            for _ in range(slices):
                for peer in range(self._peers):
                    counter = base + peer if done is None else done
                    self._queues[UPSTREAM].add(
                        size, self._copy_flow(peer), NO_COUNTER, (counter, counter + 1)
                    )
        return first

    def _gather(self) -> None:
        case = self._case
        self._copy_flows()
        chunk = case.m // case.world_size
        rows, columns = cdiv(chunk, TILE), self._columns(case.n)
        first = self._gather_units(case.k, rows, None)
        arrivals = self._gather_units(case.k, rows, None) if case.pair else []
        parts = self._parts(cdiv(case.m, TILE) * columns)
        gate = self._gate()
        for peer, row in self._tile_rows(rows):
            need = NO_COUNTER
            if peer >= 0:
                need = (first[row] + peer, first[row] + peer + 1)
            for _ in range(columns):
                self._tile(case.k, gate or need, NO_COUNTER, parts)
        if case.pair:
            self._weight_tiles(cdiv(case.k, TILE) * columns, arrivals, gate)

    def _weight_tiles(self, tiles: int, arrivals: list[int], gate: tuple[int, int] | None) -> None:
        """Tiles over all tokens: each goes through its contraction as tile rows arrive."""
        case, queue = self._case, self._queues[TILES]
        step = cdiv(len(arrivals), WEIGHT_STEPS)
        starts = arrivals[::step]
        needs = [
            (low, low + min(step, len(arrivals) - i * step) * self._peers)
            for i, low in enumerate(starts)
        ]
        cost = case.m / len(needs) * self._us_per_k / self._machine.nt_share
        cost += self._machine.acquire_us
        first = queue.claims
        for _ in range(tiles):
            queue.add(cost + self._machine.tile_us, 0, gate or needs[0])
        for tile in range(first, first + tiles):
            item = tile
            for need in needs[1:]:
                item = queue.add_continuation(item, cost, gate or need)

    def _gate(self) -> tuple[int, int] | None:
        """In ``serial``, what holds every tile back until all transfers are over."""
        units = self._queues[UPSTREAM]
        if self._case.policy != "serial" or not units.claims:
            return None
        gate = self._counter(0)
        low = min(lo for lo, hi in zip(units.sig_lo, units.sig_hi, strict=True) if hi > lo)
        return (low, gate)

    def _tile_rows(self, rows: int) -> list[tuple[int, int]]:
        """(peer, tile row) in queue order; peer -1 is the own chunk, peer p the rank after next p.

        In ``naive`` order the last rank is played, whose own chunk comes last.
        """
        order = self._case.order or "local_first"
        own = [(-1, row) for row in range(rows)]
        if order == "local_first":
            return own + [(p, row) for row in range(rows) for p in range(self._peers)]
        remote = [(p, row) for p in range(self._peers) for row in range(rows)]
        return remote + own if order == "naive" else own + remote

    def _reduce(self) -> None:
        case, machine = self._case, self._machine
        pushed = machine.reduces == "push" and self._peers > 0
        if pushed:
            self._flow(machine.push_gbps, self._limit)
            # Sums of what lies here read every source and write once.
            self._flow(machine.sum_gbps, machine.hbm_gbps / (1.0 + 1.0 / case.world_size))
        else:
            self._flow(machine.reduce_gbps, self._limit)
        sent: list[tuple[int, tuple[int, int]]] = []
        chunk = case.m // case.world_size
        rows, height = cdiv(chunk, TILE), TILE // self._machine.tile_m
        columns, whole = cdiv(case.n, self._machine.tile_n), cdiv(case.n, TILE)
        bands = [range(b, min(b + BAND_ROWS, rows)) for b in range(0, rows, BAND_ROWS)]
        if case.order == "row_major":
            bands = [range(rows)]
        gate = self._counter(0) if case.policy == "serial" else None
        for band in bands:
            # An output tile is reduced once every rank has its partial: one counter a tile, over
            # all owners. Ranks build theirs in the same order, from another owner on each, so that
            # a rank's own tiles get their partials as one rank builds for all owners.
            first = len(self._counters)
            blocks = range(len(band) * height)
            self._counters.extend([case.world_size] * (len(blocks) * columns))
            for owner, block, column in self._scattered(blocks, columns):
                ready = first + block * columns + column if gate is None else gate
                signal, sends = (ready, ready + 1), pushed and owner < self._peers
                if sends:
                    sent.append((self._queues[TILES].claims, signal))
                    signal = NO_COUNTER
                # Sent, a tile is flagged once its stores are there: the builder waits for them.
                self._tile(case.k, NO_COUNTER, signal, after_us=machine.flag_us * sends)
            for index, row in enumerate(band):
                for column in range(whole):
                    left = column * TILE // self._machine.tile_n
                    right = min(columns, cdiv((column + 1) * TILE, self._machine.tile_n))
                    for top in range(0, min(TILE, chunk - row * TILE), REDUCE_ROWS):
                        at = first + (index * height + top // self._machine.tile_m) * columns
                        need = (at + left, at + right) if gate is None else (gate, gate + 1)
                        self._reduce_unit(min(REDUCE_ROWS, chunk - row * TILE - top), 1, need)
        if gate is not None:
            self._counters[gate] = self._queues[TILES].claims
        # A builder sends the tile to its owner, and waits for it, before it claims the next.
        size = machine.tile_m * machine.tile_n * BF16_BYTES
        for item, signal in sent:
            self._queues[TILES].add_continuation(item, size, NO_COUNTER, signal, flow=1)

    def _scattered(self, blocks: range, columns: int) -> Iterator[tuple[int, int, int]]:
        """(owner, row block, column) of a band's tiles in queue order; the own rank is the last.

        Band-major sweeps a band column by column, in each all owners' rows; row-major has owner
        after owner, row block by row block. In the latter the last rank is played.
        """
        owners = range(self._case.world_size)
        if self._case.order == "row_major":
            return ((o, b, c) for o in owners for b in blocks for c in range(columns))
        return ((o, b, c) for c in range(columns) for o in owners for b in blocks)

    def _reduce_unit(self, rows: int, columns: int, need: tuple[int, int]) -> None:
        """Transfers of so many rows of so many tiles' width."""
        case, machine = self._case, self._machine
        fused = case.kernel == "gemm_rs"
        wg_gbps, flow = machine.reduce_gbps, 0
        size = rows * TILE * BF16_BYTES * self._peers
        if fused:
            size *= 1.0 + machine.sentinel
        if fused and machine.reduces == "push":
            size, wg_gbps, flow = rows * TILE * BF16_BYTES * case.world_size, machine.sum_gbps, 1
        queue = self._queues[DOWNSTREAM if fused else UPSTREAM]
        for _ in range(columns if self._peers else 0):
            queue.add(self._unit_bytes(size, wg_gbps), flow, need)

    def _bulk(self) -> None:
        case = self._case
        chunk = case.tokens // case.world_size
        if case.gathers:
            self._copy_flows()
            done = self._counter(0)
            self._gather_units(case.n, cdiv(chunk, TILE), done)
            self._counters[done] = self._queues[UPSTREAM].claims
        else:
            self._flow(self._machine.reduce_gbps, self._limit)
            for top in range(0, chunk, REDUCE_ROWS):
                rows = min(REDUCE_ROWS, chunk - top)
                self._reduce_unit(rows, cdiv(case.n, TILE), NO_COUNTER)
        tiles = cdiv(case.m, TILE) * self._columns(case.n)
        parts = self._parts(tiles)
        for _ in range(tiles):
            self._tile(case.k, NO_COUNTER, NO_COUNTER, parts)


def build(case: Case, machine: SimMachine) -> Program:
    """The program of a case on a machine."""
    return Builder(case, machine).program()
