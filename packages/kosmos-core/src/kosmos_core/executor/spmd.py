"""Running host code of all ranks, each in an OS thread of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from .errors import Deadlock, ExecutorError
from .hosts import Host, name_rank

if TYPE_CHECKING:
    from .executor import Executor


def run_spmd(ex: Executor, fn: Callable[[int], Any], return_exceptions: bool) -> list[Any]:
    """See `Executor.spmd`."""
    scheduler = ex.scheduler
    if scheduler.baton.holder is not None:
        raise RuntimeError("spmd() cannot be nested")
    ex.check_running()
    ex.note_host_writes(None)
    ex.join_hosts()
    ended: list[Host] = []
    hosts = [Host(rank, scheduler.baton, partial(fn, rank)) for rank in range(ex.num_ranks)]
    ex.collectives.reset()
    scheduler.on_host_end = ended.append
    scheduler.hosts.extend(hosts)
    for host in hosts:
        host.time = ex.clock.host_time(host.rank)
        host.start()
    failure: ExecutorError | None = None
    try:
        scheduler.run()
    except ExecutorError as e:
        failure = e
    finally:
        if scheduler.hosts:
            scheduler.unwind_hosts()
        for host in hosts:
            host.join()
    if failure is None:
        for rank in range(ex.num_ranks):
            ex.waited(rank, scheduler.streams.used_by(rank))
        ex.join_hosts()
    return _outcome(hosts, ended, failure, return_exceptions)


def _outcome(
    hosts: list[Host], ended: list[Host], failure: ExecutorError | None, return_exceptions: bool
) -> list[Any]:
    errors = [h.error for h in ended if h.error is not None]
    for h in ended:
        if h.error is not None:
            name_rank(h.error, h.rank)
    if return_exceptions:
        return [h.result if h.error is None else h.error for h in hosts]
    if failure is not None and not isinstance(failure, Deadlock):
        raise failure
    if errors:
        raise errors[0]
    if failure is not None:
        raise failure
    return [h.result for h in hosts]
