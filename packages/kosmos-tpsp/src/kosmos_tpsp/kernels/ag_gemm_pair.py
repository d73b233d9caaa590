"""Both gradients of a row-parallel layer in MXFP8, behind one gather of both copies of dY.

Gathers dY [m, k] with groups along rows for dY W -> [m, n], and with groups along columns for
dY^T X -> [k, n].

Source: paper, section 3.2.1 and Figure 5. Protocol table: docs/protocols.md.
"""

import triton
import triton.language as tl
from kosmos_core.device.barrier import call_enter, call_leave
from kosmos_core.device.roles import is_builder_last, is_mover_first
from kosmos_core.device.tiles import Grid
from kosmos_core.device.trace import CALL, trace_begin, trace_end

from kosmos_tpsp.device.config import BUILD_ONLY, GATHER_ONLY
from kosmos_tpsp.device.gather import await_all, move, open_gather
from kosmos_tpsp.device.gathered import build
from kosmos_tpsp.device.pair import build_second
from kosmos_tpsp.device.unpack import unpack_own

OUT_SHIFT = tl.constexpr(3)  # 8 bf16 elements are 16 bytes


@triton.jit(do_not_specialize=["m", "num_movers", "call_hash"])
def ag_gemm_pair_kernel(ops, ctx, m, n, k, num_movers, GRADIENT, call_hash, CONFIG):
    """One launch of `ag_gemm_pair`; a workgroup takes these steps in order.

    1. to 4. As in `ag_gemm` of MXFP8 that is dequantised; a unit is a slice of both copies.
    5. Builders, and movers once no unit is left, build tiles of the first product.
    6. Then, once all rows are there, tiles of the second.
    7. Leave: the last one holds every peer's start and moves the epoch on.
    """
    n = (n >> OUT_SHIFT) << OUT_SHIFT
    k = (k >> CONFIG.ROW_SHIFT) << CONFIG.ROW_SHIFT
    call, standing = call_enter(ctx, call_hash)
    begin = trace_begin(ctx)
    chunk_rows = m // ctx.WORLD
    grid = Grid(chunk_rows, tl.cdiv(chunk_rows, CONFIG.TILE_ROW_ROWS), tl.cdiv(n, CONFIG.BLOCK_N))
    open_gather(ops, ctx, call, standing, grid, k, CONFIG)
    if CONFIG.PHASE != BUILD_ONLY:
        if is_mover_first(call, num_movers):
            standing = move(ops, ctx, call, standing, grid, k, CONFIG)
        unpack_own(ops, ctx, call, standing, grid, k, CONFIG)
    if CONFIG.PHASE != GATHER_ONLY:
        if is_builder_last(call, num_movers, CONFIG.POLICY):
            builders = tl.maximum(tl.num_programs(0) - num_movers, 1)
            standing = build(ops, ctx, call, standing, grid, n, k, builders, m * 0, CONFIG)
            standing = build_second(
                ops, ctx, call, standing, grid, n, k, num_movers, CONFIG, GRADIENT
            )
    else:
        standing = await_all(ops, ctx, call, standing, grid, k, CONFIG)
    trace_end(ctx, CALL, call.ticket, begin)
    call_leave(ctx, call, standing)
