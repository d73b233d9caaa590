"""Runs host code of several ranks on the CPU executor with every check on, for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kosmos_core.executor import Random
from kosmos_core.worlds import cpu_world


def run_checked(
    size: int, host: Callable[..., Any], *arguments: Any, seed: int = 0, **options: Any
) -> list[Any]:
    """What `host(rank, world, *arguments)` returns on each rank.

    Args:
        size: ranks.
        host: runs on every rank.
        *arguments: passed on to it.
        seed: of the schedule.
        **options: of `cpu_world`, instead of random schedules, weak and stale memory, strict
            execution, and races raised.
    """
    checked: dict[str, Any] = {
        "policy": Random(seed),
        "weak": "random",
        "stale": True,
        "race": "raise",
        "strict": True,
        **options,
    }
    with cpu_world(size, **checked) as world:
        return world.spmd(host, world, *arguments)
