"""Where the words and tables of an MoE call lie.

The control block is that of `kosmos_core.device.layout`; behind its ticket and its leave word a set
of counters is laid out here. Regions are rows of the workspace's own peer table.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from kosmos_core.device.layout import ARRIVAL, GATHER, SHARD
from kosmos_core.device.peers import peer_ptr

# Regions. Counts are stored at peers before their starts are held: two rows of the table.
COUNTS = SHARD  # int32 [ranks, experts], by parity: how many rows each rank has for each expert
ARENA = GATHER  # bf16 [rows, hidden]: rows that this rank's experts are to work on
RETURN = tl.constexpr(5)  # bf16 [tokens * k, hidden]: results of this rank's tokens, in list order
INPUTS = tl.constexpr(6)  # backward: bf16 [rows, hidden], token rows beside the gradients in ARENA
SCALARS = tl.constexpr(7)  # backward: fp32, weights of the arena's rows, then dw in list order

# One set of counters. Heads and counters that many hit stand on lines of their own.
ROUTE_QUEUE = tl.constexpr(64)
ROUTED = tl.constexpr(96)
COUNTED = tl.constexpr(128)
LAID_OUT = tl.constexpr(160)
LIST_QUEUE = tl.constexpr(192)
LISTED = tl.constexpr(224)
DISPATCH_QUEUE = tl.constexpr(256)
TILE_QUEUE = tl.constexpr(288)
COMBINE_QUEUE = tl.constexpr(320)
FOLD_QUEUE = tl.constexpr(352)
SHARED_DONE = tl.constexpr(384)
SHARED_HALF = tl.constexpr(416)
ROUTER_DONE = tl.constexpr(448)
SHARED_QUEUE = tl.constexpr(480)
# Per block: router tiles, then GEMM1 and GEMM2 tiles of row blocks, then those of the shared one.
BLOCKS = tl.constexpr(512)

# The same words in a backward, which neither routes nor plans nor lists.
LOGIT_QUEUE = ROUTE_QUEUE
LOGITS_DONE = ROUTED
STARTED = COUNTED
PADDED = LAID_OUT
PAD_QUEUE = LIST_QUEUE
ROUTER_QUEUE = LISTED

# Head of the tables, written by the planner.
VERDICT = tl.constexpr(0)
ROW_BLOCKS = tl.constexpr(1)
DISPATCH_UNITS = tl.constexpr(2)
COMBINE_UNITS = tl.constexpr(3)
OWED = tl.constexpr(4)
HEAD_WORDS = tl.constexpr(16)

# Verdicts.
FITS = tl.constexpr(0)
OVERFLOW = tl.constexpr(1)


class Tables(NamedTuple):
    """What the planner lays out, int32, in this rank's memory; the same on all ranks but for `own`.

    Attributes:
        head: scalars.
        counts: [ranks, experts] rows that a rank has for an expert.
        before: [ranks, experts] rows of lower ranks for the expert: where the rank's rows begin
            within the expert's.
        starts: [ranks, experts] where the expert's rows begin in the rank's send list.
        arena_rows: [experts] where the expert's rows begin in its owner's arena.
        blocks: [local experts + 1] row blocks of this rank's experts up to each.
        dispatches: [local experts + 1] dispatch units up to each local expert of any owner.
        combines: [local experts + 1] combine units of this rank's experts up to each.
        base: [route blocks, experts] rows of earlier blocks of tokens for the expert.
    """

    head: tl.tensor
    counts: tl.tensor
    before: tl.tensor
    starts: tl.tensor
    arena_rows: tl.tensor
    blocks: tl.tensor
    dispatches: tl.tensor
    combines: tl.tensor
    base: tl.tensor


class Size(NamedTuple):
    """Sizes of a call on this rank.

    Attributes:
        tokens: tokens of this rank.
        hidden: width of a token.
        inter: width of an expert.
        shared_inter: width of the shared expert.
        route_blocks: blocks of tokens that are routed as one.
        arena_blocks: row blocks of the arena.
    """

    tokens: tl.tensor
    hidden: tl.tensor
    inter: tl.tensor
    shared_inter: tl.tensor
    route_blocks: tl.tensor
    arena_blocks: tl.tensor


def table_words(world: int, experts: int, route_blocks: int) -> int:
    """int32 words of the tables."""
    local = experts // world
    heads = int(HEAD_WORDS.value) + 3 * (local + 1) + experts
    return heads + (3 * world + max(1, route_blocks)) * experts


@triton.jit
def tables_at(ptr, WORLD: tl.constexpr, CONFIG):
    """The tables of a call."""
    MATRIX: tl.constexpr = WORLD * CONFIG.EXPERTS
    counts = ptr + HEAD_WORDS
    before = counts + MATRIX
    starts = before + MATRIX
    arena_rows = starts + MATRIX
    blocks = arena_rows + CONFIG.EXPERTS
    dispatches = blocks + CONFIG.LOCAL_EXPERTS + 1
    combines = dispatches + CONFIG.LOCAL_EXPERTS + 1
    base = combines + CONFIG.LOCAL_EXPERTS + 1
    return Tables(ptr, counts, before, starts, arena_rows, blocks, dispatches, combines, base)


@triton.jit
def arrivals_at(ctx, call, rank):
    """Words in which `rank` learns how many rows it was sent, [source, local expert]."""
    return peer_ptr(ctx, ARRIVAL, rank, tl.int32) + call.parity * ctx.ARRIVAL_WORDS


@triton.jit
def returned_at(ctx, call, rank):
    """Word in which all ranks count the rows that they have sent back to `rank`."""
    return arrivals_at(ctx, call, rank) + ctx.MAX_ROWS - 1


@triton.jit
def weighed_at(ctx, call, rank):
    """Word in which all ranks count the routing-weight gradients sent back to `rank`."""
    return arrivals_at(ctx, call, rank) + ctx.MAX_ROWS - 2


@triton.jit
def built_at(call, size):
    """GEMM1 tiles that are done, by row block."""
    return call.set_ptr + BLOCKS + size.route_blocks


@triton.jit
def finished_at(call, size):
    """GEMM2 tiles that are done, by row block."""
    return built_at(call, size) + size.arena_blocks


@triton.jit
def shared_built_at(call, size):
    """First tiles of the shared expert that are done, by row block of tokens."""
    return finished_at(call, size) + size.arena_blocks
