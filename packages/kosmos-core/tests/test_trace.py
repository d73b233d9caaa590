"""From spans to counts, JSON and a picture."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import torch
from kosmos_core.trace import (
    COLOURS,
    KIND_NAMES,
    LABELS,
    Span,
    _lanes,
    decode,
    draw_timeline,
    role_switches,
    save_perfetto,
)

SPANS = [
    Span(0, 0, "move", 0, 1000, 3000),
    Span(0, 0, "wait", 4, 3000, 3500),
    Span(0, 0, "build", 7, 3500, 9000),
    Span(0, 1, "build", 1, 1000, 9000),
    Span(1, 0, "build", 0, 2000, 5000),
    Span(1, 0, "move", 3, 5000, 6000),
    Span(1, 0, "build", 2, 6000, 9000),
]


def test_every_role_has_a_colour_and_a_label() -> None:
    assert set(COLOURS) == set(LABELS) == set(KIND_NAMES.values()) - {"call"}
    assert len(set(COLOURS.values())) == len(COLOURS)


def test_decode_reads_rows_up_to_their_end() -> None:
    buffer = torch.zeros(2, 1 + 4 * 2, dtype=torch.int64)
    buffer[0, :9] = torch.tensor([5, 2, 10, 100, 200, 4, 11, 200, 350])
    assert decode(buffer.flatten(), 2, 3) == [
        Span(3, 0, "move", 10, 100, 200),
        Span(3, 0, "build", 11, 200, 350),
    ]


def test_switches_are_counted_between_moving_and_building() -> None:
    assert role_switches(SPANS) == {(0, 0): 1, (0, 1): 0, (1, 0): 2}
    # What movers do at the end of a reduction is a mover's work too.
    reduces = [Span(0, 2, "build", 0, 0, 1), Span(0, 2, "reduce", 0, 2, 3)]
    assert role_switches([*reduces, Span(0, 2, "move", 0, 4, 5)]) == {(0, 2): 1}


def test_perfetto_counts_from_the_first_span(tmp_path: Path) -> None:
    save_perfetto(SPANS, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == len(SPANS)
    assert spans[0] == {
        "name": "move", "ph": "X", "pid": 0, "tid": 0, "ts": 0.0, "dur": 2.0,
        "args": {"argument": 0},
    }  # fmt: skip
    names = {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert {"rank 0", "rank 1", "WG 0", "WG 1"} == names


def test_the_picture_shows_each_role_in_its_colour(tmp_path: Path) -> None:
    draw_timeline(SPANS, tmp_path / "x.png", "title")
    pixels = np.round(matplotlib.image.imread(tmp_path / "x.png")[..., :3] * 255).astype(int)
    for kind in ("build", "move", "wait"):
        wanted = [int(COLOURS[kind][i : i + 2], 16) for i in (1, 3, 5)]
        assert (pixels == wanted).all(-1).sum() > 500, kind
    unused = [int(COLOURS["keep"][i : i + 2], 16) for i in (1, 3, 5)]
    assert not (pixels == unused).all(-1).any()


def test_marks_stand_above_the_lanes(tmp_path: Path) -> None:
    pixels = []
    for name, marks in (("without", ()), ("with", [(1000, "first"), (5000, "second")])):
        draw_timeline(SPANS, tmp_path / f"{name}.png", "title", marks=marks)
        image = np.round(matplotlib.image.imread(tmp_path / f"{name}.png")[..., :3] * 255)
        pixels.append(int((image == (0x5B, 0x66, 0x73)).all(-1).sum()))
    assert pixels[0] == 0
    assert pixels[1] > 20


def test_many_workgroups_are_thinned_out_alike_among_movers_and_builders() -> None:
    by_wg = {
        (0, wg): [Span(0, wg, "move" if wg % 4 == 3 else "build", 0, 0, 1)] for wg in range(128)
    }
    lanes = _lanes(by_wg, 0, 16)
    assert len(lanes) == 16
    assert [wg % 4 == 3 for wg in lanes] == [True] * 4 + [False] * 12
    assert max(lanes[:4]) > 90
    assert max(lanes[4:]) > 110


def test_no_spans_no_picture(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="traced=True"):
        draw_timeline([], tmp_path / "x.png", "title")
