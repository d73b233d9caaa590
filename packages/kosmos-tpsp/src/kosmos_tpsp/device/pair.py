"""The weight gradient of a pair: it reads the other copy of all rows, once all are dequantised."""

import triton
from kosmos_core.device.flags import flag_wait
from kosmos_core.device.layout import (
    ALL_READY,
    FLAG_ARRIVAL,
    PHASE_BUILD,
    SECOND_QUEUE,
    Standing,
)
from kosmos_core.device.target import fence_async_proxy
from kosmos_core.device.trace import WAIT, trace_begin, trace_end

from kosmos_tpsp.device.config import BUILD_ONLY
from kosmos_tpsp.device.gradient import build_product


@triton.jit
def await_every_row(job, ctx, call, standing, missing, tile, CONFIG):
    """Waits, before a workgroup's first tile, for both copies of the rows of all ranks.

    missing: slices to wait for, 0 once they are there; returns (standing, 0).
    """
    if missing > 0:
        begin = trace_begin(ctx)
        ok = standing.ok
        if ok != 0:
            ok = flag_wait(
                ctx, call, call.set_ptr + ALL_READY, missing, call.rank, 0, PHASE_BUILD,
                FLAG_ARRIVAL, "gpu",
            )  # fmt: skip
        standing = Standing(standing.held, ok)
        fence_async_proxy(ctx.TARGET)
        trace_end(ctx, WAIT, missing, begin)
    return standing, missing * 0


@triton.jit
def await_nothing(job, ctx, call, standing, missing, tile, CONFIG):
    """All rows were there before the launch."""
    return standing, missing


@triton.jit
def build_second(ops, ctx, call, standing, grid, n, k, num_movers, CONFIG, GRADIENT):
    """A builder: tiles of dY^T X, [k, n], once no tile of the first product is left."""
    tokens = grid.chunk_rows * ctx.WORLD
    missing = ctx.WORLD * grid.tile_rows * CONFIG.SLICES
    if CONFIG.PHASE == BUILD_ONLY:
        standing, _ = build_product(
            ops, ctx, call, standing, 0, grid, k, n, tokens, num_movers, tokens * 0, GRADIENT,
            await_nothing, SECOND_QUEUE,
        )  # fmt: skip
    else:
        standing, _ = build_product(
            ops, ctx, call, standing, missing, grid, k, n, tokens, num_movers, tokens * 0, GRADIENT,
            await_every_row, SECOND_QUEUE,
        )  # fmt: skip
    return standing
