"""Timelines of a simulated call: a Perfetto trace, and a picture like the paper's Figure 1.

A row per workgroup, sorted so that those which start as movers come first; a colour per kind of
work. Time runs to the right.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

from kosmos_heuristics.simulate.program import DOWNSTREAM, TILES, UPSTREAM, Span

WIDTH, ROW_HEIGHT, MARGIN = 1200, 3, 8
# Blue: building. Orange: transfers that others wait for. Green: transfers of results. Grey: waits.
COLOURS = {TILES: (66, 103, 172), UPSTREAM: (230, 145, 56), DOWNSTREAM: (87, 157, 87)}
WAITING, IDLE = (205, 212, 224), (255, 255, 255)
NAMES = {TILES: "build", UPSTREAM: "move", DOWNSTREAM: "reduce"}


def write_trace(spans: Sequence[Span], path: str) -> None:
    """Write a trace for ui.perfetto.dev: a process per rank, a track per workgroup.

    Args:
        spans: Items as played.
        path: File to write.
    """
    events: list[dict[str, object]] = []
    for span in spans:
        common: dict[str, object] = {"ph": "X", "pid": span.rank, "tid": span.wg}
        if span.start_us > span.claimed_us:
            wait = span.start_us - span.claimed_us
            events.append({**common, "name": "wait", "ts": span.claimed_us, "dur": wait})
        name = f"{NAMES[span.queue]} {span.item}"
        busy = span.end_us - span.start_us
        events.append({**common, "name": name, "ts": span.start_us, "dur": busy})
    Path(path).write_text(json.dumps({"traceEvents": events}), encoding="utf-8")


def write_png(spans: Sequence[Span], path: str) -> None:
    """Write a picture: a band of pixels per workgroup, rank under rank.

    Args:
        spans: Items as played, at least one.
        path: File to write.
    """
    end = max(span.end_us for span in spans)
    tracks = sorted({(span.rank, span.wg) for span in spans})
    rows = {track: index for index, track in enumerate(tracks)}
    lines = [bytearray(bytes(IDLE) * WIDTH) for _ in tracks]
    for span in spans:
        line = lines[rows[span.rank, span.wg]]
        _fill(line, span.claimed_us, span.start_us, end, WAITING)
        _fill(line, span.start_us, span.end_us, end, COLOURS[span.queue])
    blank = bytes(IDLE) * (WIDTH + 2 * MARGIN)
    image = [blank] * MARGIN
    for line in lines:
        image += [bytes(IDLE) * MARGIN + bytes(line) + bytes(IDLE) * MARGIN] * ROW_HEIGHT
    image += [blank] * MARGIN
    Path(path).write_bytes(_png(WIDTH + 2 * MARGIN, image))


def _fill(
    line: bytearray, start: float, stop: float, end: float, colour: tuple[int, int, int]
) -> None:
    first, last = int(start / end * WIDTH), min(WIDTH, int(stop / end * WIDTH + 0.5))
    if last > first:
        line[3 * first : 3 * last] = bytes(colour) * (last - first)


def _png(width: int, lines: Sequence[bytes]) -> bytes:
    """An RGB image of 8 bits a channel."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", width, len(lines), 8, 2, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + line for line in lines))
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    )
