"""All-gather fused with GEMM.

Gathers X [m, k] from every rank's chunk and multiplies it by this rank's weights.

Source: paper, section 3.2.1. Protocol table: docs/protocols.md.
"""

import triton
import triton.language as tl
from kosmos_core.device.barrier import call_enter, call_leave
from kosmos_core.device.roles import is_builder_last, is_mover_first
from kosmos_core.device.tiles import Grid
from kosmos_core.device.trace import CALL, trace_begin, trace_end

from kosmos_tpsp.device.config import BUILD_ONLY, GATHER_ONLY, UNPACKED
from kosmos_tpsp.device.gather import await_all, keep_rows, move, open_gather
from kosmos_tpsp.device.gathered import build
from kosmos_tpsp.device.unpack import unpack_own

OUT_SHIFT = tl.constexpr(3)  # 8 bf16 elements are 16 bytes


@triton.jit(do_not_specialize=["m", "num_movers", "split_tiles", "call_hash"])
def ag_gemm_kernel(ops, ctx, m, n, k, num_movers, split_tiles, call_hash, CONFIG):
    """One launch of `ag_gemm`; a workgroup takes these steps in order.

    1. Enter: arrival ticket, epoch, abort word.
    2. Pull: help to copy the own chunk into symmetric memory; whoever completes it publishes the
       start word. Push: ticket 0 publishes it at once.
    3. Movers, the first to arrive, transport units in gather order.
    4. Where MXFP8 is dequantised, everybody helps with the own chunk.
    5. Builders, and movers once no unit is left, build tiles in queue order.
    6. Complete a kept gather output.
    7. Leave: the last one holds every peer's start and moves the epoch on.
    """
    # Rows are multiples of 16 bytes (`can_fuse`). Said this way the compiler knows it too: an n
    # or k that 16 does not divide would make every copy 2 bytes wide. (A division costs registers.)
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
    if CONFIG.FORMAT == UNPACKED and CONFIG.PHASE != BUILD_ONLY:
        unpack_own(ops, ctx, call, standing, grid, k, CONFIG)
    if CONFIG.PHASE != GATHER_ONLY:
        if is_builder_last(call, num_movers, CONFIG.POLICY):
            builders = tl.maximum(tl.num_programs(0) - num_movers, 1)
            standing = build(ops, ctx, call, standing, grid, n, k, builders, split_tiles, CONFIG)
    if CONFIG.KEEP_GATHERED and CONFIG.PHASE != BUILD_ONLY:
        standing = keep_rows(ops, ctx, call, standing, grid, k, CONFIG)
    elif CONFIG.PHASE == GATHER_ONLY:
        standing = await_all(ops, ctx, call, standing, grid, k, CONFIG)
    trace_end(ctx, CALL, call.ticket, begin)
    call_leave(ctx, call, standing)
