"""The device clock: virtual nanoseconds that kernels read (`%globaltimer`, `s_memrealtime`)."""

from __future__ import annotations

from dataclasses import dataclass

from .tasks import Launch, WorkGroup

TICK_NS = 1000
MAX_JUMPS = 33
_FREE_READS = 16
_FIRST_JUMP_NS = 1_000_000_000


@dataclass(frozen=True)
class CostModel:
    """What operations cost in simulated time; the defaults have the proportions of an H200.

    A picture of how work overlaps, no prediction: bandwidth is per workgroup and not shared.

    Attributes:
        local_gbps: a workgroup's bandwidth to its own rank's memory, GB/s.
        remote_gbps: to other ranks' memory, GB/s.
        tflops: a workgroup's rate of matrix products, TFLOPS.
        atomic_ns: an atomic on local memory.
        remote_atomic_ns: an atomic on another rank's memory.
        wake_ns: until a polling workgroup sees a change.
        launch_ns: between the host's launch and the first instruction.
    """

    local_gbps: float = 30.0
    remote_gbps: float = 20.0
    tflops: float = 5.0
    atomic_ns: int = 700
    remote_atomic_ns: int = 2000
    wake_ns: int = 500
    launch_ns: int = 5000

    def access_ns(self, local: bool, nbytes: int) -> int:
        """Time of a load or store."""
        return int(nbytes / (self.local_gbps if local else self.remote_gbps))

    def dot_ns(self, flops: int) -> int:
        """Time of a matrix product."""
        return int(flops / (self.tflops * 1000))


class DeviceClock:
    """The clocks that kernels read.

    Without a cost model there is one clock, which advances by a microsecond per synchronisation
    operation of anybody. With one, every workgroup has its own time, carried along by what it
    waits for.

    A kernel that waits by reading the clock alone makes it advance geometrically, so that a long
    delay costs few steps. When every workgroup is parked and some loop reads the clock, the
    scheduler lets it jump, by one second at first and twice as far each time.

    Args:
        cost: the cost model, or None.

    Attributes:
        ns: current time; with a cost model, the latest of any workgroup.
    """

    def __init__(self, cost: CostModel | None = None) -> None:
        self.cost = cost
        self.ns = 0
        self._jumps = 0
        # Per rank: when its host has got so far, and when a workgroup of it ended last.
        self._hosts: dict[int, int] = {}
        self._ended: dict[int, int] = {}
        self._streams: dict[tuple[int, int], int] = {}

    def now(self, w: WorkGroup) -> int:
        """Time of a workgroup."""
        return self.ns if self.cost is None else w.time

    def tick(self) -> None:
        """A synchronisation operation takes place."""
        if self.cost is None:
            self.ns += TICK_NS

    def charge(self, w: WorkGroup, ns: int) -> None:
        """An operation of `w` takes time (cost model only)."""
        w.time += ns
        if w.time > self.ns:
            self.ns = w.time

    def read(self, w: WorkGroup) -> bool:
        """`w` reads the clock (then take `now`); returns whether it only waits for time to pass."""
        w.clock_reads += 1
        w.spin_reads += 1
        if w.spin_reads == 1:
            w.spin_ns = self.now(w)
        step = TICK_NS if self.cost is None else 20
        waits = w.spin_reads > _FREE_READS
        if waits:
            step += (self.now(w) - w.spin_ns) // 4
        if self.cost is None:
            self.ns += step
        else:
            self.charge(w, step)
        return waits

    # ---- long waits
    def jump(self) -> bool:
        """Let much time pass; False if it has been tried often enough."""
        if self._jumps >= MAX_JUMPS:
            return False
        self.ns += _FIRST_JUMP_NS << self._jumps
        self._jumps += 1
        return True

    def jumped(self, w: WorkGroup) -> None:
        """`w` runs again after a jump."""
        w.time = max(w.time, self.ns)

    def settle(self) -> None:
        """Something has happened: the next jump is short again."""
        self._jumps = 0

    # ---- how time passes on between tasks
    def woken(self, w: WorkGroup, by: WorkGroup | None) -> None:
        """`w` sees a change that `by` made."""
        if self.cost is not None and by is not None:
            w.time = max(w.time, by.time + self.cost.wake_ns)

    def begin(self, launch: Launch) -> None:
        """A launch starts."""
        key = (launch.rank, launch.stream)
        launch_ns = 0 if self.cost is None else self.cost.launch_ns
        host = self._hosts.get(launch.rank, 0) + launch_ns
        launch.start_ns = max(host, self._streams.get(key, 0))
        self._ended[launch.rank] = 0

    def start(self, w: WorkGroup) -> None:
        """A workgroup starts: when its launch did, or when a slot became free."""
        w.time = max(w.launch.start_ns, self._ended.get(w.rank, 0))

    def finish(self, w: WorkGroup) -> None:
        """A workgroup has ended."""
        key = (w.rank, w.launch.stream)
        self._streams[key] = max(self._streams.get(key, 0), w.time)
        self._ended[w.rank] = w.time

    def host_waited(self, rank: int, stream: int) -> None:
        """The host of a rank has waited for a stream."""
        self._hosts[rank] = max(self._hosts.get(rank, 0), self._streams.get((rank, stream), 0))

    def host_time(self, rank: int) -> int:
        """How far the host of a rank has got."""
        return self._hosts.get(rank, 0)

    def hosts_met(self, num_ranks: int) -> None:
        """All hosts have met."""
        latest = max([self._hosts.get(r, 0) for r in range(num_ranks)])
        self._hosts = dict.fromkeys(range(num_ranks), latest)
