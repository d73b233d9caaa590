"""What a workspace consists of: regions of symmetric memory, and how many words its calls share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kosmos_core.device import layout
from kosmos_core.device.trace import EVENT_WORDS

SPLIT_TICKETS = 1024


@dataclass(frozen=True)
class Region:
    """A named region of symmetric memory.

    Attributes:
        name: what errors and reports call it.
        row: its row in the peer table (`device/layout.py`).
        num_elements: elements a rank and copy.
        dtype: element type.
        depth: 2 where the owner refills it before it holds its peers' starts, else 1.
        poison: bits of an element that has not arrived yet, in a region of 2-byte elements that is
            polled in its data (`device/sentinel.py`); `reset()` fills it with them. None elsewhere.
    """

    name: str
    row: int
    num_elements: int
    dtype: torch.dtype
    depth: int = 1
    poison: int | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes a rank."""
        return self.num_elements * self.depth * self.dtype.itemsize


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def control_sizes(max_tile_rows: int, num_counters: int | None = None) -> tuple[int, int, int]:
    """Sizes of the counters for so many tile rows a source.

    Args:
        max_tile_rows: tile rows a source may have.
        num_counters: words of a set beyond the queue heads; None takes arrival words and tickets.

    Returns:
        (arrival stride, int32 words of a counter set, int32 words of an arrival set).
    """
    stride = 32
    while stride < max_tile_rows:
        stride *= 2
    granule = int(layout.SET_GRANULE.value)
    ranks = int(layout.MAX_RANKS.value)
    if num_counters is None:
        num_counters = ranks * stride + SPLIT_TICKETS
    counters = int(layout.COUNTERS.value) + num_counters
    return stride, _round_up(counters, granule), _round_up(ranks * stride, granule)


def trace_num_words(num_wgs: int, trace_events: int) -> int:
    """int64 words of the trace buffer of so many workgroups."""
    return num_wgs * (1 + int(EVENT_WORDS.value) * trace_events) if trace_events else 0


def workspace_num_bytes(
    regions: Sequence[Region],
    max_tile_rows: int,
    trace_words: int = 0,
    num_counters: int | None = None,
) -> int:
    """Bytes that a workspace of these regions takes on each rank."""
    _, set_words, arrival_words = control_sizes(max_tile_rows, num_counters)
    control = 4 * (int(layout.HEADER_WORDS.value) + 2 * set_words)
    shared = 8 * int(layout.SIGNAL_WORDS.value) + 4 * 2 * arrival_words
    table = 8 * int(layout.NUM_REGIONS.value) * int(layout.MAX_RANKS.value)
    return control + shared + table + 8 * trace_words + sum(r.num_bytes for r in regions)
