"""What the tests of several modules share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kosmos_core.testing.checked import run_checked
from kosmos_core.worlds import cpu_world


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Random numbers are the same in every run."""
    torch.manual_seed(0)


@pytest.fixture
def on_executor() -> Callable[..., Any]:
    """Runs `work()` on one rank of the executor, unchecked and fast, or with mutations."""

    def run(work: Callable[[], Any], **options: Any) -> Any:
        with cpu_world(1, **options) as world:
            (result,) = world.spmd(lambda rank: work())
        return result

    return run


@pytest.fixture
def checked() -> Callable[..., Any]:
    """Runs `work()` on one rank with every check of the executor on."""

    def run(work: Callable[[], Any], **options: Any) -> Any:
        (result,) = run_checked(1, lambda rank, world: work(), **options)
        return result

    return run
