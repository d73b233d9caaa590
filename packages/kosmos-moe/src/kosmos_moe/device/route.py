"""Route: router logits in tiles, then scores, choices and weights of each block of tokens.

=============== =================== ==================== ====== ============= ======================
word            writer              reader               scope  order         guards
=============== =================== ==================== ====== ============= ======================
router tiles of who has built a     the last of them     gpu    barrier +     logits of the block
a block         tile, +1                                        acq_rel
                (`elect_last`)
routed          who has routed a    the last of them,    gpu    barrier +     choices and counts of
                block, and ticket   who plans                   acq_rel       all blocks
                0, +1
=============== =================== ==================== ====== ============= ======================

Ticket 0 counts in because a rank without tokens needs a last arriver, too.
"""

import triton
import triton.language as tl
from kosmos_core.device.barrier import elect_last
from kosmos_core.device.flags import abort_all
from kosmos_core.device.layout import FAULT, PHASE_PLAN, Standing
from kosmos_core.device.queue import queue_claim
from kosmos_core.device.trace import ROUTE, trace_begin, trace_end

from kosmos_moe.device.config import GIVEN, SIGMOID, UNIFORM
from kosmos_moe.device.layout import BLOCKS, ROUTE_QUEUE, ROUTED

# Beyond this, and where they are NaN, logits and keys count as this: every token then chooses
# distinct experts.
LARGEST = tl.constexpr(3.0e38)
BAD_ARGUMENT = tl.constexpr(7)  # kosmos_core.peer_errors.FAULT_REASONS


@triton.jit
def tame(values):
    """Values kept within the largest finite ones, NaN as the smallest."""
    return tl.minimum(tl.where(values > -LARGEST, values, -LARGEST), LARGEST)


@triton.jit
def logits_tile(ops, size, block, column, CONFIG):
    """[ROUTE_M, ROUTE_N] logits of a block of tokens, in fp32.

    Tokens are bf16, so that products with bf16 parts of the weights are exact: three parts carry
    all 24 bits of an fp32 weight.
    """
    rows = block * CONFIG.ROUTE_M + tl.arange(0, CONFIG.ROUTE_M)
    columns = column * CONFIG.ROUTE_N + tl.arange(0, CONFIG.ROUTE_N)
    inside_rows = (rows < size.tokens)[:, None]
    inside_columns = (columns < CONFIG.EXPERTS)[:, None]
    x_ptr = ops.x_ptr + rows.to(tl.int64)[:, None] * size.hidden
    w_ptr = ops.router_ptr + columns.to(tl.int64)[:, None] * size.hidden
    acc = tl.zeros((CONFIG.ROUTE_M, CONFIG.ROUTE_N), tl.float32)
    for k in tl.range(0, size.hidden, CONFIG.ROUTE_K, num_stages=CONFIG.STAGES):
        at = (k + tl.arange(0, CONFIG.ROUTE_K))[None, :]
        x = tl.load(x_ptr + at, mask=inside_rows & (at < size.hidden), other=0.0)
        w = tl.load(w_ptr + at, mask=inside_columns & (at < size.hidden), other=0.0)
        if CONFIG.ROUTER_PARTS == 1:
            acc = tl.dot(x, w.T, acc)
        else:
            high = w.to(tl.bfloat16)
            rest = w - high.to(tl.float32)
            middle = rest.to(tl.bfloat16)
            low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
            acc = tl.dot(x, low.T, acc)
            acc = tl.dot(x, middle.T, acc)
            acc = tl.dot(x, high.T, acc)
    tl.store(
        ops.logits_ptr + rows.to(tl.int64)[:, None] * CONFIG.EXPERTS + columns[None, :],
        acc,
        mask=inside_rows & (columns < CONFIG.EXPERTS)[None, :],
    )


@triton.jit
def largest(keys, columns):
    """([rows] column of the largest key, lowest of equal ones; [rows, columns] where it is)."""
    _, place = tl.max(keys, axis=1, return_indices=True, return_indices_tie_break_left=True)
    return place, columns[None, :] == place[:, None]


@triton.jit
def within_groups(keys, experts, CONFIG):
    """The keys, -inf where the expert's group is not among the token's best groups."""
    SPAN: tl.constexpr = CONFIG.EXPERTS // CONFIG.GROUPS
    names = tl.arange(0, CONFIG.GROUPS_P2)
    totals = tl.zeros((CONFIG.ROUTE_ROWS, CONFIG.GROUPS_P2), tl.float32)
    totals = tl.where(names[None, :] < CONFIG.GROUPS, totals, float("-inf"))
    for group in range(CONFIG.GROUPS):
        left = tl.where((experts // SPAN == group)[None, :], keys, float("-inf"))
        total = tl.max(left, axis=1)
        for _ in range(1, CONFIG.GROUP_BEST):
            _, hit = largest(left, experts)
            left = tl.where(hit, float("-inf"), left)
            total += tl.max(left, axis=1)
        totals = tl.where(names[None, :] == group, tame(total)[:, None], totals)
    allowed = tl.zeros((CONFIG.ROUTE_ROWS, CONFIG.EXPERTS_P2), tl.int32)
    for _ in range(CONFIG.GROUP_TOPK):
        best, hit = largest(totals, names)
        totals = tl.where(hit, float("-inf"), totals)
        allowed = allowed | (experts[None, :] // SPAN == best[:, None]).to(tl.int32)
    return tl.where(allowed != 0, keys, float("-inf"))


@triton.jit
def score_rows(logits, experts, CONFIG):
    """(scores, largest logit, sum of exponentials) of [rows, experts] tame logits."""
    known = (experts < CONFIG.EXPERTS)[None, :]
    most = tl.max(tl.where(known, logits, float("-inf")), axis=1)
    powers = tl.where(known, tl.exp(logits - most[:, None]), 0.0)
    total = tl.sum(powers, axis=1)
    if CONFIG.SCORE == SIGMOID:
        scores = tl.where(known, 1.0 / (1.0 + tl.exp(-logits)), 0.0)
    else:
        scores = powers / total[:, None]
    return scores, most, total


@triton.jit
def key_rows(ops, logits, scores, experts, CONFIG):
    """[rows, experts] keys by which experts are chosen; -inf for what must not be."""
    keys = logits
    if CONFIG.BIAS or CONFIG.GROUPS > 1:
        if CONFIG.SCORE_FIRST:
            keys = scores
        if CONFIG.BIAS:
            bias = tl.load(ops.bias_ptr + experts, mask=experts < CONFIG.EXPERTS, other=0.0)
            keys = keys + bias[None, :]
        keys = tame(keys)
    keys = tl.where((experts < CONFIG.EXPERTS)[None, :], keys, float("-inf"))
    if CONFIG.GROUPS > 1:
        keys = within_groups(keys, experts, CONFIG)
    return keys


@triton.jit
def weigh(values, factors, CONFIG):
    """The k weights of a token from the scores, or from the logits, of the experts chosen."""
    K: tl.constexpr = CONFIG.TOPK
    weights = values
    if not CONFIG.SCORE_FIRST:
        if CONFIG.SCORE == SIGMOID:
            weights = (1.0 / (1.0 + tl.exp(-values[0])),)
            for j in tl.static_range(1, K):
                weights = weights + (1.0 / (1.0 + tl.exp(-values[j])),)
        else:
            most = values[0]
            for j in tl.static_range(1, K):
                most = tl.maximum(most, values[j])
            weights = (tl.exp(values[0] - most),)
            for j in tl.static_range(1, K):
                weights = weights + (tl.exp(values[j] - most),)
            total = weights[0]
            for j in tl.static_range(1, K):
                total += weights[j]
            parts = (weights[0] / total,)
            for j in tl.static_range(1, K):
                parts = parts + (weights[j] / total,)
            weights = parts
    factor = values[0] * 0.0 + factors.scaling
    if CONFIG.NORMALIZE:
        total = weights[0]
        for j in tl.static_range(1, K):
            total += weights[j]
        factor = factor / (total + 1e-20)
    scaled = (weights[0] * factor,)
    for j in tl.static_range(1, K):
        scaled = scaled + (weights[j] * factor,)
    return scaled


@triton.jit
def route_rows(ops, size, factors, rows, experts, CONFIG):
    """Chooses for ROUTE_ROWS tokens.

    Returns ([experts] choices, [experts] sums of shares, sum of squared logsumexps).
    """
    K: tl.constexpr = CONFIG.TOPK
    real = rows < size.tokens
    if CONFIG.PADDING:
        real = real & (tl.load(ops.padding_ptr + rows, mask=real, other=1) == 0)
    known = (experts < CONFIG.EXPERTS)[None, :]
    at = rows.to(tl.int64)[:, None] * CONFIG.EXPERTS + experts[None, :]
    logits = tame(
        tl.load(ops.logits_ptr + at, mask=(rows < size.tokens)[:, None] & known, other=0.0)
    )
    scores, most, total = score_rows(logits, experts, CONFIG)
    keys = key_rows(ops, logits, scores, experts, CONFIG)
    source = scores if CONFIG.SCORE_FIRST else logits
    chosen = tl.zeros((CONFIG.EXPERTS_P2,), tl.int32)
    for j in tl.static_range(0, K):
        if CONFIG.ROUTING == UNIFORM:
            place = (rows + j * (CONFIG.EXPERTS // K)) % CONFIG.EXPERTS
            hit = experts[None, :] == place[:, None]
        else:
            place, hit = largest(keys, experts)
            keys = tl.where(hit, float("-inf"), keys)
        value = tl.sum(tl.where(hit, source, 0.0), axis=1)
        if j == 0:
            values = (value,)
        else:
            values = values + (value,)
        tl.store(ops.ids_ptr + rows * K + j, tl.where(real, place, -1), mask=rows < size.tokens)
        chosen += tl.sum((hit & real[:, None]).to(tl.int32), axis=0)
    weights = weigh(values, factors, CONFIG)
    for j in tl.static_range(0, K):
        weight = tl.where(real, weights[j], 0.0)
        tl.store(ops.weights_ptr + rows * K + j, weight, mask=rows < size.tokens)
    shares = tl.zeros((CONFIG.EXPERTS_P2,), tl.float32)
    squares = tl.sum(most * 0.0, axis=0)
    if CONFIG.LOSS:
        share = scores
        if CONFIG.SCORE == SIGMOID:
            share = scores / (tl.sum(scores, axis=1) + 1e-20)[:, None]
        shares = tl.sum(tl.where(real[:, None], share, 0.0), axis=0)
        logsum = most + tl.log(total)
        squares = tl.sum(tl.where(real, logsum * logsum, 0.0), axis=0)
    return chosen, shares, squares


@triton.jit
def choices_of(ops, size, rows, experts, CONFIG):
    """[rows, experts] int32: 1 where a token goes to an expert; and how many entries are wrong.

    Entries that name no expert go nowhere, and a second one of the same expert counts for nothing:
    whatever is given, lists have no holes.
    """
    K: tl.constexpr = CONFIG.TOPK
    chosen = tl.zeros((CONFIG.ROUTE_ROWS, CONFIG.EXPERTS_P2), tl.int32)
    named = tl.zeros((CONFIG.ROUTE_ROWS,), tl.int32)
    for j in tl.static_range(0, K):
        place = tl.load(ops.ids_ptr + rows * K + j, mask=rows < size.tokens, other=-1)
        hit = (experts[None, :] == place[:, None]) & (experts < CONFIG.EXPERTS)[None, :]
        chosen = chosen | hit.to(tl.int32)
        named += (rows < size.tokens).to(tl.int32)
    wrong = tl.sum(named - tl.sum(chosen, axis=1), axis=0)
    return chosen, wrong


@triton.jit
def take_rows(ops, size, rows, experts, CONFIG):
    """Counts the choices that ROUTE_ROWS tokens were given: ([experts] choices, wrong entries)."""
    chosen, wrong = choices_of(ops, size, rows, experts, CONFIG)
    if CONFIG.PADDING:
        real = tl.load(ops.padding_ptr + rows, mask=rows < size.tokens, other=1) == 0
        chosen = tl.where(real[:, None], chosen, 0)
    return tl.sum(chosen, axis=0), wrong


@triton.jit
def route_block(ops, size, factors, block, CONFIG):
    """Routes a block of tokens; returns how many entries of a given routing are wrong."""
    experts = tl.arange(0, CONFIG.EXPERTS_P2)
    known = experts < CONFIG.EXPERTS
    chosen = tl.zeros((CONFIG.EXPERTS_P2,), tl.int32)
    shares = tl.zeros((CONFIG.EXPERTS_P2,), tl.float32)
    squares = size.tokens * 0.0
    wrong = size.tokens * 0
    for first in range(0, CONFIG.ROUTE_M, CONFIG.ROUTE_ROWS):
        rows = block * CONFIG.ROUTE_M + first + tl.arange(0, CONFIG.ROUTE_ROWS)
        if CONFIG.ROUTING == GIVEN:
            more, bad = take_rows(ops, size, rows, experts, CONFIG)
            wrong += bad
        else:
            more, share, square = route_rows(ops, size, factors, rows, experts, CONFIG)
            shares += share
            squares += square
        chosen += more
    tl.store(ops.counts_ptr + block * CONFIG.EXPERTS + experts, chosen, mask=known)
    if CONFIG.LOSS:
        sums_ptr = ops.sums_ptr + block * (CONFIG.EXPERTS + 1)
        tl.store(sums_ptr + experts, shares, mask=known)
        tl.store(sums_ptr + CONFIG.EXPERTS, squares)
    return wrong


@triton.jit
def route(ops, ctx, call, standing, size, factors, CONFIG):
    """All workgroups route.

    Returns (whether this one is the last and plans, standing).
    """
    columns = tl.cdiv(CONFIG.EXPERTS, CONFIG.ROUTE_N)
    if CONFIG.ROUTING == GIVEN:
        columns = 1
    units = size.route_blocks * columns
    arrivals = size.route_blocks + 1
    plans = call.ticket < 0
    ok = standing.ok
    unit = units * 0
    while unit < units:
        unit = queue_claim(call.set_ptr + ROUTE_QUEUE)
        if unit < units:
            begin = trace_begin(ctx)
            block = unit // columns
            complete = unit >= 0
            if CONFIG.ROUTING != GIVEN:
                logits_tile(ops, size, block, unit % columns, CONFIG)
                complete = elect_last(call.set_ptr + BLOCKS + block, columns, ctx.TARGET)
            if complete:
                wrong = route_block(ops, size, factors, block, CONFIG)
                if CONFIG.ROUTING == GIVEN:
                    if wrong > 0:
                        zero = wrong * 0
                        abort_all(
                            ctx, call.rank, call.epoch, zero + FAULT, call.rank, zero + PHASE_PLAN,
                            zero, zero, zero + BAD_ARGUMENT, zero,
                        )  # fmt: skip
                        ok = zero
                plans = plans | elect_last(call.set_ptr + ROUTED, arrivals, ctx.TARGET)
            trace_end(ctx, ROUTE, unit, begin)
    if call.ticket == 0:
        plans = plans | elect_last(call.set_ptr + ROUTED, arrivals, ctx.TARGET)
    return plans, Standing(standing.held, ok)
