"""What the simulator's core runs: queues of work, flows of bytes, counters, crews.

A program knows nothing of GEMMs or collectives: ``tpsp`` turns a kernel, its plan and a machine
into these arrays, and the core (``engine`` in Python, ``csrc`` in C++) plays them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# Of what this module says to the native core; an older build is not used.
CORE_VERSION = 2
# Queues of a rank. A mover's queue is drained from the start; the other is offered as it fills.
TILES, UPSTREAM, DOWNSTREAM = 0, 1, 2
# Roles a workgroup may start in.
BUILDER, MOVER, REDUCER, DUAL, PLANNED, GONE = 0, 1, 2, 3, 4, 5
NO_COUNTER = (0, 0)
NO_LIMIT = (-1, -1)


@dataclass
class Queue:
    """Work in claim order, one entry per item in each list.

    Args:
        cost: Tiles: microseconds while every workgroup builds. Transfers: bytes.
        flow: Transfers: the flow that carries them. Tiles: 0, and of a continuation in which the
            builder itself sends, one more than the flow; its cost is then in bytes.
        need_lo: First counter that must be zero before the item starts.
        need_hi: One past the last such counter; equal to ``need_lo`` if it waits for nothing.
        sig_lo: First counter that the finished item takes one off.
        sig_hi: One past the last such counter.
        then: Item that the same workgroup goes on with, or -1. Continuations stand behind the
            items that are claimed.
        claims: Number of items that are claimed, the first ones.
    """

    cost: list[float] = field(default_factory=list)
    flow: list[int] = field(default_factory=list)
    need_lo: list[int] = field(default_factory=list)
    need_hi: list[int] = field(default_factory=list)
    sig_lo: list[int] = field(default_factory=list)
    sig_hi: list[int] = field(default_factory=list)
    then: list[int] = field(default_factory=list)
    claims: int = 0

    def add(
        self,
        cost: float,
        flow: int = 0,
        need: tuple[int, int] = NO_COUNTER,
        signal: tuple[int, int] = NO_COUNTER,
    ) -> None:
        """Append one item that is claimed; continuations come after all of these."""
        self._append(cost, flow, need, signal)
        self.claims += 1

    def add_continuation(
        self,
        item: int,
        cost: float,
        need: tuple[int, int],
        signal: tuple[int, int] = NO_COUNTER,
        flow: int | None = None,
    ) -> int:
        """Append what the workgroup that ends ``item`` goes on with, and return its index."""
        self._append(cost, self.flow[item] if flow is None else flow, need, signal)
        self.then[item] = len(self.cost) - 1
        return len(self.cost) - 1

    def _append(
        self, cost: float, flow: int, need: tuple[int, int], signal: tuple[int, int]
    ) -> None:
        self.cost.append(cost)
        self.flow.append(flow)
        self.need_lo.append(need[0])
        self.need_hi.append(need[1])
        self.sig_lo.append(signal[0])
        self.sig_hi.append(signal[1])
        self.then.append(-1)


@dataclass
class Flow:
    """A stream of bytes whose movers share a rate.

    Args:
        rank: The rank whose movers drive it.
        sender: Table of the sending side's limit (an index into ``Program.tables``), and the group
            whose movers share it.
        receiver: The same for the receiving side; ``NO_LIMIT`` if it sets no limit of its own.
    """

    rank: int
    sender: tuple[int, int]
    receiver: tuple[int, int] = NO_LIMIT


@dataclass
class Rank:
    """Queues and crews of one rank.

    Args:
        queues: Tiles, upstream transfers, downstream transfers.
        starts: Microseconds at which each workgroup starts, in order of arrival.
        roles: Role in which each workgroup starts.
        after: Role of each mover once the upstream queue is empty; ``GONE`` keeps roles fixed.
        alternate: Whether roles are taken up again at every claim (two-way upstream): a mover
            builds a tile that is ready between two transfers, a builder transfers while none is.
        join: Most workgroups that transfer at once when builders find no tile left; 0 keeps roles.
        steal: Tiles that a planned workgroup builds before it turns to the downstream queue.
        switch_at: Place in the tile queue at which it turns to it in any case.
    """

    queues: list[Queue]
    starts: list[float]
    roles: list[int]
    after: list[int]
    alternate: bool = False
    join: int = 0
    steal: int = 0
    switch_at: int = 1 << 30


@dataclass
class Program:
    """Everything that one run needs.

    Args:
        ranks: The ranks that are played; one stands for all where they are alike.
        flows: The flows of bytes.
        tables: Bytes per microsecond of *one* mover by the number that share a limit.
        groups: Number of groups that the flows refer to.
        build_rate: Progress of one builder by how many build, 1 with the whole grid building.
        build_drag: Factor on it by how many workgroups of the rank transfer.
        move_drag: Factor on the rate of transfers by how many workgroups of the rank build.
        counters: Initial values.
        flag_us: From an item's end to the moment at which others see it.
    """

    ranks: list[Rank]
    flows: list[Flow]
    tables: list[list[float]]
    groups: int
    build_rate: list[float]
    build_drag: list[float]
    move_drag: list[float]
    counters: list[int]
    flag_us: float = 0.0


@dataclass(frozen=True)
class Span:
    """One item as it was played: workgroup, queue, index, and when.

    Args:
        rank: Rank of the workgroup.
        wg: Workgroup, in order of arrival.
        queue: Queue of the item.
        item: Index in it.
        claimed_us: When it was claimed.
        start_us: When it started (its counters were zero).
        end_us: When it ended.
    """

    rank: int
    wg: int
    queue: int
    item: int
    claimed_us: float
    start_us: float
    end_us: float


@dataclass(frozen=True)
class Played:
    """Outcome of a run.

    Args:
        end_us: When each rank's last item ended.
        busy_us: Per rank, workgroup-microseconds in each queue's items.
        wait_us: Per rank, workgroup-microseconds waiting for counters, by queue.
        events: Number of events.
        spans: Items as played, in order of their end; empty unless asked for.
    """

    end_us: list[float]
    busy_us: list[list[float]]
    wait_us: list[list[float]]
    events: int
    spans: list[Span]
