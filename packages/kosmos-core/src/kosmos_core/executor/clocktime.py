"""The device clock: virtual nanoseconds that kernels read (`%globaltimer`, `s_memrealtime`)."""

from __future__ import annotations

from .tasks import WorkGroup

TICK_NS = 1000
_FREE_READS = 16
_FIRST_JUMP_NS = 1_000_000_000
MAX_JUMPS = 33


class DeviceClock:
    """One clock for all ranks. It advances by a microsecond per synchronisation operation.

    A kernel that waits by reading the clock alone makes it advance geometrically, so that a long
    delay costs few steps. When every workgroup is parked and some loop reads the clock, the
    scheduler lets it jump, by one second at first and twice as far each time.

    Attributes:
        ns: current time.
    """

    def __init__(self) -> None:
        self.ns = 0
        self._jumps = 0

    def tick(self) -> None:
        """A synchronisation operation takes place."""
        self.ns += TICK_NS

    def read(self, w: WorkGroup) -> bool:
        """`w` reads the clock (then take `ns`); returns whether it only waits for time to pass."""
        w.clock_reads += 1
        w.spin_reads += 1
        if w.spin_reads == 1:
            w.spin_ns = self.ns
        self.ns += TICK_NS
        if w.spin_reads <= _FREE_READS:
            return False
        self.ns += (self.ns - w.spin_ns) // 4
        return True

    def jump(self) -> bool:
        """Let much time pass; False if it has been tried often enough."""
        if self._jumps >= MAX_JUMPS:
            return False
        self.ns += _FIRST_JUMP_NS << self._jumps
        self._jumps += 1
        return True

    def settle(self) -> None:
        """Something has happened: the next jump is short again."""
        self._jumps = 0
