"""Queue orders: from an index to the work it stands for.

One function maps a tile to its (flag, data). A chunk is the rows of one rank; a tile row is
TILE_ROW_ROWS of them and is what arrives as one; a row block is BLOCK_M of them. Tiles are numbered
over whole tile rows, so that an index is decoded by division alone: a row block past the chunk's
end is numbered but empty, and its claimer skips it.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from kosmos_core.device.peers import peer_at
from kosmos_core.device.queue import queue_claim

BAND_MAJOR = tl.constexpr(0)
ROW_MAJOR = tl.constexpr(1)

LOCAL_FIRST = tl.constexpr(0)
CHUNK_MAJOR = tl.constexpr(1)
NAIVE = tl.constexpr(2)


class Grid(NamedTuple):
    """The output tiles of a gathered GEMM.

    Attributes:
        chunk_rows: rows of one rank's chunk.
        tile_rows: tile rows of a chunk.
        columns: column blocks of the output.
    """

    chunk_rows: tl.tensor
    tile_rows: tl.tensor
    columns: tl.tensor


class Tile(NamedTuple):
    """One output tile.

    Attributes:
        src_rank: whose chunk it lies in: who sends its rows, or who owns what comes of them.
        row_block: BLOCK_M rows within the chunk.
        column: BLOCK_N columns.
        tile_row: which arrival of that chunk its rows belong to.
    """

    src_rank: tl.tensor
    row_block: tl.tensor
    column: tl.tensor
    tile_row: tl.tensor


@triton.jit
def swept_tile(index, blocks, columns, GROUP_M: tl.constexpr):
    """(row block, column) of tile `index` of a plain GEMM.

    Bands of GROUP_M of the `blocks` row blocks, each swept column by column.
    """
    band = GROUP_M * columns
    first = index // band * GROUP_M
    size = tl.minimum(blocks - first, GROUP_M)
    return first + (index % band) % size, (index % band) // size


@triton.jit
def num_gathered_tiles(
    grid,
    ORDER: tl.constexpr,
    WORLD: tl.constexpr,
    TILE_ROW_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Indices in the tile queue, empty row blocks of remote tile rows included."""
    row_blocks = grid.tile_rows * (TILE_ROW_ROWS // BLOCK_M) * (WORLD - 1)
    if ORDER == NAIVE:
        row_blocks += grid.tile_rows * (TILE_ROW_ROWS // BLOCK_M)
    else:
        row_blocks += tl.cdiv(grid.chunk_rows, BLOCK_M)
    return row_blocks * grid.columns


@triton.jit
def gathered_tile(
    index,
    grid,
    rank,
    ORDER: tl.constexpr,
    WORLD: tl.constexpr,
    TILE_ROW_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    GROUP_M: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
):
    """Tile `index` of the queue of an all-gathered GEMM.

    local_first: own chunk in bands of GROUP_M row blocks, then the peers' tile rows in gather order
    (row by row, peers interleaved), GROUP_ROWS of them swept together column by column.
    chunk_major: own chunk first, then peer after peer.
    naive: chunks in rank order, own chunk in its place.
    """
    PER_ROW: tl.constexpr = TILE_ROW_ROWS // BLOCK_M
    blocks = tl.cdiv(grid.chunk_rows, BLOCK_M)
    if ORDER == NAIVE:
        local = 0
        rows = grid.tile_rows * WORLD
    else:
        local = blocks * grid.columns
        rows = grid.tile_rows * (WORLD - 1)
    src_rank = rank
    if index < local:
        row_block, column = swept_tile(index, blocks, grid.columns, GROUP_M)
    else:
        group = GROUP_ROWS * PER_ROW * grid.columns
        first = (index - local) // group * GROUP_ROWS
        size = tl.maximum(tl.minimum(rows - first, GROUP_ROWS), 1)
        within = (index - local) % group
        column = within // (size * PER_ROW)
        place = within % (size * PER_ROW)
        row = first + place // PER_ROW
        if ORDER == NAIVE:
            src_rank = row // grid.tile_rows
            tile_row = row % grid.tile_rows
        elif ORDER == CHUNK_MAJOR:
            src_rank = peer_at(rank, 1 + row // grid.tile_rows, WORLD)
            tile_row = row % grid.tile_rows
        else:
            PEERS: tl.constexpr = WORLD - 1 if WORLD > 1 else 1
            src_rank = peer_at(rank, 1 + row % PEERS, WORLD)
            tile_row = row // PEERS
        row_block = tile_row * PER_ROW + place % PER_ROW
    return Tile(src_rank, row_block, column, row_block // PER_ROW)


@triton.jit
def num_scattered_tiles(
    grid, WORLD: tl.constexpr, TILE_ROW_ROWS: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Indices in the tile queue of a GEMM whose output is scattered, empty row blocks included."""
    return grid.tile_rows * (TILE_ROW_ROWS // BLOCK_M) * WORLD * grid.columns


@triton.jit
def scattered_tile(
    index,
    grid,
    rank,
    ORDER: tl.constexpr,
    WORLD: tl.constexpr,
    TILE_ROW_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BAND_ROWS: tl.constexpr,
):
    """Tile `index` of the queue of a GEMM whose rows are reduced at the ranks that own them.

    `src_rank` of the tile is the rank that owns its rows. band_major: BAND_ROWS tile rows of every
    owner before the next ones, each band swept column by column, in a column the following rank's
    rows first and the own last: what is built at a time goes to all owners, so that the links are
    in use all the time. row_major: owner after owner in rank order, row block by row block.
    """
    PER_ROW: tl.constexpr = TILE_ROW_ROWS // BLOCK_M
    if ORDER == ROW_MAJOR:
        place = index // grid.columns
        column = index % grid.columns
        blocks = grid.tile_rows * PER_ROW
        owner = place // blocks
        row_block = place % blocks
    else:
        band = BAND_ROWS * PER_ROW * WORLD * grid.columns
        first = index // band * BAND_ROWS
        rows = tl.minimum(grid.tile_rows - first, BAND_ROWS) * PER_ROW
        within = index % band
        column = within // (rows * WORLD)
        place = within % (rows * WORLD)
        owner = peer_at(rank, 1 + place // rows, WORLD)
        row_block = first * PER_ROW + place % rows
    return Tile(owner, row_block, column, row_block // PER_ROW)


@triton.jit
def claim_tiles(
    heads_ptr,
    bucket,
    total,
    builders,
    XCDS: tl.constexpr,
    XCD_RUN: tl.constexpr,
    RUN: tl.constexpr,
):
    """Claims a tile; in a deep queue RUN tiles, for the first claim of each of `builders`.

    Returns (first, past the last, step, bucket); first >= total: the queue is empty. The tiles of a
    run lie `builders` apart: what all work on at a time are neighbours then, and the queue is
    consumed in its order. Deep means that two tiles a workgroup are left to single claims, so that
    what is claimed at once never decides who finishes last.
    """
    runs = total * 0
    if RUN > 1:
        runs = tl.where(total >= (RUN + 2) * tl.num_programs(0), builders, 0)
    claim, bucket = claim_bucketed(heads_ptr, bucket, total - runs * (RUN - 1), XCDS, XCD_RUN)
    if claim < runs:
        return claim, claim + RUN * runs, runs, bucket
    else:
        first = claim + runs * (RUN - 1)
        return first, first + 1, tl.maximum(runs, 1), bucket


@triton.jit
def claim_bucketed(heads_ptr, bucket, total, XCDS: tl.constexpr, RUN: tl.constexpr):
    """Claims from XCDS interleaved queues, own bucket first.

    Returns (index, bucket); index >= total: all are empty. Bucket b holds runs of RUN consecutive
    indices out of every XCDS * RUN, so that one die's L2 sees neighbours.
    heads_ptr: one queue head a bucket.
    """
    index = total
    tries = 0
    while (index >= total) & (tries < XCDS):
        place = queue_claim(heads_ptr + bucket)
        index = (place // RUN * XCDS + bucket) * RUN + place % RUN
        if index >= total:
            bucket = (bucket + 1) % XCDS
            tries += 1
    return index, bucket
