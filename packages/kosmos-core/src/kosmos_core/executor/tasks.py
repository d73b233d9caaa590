"""What the scheduler switches between: workgroups of kernels and host threads of ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from greenlet import greenlet  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from .buffers import Store
    from .polls import Poll
    from .region import Region

Look = tuple[int, "Region", int, Any, bool]
Clock = np.ndarray[Any, np.dtype[np.int64]]


class Ordering:
    """Order and scope of an atomic.

    Attributes:
        acquire, release: order.
        system: scope ``sys`` (else the rank).
    """

    __slots__ = ("acquire", "release", "system")

    def __init__(self, acquire: bool, release: bool, system: bool) -> None:
        self.acquire = acquire
        self.release = release
        self.system = system


class Task:
    """Something the policy can pick.

    Attributes:
        id: number, unique in one executor; the entries of `Executor.schedule`.
        rank: rank it belongs to.
        wg: linear program id, -1 for host code.
        pid: program id (x, y, z), (-1, -1, -1) for host code.
        time: its simulated time in ns (with a cost model).
    """

    __slots__ = ("id", "pid", "rank", "time", "wg")

    def __init__(self, id: int, rank: int, wg: int, pid: tuple[int, int, int]) -> None:
        self.id = id
        self.rank = rank
        self.wg = wg
        self.pid = pid
        self.time = 0

    @property
    def is_host(self) -> bool:
        """Whether this is the host thread of a rank."""
        return self.wg < 0


class Launch:
    """One kernel launch of one rank."""

    __slots__ = (
        "args", "clock", "done", "fn", "grid", "name", "num_live", "number", "pending", "rank",
        "regions", "start_ns", "stream",
    )  # fmt: skip

    def __init__(
        self,
        rank: int,
        stream: int,
        fn: Callable[..., Any],
        name: str,
        grid: tuple[int, int, int],
        args: dict[str, Any],
        number: int,
        regions: list[Region],
    ) -> None:
        self.rank = rank
        self.stream = stream
        self.fn = fn
        self.name = name
        self.grid = grid
        self.args = args
        self.number = number
        self.regions = regions
        for region in regions:
            region.users += 1
        self.pending: list[tuple[int, int, int]] = []
        self.num_live = 0
        self.done = False
        self.start_ns = 0
        # Vector clock of the host at the launch (race detector only).
        self.clock: Clock | None = None

    def finish(self) -> None:
        """All its workgroups have ended."""
        self.done = True
        self.args = {}
        for region in self.regions:
            region.users -= 1
        self.regions = []

    def __repr__(self) -> str:
        return f"{self.name}{list(self.grid)} on rank {self.rank}, stream {self.stream}"


class WorkGroup(Task):
    """One program instance of a launch, running in its own greenlet."""

    __slots__ = (
        "buffer", "clk", "clk_tile", "clock_reads", "coherent", "fence", "fingerprint", "greenlet",
        "launch", "num_notes", "num_parks", "num_plain", "num_polls", "parked", "pending",
        "proxy_dirty", "rep", "seen", "slot", "span_start", "spin_ns", "spin_reads", "spins",
        "timed", "trail", "unbarred", "vc", "vc_tile", "view_gpu", "view_sys", "wait_start",
        "watches", "young",
    )  # fmt: skip

    def __init__(self, id: int, launch: Launch, pid: tuple[int, int, int]) -> None:
        gx, gy, _ = launch.grid
        super().__init__(id, launch.rank, pid[0] + gx * (pid[1] + gy * pid[2]), pid)
        self.launch = launch
        self.greenlet: greenlet | None = None
        # Polling (see polls.py).
        self.parked = False
        self.timed = False
        # The latest synchronising read by site and address, since it last did anything else.
        self.seen: dict[tuple[int, int], Poll] = {}
        self.num_notes = 0
        self.rep = 0
        self.watches: list[tuple[Region, int, int]] = []
        # Further places that reads spanning several tensors have polled.
        self.spins: dict[tuple[Region, int, int], None] = {}
        # The latest polls: site, region, offset, value, whether they acquire.
        self.trail: deque[Look] = deque(maxlen=8)
        self.num_polls = 0
        self.fingerprint = 0
        self.num_parks = 0
        self.num_plain = 0
        # Device clock.
        self.clock_reads = 0
        self.spin_reads = 0
        self.spin_ns = 0
        # Weak memory: store buffers, and up to which store this WG sees memory.
        self.buffer: dict[Region, list[Store]] = {}
        self.young: dict[Region, list[Store]] = {}
        self.view_gpu = 0
        self.view_sys = 0
        self.coherent: dict[Region, dict[tuple[int, int], int]] = {}
        # Race detector: slot in vector clocks; in strict mode slot + 1 is "the other threads".
        self.slot = 0
        self.clk = 0
        self.clk_tile = 0
        self.vc: Clock = _EMPTY
        self.vc_tile: Clock = _EMPTY
        self.pending: Clock | None = None
        self.fence: Clock | None = None
        # Lints and trace.
        self.unbarred = 0
        self.proxy_dirty = False
        self.span_start = 0
        self.wait_start = 0

    def __repr__(self) -> str:
        if self.launch.grid[1:] == (1, 1):
            return f"rank{self.rank}.wg{self.pid[0]}"
        return f"rank{self.rank}.wg{self.pid}"


_EMPTY: Clock = np.zeros(0, np.int64)
