"""Handles of calls: one for equal calls, as long as the workspace lives, in every thread."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from kosmos_core import handles
from kosmos_core.errors import WorkspaceError
from kosmos_core.handles import call_handle, resolve


class Place(SimpleNamespace):
    """Stands for a workspace."""

    __hash__ = object.__hash__


class Slow:
    """Choices whose hash takes long enough for another thread to come in between."""

    def __hash__(self) -> int:
        time.sleep(0.05)
        return 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slow)


def test_threads_that_call_at_the_same_time_get_the_same_handle() -> None:
    place = Place(world=SimpleNamespace(size=2))
    before = len(handles._CALLS)
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(call_handle, [place] * 4, [Slow() for _ in range(4)]))
    [handle] = found
    assert len(handles._CALLS) == before + 1
    assert resolve(handle) == (place, Slow())
    del place
    assert len(handles._CALLS) == before
    with pytest.raises(WorkspaceError, match="no longer exists"):
        resolve(handle)
