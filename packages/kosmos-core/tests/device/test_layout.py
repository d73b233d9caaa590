"""The word layout: blocks that do not overlap, and room for every rank."""

from __future__ import annotations

from itertools import pairwise

from kosmos_core.device import layout
from kosmos_core.errors import PeerFaultError, PeerMismatchError, PeerTimeoutError


def value(name: str) -> int:
    return int(getattr(layout, name).value)


def test_counters_of_a_set_stand_on_lines_of_their_own() -> None:
    names = (
        "TICKET", "LEAVE", "COPY_QUEUE", "COPY_DONE", "UNIT_QUEUE", "TILE_QUEUE", "KEEP_QUEUE",
        "SPLIT_QUEUE", "JOIN_QUEUE", "POISON_QUEUE", "REDUCE_QUEUE",
        "UNPACK_QUEUE", "ALL_READY", "SECOND_QUEUE", "COUNTERS",
    )  # fmt: skip
    places = [value(name) for name in names]
    assert all(b - a >= value("LINE") for a, b in pairwise(places))
    # One queue head for each of up to eight dies.
    assert value("KEEP_QUEUE") - value("TILE_QUEUE") >= 8


def test_signal_words_do_not_overlap() -> None:
    ranks, words = value("MAX_RANKS"), value("RECORD_WORDS")
    assert value("START") + 2 * ranks <= value("ABORT") < value("RECORD")
    assert value("RECORD") + ranks * words <= value("SIGNAL_WORDS")
    records = [
        value(name) for name in dir(layout) if name.startswith("RECORD_") and name != "RECORD_WORDS"
    ]
    assert sorted(records) == list(range(words))


def test_the_header_has_a_word_for_everything() -> None:
    names = ("EPOCH", "RANK", "RAISED", "BOUND_MS", "STAGE_TURN", "STAGE_EXTENT")
    header = [value(name) for name in names] + [value("STAGE_EXTENT") + 1]
    assert len(set(header)) == len(header)
    assert max(header) < value("HEADER_WORDS")


def test_rows_of_the_peer_table_are_distinct() -> None:
    rows = [value("SIGNAL"), value("ARRIVAL"), value("SHARD"), value("SHARD") + 1, value("GATHER")]
    rows += [value("STAGING"), value("STAGING") + 1]
    assert len(set(rows)) == len(rows)
    assert max(rows) < value("NUM_REGIONS")


def test_everything_that_an_exception_names_has_a_name() -> None:
    phases = {
        value(name) for name in dir(layout) if name.startswith("PHASE_") and name != "PHASE_NAMES"
    }
    flags = {
        value(name) for name in dir(layout) if name.startswith("FLAG_") and name != "FLAG_NAMES"
    }
    assert phases == set(layout.PHASE_NAMES)
    assert flags == set(layout.FLAG_NAMES)
    kinds = {PeerTimeoutError: "TIMEOUT", PeerMismatchError: "MISMATCH", PeerFaultError: "FAULT"}
    assert len({value(name) for name in kinds.values()}) == len(kinds)
