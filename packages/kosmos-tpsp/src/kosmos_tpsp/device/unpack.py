"""Dequantising on arrival: MXFP8 rows become the BF16 rows that builders multiply.

Pulled rows are dequantised by the mover that reads them from their source. Pushed ones lie in the
gather region until a mover of the receiver finds their tile row complete. The own rows of a rank
are dequantised by its workgroups before they build.

=============== =================== ==================== ====== ============= ======================
word            writer              reader               scope  order         guards
=============== =================== ==================== ====== ============= ======================
ready counter   whoever has         builders, >= slices  gpu    barrier +     dequantised rows of
(arrival of     dequantised a       of the tile row             release;      that tile row
pulled rows)    slice, +1                                       acquire
all ready       the same, +1        builders of the      gpu    the same      dequantised rows of
                                    weight gradient,                          all ranks, both
                                    >= slices of all                          copies
=============== =================== ==================== ====== ============= ======================
"""

import triton
import triton.language as tl
from kosmos_core.device.flags import flag_arrive, flag_wait
from kosmos_core.device.layout import (
    ALL_READY,
    ARRIVAL,
    COUNTERS,
    FLAG_ARRIVAL,
    GATHER,
    PHASE_GATHER,
    UNPACK_QUEUE,
    Standing,
)
from kosmos_core.device.mover import fill_nan
from kosmos_core.device.peers import peer_at, peer_ptr
from kosmos_core.device.queue import queue_claim
from kosmos_core.device.trace import COPY_IN, trace_begin, trace_end

from kosmos_tpsp.device.config import BOTH, COLUMNS
from kosmos_tpsp.device.rows import (
    columns_after,
    own_columns,
    own_rows,
    region_rows,
    rows_at,
    unpack_elements,
)


@triton.jit
def slice_rows(grid, tile_row, part, CONFIG):
    """First row of a slice within its chunk, and how many rows it has (0 past the chunk's end)."""
    ROWS: tl.constexpr = CONFIG.TILE_ROW_ROWS // CONFIG.SLICES
    first = tile_row * CONFIG.TILE_ROW_ROWS + part * ROWS
    return first, tl.maximum(tl.minimum(grid.chunk_rows - first, ROWS), 0)


@triton.jit
def ready_word(ctx, call, src_rank, tile_row):
    """The counter that says how many slices of (source, tile row) builders may read."""
    return call.set_ptr + COUNTERS + src_rank * ctx.MAX_ROWS + tile_row


@triton.jit
def landed_word(ctx, call, src_rank, tile_row):
    """The counter in which a peer counts the slices that it has pushed here."""
    base = peer_ptr(ctx, ARRIVAL, call.rank, tl.int32) + call.parity * ctx.ARRIVAL_WORDS
    return base + src_rank * ctx.MAX_ROWS + tile_row


@triton.jit
def unpack_slice(
    ops, ctx, call, standing, grid, k, source, columns, src_rank, tile_row, part, CONFIG
):
    """Dequantises a slice of a source's rows, which begin at `source`, and counts it as ready.

    columns: where the copy with groups along columns begins, if both are gathered.
    """
    first, rows = slice_rows(grid, tile_row, part, CONFIG)
    offset = first.to(tl.int64) * k
    place = src_rank * (grid.chunk_rows.to(tl.int64) * k) + offset
    to_ptr = ops.gathered_ptr + place
    if standing.ok != 0:
        unpack_elements(
            rows_at(source, offset, CONFIG), to_ptr, rows, k, CONFIG, ctx.TARGET,
            CONFIG.COPIES == COLUMNS,
        )  # fmt: skip
        if CONFIG.COPIES == BOTH:
            unpack_elements(
                rows_at(columns, offset, CONFIG), ops.left_ptr + place, rows, k, CONFIG,
                ctx.TARGET, True,
            )  # fmt: skip
        flag_arrive(ready_word(ctx, call, src_rank, tile_row), "gpu", ctx.TARGET)
        if CONFIG.COPIES == BOTH:
            flag_arrive(call.set_ptr + ALL_READY, "gpu", ctx.TARGET)
    else:
        fill_nan(to_ptr, rows * k, CONFIG.COPY_ELEMENTS)


@triton.jit
def unpack_landed(ops, ctx, call, standing, grid, k, tile_row, part, step, CONFIG):
    """Push: dequantises a slice that a peer has pushed, once its whole tile row is there."""
    src_rank = peer_at(call.rank, 1 + step, ctx.WORLD)
    word_ptr = landed_word(ctx, call, src_rank, tile_row)
    ok = standing.ok
    if ok != 0:
        ok = flag_wait(
            ctx, call, word_ptr, CONFIG.SLICES, src_rank, tile_row, PHASE_GATHER, FLAG_ARRIVAL,
            "sys",
        )  # fmt: skip
    standing = Standing(standing.held, ok)
    chunk = grid.chunk_rows.to(tl.int64) * k
    landing = region_rows(ctx, GATHER, call.rank, chunk * ctx.WORLD, CONFIG)
    source = rows_at(landing, src_rank * chunk, CONFIG)
    columns = source
    if CONFIG.COPIES == BOTH:
        columns = rows_at(columns_after(landing, chunk * ctx.WORLD), src_rank * chunk, CONFIG)
    unpack_slice(
        ops, ctx, call, standing, grid, k, source, columns, src_rank, tile_row, part, CONFIG
    )
    return standing


@triton.jit
def unpack_own(ops, ctx, call, standing, grid, k, CONFIG):
    """Dequantises the own rows, with every workgroup that comes."""
    units = grid.tile_rows * CONFIG.SLICES
    own = own_rows(ops, CONFIG)
    columns = own
    if CONFIG.COPIES == BOTH:
        columns = own_columns(ops)
    unit = queue_claim(call.set_ptr + UNPACK_QUEUE)
    while unit < units:
        begin = trace_begin(ctx)
        unpack_slice(
            ops, ctx, call, standing, grid, k, own, columns, call.rank,
            unit // CONFIG.SLICES, unit % CONFIG.SLICES, CONFIG,
        )  # fmt: skip
        trace_end(ctx, COPY_IN, unit, begin)
        unit = queue_claim(call.set_ptr + UNPACK_QUEUE)
