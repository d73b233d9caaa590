"""What the tests of several modules share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from kosmos_core.executor import Random
from kosmos_core.worlds import cpu_world

with contextlib.suppress(ImportError):
    # Inductor imports it on the thread of a rank, where its own distutils was seen not to be found.
    import setuptools  # noqa: F401


@pytest.fixture
def on_cpu() -> Callable[..., list[Any]]:
    """Runs `host(rank, world, *arguments)` on the executor with every check on."""

    def run(size: int, host: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
        checked: dict[str, Any] = {
            "policy": Random(options.get("seed", 0)),
            "weak": "random",
            "stale": True,
            "race": "raise",
            "strict": True,
            **options,
        }
        with cpu_world(size, **checked) as world:
            return world.spmd(host, world, *arguments)

    return run
