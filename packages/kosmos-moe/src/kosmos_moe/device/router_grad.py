"""Gradients of the router: from the weights through the score function to logits, tokens, weights.

=============== =================== ==================== ====== ============= ======================
word            writer              reader               scope  order         guards
=============== =================== ==================== ====== ============= ======================
logits done     who has made the    dXr and dWr tiles,   gpu    barrier +     dlogits
                dlogits of a block, == blocks                   release;
                +1                                              acquire
router done     who has built a     fold, == all of      gpu    barrier +     dXr
                dXr tile, +1        them                        release;
                                                                acquire
=============== =================== ==================== ====== ============= ======================

These are the only tiles that wait for the GEMMs of other ranks: they stand in queues of their own,
which workgroups come to when they have no other tile.
"""

import triton
import triton.language as tl
from kosmos_core.device.barrier import call_again
from kosmos_core.device.flags import flag_arrive, flag_wait
from kosmos_core.device.layout import FLAG_ARRIVAL, PHASE_BUILD, Standing
from kosmos_core.device.peers import peer_ptr
from kosmos_core.device.queue import queue_claim
from kosmos_core.device.trace import ROUTE, trace_begin, trace_end

from kosmos_moe.device.config import GIVEN, SIGMOID
from kosmos_moe.device.layout import (
    LOGIT_QUEUE,
    LOGITS_DONE,
    OWED,
    ROUTER_DONE,
    ROUTER_QUEUE,
    SCALARS,
    weighed_at,
)
from kosmos_moe.device.plan import await_word
from kosmos_moe.device.route import score_rows, tame


@triton.jit
def num_router_tiles(size, CONFIG):
    """How many dXr tiles there are; a routing that is given has none."""
    if CONFIG.ROUTING == GIVEN:
        return size.tokens * 0
    else:
        return size.route_blocks * tl.cdiv(size.hidden, CONFIG.ROUTE_N)


@triton.jit
def choice_gradient(ops, dw_ptr, size, rows, j, CONFIG):
    """(expert, gradient of its weight) of choice j of some tokens; 0 for what went nowhere."""
    K: tl.constexpr = CONFIG.TOPK
    inside = rows < size.tokens
    place = tl.load(ops.places_ptr + rows * K + j, mask=inside, other=-1)
    expert = tl.load(ops.ids_ptr + rows * K + j, mask=inside, other=-1)
    return expert, tl.load(dw_ptr + place, mask=inside & (place >= 0), other=0.0)


@triton.jit
def score_gradient(ops, dw_ptr, size, factors, rows, logits, scores, experts, CONFIG):
    """([rows, experts] gradients of the scores, of the logits) by way of the weights."""
    K: tl.constexpr = CONFIG.TOPK
    source = scores if CONFIG.SCORE_FIRST else logits
    # Values of the chosen experts as they were before they were normalised.
    total = tl.zeros((CONFIG.ROUTE_ROWS,), tl.float32)
    most = tl.full((CONFIG.ROUTE_ROWS,), float("-inf"), tl.float32)
    for j in tl.static_range(0, K):
        expert, dw = choice_gradient(ops, dw_ptr, size, rows, j, CONFIG)
        value = tl.sum(tl.where(experts[None, :] == expert[:, None], source, 0.0), axis=1)
        if j == 0:
            values = (value,)
            gradients = (dw,)
        else:
            values = values + (value,)
            gradients = gradients + (dw,)
        most = tl.maximum(most, value)
    if not CONFIG.SCORE_FIRST:
        for j in tl.static_range(0, K):
            if CONFIG.SCORE == SIGMOID:
                scored = 1.0 / (1.0 + tl.exp(-values[j]))
            else:
                scored = tl.exp(values[j] - most)
            total += scored
            if j == 0:
                parts = (scored,)
            else:
                parts = parts + (scored,)
        if CONFIG.SCORE == SIGMOID:
            values = parts
        else:
            values = (parts[0] / total,)
            for j in tl.static_range(1, K):
                values = values + (parts[j] / total,)
    norm = tl.full((CONFIG.ROUTE_ROWS,), 1.0, tl.float32)
    mean = tl.zeros((CONFIG.ROUTE_ROWS,), tl.float32)
    if CONFIG.NORMALIZE:
        norm = norm * 0.0 + 1e-20
        for j in tl.static_range(0, K):
            norm += values[j]
        for j in tl.static_range(0, K):
            mean += gradients[j] * values[j] / norm
    inner = tl.zeros((CONFIG.ROUTE_ROWS,), tl.float32)
    for j in tl.static_range(0, K):
        inner += (gradients[j] - mean) * factors.scaling / norm * values[j]
    dscores = tl.zeros((CONFIG.ROUTE_ROWS, CONFIG.EXPERTS_P2), tl.float32)
    dlogits = tl.zeros((CONFIG.ROUTE_ROWS, CONFIG.EXPERTS_P2), tl.float32)
    for j in tl.static_range(0, K):
        expert, _ = choice_gradient(ops, dw_ptr, size, rows, j, CONFIG)
        hit = experts[None, :] == expert[:, None]
        gradient = (gradients[j] - mean) * factors.scaling / norm
        if CONFIG.SCORE_FIRST:
            dscores += tl.where(hit, gradient[:, None], 0.0)
        elif CONFIG.SCORE == SIGMOID:
            slope = gradient * values[j] * (1.0 - values[j])
            dlogits += tl.where(hit, slope[:, None], 0.0)
        else:
            slope = values[j] * (gradient - inner)
            dlogits += tl.where(hit, slope[:, None], 0.0)
    return dscores, dlogits


@triton.jit
def logit_rows(ops, dw_ptr, size, tables, factors, rank, rows, CONFIG):
    """Gradients of the logits of ROUTE_ROWS tokens, those of the losses included."""
    experts = tl.arange(0, CONFIG.EXPERTS_P2)
    known = (experts < CONFIG.EXPERTS)[None, :]
    real = rows < size.tokens
    at = rows.to(tl.int64)[:, None] * CONFIG.EXPERTS + experts[None, :]
    inside = real[:, None] & known
    if CONFIG.PADDING:
        real = real & (tl.load(ops.padding_ptr + rows, mask=real, other=1) == 0)
    logits = tame(tl.load(ops.logits_ptr + at, mask=inside, other=0.0))
    scores, most, total = score_rows(logits, experts, CONFIG)
    dscores, dlogits = score_gradient(
        ops, dw_ptr, size, factors, rows, logits, scores, experts, CONFIG
    )
    if CONFIG.LOSS:
        chosen = tl.load(
            tables.counts + rank * CONFIG.EXPERTS + experts, mask=experts < CONFIG.EXPERTS, other=0
        ).to(tl.float32)
        dloss = tl.load(ops.dloss_ptr)
        tokens = tl.maximum((tl.load(tables.head + OWED) // CONFIG.TOPK).to(tl.float32), 1.0)
        balance = dloss * factors.aux * CONFIG.EXPERTS / (CONFIG.TOPK * tokens * tokens)
        share = balance * chosen[None, :]
        if CONFIG.SCORE == SIGMOID:
            whole = (tl.sum(scores, axis=1) + 1e-20)[:, None]
            mean = tl.sum(share * scores, axis=1)[:, None] / whole
            dscores += (share - mean) / whole
        else:
            dscores += share + scores * 0.0
        logsum = most + tl.log(total)
        powers = tl.exp(logits - most[:, None]) / total[:, None]
        dlogits += (dloss * factors.z * 2.0 / tokens * logsum)[:, None] * powers
    if CONFIG.SCORE == SIGMOID:
        dlogits += dscores * scores * (1.0 - scores)
    else:
        dlogits += scores * (
            dscores - tl.sum(tl.where(known, dscores * scores, 0.0), axis=1)[:, None]
        )
    tl.store(ops.dlogits_ptr + at, tl.where(real[:, None], dlogits, 0.0), mask=inside)


@triton.jit
def logit_block(ops, ctx, call, size, tables, factors, block, CONFIG):
    """Gradients of the logits of a block of tokens, or of the weights that were given."""
    arena_rows = size.arena_blocks * CONFIG.BLOCK_M
    dw_ptr = peer_ptr(ctx, SCALARS, call.rank, tl.float32) + arena_rows
    for first in range(0, CONFIG.ROUTE_M, CONFIG.ROUTE_ROWS):
        rows = block * CONFIG.ROUTE_M + first + tl.arange(0, CONFIG.ROUTE_ROWS)
        if CONFIG.ROUTING == GIVEN:
            for j in tl.static_range(0, CONFIG.TOPK):
                _, dw = choice_gradient(ops, dw_ptr, size, rows, j, CONFIG)
                to_ptr = ops.dweights_ptr + rows * CONFIG.TOPK + j
                tl.store(to_ptr, dw, mask=rows < size.tokens)
        else:
            logit_rows(ops, dw_ptr, size, tables, factors, call.rank, rows, CONFIG)


@triton.jit
def split(values):
    """An fp32 tile in two bf16 parts, 16 bits of it."""
    high = values.to(tl.bfloat16)
    return high, (values - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def token_tile(ops, size, block, column, CONFIG):
    """A dXr tile: gradients of the logits times the router's weights, in fp32."""
    rows = block * CONFIG.ROUTE_M + tl.arange(0, CONFIG.ROUTE_M)
    columns = column * CONFIG.ROUTE_N + tl.arange(0, CONFIG.ROUTE_N)
    inside = (rows < size.tokens)[:, None]
    K: tl.constexpr = CONFIG.ROUTE_K // 2
    acc = tl.zeros((CONFIG.ROUTE_M, CONFIG.ROUTE_N), tl.float32)
    for k in tl.range(0, CONFIG.EXPERTS, K, num_stages=1):
        experts = k + tl.arange(0, K)
        known = experts < CONFIG.EXPERTS
        d = tl.load(
            ops.dlogits_ptr + rows.to(tl.int64)[:, None] * CONFIG.EXPERTS + experts[None, :],
            mask=inside & known[None, :], other=0.0,
        )  # fmt: skip
        w = tl.load(
            ops.router_ptr + experts.to(tl.int64)[:, None] * size.hidden + columns[None, :],
            mask=known[:, None] & (columns < size.hidden)[None, :], other=0.0,
        ).to(tl.float32)  # fmt: skip
        d_high, d_low = split(d)
        w_high, w_low = split(w)
        acc = tl.dot(d_low, w_high, acc)
        acc = tl.dot(d_high, w_low, acc)
        acc = tl.dot(d_high, w_high, acc)
    to_ptr = ops.router_dx_ptr + rows.to(tl.int64)[:, None] * size.hidden + columns[None, :]
    tl.store(to_ptr, acc, mask=inside & (columns < size.hidden)[None, :])


@triton.jit
def weight_tile(ops, size, band, column, CONFIG):
    """A dWr tile: gradients of the logits transposed times the tokens, in fp32."""
    experts = band * CONFIG.ROUTE_M + tl.arange(0, CONFIG.ROUTE_M)
    columns = column * CONFIG.ROUTE_N + tl.arange(0, CONFIG.ROUTE_N)
    known = (experts < CONFIG.EXPERTS)[None, :]
    K: tl.constexpr = CONFIG.ROUTE_K // 2
    acc = tl.zeros((CONFIG.ROUTE_M, CONFIG.ROUTE_N), tl.float32)
    for k in tl.range(0, size.tokens, K, num_stages=1):
        rows = k + tl.arange(0, K)
        inside = (rows < size.tokens)[:, None]
        d = tl.load(
            ops.dlogits_ptr + rows.to(tl.int64)[:, None] * CONFIG.EXPERTS + experts[None, :],
            mask=inside & known, other=0.0,
        )  # fmt: skip
        x = tl.load(
            ops.x_ptr + rows.to(tl.int64)[:, None] * size.hidden + columns[None, :],
            mask=inside & (columns < size.hidden)[None, :], other=0.0,
        )  # fmt: skip
        high, low = split(d)
        acc = tl.dot(low.T, x, acc)
        acc = tl.dot(high.T, x, acc)
    to_ptr = ops.drouter_ptr + experts.to(tl.int64)[:, None] * size.hidden + columns[None, :]
    inside = (experts < CONFIG.EXPERTS)[:, None] & (columns < size.hidden)[None, :]
    tl.store(to_ptr, acc, mask=inside)


@triton.jit
def make_logits(ops, ctx, call, standing, size, tables, factors, CONFIG):
    """Gradients of the logits, block by block, once dw has come back from all owners."""
    ok = standing.ok
    if (size.route_blocks > 0) & (ok != 0):
        ok = flag_wait(
            ctx, call, weighed_at(ctx, call, call.rank), tl.load(tables.head + OWED), call.rank,
            call.rank, PHASE_BUILD, FLAG_ARRIVAL, "sys",
        )  # fmt: skip
    block = call.ticket * 0
    while (block < size.route_blocks) & (ok != 0):
        block = queue_claim(call.set_ptr + LOGIT_QUEUE)
        if block < size.route_blocks:
            begin = trace_begin(ctx)
            logit_block(ops, ctx, call, size, tables, factors, block, CONFIG)
            flag_arrive(call.set_ptr + LOGITS_DONE, "gpu", ctx.TARGET)
            trace_end(ctx, ROUTE, block, begin)
    return Standing(standing.held, ok)


@triton.jit
def route_back(ops, ctx, call, standing, size, tables, factors, call_hash, CONFIG):
    """All workgroups, once no other tile is left: dlogits, then dXr and dWr tiles.

    Returns (call, standing).
    """
    standing = make_logits(ops, ctx, call, standing, size, tables, factors, CONFIG)
    if CONFIG.ROUTING != GIVEN:
        standing = await_word(ctx, call, standing, LOGITS_DONE, size.route_blocks, PHASE_BUILD)
        ticket = call.ticket
        ok = standing.ok
        tile = ticket * 0
        total = tile + 1
        # As in `build_and_combine`: nothing is kept over a tile's sums that can be made anew.
        while tl.condition((tile < total) & (ok != 0), disable_licm=True):
            own = call_again(ctx, ticket, call_hash)
            columns = tl.cdiv(size.hidden, CONFIG.ROUTE_N)
            tiles = num_router_tiles(size, CONFIG)
            total = tiles + tl.cdiv(CONFIG.EXPERTS, CONFIG.ROUTE_M) * columns
            tile = queue_claim(own.set_ptr + ROUTER_QUEUE)
            if tile < tiles:
                token_tile(ops, size, tile // columns, tile % columns, CONFIG)
                flag_arrive(own.set_ptr + ROUTER_DONE, "gpu", ctx.TARGET)
            elif tile < total:
                weight_tile(ops, size, (tile - tiles) // columns, (tile - tiles) % columns, CONFIG)
    return call_again(ctx, call.ticket, call_hash), standing
