"""Planted defects of `bulk_rs`; what it shares with the other ops is in their lists."""

from __future__ import annotations

from typing import Any

from kosmos_tpsp.cli.plants import Plant
from kosmos_tpsp.device import gather, gradient, scatter

PULL = {"transport": "pull"}
PUSH = {"transport": "push"}
# (tokens of a rank, n, m): several tile rows, ragged, twice.
WIDE = ((72, 40, 24),) * 3
# Tiles enough for a mover that builds to send everything and add up between them.
DEEP = ((40, 72, 200),) * 2


def _plant(name: str, rule: str, what: str, *edits: tuple[Any, str, str], **more: Any) -> Plant:
    shapes = more.pop("shapes", WIDE)
    return Plant(f"bulk_rs_{name}", rule, what, edits, shapes=shapes, op="bulk_rs", **more)


BULK_RS_PLANTS = [
    _plant(
        "pulled_before_start",
        "start and end",
        "rows are pulled from a peer that may not have made them yet",
        (
            gradient.hold_all,
            "start_hold_all(ctx, call, standing, PHASE_REDUCE)",
            "standing",
        ),
        choices=PULL,
        ranks=3,
    ),
    _plant(
        "sent_before_start",
        "start and end",
        "rows are sent to a rank that may still add up those of the call before",
        (
            gather.transport,
            "start_hold(ctx, call, standing, peer, PHASE_GATHER)",
            "Standing(standing.held | (1 << peer), standing.ok)",
        ),
        choices=PUSH,
        ranks=3,
    ),
    _plant(
        "slot_of_the_owner",
        "consume",
        "all ranks send into the same slot of an owner",
        (gather.transport, "call.rank * chunk + offset", "peer * chunk + offset"),
        choices=PUSH,
        ranks=3,
    ),
    _plant(
        "fewer_slices_awaited",
        "consume",
        "a tile row is added up when its last slice is still missing",
        (gradient.await_sent, "CONFIG.SLICES", "CONFIG.SLICES - 1"),
        choices=PUSH,
    ),
    _plant(
        "last_source_unawaited",
        "consume",
        "the rows of one peer are not waited for",
        (
            scatter.await_sources,
            "for step in range(FIRST, ctx.WORLD)",
            "for step in range(FIRST, ctx.WORLD - 1)",
        ),
        choices=PUSH,
        ranks=3,
    ),
    _plant(
        "next_row_unawaited",
        "consume",
        "a mover that has waited for a tile row takes the next one for granted",
        (scatter.add_up, "if tile_row != ready:", "if tile_row > ready + 1:"),
        choices=PUSH,
    ),
    _plant(
        "words_of_the_other_set",
        "epochs",
        "movers wait for arrivals in the words of the next call",
        (
            scatter.await_sources,
            "call.parity * ctx.ARRIVAL_WORDS",
            "(1 - call.parity) * ctx.ARRIVAL_WORDS",
        ),
        choices=PUSH,
    ),
    _plant(
        "added_up_before_sent",
        "claims",
        "movers wait for what the peers send before they send themselves",
        (
            gradient.reduce_chunk,
            "standing = move(ops, ctx, call, standing, grid, n, CONFIG)",
            "standing = standing",
        ),
        (
            gradient.reduce_chunk,
            "fence_async_proxy(ctx.TARGET)",
            "standing = move(ops, ctx, call, standing, grid, n, CONFIG)",
        ),
        choices=PUSH,
    ),
    _plant(
        "added_up_between_tiles_before_arrival",
        "consume",
        "a mover that builds adds up a unit between tiles that has not arrived from one peer",
        (gradient.add_if_here, "CONFIG.SLICES, 1) == 0", "CONFIG.SLICES, 1) <= 1"),
        choices={"policy": "two_way", **PUSH},
        ranks=3,
        shapes=DEEP,
    ),
    _plant(
        "pulled_between_tiles_before_start",
        "start and end",
        "a mover that builds pulls rows between tiles without holding the starts of its peers",
        (gradient.add_if_here, "hold_all(ctx, call, standing, grid, tile_row, CONFIG)", "standing"),
        choices={"policy": "two_way", **PULL},
        ranks=3,
        shapes=DEEP,
    ),
    _plant(
        "sent_between_tiles_alone",
        "claims",
        "what a mover that builds has not sent when no tile is left stays unsent",
        (
            gradient.reduce_chunk,
            "standing = move(ops, ctx, call, standing, grid, n, CONFIG)",
            "standing = standing",
        ),
        choices={"policy": "two_way", **PUSH},
    ),
]
