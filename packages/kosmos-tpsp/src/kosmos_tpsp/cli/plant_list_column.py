"""Planted defects of what `bulk_ag` hands over to `bulk_rs`."""

from __future__ import annotations

from typing import Any

from kosmos_core.device import barrier

from kosmos_tpsp.cli.plants import Plant
from kosmos_tpsp.device import beside

PULL = {"transport": "pull"}
# (tokens of a rank, n, k): a handover that the next call overwrites in full.
SAME = ((40, 40, 16),) * 4


def _plant(name: str, rule: str, what: str, *edits: tuple[Any, str, str], **more: Any) -> Plant:
    shapes = more.pop("shapes", SAME)
    more = {"ranks": 3, "choices": PULL, **more}
    return Plant(f"column_{name}", rule, what, edits, shapes=shapes, op="bulk_column", **more)


COLUMN_PLANTS = [
    _plant(
        "handed_over_unheld",
        "start and end",
        "a product is stored where peers may still read that of the call before",
        (
            beside.build_beside,
            "start_hold_all(ctx, call, standing, PHASE_BUILD)",
            "standing",
        ),
    ),
    _plant(
        "one_reader_held",
        "start and end",
        "the start of the next rank is taken for that of all readers",
        (barrier.start_hold_all, "range(1, ctx.WORLD)", "range(1, 2)"),
    ),
    _plant(
        "held_for_the_first_tile_alone",
        "start and end",
        "only who builds the first tile of a product holds the starts of its readers",
        (
            beside.build_beside,
            "standing = start_hold_all(ctx, call, standing, PHASE_BUILD)",
            "if call.ticket == 0:\n"
            "            standing = start_hold_all(ctx, call, standing, PHASE_BUILD)",
        ),
    ),
]
