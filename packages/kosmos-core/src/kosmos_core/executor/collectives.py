"""Collectives of host code: barrier and all-gather between the host threads of `spmd`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .executor import Executor


class Collectives:
    """Matches the calls of all ranks by their order.

    Args:
        ex: the executor.
    """

    def __init__(self, ex: Executor) -> None:
        self._ex = ex
        self._arrived: dict[int, dict[int, Any]] = {}
        self._kinds: dict[int, tuple[str, int]] = {}
        self._left: dict[int, int] = {}

    def reset(self) -> None:
        """Forget unfinished collectives of an earlier `spmd`."""
        self._arrived.clear()
        self._kinds.clear()
        self._left.clear()

    def barrier(self) -> None:
        """All ranks meet."""
        if self._ex.scheduler.baton.holder is None:
            self._ex.note_host_writes(None)
            self._ex.join_hosts()
            return
        self._meet("host_barrier", None)

    def all_gather(self, value: Any) -> list[Any]:
        """Values of all ranks, in rank order.

        Raises:
            RuntimeError: called outside `spmd`.
        """
        if self._ex.scheduler.baton.holder is None:
            raise RuntimeError("host_all_gather() needs spmd(): it gathers from host threads")
        return self._meet("host_all_gather", value)

    def _meet(self, kind: str, value: Any) -> list[Any]:
        ex = self._ex
        host = ex.scheduler.baton.holder
        assert host is not None
        ex.check_running()
        number = host.collectives
        host.collectives += 1
        first, first_rank = self._kinds.setdefault(number, (kind, host.rank))
        if first != kind:
            raise RuntimeError(
                f"rank {host.rank} calls {kind}() where rank {first_rank} has called {first}(): "
                "all ranks must call the same collectives in the same order"
            )
        ex.note_host_writes(host.rank)
        arrived = self._arrived.setdefault(number, {})
        arrived[host.rank] = value
        if len(arrived) == ex.num_ranks:
            ex.join_hosts()
        missing = [r for r in range(ex.num_ranks) if r not in arrived]
        why = f"{kind}() number {number}: waits for ranks {missing}"
        host.wait(lambda: len(arrived) == ex.num_ranks, why)
        host.time = ex.clock.host_time(host.rank)
        values = [arrived[r] for r in range(ex.num_ranks)]
        self._left[number] = self._left.get(number, 0) + 1
        if self._left[number] == ex.num_ranks:
            # What was exchanged must not outlive the exchange: it may be memory.
            del self._arrived[number], self._kinds[number], self._left[number]
        return values
