"""Kernels that measure a machine, built from the device functions of the fused kernels.

| word | writer | reader | scope | order | guards |
|---|---|---|---|---|---|
| queue head | every WG, +1 | the claimer | gpu | relaxed | nothing |
| rank's word | partner, +1 a round | this rank | sys | barrier + release / acquire | nothing |
| WG's word | other WG, +1 a round | this WG | gpu | barrier + release / acquire | nothing |
| presence word | every WG, +1 | every WG | gpu | barrier + release / acquire | nothing |

Heads and the presence word are zeroed by the host before a launch; a rank's word stands in the
arrival set of the call, a WG's word in its counter set. What is measured or counted is the flag
itself, so that no data is guarded.
"""

# mypy: ignore-errors

from typing import NamedTuple

import triton
import triton.language as tl

from kosmos_core.device.barrier import call_clean, call_enter, call_leave, start_hold, start_publish
from kosmos_core.device.flags import flag_arrive, flag_read, flag_wait
from kosmos_core.device.gemm import TN, gemm_tile, store_accumulator
from kosmos_core.device.layout import (
    ARRIVAL,
    COUNTERS,
    FLAG_ARRIVAL,
    PHASE_GATHER,
    PHASE_START,
)
from kosmos_core.device.mover import copy_run
from kosmos_core.device.peers import peer_ptr
from kosmos_core.device.queue import queue_claim
from kosmos_core.device.target import clock_ns, is_over, matrix_view
from kosmos_core.device.tiles import LOCAL_FIRST, Grid, gathered_tile, num_gathered_tiles

# Rows of the table of a copy: where each route reads, and where it writes.
SOURCE = tl.constexpr(0)
TARGET_ROW = tl.constexpr(1)


class Routes(NamedTuple):
    """Where a copy goes from and to.

    Attributes:
        table_ptr: int64 [2, MAX_RANKS], source and target address of each route, 16-byte aligned.
    """

    table_ptr: tl.tensor


@triton.jit(do_not_specialize=["num_routes", "units"])
def copy_kernel(
    routes,
    head_ptr,
    num_routes,
    units,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Workgroups claim units of UNIT bf16 elements and copy them: BLOCK a step, DEPTH steps ahead.

    Routes take turns, so that few workgroups keep all links busy. Pull and push differ in the
    table alone.
    """
    unit = queue_claim(head_ptr)
    while unit < units:
        route = unit % num_routes
        offset = (unit // num_routes).to(tl.int64) * UNIT
        src_ptr = peer_ptr(routes, SOURCE, route, tl.bfloat16) + offset
        dst_ptr = peer_ptr(routes, TARGET_ROW, route, tl.bfloat16) + offset
        copy_run(src_ptr, dst_ptr, UNIT, BLOCK, DEPTH)
        unit = queue_claim(head_ptr)


@triton.jit
def build_claimed(
    a_ptr,
    b_ptr,
    c_ptr,
    head_ptr,
    m,
    n,
    k,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP_M: tl.constexpr,
    STORE_SPLITS: tl.constexpr,
    TARGET: tl.constexpr,
):
    """A builder: tiles of C [m, n] = A [m, k] times B [n, k] transposed until none is left."""
    grid = Grid(m, tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N))
    a_view = matrix_view(a_ptr, 1, m, k, BLOCK_M, BLOCK_K, TARGET)
    b_view = matrix_view(b_ptr, 1, n, k, BLOCK_N, BLOCK_K, TARGET)
    c_view = matrix_view(c_ptr, 1, m, n, BLOCK_M, BLOCK_N // STORE_SPLITS, TARGET)
    tiles = num_gathered_tiles(grid, LOCAL_FIRST, 1, BLOCK_M, BLOCK_M)
    index = queue_claim(head_ptr)
    while index < tiles:
        tile = gathered_tile(index, grid, index * 0, LOCAL_FIRST, 1, BLOCK_M, BLOCK_M, GROUP_M, 1)
        row = tile.row_block * BLOCK_M
        col = tile.column * BLOCK_N
        acc = gemm_tile(
            a_view, b_view, 0, row, col, 0, k, 0.0, TN, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, True,
            True, True, TARGET,
        )  # fmt: skip
        store_accumulator(c_view, 0, row, col, acc, BLOCK_M, BLOCK_N, STORE_SPLITS, TARGET)
        index = queue_claim(head_ptr)


@triton.jit(do_not_specialize=["m"])
def gemm_kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    head_ptr,
    m,
    n,
    k,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP_M: tl.constexpr,
    STORE_SPLITS: tl.constexpr,
    TARGET: tl.constexpr,
):
    """C [m, n] = A [m, k] times B [n, k] transposed, all bf16: builders that claim tiles.

    n is a multiple of BLOCK_N and k of BLOCK_K.
    """
    build_claimed(
        a_ptr, b_ptr, c_ptr, head_ptr, m, n, k,
        BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M, STORE_SPLITS, TARGET,
    )  # fmt: skip


@triton.jit
def empty_kernel(word_ptr):
    """A launch that does nothing."""
    return


@triton.jit(do_not_specialize=["hold_ns"])
def start_order_kernel(
    head_ptr, tickets_ptr, times_ptr, hold_ns, SPREAD: tl.constexpr, TARGET: tl.constexpr
):
    """Each workgroup notes its arrival ticket and the time, then stays 1 to SPREAD times hold_ns.

    tickets_ptr: int32 [workgroups]; times_ptr: int64 [workgroups], nanoseconds; both by program id.
    """
    pid = tl.program_id(0)
    ticket = queue_claim(head_ptr)
    begin = clock_ns(TARGET)
    tl.store(tickets_ptr + pid, ticket)
    tl.store(times_ptr + pid, begin)
    # 7 is prime to every SPREAD in use: neighbours stay for different times.
    hold = hold_ns.to(tl.int64) * (1 + pid * 7 % SPREAD)
    while not is_over(begin, hold, TARGET):
        pass


@triton.jit(do_not_specialize=["bound_ns"])
def presence_kernel(word_ptr, seen_ptr, bound_ns, TARGET: tl.constexpr):
    """Every workgroup counts itself in and waits, for bound_ns at most, until all are there.

    seen_ptr: int32 [workgroups], how many each one saw; all if the whole grid is resident at once.
    """
    total = tl.num_programs(0)
    flag_arrive(word_ptr, "gpu", TARGET)
    begin = clock_ns(TARGET)
    over = total < 0
    seen = total * 0
    while (seen < total) & (not over):
        seen = flag_read(word_ptr, "gpu")
        over = is_over(begin, bound_ns, TARGET)
    tl.store(seen_ptr + tl.program_id(0), seen)


@triton.jit
def volley(ctx, call, standing, own_ptr, theirs_ptr, partner, leads, rounds, SCOPE: tl.constexpr):
    """`rounds` flags to the partner and back. Returns nanoseconds, and 1, or 0 when aborted."""
    ok = standing.ok
    done = rounds * 0
    begin = clock_ns(ctx.TARGET)
    while (done < rounds) & (ok != 0):
        if leads:
            flag_arrive(theirs_ptr, SCOPE, ctx.TARGET)
        done += 1
        ok = flag_wait(ctx, call, own_ptr, done, partner, 0, PHASE_GATHER, FLAG_ARRIVAL, SCOPE)
        if (not leads) & (ok != 0):
            flag_arrive(theirs_ptr, SCOPE, ctx.TARGET)
    return clock_ns(ctx.TARGET) - begin, ok


@triton.jit(do_not_specialize=["partner", "rounds", "call_hash"])
def ping_pong_kernel(ctx, elapsed_ptr, partner, rounds, call_hash):
    """One workgroup a rank: flags between this rank and `partner` through symmetric memory.

    elapsed_ptr: int64 [1], nanoseconds of all rounds. A rank whose partner is itself only takes
    part in the call.
    """
    call, standing = call_enter(ctx, call_hash)
    if standing.ok != 0:
        start_publish(ctx, call)
    call_clean(ctx, call, standing)
    if partner != call.rank:
        standing = start_hold(ctx, call, standing, partner, PHASE_START)
        words = call.parity * ctx.ARRIVAL_WORDS
        own_ptr = peer_ptr(ctx, ARRIVAL, call.rank, tl.int32) + words + partner * ctx.MAX_ROWS
        theirs_ptr = peer_ptr(ctx, ARRIVAL, partner, tl.int32) + words + call.rank * ctx.MAX_ROWS
        leads = call.rank < partner
        elapsed, _ = volley(ctx, call, standing, own_ptr, theirs_ptr, partner, leads, rounds, "sys")
        tl.store(elapsed_ptr, elapsed)
    call_leave(ctx, call, standing)


@triton.jit(do_not_specialize=["rounds", "call_hash"])
def local_ping_pong_kernel(ctx, elapsed_ptr, rounds, call_hash):
    """Two workgroups of one rank: flags between them through local memory.

    elapsed_ptr: int64 [1], nanoseconds of all rounds.
    """
    call, standing = call_enter(ctx, call_hash)
    if call.ticket == 0:
        if standing.ok != 0:
            start_publish(ctx, call)
        call_clean(ctx, call, standing)
    words_ptr = call.set_ptr + COUNTERS
    own_ptr = words_ptr + call.ticket * ctx.MAX_ROWS
    theirs_ptr = words_ptr + (1 - call.ticket) * ctx.MAX_ROWS
    elapsed, _ = volley(
        ctx, call, standing, own_ptr, theirs_ptr, call.rank, call.ticket == 0, rounds, "gpu"
    )
    if call.ticket == 0:
        tl.store(elapsed_ptr, elapsed)
    call_leave(ctx, call, standing)
