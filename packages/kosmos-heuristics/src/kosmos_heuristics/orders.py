"""Queue orders in pure Python: what the kernels' ids mean.

The kernels compute the same mapping on the device; this is their definition, used by tests and by
anything that replays a run. Numbering:

- ``mc`` rows per chunk, ``R = ceil(mc / tile_row_rows)`` tile rows per chunk,
  ``T = tile_row_rows / block_m`` row blocks per tile row, ``NC = ceil(n / block_n)`` columns.
- The local part covers ``ceil(mc / block_m)`` row blocks, in groups of ``group_m``: inside a group
  column by column, row block fastest.
- The remote part is numbered over whole tile rows, ``R * T`` row blocks per source, so that ids are
  computed by division only; row blocks past the chunk's end are empty and skipped by the consumer.
  Tile rows stand in groups of ``group_rows``: inside a group column by column, inside a column tile
  row by tile row, inside a tile row the ``T`` row blocks.
- The last ``split_tiles`` ids stand in a queue of their own, in which each is ``split_k`` units:
  unit ``ticket * split_k + part`` is that part of id ``num_whole + ticket``. Parts cover whole
  steps of ``block_k``, so that only the last one that is not empty meets a ragged end of k.
- ``local_first`` takes tile rows in gather order (row by row, sources from ``rank + 1`` on),
  ``chunk_major`` source by source from ``rank + 1`` on, ``naive`` source by source from 0 on with
  the own chunk in its place and no local part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kosmos_heuristics.checks import cdiv, check_choice, check_int
from kosmos_heuristics.errors import PlanError
from kosmos_heuristics.machine import TRANSPORTS
from kosmos_heuristics.plans import ORDERS, AgGemmPlan
from kosmos_heuristics.problems import AgGemmProblem

_FIX = "take the numbers from a plan and a problem"


class Tile(NamedTuple):
    """An output tile: ``row_block`` counts ``block_m`` rows inside the chunk of ``src_rank``."""

    src_rank: int
    row_block: int
    col_block: int


class BuilderUnit(NamedTuple):
    """A builder's unit: columns ``k_begin`` to ``k_end`` of the contraction of a tile.

    ``part`` counts the tile's parts; an unsplit tile has one. Where k is short the last parts are
    empty, ``k_begin == k_end``.
    """

    tile_id: int
    tile: Tile
    part: int
    k_begin: int
    k_end: int


class MoverUnit(NamedTuple):
    """A mover's unit: slice ``slice_idx`` of tile row ``tile_row``, to or from ``peer``.

    Pulled, the tile row is one of the peer's chunk; pushed, one of the own chunk, sent to the peer.
    """

    peer: int
    tile_row: int
    slice_idx: int


@dataclass(frozen=True)
class TileQueue:
    """The tile queue of one rank.

    Args:
        world_size: Ranks in the group.
        rank: This rank.
        chunk_rows: Rows of a rank's chunk.
        n: Columns of the output.
        k: Contraction.
        block_m: Rows of a tile.
        block_n: Columns of a tile.
        block_k: Contraction step.
        tile_row_rows: Rows of a tile row, a multiple of ``block_m``.
        group_m: Row blocks swept together in the local part.
        group_rows: Tile rows swept together in the remote part.
        order: ``local_first``, ``chunk_major`` or ``naive``.
        split_k: Parts of the contraction of each split tile.
        split_tiles: Tiles at the end of the queue that are split; all of them if there are fewer.

    Raises:
        PlanError: A number is out of range.
    """

    world_size: int
    rank: int
    chunk_rows: int
    n: int
    k: int
    block_m: int
    block_n: int
    block_k: int
    tile_row_rows: int
    group_m: int
    group_rows: int
    order: str = "local_first"
    split_k: int = 1
    split_tiles: int = 0

    def __post_init__(self) -> None:
        check_choice(PlanError, "order", self.order, ORDERS, "choose an order")
        for name in ("world_size", "n", "k", "group_m", "group_rows", "split_k"):
            check_int(PlanError, name, getattr(self, name), 1, _FIX)
        for name in ("block_m", "block_n", "block_k"):
            check_int(PlanError, name, getattr(self, name), 1, _FIX)
        for name in ("chunk_rows", "rank", "split_tiles"):
            check_int(PlanError, name, getattr(self, name), 0, _FIX)
        if self.rank >= self.world_size:
            raise PlanError("rank", self.rank, f"below world_size {self.world_size}", _FIX)
        check_int(PlanError, "tile_row_rows", self.tile_row_rows, 1, _FIX)
        if self.tile_row_rows % self.block_m:
            wanted = f"a multiple of block_m {self.block_m}"
            raise PlanError("tile_row_rows", self.tile_row_rows, wanted, _FIX)

    @classmethod
    def of(cls, problem: AgGemmProblem, plan: AgGemmPlan, rank: int) -> TileQueue:
        """The queue of ``rank`` under a plan."""
        return cls(
            world_size=problem.world_size,
            rank=rank,
            chunk_rows=problem.chunk_rows,
            n=problem.n,
            k=problem.k,
            block_m=plan.block_m,
            block_n=plan.block_n,
            block_k=plan.block_k,
            tile_row_rows=plan.tile_row_rows,
            group_m=plan.group_m,
            group_rows=plan.group_rows,
            order=plan.order,
            split_k=plan.split_k,
            split_tiles=plan.split_tiles,
        )

    @property
    def num_columns(self) -> int:
        """Column blocks, ``NC``."""
        return cdiv(self.n, self.block_n)

    @property
    def tile_rows(self) -> int:
        """Tile rows per chunk, ``R``."""
        return cdiv(self.chunk_rows, self.tile_row_rows)

    @property
    def row_blocks_per_tile_row(self) -> int:
        """Row blocks per tile row, ``T``."""
        return self.tile_row_rows // self.block_m

    @property
    def chunk_row_blocks(self) -> int:
        """Row blocks that hold rows of a chunk."""
        return cdiv(self.chunk_rows, self.block_m)

    @property
    def num_local(self) -> int:
        """Ids of the local part; the first ids of the queue."""
        return 0 if self.order == "naive" else self.chunk_row_blocks * self.num_columns

    @property
    def num_remote(self) -> int:
        """Ids of the remote part, empty row blocks included (``naive``: of all chunks)."""
        sources = self.world_size if self.order == "naive" else self.world_size - 1
        return self.tile_rows * sources * self.row_blocks_per_tile_row * self.num_columns

    @property
    def num_ids(self) -> int:
        """Ids of the queue."""
        return self.num_local + self.num_remote

    @property
    def num_whole(self) -> int:
        """Ids whose tiles are built whole; the others are split."""
        return max(0, self.num_ids - self.split_tiles) if self.split_k > 1 else self.num_ids

    def units(self) -> Iterator[BuilderUnit]:
        """The units of all builders in claim order, empty row blocks left out.

        Whole tiles first, then the parts of the split ones. This is the order of one queue: with
        XCD bucketing the whole tiles are claimed from several, each of which keeps it.
        """
        span = cdiv(cdiv(self.k, self.block_k), self.split_k) * self.block_k
        for tile_id in range(self.num_ids):
            tile = self.tile(tile_id)
            if self.is_empty(tile):
                continue
            if tile_id < self.num_whole:
                yield BuilderUnit(tile_id, tile, 0, 0, self.k)
                continue
            for part in range(self.split_k):
                k_begin, k_end = min(part * span, self.k), min((part + 1) * span, self.k)
                yield BuilderUnit(tile_id, tile, part, k_begin, k_end)

    def tile(self, tile_id: int) -> Tile:
        """The tile of an id in ``0 .. num_ids - 1``; it may be empty.

        Raises:
            PlanError: The id is outside the queue.
        """
        if not 0 <= tile_id < self.num_ids:
            raise PlanError("tile_id", tile_id, f"0 to {self.num_ids - 1}", "claim fewer tiles")
        if tile_id < self.num_local:
            return self._local(tile_id)
        return self._remote(tile_id - self.num_local)

    def is_empty(self, tile: Tile) -> bool:
        """Whether the tile lies past the end of its chunk."""
        return tile.row_block >= self.chunk_row_blocks

    def tile_row(self, position: int) -> tuple[int, int]:
        """``(src_rank, tile row)`` at a position of the remote part's sequence of tile rows."""
        if self.order == "local_first":
            row, peer = divmod(position, self.world_size - 1)
            return (self.rank + 1 + peer) % self.world_size, row
        source, row = divmod(position, self.tile_rows)
        if self.order == "chunk_major":
            return (self.rank + 1 + source) % self.world_size, row
        return source, row

    def _local(self, tile_id: int) -> Tile:
        group, inside = divmod(tile_id, self.group_m * self.num_columns)
        first = group * self.group_m
        height = min(self.chunk_row_blocks - first, self.group_m)
        column, row = divmod(inside, height)
        return Tile(self.rank, first + row, column)

    def _remote(self, remote_id: int) -> Tile:
        blocks = self.row_blocks_per_tile_row
        per_tile_row = blocks * self.num_columns
        total = self.num_remote // per_tile_row
        group, inside = divmod(remote_id, self.group_rows * per_tile_row)
        first = group * self.group_rows
        height = min(total - first, self.group_rows)
        column, within = divmod(inside, height * blocks)
        offset, block = divmod(within, blocks)
        src_rank, row = self.tile_row(first + offset)
        return Tile(src_rank, row * blocks + block, column)


@dataclass(frozen=True)
class MoverQueue:
    """The mover units of one rank in gather order.

    Tile row by tile row; inside one the slices, inside a slice the peers, so that consecutive units
    use different links. Pulling, rank r takes from r+1, r+2, ...; pushing, it serves r-1, r-2, ...
    (mod world_size): peer d consumes the chunk of d+1 first.

    Args:
        world_size: Ranks in the group.
        rank: This rank.
        tile_rows: Tile rows per chunk.
        slices: Units of a tile row.
        transport: ``pull`` or ``push``.
    """

    world_size: int
    rank: int
    tile_rows: int
    slices: int
    transport: str

    def __post_init__(self) -> None:
        check_choice(PlanError, "transport", self.transport, TRANSPORTS, "choose a transport")
        for name in ("world_size", "slices"):
            check_int(PlanError, name, getattr(self, name), 1, _FIX)
        for name in ("rank", "tile_rows"):
            check_int(PlanError, name, getattr(self, name), 0, _FIX)
        if self.rank >= self.world_size:
            raise PlanError("rank", self.rank, f"below world_size {self.world_size}", _FIX)

    @property
    def num_units(self) -> int:
        """Units of the queue."""
        return self.tile_rows * self.slices * (self.world_size - 1)

    def unit(self, unit_id: int) -> MoverUnit:
        """The unit of an id in ``0 .. num_units - 1``.

        Raises:
            PlanError: The id is outside the queue.
        """
        if not 0 <= unit_id < self.num_units:
            raise PlanError("unit_id", unit_id, f"0 to {self.num_units - 1}", "claim fewer units")
        peers = self.world_size - 1
        row_slice, step = divmod(unit_id, peers)
        tile_row, slice_idx = divmod(row_slice, self.slices)
        distance = 1 + step if self.transport == "pull" else -1 - step
        return MoverUnit((self.rank + distance) % self.world_size, tile_row, slice_idx)
