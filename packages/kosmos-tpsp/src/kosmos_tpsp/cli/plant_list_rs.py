"""Planted defects of `gemm_rs`; what it shares with `ag_gemm` is in `plant_list`."""

from __future__ import annotations

from typing import Any

from kosmos_core.device import roles

from kosmos_tpsp.cli.plants import Plant
from kosmos_tpsp.device import scatter
from kosmos_tpsp.kernels.gemm_rs import gemm_rs_kernel

# Three columns of tiles, twice: words and rows of the first call fit the second.
WIDE = ((40, 72, 16),) * 3
# What a tile is counted as once it is stored.
SENT = "tl.where(goes, tile.src_rank * ctx.MAX_ROWS + tile.tile_row, -1)"
SMALL = ((24, 40, 16), (40, 40, 16), (24, 40, 16))


def _plant(name: str, rule: str, what: str, *edits: tuple[Any, str, str], **more: Any) -> Plant:
    shapes = more.pop("shapes", WIDE)
    return Plant(f"rs_{name}", rule, what, edits, shapes=shapes, op="gemm_rs", **more)


SCATTER_PLANTS = [
    _plant(
        "sent_before_start",
        "start and end",
        "partial sums are sent to a rank that may still read those of the call before",
        (
            scatter.hold_owner,
            "start_hold(ctx, call, standing, owner, PHASE_BUILD)",
            "Standing(standing.held | (1 << owner), standing.ok)",
        ),
    ),
    _plant(
        "arrival_gpu_scope",
        "scope",
        "a tile on a peer is counted in with scope gpu",
        (scatter.count_sent, 'word_ptr, "sys"', 'word_ptr, "gpu"'),
    ),
    _plant(
        "tile_counted_before_it_is_stored",
        "publish",
        "a tile is counted in at its owner before it is stored there",
        (
            scatter.send_tile,
            "count_sent(ctx, call, sent)",
            "count_sent(ctx, call, tile.src_rank * ctx.MAX_ROWS + tile.tile_row)",
        ),
        (scatter.send_tile, SENT, "sent * 0 - 1"),
    ),
    _plant(
        "last_tile_uncounted",
        "publish",
        "a builder that finds no tile left does not count the one that it stored last",
        (
            scatter.build_and_send,
            "count_sent(ctx, call, sent)\n    return standing",
            "return standing",
        ),
    ),
    _plant(
        "tile_of_a_mover_uncounted",
        "publish",
        "two-way: a mover does not count the tile that it has built while it had nothing to add up",
        (scatter.send_meanwhile, "count_sent(ctx, call, sent)", "pass"),
        choices={"policy": "two_way"},
    ),
    _plant(
        "fewer_tiles_awaited",
        "consume",
        "a tile row is added up when one column of its tiles is still missing",
        (scatter.tiles_of_row, "* grid.columns", "* (grid.columns - 1)"),
    ),
    _plant(
        "own_tiles_unawaited",
        "consume",
        "movers wait for what peers send, not for what their own builders do",
        (
            scatter.await_arrivals,
            "tiles_of_row(grid, tile_row, CONFIG), 0)",
            "tiles_of_row(grid, tile_row, CONFIG), 1)",
        ),
    ),
    _plant(
        "next_row_unawaited",
        "consume",
        "a mover that has waited for a tile row takes the next one for granted",
        (scatter.add_up, "if tile_row != ready:", "if tile_row > ready + 1:"),
        shapes=((72, 40, 16),) * 2,
    ),
    _plant(
        "slot_of_the_owner",
        "consume",
        "all ranks store into the same slot of an owner",
        (scatter.send_tile, "store_output(view, call.rank", "store_output(view, tile.src_rank"),
        ranks=3,
    ),
    _plant(
        "word_of_the_owner",
        "consume",
        "tiles are counted in as if their owner had sent them",
        (scatter.count_sent, "call.rank * ctx.MAX_ROWS", "owner * ctx.MAX_ROWS"),
    ),
    _plant(
        "empty_tile_counted",
        "consume",
        "tiles past the end of a chunk are counted in as if they had rows",
        (scatter.send_tile, SENT, SENT.replace("goes", "standing.ok != 0")),
        shapes=((40, 40, 16),) * 2,
    ),
    _plant(
        "other_set",
        "epochs",
        "tiles are counted into the words of the next call",
        (
            scatter.count_sent,
            "call.parity * ctx.ARRIVAL_WORDS",
            "(1 - call.parity) * ctx.ARRIVAL_WORDS",
        ),
    ),
    _plant(
        "movers_first",
        "roles",
        "the first workgroups to arrive add up, and builders find no room",
        (
            roles.is_mover_last,
            "call.ticket >= tl.num_programs(0) - num_movers",
            "call.ticket < num_movers",
        ),
        fixed={"slots": 1},
    ),
    _plant(
        "built_and_gone",
        "start and end",
        "a launch that only builds ends before all that peers send has arrived",
        (
            gemm_rs_kernel,
            "await_all_partials(ctx, call, standing, grid, CONFIG)",
            "standing",
        ),
        choices={"policy": "serial"},
        shapes=SMALL,
        ranks=3,
    ),
]
