"""What the tests of several modules share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kosmos_core.testing.checked import run_checked


@pytest.fixture
def on_cpu() -> Callable[..., list[Any]]:
    """Runs `host(rank, world, *arguments)` on the executor with every check on."""
    return run_checked
