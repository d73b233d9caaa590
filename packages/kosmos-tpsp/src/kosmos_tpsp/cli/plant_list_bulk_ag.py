"""Planted defects of `bulk_ag`; what it shares with `ag_gemm` is in `plant_list`."""

from __future__ import annotations

from typing import Any

from kosmos_tpsp.cli.plants import Plant
from kosmos_tpsp.device import beside, gather
from kosmos_tpsp.kernels.bulk_ag import bulk_ag_kernel

PULL = {"transport": "pull"}
PUSH = {"transport": "push"}
# Two tile rows of a rank and several tiles, over and over: words of earlier calls fit later ones.
SAME = ((40, 32, 32),) * 3


def _plant(name: str, rule: str, what: str, *edits: tuple[Any, str, str], **more: Any) -> Plant:
    shapes = more.pop("shapes", SAME)
    return Plant(f"bulk_ag_{name}", rule, what, edits, shapes=shapes, op="bulk_ag", **more)


BESIDE_PLANTS = [
    _plant(
        "width_of_the_contraction",
        "start and end",
        "rows as wide as the contraction are copied in, not as what is gathered",
        (
            bulk_ag_kernel,
            "open_gather(ops, ctx, call, standing, rows, n, CONFIG)",
            "open_gather(ops, ctx, call, standing, rows, k, CONFIG)",
        ),
        shapes=((40, 16, 64),) * 2,
        choices=PULL,
    ),
    _plant(
        "rows_over_the_own",
        "consume",
        "pulled rows land where the own chunk of the gather output is",
        (
            gather.transport,
            "chunk * ctx.WORLD, peer * chunk",
            "chunk * ctx.WORLD, call.rank * chunk",
        ),
        choices=PULL,
    ),
    _plant(
        "nobody_moves",
        "roles",
        "whoever is to move only completes the gather output",
        (
            beside.gather_beside,
            "standing = move(ops, ctx, call, standing, rows, n, CONFIG)",
            "pass",
        ),
        choices=PUSH,
    ),
    _plant(
        "left_before_arrival",
        "start and end",
        "a launch that only gathers ends before all that peers push has arrived",
        (
            beside.gather_beside,
            "standing = keep_rows(ops, ctx, call, standing, rows, n, CONFIG)",
            "pass",
        ),
        choices={"policy": "serial", **PUSH},
        ranks=3,
    ),
    _plant(
        "kept_before_arrival",
        "consume",
        "pushed rows are copied to the gather output without waiting for them",
        (
            gather.keep_rows,
            "standing = await_rows(ops, ctx, call, standing, grid, k, peer, tile_row, CONFIG)",
            "pass",
        ),
        choices=PUSH,
    ),
    _plant(
        "build_unannounced",
        "start and end",
        "a launch that only builds publishes no start, though peers hold it before they hand over",
        (
            gather.open_gather,
            "if CONFIG.PHASE == BUILD_ONLY:\n        publishes = call.ticket == 0",
            "if CONFIG.PHASE == BUILD_ONLY:\n        publishes = call.ticket < 0",
        ),
        choices={"policy": "serial", "dx_to": "handover"},
    ),
    _plant(
        "moved_before_start",
        "start and end",
        "a mover that builds moves a unit between tiles without holding the peer's start",
        (gather.transport, "start_hold(ctx, call, standing, peer, PHASE_GATHER)", "standing"),
        choices={"policy": "two_way", "dx_to": "tensor", **PULL},
    ),
    _plant(
        "input_overwritten",
        "start and end",
        "one shard instead of two by parity: refilled while a peer still pulls from it",
        (gather.copy_in, "SHARD + call.parity", "SHARD"),
        (gather.transport, "SHARD + call.parity", "SHARD"),
        shapes=((40, 32, 16),) * 4,
        ranks=3,
        choices={"policy": "fixed", "dx_to": "tensor", **PULL},
    ),
    _plant(
        "start_by_the_last",
        "roles",
        "the last workgroup to arrive publishes the start, and builders wait for it to hand over",
        (
            gather.open_gather,
            "else:\n        publishes = call.ticket == 0",
            "else:\n        publishes = call.ticket == tl.num_programs(0) - 1",
        ),
        choices={"dx_to": "handover", **PUSH},
        fixed={"slots": 1, "start": "descending"},
    ),
    _plant(
        "unit_skipped",
        "claims",
        "a mover that builds claims a unit before each tile and moves only every other one",
        (
            beside.alternate,
            "if unit < num_units(ctx, job.rows, CONFIG):",
            "if (unit < num_units(ctx, job.rows, CONFIG)) & (unit % 2 == 0):",
        ),
        choices={"policy": "two_way", **PUSH},
    ),
]
