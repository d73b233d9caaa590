"""The device's numbering of tiles and mover units is that of kosmos_heuristics, index by index."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from kosmos_core.device.layout import Call, Context
from kosmos_core.device.tiles import Grid, claim_tiles, gathered_tile, num_gathered_tiles
from kosmos_core.executor import Executor, PriorityRandom, Random
from kosmos_heuristics.orders import MoverQueue, TileQueue
from kosmos_tpsp.device.config import AgGemmConfig
from kosmos_tpsp.device.gather import unit_place, unit_target
from kosmos_tpsp.ops.ag_gemm import ORDERS
from kosmos_tpsp.ops.prepared import TRANSPORTS


@triton.jit
def number_tiles_kernel(
    out_ptr,
    chunk_rows,
    tile_rows,
    columns,
    rank,
    count,
    ORDER: tl.constexpr,
    WORLD: tl.constexpr,
    TILE_ROW_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    GROUP_M: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
):
    grid = Grid(chunk_rows, tile_rows, columns)
    total = num_gathered_tiles(grid, ORDER, WORLD, TILE_ROW_ROWS, BLOCK_M)
    tl.store(out_ptr, total)
    for index in range(tl.minimum(total, count)):
        tile = gathered_tile(
            index, grid, rank, ORDER, WORLD, TILE_ROW_ROWS, BLOCK_M, GROUP_M, GROUP_ROWS
        )
        tl.store(out_ptr + 4 * index + 4, tile.src_rank)
        tl.store(out_ptr + 4 * index + 5, tile.row_block)
        tl.store(out_ptr + 4 * index + 6, tile.column)
        tl.store(out_ptr + 4 * index + 7, tile.tile_row)


def numbered(queue: TileQueue) -> tuple[int, list[tuple[int, ...]]]:
    """The device's (number of indices, [(source, row block, column, tile row)])."""
    out = torch.full((4 * queue.num_ids + 4,), -1, dtype=torch.int32)
    with Executor() as executor:
        number_tiles_kernel[(1,)](
            out, queue.chunk_rows, queue.tile_rows, queue.num_columns, queue.rank, queue.num_ids,
            ORDERS[queue.order], queue.world_size, queue.tile_row_rows, queue.block_m,
            queue.group_m, queue.group_rows,
        )  # fmt: skip
        executor.run()
    places = out[4:].view(-1, 4).tolist()
    return int(out[0]), [tuple(place) for place in places]


def draw_queue(seed: int) -> TileQueue:
    rng = random.Random(seed)
    world_size = seed % 8 + 1
    block_m = rng.choice((16, 32, 64))
    return TileQueue(
        world_size=world_size,
        rank=rng.randrange(world_size),
        chunk_rows=rng.choice((1, 15, 16, 17, 40, 64, 100, 129)),
        n=rng.choice((1, 16, 31, 32, 33, 100)),
        k=16,
        block_k=16,
        block_m=block_m,
        block_n=rng.choice((16, 32)),
        tile_row_rows=block_m * rng.choice((1, 2, 4)),
        group_m=rng.choice((1, 2, 3, 8)),
        group_rows=rng.choice((1, 1, 2, 3)),
        order=("local_first", "chunk_major", "naive")[seed // 8 % 3],
    )


@pytest.mark.parametrize("seed", range(48))
def test_tiles_are_numbered_as_the_heuristics_number_them(seed: int) -> None:
    queue = draw_queue(seed)
    total, places = numbered(queue)
    assert total == queue.num_ids
    blocks = queue.row_blocks_per_tile_row
    wanted = [(*queue.tile(i), queue.tile(i).row_block // blocks) for i in range(queue.num_ids)]
    assert places == wanted
    # Every tile once, the empty ones aside.
    real = [place[:3] for place in places if place[1] < queue.chunk_row_blocks]
    everything = queue.world_size * queue.chunk_row_blocks * queue.num_columns
    assert len(real) == len(set(real)) == everything


def test_another_order_is_another_numbering() -> None:
    first = draw_queue(2)
    queues = [replace(first, order=order, chunk_rows=129, n=100) for order in ORDERS]
    assert len({tuple(numbered(queue)[1]) for queue in queues}) == 3


@triton.jit
def number_units_kernel(
    out_ptr,
    table_ptr,
    count,
    rank,
    CONFIG,
    ctx,
):
    zero = rank * 0
    wide = zero.to(tl.int64)
    call = Call(rank, zero, zero, wide, zero, table_ptr, table_ptr, wide)
    for unit in range(count):
        tile_row, part, step = unit_place(ctx, unit, CONFIG)
        peer, _ = unit_target(ctx, call, tile_row, step, CONFIG)
        tl.store(out_ptr + 3 * unit, peer)
        tl.store(out_ptr + 3 * unit + 1, tile_row)
        tl.store(out_ptr + 3 * unit + 2, part)


@pytest.mark.parametrize("transport", ["pull", "push"])
@pytest.mark.parametrize("size", range(2, 9))
def test_mover_units_are_numbered_as_the_heuristics_number_them(
    size: int, transport: str, unit_structs: Any
) -> None:
    rng = random.Random(size)
    for slices in (1, 2, 4):
        rank, tile_rows = rng.randrange(size), rng.randint(1, 5)
        queue = MoverQueue(size, rank, tile_rows, slices, transport)
        out = torch.full((3 * queue.num_units,), -1, dtype=torch.int32)
        with Executor() as executor:
            table = torch.full((64,), out.data_ptr(), dtype=torch.int64)
            config, ctx = unit_structs(TRANSPORTS[transport], slices, size, table)
            number_units_kernel[(1,)](out, out, queue.num_units, rank, config, ctx)
            executor.run()
        found = [tuple(place) for place in out.view(-1, 3).tolist()]
        assert found == [tuple(queue.unit(i)) for i in range(queue.num_units)]
        # Neighbouring units use different links.
        peers = [place[0] for place in found]
        runs = [peers[i : i + size - 1] for i in range(0, len(peers), size - 1)]
        assert all(len(set(run)) == size - 1 for run in runs)


@pytest.fixture
def unit_structs() -> Any:
    """Makes the structs that the numbering of units reads."""

    def make(transport: Any, slices: int, size: int, table: torch.Tensor) -> tuple[Any, Any]:
        unused = dict.fromkeys(AgGemmConfig._fields, tl.constexpr(0))
        given = {"TRANSPORT": transport, "SLICES": tl.constexpr(slices)}
        words = (tl.constexpr(n) for n in (size, 1024, 1024, 32, 0, 0))
        return AgGemmConfig(**{**unused, **given}), Context(table, table, table, table, *words)

    return make


@triton.jit
def claim_kernel(
    heads_ptr,
    seen_ptr,
    total,
    builders,
    XCDS: tl.constexpr,
    XCD_RUN: tl.constexpr,
    RUN: tl.constexpr,
):
    bucket = tl.program_id(0) % XCDS
    first, past, step, bucket = claim_tiles(heads_ptr, bucket, total, builders, XCDS, XCD_RUN, RUN)
    while first < total:
        for place in range(first, past, step):
            tl.atomic_add(seen_ptr + place, 1, sem="relaxed", scope="gpu")
        first, past, step, bucket = claim_tiles(
            heads_ptr, bucket, total, builders, XCDS, XCD_RUN, RUN
        )


@pytest.mark.parametrize("xcds", [1, 2, 4])
@pytest.mark.parametrize("run", [1, 2, 3])
def test_every_tile_is_claimed_once(xcds: int, run: int) -> None:
    for seed, total in enumerate((1, 2, 7, 16, 50, 121)):
        policy = Random(seed) if seed % 2 else PriorityRandom(seed)
        with Executor(policy=policy, slots=1 + seed % 3) as executor:
            heads = executor.symmetric(xcds, torch.int32, "heads")[0]
            seen = executor.symmetric(total, torch.int32, "seen")[0]
            claim_kernel[(4,)](heads, seen, total, 1 + seed % 4, xcds, 4, run)
            executor.run()
        assert seen.tolist() == [1] * total
