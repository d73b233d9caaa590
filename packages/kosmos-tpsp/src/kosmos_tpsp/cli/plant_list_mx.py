"""Planted defects of MXFP8 gathers; what they share with BF16 ones is in `plant_list`.

Those show in MXFP8, too: `check --plant NAME --dtype mxfp8`.
"""

from __future__ import annotations

from typing import Any

from kosmos_tpsp.cli.plants import Plant
from kosmos_tpsp.device import gather, gathered, rows, scaled, unpack
from kosmos_tpsp.device.mx import load_column_groups
from kosmos_tpsp.kernels.ag_gemm import ag_gemm_kernel

PULL = {"transport": "pull"}
PUSH = {"transport": "push"}
AS_IT_IS = {"block_scaled": True}


def _plant(name: str, rule: str, what: str, *edits: tuple[Any, str, str], **more: Any) -> Plant:
    return Plant(f"mx_{name}", rule, what, edits, dtype="mxfp8", **more)


MX_PLANTS = [
    _plant(
        "scales_late",
        "publish",
        "a pushed unit is counted in once its elements are there, before its scales are",
        (
            gather.transport,
            "copy_elements(sent, place, rows * k, CONFIG, ctx.TARGET)",
            "copy_run(sent.ptr, place.ptr, rows * k, CONFIG.COPY_ELEMENTS, CONFIG.COPY_DEPTH)\n"
            "            flag_arrive(peer_ptr(ctx, ARRIVAL, peer, tl.int32) "
            "+ call.parity * ctx.ARRIVAL_WORDS + call.rank * ctx.MAX_ROWS + tile_row, "
            '"sys", ctx.TARGET)\n'
            "            copy_run(sent.scale_ptr, place.scale_ptr, rows * k // 32, 32, 1)",
        ),
        (gather.carry_unit, "if standing.ok != 0:", "if standing.ok == 2:"),
        choices=PUSH,
    ),
    _plant(
        "scales_over_elements",
        "publish",
        "scales of a region lie where the elements of its last rows do",
        (rows.region_rows, "Rows(ptr, ptr + elements)", "Rows(ptr, ptr + elements - 64)"),
        choices=PUSH,
    ),
    _plant(
        "scales_of_another_row",
        "consume",
        "the scales that a unit takes are those of the group after its own",
        (rows.rows_at, "offset // GROUP", "offset // GROUP + 1"),
        choices=PULL,
    ),
    _plant(
        "scales_of_another_rank",
        "consume",
        "every chunk is multiplied with the scales of the first one",
        (scaled.scaled_sum, "a_view.scale_ptr + offset // GROUP", "a_view.scale_ptr"),
        choices={**AS_IT_IS, **PULL},
        ranks=3,
    ),
    _plant(
        "dequantised_before_arrival",
        "consume",
        "pushed rows are dequantised without waiting for them",
        (unpack.unpack_landed, "if ok != 0:", "if ok == 2:"),
        choices=PUSH,
    ),
    _plant(
        "landed_polled_gpu_scope",
        "scope",
        "what peers have pushed is polled with scope gpu",
        (unpack.unpack_landed, '"sys"', '"gpu"'),
        choices=PUSH,
    ),
    _plant(
        "dequantised_too_early",
        "consume",
        "pushed rows are dequantised when one slice of their tile row is still missing",
        (unpack.unpack_landed, "word_ptr, CONFIG.SLICES", "word_ptr, CONFIG.SLICES - 1"),
        choices=PUSH,
    ),
    _plant(
        "ready_before_dequantised",
        "publish",
        "a slice is counted as ready before it is dequantised",
        (
            unpack.unpack_slice,
            "        unpack_elements(\n            rows_at(source",
            '        flag_arrive(ready_word(ctx, call, src_rank, tile_row), "gpu", ctx.TARGET)\n'
            "        unpack_elements(\n            rows_at(source",
        ),
    ),
    _plant(
        "own_rows_unawaited",
        "consume",
        "builders read their own rows without waiting until they are dequantised",
        (
            gathered.await_tile,
            "((tile.src_rank != call.rank) | DEQUANTISES)",
            "(tile.src_rank != call.rank)",
        ),
    ),
    _plant(
        "landed_taken_for_ready",
        "consume",
        "builders wait until pushed rows are there, not until they are dequantised",
        (
            gather.arrival_word,
            "CONFIG.TRANSPORT == PUSH and CONFIG.FORMAT != UNPACKED",
            "CONFIG.TRANSPORT == PUSH and src_rank != call.rank",
        ),
        choices=PUSH,
    ),
    _plant(
        "nobody_dequantises",
        "roles",
        "the own rows are left to the movers, which have other things to do",
        (ag_gemm_kernel, "unpack_own(ops, ctx, call, standing, grid, k, CONFIG)", "pass"),
    ),
    _plant(
        "same_tile_row",
        "roles",
        "a mover waits for the tile row that it and its peers are still pushing",
        (gather.move_unit, "if tile_row > 0:", "if tile_row < grid.tile_rows:"),
        (gather.move_unit, "k, tile_row - 1, part", "k, tile_row, part"),
        choices={"cap": 2, **PUSH},
    ),
    _plant(
        "dequantised_twice",
        "claims",
        "every mover dequantises all slices of a tile row, not the one of its unit",
        (
            gather.move_unit,
            "            standing = unpack_landed(\n"
            "                ops, ctx, call, standing, grid, k, tile_row - 1, part, step, CONFIG\n"
            "            )",
            "            for each in range(CONFIG.SLICES):\n"
            "                standing = unpack_landed(\n"
            "                    ops, ctx, call, standing, grid, k, tile_row - 1, each, step,\n"
            "                    CONFIG\n"
            "                )",
        ),
        choices=PUSH,
    ),
    _plant(
        "columns_before_arrival",
        "consume",
        "a pushed column-wise copy is dequantised without waiting for it",
        (unpack.unpack_landed, "if ok != 0:", "if ok == 2:"),
        op="bulk_ag",
        shapes=((64, 32, 32), (32, 24, 32), (64, 32, 32)),
        choices=PUSH,
    ),
    _plant(
        "columns_with_the_next_scales",
        "consume",
        "groups along columns are dequantised with the scales of the rows after them",
        (load_column_groups, "scale_ptr + band * cols", "scale_ptr + (band + 1) * cols"),
        op="bulk_ag",
        shapes=((64, 32, 32),) * 2,
        choices=PULL,
    ),
]
