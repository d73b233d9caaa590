"""Training jobs small enough for tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from integration.training.presets import Preset, Sizes
from integration.training.text import Batches
from integration.training.trainer import Job


@pytest.fixture(scope="session")
def make_job() -> Callable[..., Job]:
    """A job of one block and 128 tokens, on the text that every job trains on."""
    text = Batches.of_library(1, 1, 0).text

    def make(steps: int = 3, seed: int = 0, layers: int = 1) -> Job:
        sizes = Sizes(64, 96, layers, 8, 4, 64, 2)
        preset = Preset("test", sizes, steps, 1e-2, 2, 1)
        return Job(preset, Batches(text, sizes.batch, sizes.seq, seed), steps, seed)

    return make
