"""The queue order of a GEMM whose rows are summed at the ranks that own them."""

from __future__ import annotations

import random

import pytest
import torch
import triton
import triton.language as tl
from kosmos_core.device.tiles import (
    BAND_MAJOR,
    ROW_MAJOR,
    Grid,
    num_scattered_tiles,
    scattered_tile,
)
from kosmos_core.executor import Executor


@triton.jit
def number_kernel(
    out_ptr,
    chunk_rows,
    tile_rows,
    columns,
    rank,
    ORDER: tl.constexpr,
    WORLD: tl.constexpr,
    TILE_ROW_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BAND_ROWS: tl.constexpr,
):
    grid = Grid(chunk_rows, tile_rows, columns)
    total = num_scattered_tiles(grid, WORLD, TILE_ROW_ROWS, BLOCK_M)
    tl.store(out_ptr, total)
    for index in range(total):
        tile = scattered_tile(index, grid, rank, ORDER, WORLD, TILE_ROW_ROWS, BLOCK_M, BAND_ROWS)
        tl.store(out_ptr + 4 * index + 4, tile.src_rank)
        tl.store(out_ptr + 4 * index + 5, tile.row_block)
        tl.store(out_ptr + 4 * index + 6, tile.column)
        tl.store(out_ptr + 4 * index + 7, tile.tile_row)


def tiles_of(
    order: tl.constexpr, world: int, rank: int, tile_rows: int, columns: int, band: int
) -> list[tuple[int, int, int, int]]:
    """(owner, row block, column, tile row) in queue order; two row blocks a tile row."""
    with Executor(1) as ex:
        out = ex.empty(0, (4 + 8 * world * tile_rows * columns,), torch.int32, "out")
        with ex.on(0):
            number_kernel[(1,)](
                out, 32 * tile_rows, tile_rows, columns, rank, order, world, 32, 16, band
            )
        ex.run()
    assert int(out[0]) == 2 * world * tile_rows * columns
    rows = out[4:].view(-1, 4).tolist()
    return [(row[0], row[1], row[2], row[3]) for row in rows]


@pytest.mark.parametrize("order", [BAND_MAJOR, ROW_MAJOR])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_every_tile_has_one_number(world: int, order: tl.constexpr) -> None:
    rng = random.Random(world)
    for _ in range(3):
        tile_rows, columns, band = rng.randint(1, 5), rng.randint(1, 4), rng.randint(1, 3)
        found = tiles_of(order, world, rng.randrange(world), tile_rows, columns, band)
        wanted = {
            (owner, block, column, block // 2)
            for owner in range(world)
            for block in range(2 * tile_rows)
            for column in range(columns)
        }
        assert len(found) == len(wanted)
        assert set(found) == wanted


@pytest.mark.parametrize("world", [2, 3, 8])
def test_bands_follow_one_another_and_every_column_goes_to_all_owners(world: int) -> None:
    band, rank, columns = 2, 1, 3
    found = tiles_of(BAND_MAJOR, world, rank, 5, columns, band)
    assert [tile[3] // band for tile in found] == sorted(tile[3] // band for tile in found)
    full = 2 * band * world
    for first in range(0, 2 * 2 * band * world * columns, full):
        column = found[first : first + full]
        assert len({tile[2] for tile in column}) == 1
        owners = [tile[0] for tile in column[:: 2 * band]]
        # The following rank first, the own rows last.
        assert owners == [(rank + 1 + step) % world for step in range(world)]
