"""Kernels that measure sums of several ranks' rows, and transport beside builders.

| word | writer | reader | scope | order | guards |
|---|---|---|---|---|---|
| queue heads | every WG, +1 | the claimer; movers | gpu | relaxed; acquire | nothing |

Heads are zeroed by the host before a launch. Movers read the tile queue's head to learn that the
builders are done: nothing that the builders wrote is read after it.
"""

# mypy: ignore-errors

from typing import NamedTuple

import triton
import triton.language as tl

from kosmos_core.device.flags import flag_read
from kosmos_core.device.mover import copy_run
from kosmos_core.device.peers import peer_ptr
from kosmos_core.device.queue import queue_claim
from kosmos_core.device.reduce import reduce_run
from kosmos_core.kernels.measure import SOURCE, TARGET_ROW, build_claimed


class Heads(NamedTuple):
    """Queues of one launch, and what its movers did.

    Attributes:
        tiles_ptr: int32 [1], head of the tile queue.
        tickets_ptr: int32 [1], arrivals: the first become movers.
        moved_ptr: int32 [movers], units of each mover, added up over launches.
    """

    tiles_ptr: tl.tensor
    tickets_ptr: tl.tensor
    moved_ptr: tl.tensor


class Matrices(NamedTuple):
    """The builders' operands: a [m, k] and b [n, k] give c [m, n], all bf16."""

    a_ptr: tl.tensor
    b_ptr: tl.tensor
    c_ptr: tl.tensor


@triton.jit
def sum_unit(routes, offset, UNIT: tl.constexpr, BLOCK: tl.constexpr, SOURCES: tl.constexpr):
    """Adds up UNIT elements of SOURCES routes, BLOCK of each a step."""
    zero = offset.to(tl.int32) * 0
    sources = (peer_ptr(routes, SOURCE, zero, tl.bfloat16) + offset,)
    for source in tl.static_range(1, SOURCES):
        sources = sources + (peer_ptr(routes, SOURCE, zero + source, tl.bfloat16) + offset,)
    dst_ptr = peer_ptr(routes, TARGET_ROW, zero, tl.bfloat16) + offset
    reduce_run(sources, dst_ptr, UNIT, SOURCES, BLOCK)


@triton.jit(do_not_specialize=["units"])
def sum_kernel(
    routes,
    head_ptr,
    units,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    SOURCES: tl.constexpr,
):
    """Workgroups claim units of UNIT bf16 elements and add up what all routes have of them."""
    unit = queue_claim(head_ptr)
    while unit < units:
        sum_unit(routes, unit.to(tl.int64) * UNIT, UNIT, BLOCK, SOURCES)
        unit = queue_claim(head_ptr)


@triton.jit(do_not_specialize=["m", "num_movers", "units", "most"])
def beside_kernel(
    matrices,
    routes,
    heads,
    m,
    n,
    k,
    num_movers,
    units,
    most,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
    SOURCES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP_M: tl.constexpr,
    STORE_SPLITS: tl.constexpr,
    TARGET: tl.constexpr,
):
    """The first num_movers WGs to arrive transfer until the others have claimed every tile.

    A mover goes through units of its own, again and again, `most` of them at most. SOURCES is 0
    for copies along route 0, DEPTH steps ahead, or how many routes are added up.
    """
    ticket = queue_claim(heads.tickets_ptr)
    if ticket < num_movers:
        tiles = tl.cdiv(m, BLOCK_M) * tl.cdiv(n, BLOCK_N)
        unit = ticket
        moved = ticket * 0
        while (moved < most) & (flag_read(heads.tiles_ptr, "gpu") < tiles):
            offset = unit.to(tl.int64) * UNIT
            if SOURCES == 0:
                src_ptr = peer_ptr(routes, SOURCE, ticket * 0, tl.bfloat16) + offset
                dst_ptr = peer_ptr(routes, TARGET_ROW, ticket * 0, tl.bfloat16) + offset
                copy_run(src_ptr, dst_ptr, UNIT, BLOCK, DEPTH)
            else:
                sum_unit(routes, offset, UNIT, BLOCK, SOURCES)
            moved += 1
            unit += num_movers
            if unit >= units:
                unit = ticket
        before = tl.load(heads.moved_ptr + ticket)
        tl.store(heads.moved_ptr + ticket, before + moved)
    else:
        build_claimed(
            matrices.a_ptr, matrices.b_ptr, matrices.c_ptr, heads.tiles_ptr, m, n, k,
            BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M, STORE_SPLITS, TARGET,
        )  # fmt: skip
