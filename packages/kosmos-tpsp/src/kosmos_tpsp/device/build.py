"""Builders: output tiles of a GEMM in queue order, split along the contraction where asked.

One loop serves all operations. What a tile is, what it waits for, what is multiplied and where the
product goes are functions that an operation passes to it.

=============== =================== ==================== ====== ============= ======================
word            writer              reader               scope  order         guards
=============== =================== ==================== ====== ============= ======================
pair ticket     both workgroups of  the second of them   gpu    barrier +     the first's partial
                a pair, +1                                      acq_rel;      sum
                (`elect_last`)                                  acquire
=============== =================== ==================== ====== ============= ======================

A split tile has one ticket a pair, SPLIT_K - 1 in all; they follow the arrival words in the set of
counters.
"""

import triton
import triton.language as tl
from kosmos_core.device.barrier import elect_last
from kosmos_core.device.flags import flag_read
from kosmos_core.device.gemm import NN, gemm_tile, store_accumulator
from kosmos_core.device.layout import COUNTERS, MAX_RANKS, SPLIT_QUEUE, TILE_QUEUE
from kosmos_core.device.queue import queue_claim
from kosmos_core.device.target import fence_async_proxy, load_tile, matrix_view, store_tile
from kosmos_core.device.tiles import claim_tiles
from kosmos_core.device.trace import BUILD, trace_begin, trace_end


@triton.jit
def combine_pair(partials, own_row, other_row, ticket_ptr, acc, CONFIG, TARGET: tl.constexpr):
    """Two partial sums become one.

    Returns (sum, True) to the second workgroup to come, (acc, False) to the first. Nothing depends
    on who is second, since a + b is b + a. A second that finds the first's partial need not store
    its own. The partial of a workgroup that knows of an abort is NaN, and so is the sum.
    """
    complete = flag_read(ticket_ptr, "gpu") == 1
    if not complete:
        store_tile(partials, 0, own_row, 0, acc, CONFIG.BLOCK_M, CONFIG.BLOCK_N, TARGET)
        complete = elect_last(ticket_ptr, 2, TARGET)
    fence_async_proxy(TARGET)
    if complete:
        acc += load_tile(
            partials, 0, other_row, 0, CONFIG.BLOCK_M, CONFIG.BLOCK_N, True, True, TARGET
        )
    return acc, complete


@triton.jit
def reduce_splits(partials, ctx, call, acc, split_tile, part, CONFIG):
    """Combines the SPLIT_K partial tiles of one output tile, pair by pair, in fixed order.

    SPLIT_K is a power of two. Returns (sum, True) to the workgroup that completes the tile, and
    (anything, False) to the others.
    """
    tickets_ptr = call.set_ptr + COUNTERS + MAX_RANKS * ctx.MAX_ROWS + split_tile * CONFIG.SPLIT_K
    first = split_tile * CONFIG.SPLIT_K
    complete = part >= 0
    for level in tl.static_range(0, 3):
        if (1 << level) < CONFIG.SPLIT_K:
            if complete:
                own = part >> level << level
                other = own ^ (1 << level)
                place = CONFIG.SPLIT_K - (CONFIG.SPLIT_K >> level) + (part >> (level + 1))
                acc, complete = combine_pair(
                    partials, (first + own) * CONFIG.BLOCK_M, (first + other) * CONFIG.BLOCK_M,
                    tickets_ptr + place, acc, CONFIG, ctx.TARGET,
                )  # fmt: skip
    return acc, complete


@triton.jit
def tile_sum(
    a_view,
    weights,
    chunk,
    standing,
    tile,
    k_begin,
    k_end,
    CONFIG,
    TARGET: tl.constexpr,
    EVEN_M: tl.constexpr = True,
):
    """The fp32 tile over part of the contraction, of rows of chunk `chunk` of A.

    EVEN_M: as `gemm_tile` has it. Once the call is aborted nothing is read and the tile is NaN.
    """
    begin_with = 0.0
    if standing.ok == 0:
        k_end = k_begin
        begin_with = float("nan")
    return gemm_tile(
        a_view, weights, chunk, tile.row_block * CONFIG.BLOCK_M, tile.column * CONFIG.BLOCK_N,
        k_begin, k_end, begin_with, CONFIG.LAYOUT, CONFIG.BLOCK_M, CONFIG.BLOCK_N, CONFIG.BLOCK_K,
        CONFIG.STAGES, CONFIG.EVEN_K, EVEN_M, CONFIG.EVEN_N, TARGET,
    )  # fmt: skip


@triton.jit
def view_weights(w_ptr, n, k, CONFIG, TARGET: tl.constexpr):
    """The weights, [n, k] (TN) or [k, n] (NN)."""
    if CONFIG.LAYOUT == NN:
        return matrix_view(w_ptr, 1, k, n, CONFIG.BLOCK_K, CONFIG.BLOCK_N, TARGET)
    else:
        return matrix_view(w_ptr, 1, n, k, CONFIG.BLOCK_N, CONFIG.BLOCK_K, TARGET)


@triton.jit
def view_partials(partial_ptr, split_tiles, CONFIG, TARGET: tl.constexpr):
    """The fp32 partial tiles of split tiles, SPLIT_K of each below one another."""
    rows = split_tiles * (CONFIG.SPLIT_K * CONFIG.BLOCK_M)
    return matrix_view(
        partial_ptr, 1, rows, rows * 0 + CONFIG.BLOCK_N, CONFIG.BLOCK_M, CONFIG.BLOCK_N, TARGET
    )


@triton.jit
def split_span(k, CONFIG):
    """Elements of the contraction in a part of a split tile.

    A part covers whole BLOCK_K steps, so that only the last one meets the ragged end.
    """
    return tl.cdiv(tl.cdiv(k, CONFIG.BLOCK_K), CONFIG.SPLIT_K) * CONFIG.BLOCK_K


@triton.jit
def store_output(
    out, chunk, row, tile, acc, CONFIG, TARGET: tl.constexpr, POLLED: tl.constexpr = False
):
    """Rounds a complete tile once and stores it at a row of a chunk, or past its end nowhere.

    POLLED: the output is polled in its data, and its view is of int16.
    """
    store_accumulator(
        out, chunk, row, tile.column * CONFIG.BLOCK_N, acc,
        CONFIG.BLOCK_M, CONFIG.BLOCK_N, CONFIG.STORE_SPLITS, TARGET, POLLED,
    )  # fmt: skip


@triton.jit
def build_whole(
    job,
    ctx,
    call,
    standing,
    state,
    first,
    past,
    step,
    CONFIG,
    LOCATE: tl.constexpr,
    BEFORE: tl.constexpr,
    SUM: tl.constexpr,
    AFTER: tl.constexpr,
):
    """Builds the whole tiles of a claim; arguments as `build_tiles`. Returns (standing, state)."""
    # Multiplying and storing stand in no branch, so that a store overlaps the next tile.
    for place in tl.range(first, past, step):
        tile = LOCATE(job, ctx, call, place, CONFIG)
        standing, state = BEFORE(job, ctx, call, standing, state, tile, CONFIG)
        begin = trace_begin(ctx)
        # An empty row block has nothing to read, and its store ends outside the chunk.
        k_end = tl.where(tile.row_block * CONFIG.BLOCK_M < job.grid.chunk_rows, job.k, 0)
        acc = SUM(job, ctx, call, standing, tile, 0, k_end, CONFIG)
        state = AFTER(job, ctx, call, standing, state, tile, acc, CONFIG)
        trace_end(ctx, BUILD, place, begin)
    return standing, state


@triton.jit
def num_whole(tiles, split_tiles, CONFIG):
    """Tiles of the queue that are not split: the first ones."""
    whole = tiles
    if CONFIG.SPLIT_K > 1:
        whole = tl.maximum(tiles - split_tiles, 0)
    return whole


@triton.jit
def build_claim(
    job,
    ctx,
    call,
    standing,
    state,
    tiles,
    builders,
    split_tiles,
    CONFIG,
    LOCATE: tl.constexpr,
    BEFORE: tl.constexpr,
    SUM: tl.constexpr,
    AFTER: tl.constexpr,
):
    """Claims whole tiles once and builds them; arguments as `build_tiles`.

    For a mover that has nothing to move. Returns (standing, state, whether there were any).
    """
    whole = num_whole(tiles, split_tiles, CONFIG)
    index, past, step, _ = claim_tiles(
        call.set_ptr + TILE_QUEUE, tl.program_id(0) % CONFIG.XCDS, whole, builders, CONFIG.XCDS,
        CONFIG.XCD_RUN, CONFIG.CLAIM_RUN,
    )  # fmt: skip
    if index < whole:
        standing, state = build_whole(
            job, ctx, call, standing, state, index, past, step, CONFIG, LOCATE, BEFORE, SUM, AFTER
        )
    return standing, state, index < whole


@triton.jit
def build_tiles(
    job,
    ctx,
    call,
    standing,
    state,
    tiles,
    builders,
    split_tiles,
    CONFIG,
    LOCATE: tl.constexpr,
    BEFORE: tl.constexpr,
    SUM: tl.constexpr,
    AFTER: tl.constexpr,
    QUEUE: tl.constexpr = TILE_QUEUE,
):
    """A builder: tiles in queue order until none is left.

    The last `split_tiles` tiles are split SPLIT_K ways along the contraction and stand in a queue
    of their own: few-tile shapes keep all workgroups busy that way, and what follows the last
    arrival is shorter.

    job: what the op's functions need; it has the fields `ops`, `grid` and `k`.
    state: what they carry from tile to tile. Returns (standing, state).
    tiles: indices of the queue; a tile whose rows lie past the end of its chunk is empty.
    LOCATE: (job, ctx, call, index, CONFIG) gives tile `index`.
    BEFORE: (job, ctx, call, standing, state, tile, CONFIG) waits for what a tile needs; returns
        (standing, state).
    SUM: (job, ctx, call, standing, tile, k_begin, k_end, CONFIG) multiplies.
    AFTER: (job, ctx, call, standing, state, tile, acc, CONFIG) disposes of a complete tile; of an
        empty one, too, where tiles are whole. Returns the state.
    QUEUE: whose heads are claimed from; of several queues in a launch one may have split tiles.
    """
    whole = num_whole(tiles, split_tiles, CONFIG)
    heads_ptr = call.set_ptr + QUEUE
    bucket = tl.program_id(0) % CONFIG.XCDS
    index, past, step, bucket = claim_tiles(
        heads_ptr, bucket, whole, builders, CONFIG.XCDS, CONFIG.XCD_RUN, CONFIG.CLAIM_RUN
    )
    while index < whole:
        standing, state = build_whole(
            job, ctx, call, standing, state, index, past, step, CONFIG, LOCATE, BEFORE, SUM, AFTER
        )
        index, past, step, bucket = claim_tiles(
            heads_ptr, bucket, whole, builders, CONFIG.XCDS, CONFIG.XCD_RUN, CONFIG.CLAIM_RUN
        )
    if CONFIG.SPLIT_K > 1:
        span = split_span(job.k, CONFIG)
        partials = view_partials(job.ops.partial_ptr, split_tiles, CONFIG, ctx.TARGET)
        unit = queue_claim(call.set_ptr + SPLIT_QUEUE)
        while unit < (tiles - whole) * CONFIG.SPLIT_K:
            split_tile = unit // CONFIG.SPLIT_K
            part = unit % CONFIG.SPLIT_K
            tile = LOCATE(job, ctx, call, whole + split_tile, CONFIG)
            if tile.row_block * CONFIG.BLOCK_M < job.grid.chunk_rows:
                standing, state = BEFORE(job, ctx, call, standing, state, tile, CONFIG)
                begin = trace_begin(ctx)
                k_end = tl.minimum((part + 1) * span, job.k)
                acc = SUM(job, ctx, call, standing, tile, part * span, k_end, CONFIG)
                acc, complete = reduce_splits(partials, ctx, call, acc, split_tile, part, CONFIG)
                if complete:
                    state = AFTER(job, ctx, call, standing, state, tile, acc, CONFIG)
                trace_end(ctx, BUILD, whole + split_tile, begin)
            unit = queue_claim(call.set_ptr + SPLIT_QUEUE)
    return standing, state
