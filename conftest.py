"""Skips tests that need more GPUs than there are, and can make their absence a failure."""

from __future__ import annotations

import functools

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that the GPU sessions of noxfile.py pass."""
    parser.addoption(
        "--require-gpu",
        action="store_true",
        help="a test marked gpu or multi_gpu fails, and is not skipped, where no GPU is found",
    )


@functools.cache
def _num_gpus() -> int:
    # Imported late: the suite of kosmos-heuristics runs where torch is not installed.
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _wanted_gpus(item: pytest.Item) -> int:
    multi = item.get_closest_marker("multi_gpu")
    if multi is not None:
        return int(multi.args[0])
    return 1 if item.get_closest_marker("gpu") is not None else 0


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip `item` for want of GPUs; under --require-gpu, fail it where there is none at all."""
    wanted = _wanted_gpus(item)
    if wanted == 0 or _num_gpus() >= wanted:
        return
    reason = f"needs {wanted} GPUs, found {_num_gpus()}"
    if item.config.getoption("--require-gpu") and _num_gpus() == 0:
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)
