"""The order of fused launches of different streams: whoever may still run is waited for."""

from __future__ import annotations

from collections.abc import Hashable

import pytest
from kosmos_core.worlds.ordering import LaunchOrder

NUM_SMS = 132


class Streams:
    """Launches on streams of one GPU, and which streams each of them waited for."""

    def __init__(self) -> None:
        self.order = LaunchOrder(NUM_SMS)

    def launch(self, stream: str, num_wgs: int) -> set[Hashable]:
        waited: set[Hashable] = set()
        self.order.enter(stream, num_wgs, waited.add)
        return waited


@pytest.fixture
def streams() -> Streams:
    return Streams()


def test_one_stream_waits_for_nobody(streams: Streams) -> None:
    assert streams.launch("a", NUM_SMS) == set()
    assert streams.launch("a", NUM_SMS) == set()


def test_launches_that_fit_side_by_side_run_side_by_side(streams: Streams) -> None:
    assert streams.launch("a", 66) == set()
    assert streams.launch("b", 66) == set()
    assert streams.launch("a", 66) == set()
    assert streams.launch("c", 1) == {"a", "b"}


def test_an_earlier_launch_of_a_stream_may_still_run(streams: Streams) -> None:
    streams.launch("a", NUM_SMS)
    streams.launch("a", 66)
    assert streams.launch("b", 66) == {"a"}


def test_who_waited_for_a_launch_stands_for_it(streams: Streams) -> None:
    streams.launch("a", NUM_SMS)
    assert streams.launch("b", 1) == {"a"}
    # The 1 of b has not begun as long as a runs.
    assert streams.launch("c", 131) == {"b"}


def test_what_the_host_has_waited_for_is_forgotten(streams: Streams) -> None:
    streams.launch("a", NUM_SMS)
    before = streams.order.launches
    streams.launch("b", NUM_SMS)
    streams.order.forget(before)
    assert streams.launch("c", NUM_SMS) == {"b"}
    streams.order.forget(streams.order.launches)
    assert streams.launch("a", NUM_SMS) == set()
