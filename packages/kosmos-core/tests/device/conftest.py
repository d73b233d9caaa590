"""What the tests of the device functions share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kosmos_core.executor import Executor, Random


@pytest.fixture
def checked() -> Callable[..., Executor]:
    """Makes an executor with every check on."""

    def make(num_ranks: int = 1, seed: int = 0, **options: Any) -> Executor:
        settings: dict[str, Any] = {
            "policy": Random(seed),
            "seed": seed,
            "weak": "random",
            "stale": True,
            "race": "raise",
            "strict": True,
            **options,
        }
        return Executor(num_ranks, **settings)

    return make
