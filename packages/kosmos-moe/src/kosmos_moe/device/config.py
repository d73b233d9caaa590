"""Constants and operands of the MoE kernels, as their device functions see them."""

from typing import NamedTuple

import triton.language as tl

SOFTMAX = tl.constexpr(0)
SIGMOID = tl.constexpr(1)

# Where the routing comes from.
ROUTER = tl.constexpr(0)
UNIFORM = tl.constexpr(1)
GIVEN = tl.constexpr(2)

# Who combines. DEDICATED: the combine crew does nothing else until all is combined; the others join
# it once no tile is left. FIXED: they never do. PLANNED: the crew builds as many tiles as a model
# of the costs gives it, then does nothing but combine, and nobody joins it.
TWO_WAY = tl.constexpr(0)
DEDICATED = tl.constexpr(1)
FIXED = tl.constexpr(2)
PLANNED = tl.constexpr(3)

DESTINATION_MINOR = tl.constexpr(0)
DESTINATION_MAJOR = tl.constexpr(1)


class MoeConfig(NamedTuple):
    """Constants of one compiled variant; every field is a constexpr.

    Attributes:
        EXPERTS, LOCAL_EXPERTS, TOPK: of the layer; P2 names the next power of two.
        SCORE, SCORE_FIRST, NORMALIZE, GROUPS, GROUP_TOPK, GROUP_BEST: `RouterOptions`.
        ROUTING: where the routing comes from.
        BIAS, PADDING, LOSS, SHARED: whether the call has them.
        ROUTER_PARTS: bf16 parts that a router weight is split into, 1 (bf16) or 3 (fp32).
        ROUTE_M, ROUTE_N, ROUTE_K: tile of the router's GEMM.
        ROUTE_ROWS: tokens that are routed at once.
        PLAN_ROWS: blocks of tokens whose counts are added up at once.
        BLOCK_M, BLOCK_N, BLOCK_K, STAGES: tile of the experts' GEMMs; GEMM1 makes BLOCK_N / 2
            columns of gate and up each.
        EVEN_H, EVEN_I: whether BLOCK_K divides the contraction of GEMM1, and of every GEMM2.
        UNIT_ROWS: most rows of a dispatch or combine unit.
        COPY_ROWS, PIECE, BURST: rows, elements and pieces that a dispatcher has in flight.
        COPY_ELEMENTS, COPY_DEPTH: step of a combiner.
        FOLD_ROWS: tokens that are folded at once.
        POLICY, ORDER: who combines; order of the push lists.
        SAVE: whether the pre-activations are kept.
        ROW_COST: time to push a row back, in millionths of that to build a tile; PLANNED only.
        BACKWARD: whether this is the backward.
        MAIN_GRAD: whether weight gradients are added to what they were before, in fp32.
        WGRAD_K: rows that a step of a weight gradient's contraction takes; divides BLOCK_M.
        PARTS: column parts in which the epilogues with SwiGLU, and fp32 sums, are worked off.
    """

    EXPERTS: tl.constexpr
    EXPERTS_P2: tl.constexpr
    LOCAL_EXPERTS: tl.constexpr
    LOCAL_P2: tl.constexpr
    WORLD_P2: tl.constexpr
    TOPK: tl.constexpr
    SCORE: tl.constexpr
    SCORE_FIRST: tl.constexpr
    NORMALIZE: tl.constexpr
    GROUPS: tl.constexpr
    GROUPS_P2: tl.constexpr
    GROUP_TOPK: tl.constexpr
    GROUP_BEST: tl.constexpr
    ROUTING: tl.constexpr
    BIAS: tl.constexpr
    PADDING: tl.constexpr
    LOSS: tl.constexpr
    SHARED: tl.constexpr
    ROUTER_PARTS: tl.constexpr
    ROUTE_M: tl.constexpr
    ROUTE_N: tl.constexpr
    ROUTE_K: tl.constexpr
    ROUTE_ROWS: tl.constexpr
    PLAN_ROWS: tl.constexpr
    BLOCK_M: tl.constexpr
    BLOCK_N: tl.constexpr
    BLOCK_K: tl.constexpr
    STAGES: tl.constexpr
    EVEN_H: tl.constexpr
    EVEN_I: tl.constexpr
    UNIT_ROWS: tl.constexpr
    COPY_ROWS: tl.constexpr
    PIECE: tl.constexpr
    BURST: tl.constexpr
    COPY_ELEMENTS: tl.constexpr
    COPY_DEPTH: tl.constexpr
    FOLD_ROWS: tl.constexpr
    POLICY: tl.constexpr
    ORDER: tl.constexpr
    SAVE: tl.constexpr
    ROW_COST: tl.constexpr
    BACKWARD: tl.constexpr
    MAIN_GRAD: tl.constexpr
    WGRAD_K: tl.constexpr
    PARTS: tl.constexpr


class Factors(NamedTuple):
    """Numbers of the router that no code depends on, fp32.

    Attributes:
        scaling: factor of all weights.
        aux: coefficient of the load-balancing loss.
        z: coefficient of the z-loss.
    """

    scaling: tl.tensor
    aux: tl.tensor
    z: tl.tensor


class ForwardOperands(NamedTuple):
    """Matrices of one forward, row-major.

    Attributes:
        x_ptr: bf16 [tokens, hidden].
        router_ptr: bf16 or fp32 [experts, hidden].
        bias_ptr: fp32 [experts].
        padding_ptr: uint8 [tokens], not 0 for tokens that go nowhere.
        w1_ptr: bf16 [local experts, 2, inter, hidden], gate first.
        w2_ptr: bf16 [local experts, hidden, inter].
        shared1_ptr: bf16 [2, shared inter, hidden].
        shared2_ptr: bf16 [hidden, shared inter].
        y_ptr: bf16 [tokens, hidden].
        loss_ptr: fp32 [1].
        ids_ptr: int32 [tokens, k]; given, or what the router chose, -1 for padding.
        weights_ptr: fp32 [tokens, k], likewise.
        places_ptr: int32 [tokens, k], place of each choice in the send list, -1 for none.
        act_ptr: bf16 [2, arena rows, inter], gate and up before SwiGLU.
        shared_act_ptr: bf16 [2, tokens, shared inter].
        h_ptr: bf16 [arena rows, inter], after SwiGLU.
        y2_ptr: bf16 [arena rows, hidden], results in the order of the arena.
        shared_h_ptr: bf16 [tokens, shared inter].
        shared_y_ptr: bf16 [tokens, hidden].
        logits_ptr: fp32 [tokens, experts].
        sums_ptr: fp32 [route blocks, experts + 1], shares of each expert, then the z-loss.
        counts_ptr: int32 [route blocks, experts], choices of each expert.
        list_ptr: int32 [tokens * k], tokens in the order in which they are sent.
        tables_ptr: int32, `Tables`.
        verdict_ptr: int32 [1], copy of the verdict for the host.
    """

    x_ptr: tl.tensor
    router_ptr: tl.tensor
    bias_ptr: tl.tensor
    padding_ptr: tl.tensor
    w1_ptr: tl.tensor
    w2_ptr: tl.tensor
    shared1_ptr: tl.tensor
    shared2_ptr: tl.tensor
    y_ptr: tl.tensor
    loss_ptr: tl.tensor
    ids_ptr: tl.tensor
    weights_ptr: tl.tensor
    places_ptr: tl.tensor
    act_ptr: tl.tensor
    shared_act_ptr: tl.tensor
    h_ptr: tl.tensor
    y2_ptr: tl.tensor
    shared_h_ptr: tl.tensor
    shared_y_ptr: tl.tensor
    logits_ptr: tl.tensor
    sums_ptr: tl.tensor
    counts_ptr: tl.tensor
    list_ptr: tl.tensor
    tables_ptr: tl.tensor
    verdict_ptr: tl.tensor


class BackwardOperands(NamedTuple):
    """Matrices of one backward, row-major; what the forward saved, gradients in and out, scratch.

    Attributes:
        dy_ptr: bf16 [tokens, hidden].
        dloss_ptr: fp32 [1], gradient of the auxiliary loss.
        x_ptr, router_ptr, bias_ptr, padding_ptr, w1_ptr, w2_ptr, shared1_ptr, shared2_ptr, ids_ptr,
            weights_ptr, places_ptr, act_ptr, shared_act_ptr, logits_ptr, list_ptr, tables_ptr: as
            in `ForwardOperands`.
        y_ptr: bf16 [tokens, hidden], gradient of the tokens.
        drouter_ptr: fp32 [experts, hidden].
        dweights_ptr: fp32 [tokens, k], gradient of a routing that was given.
        dw1_ptr: bf16 [local experts, 2, inter, hidden]; fp32 with MAIN_GRAD.
        dw2_ptr: [local experts, hidden, inter], likewise.
        dshared1_ptr, dshared2_ptr: likewise of the shared expert.
        h_ptr: bf16 [arena rows, inter], w * h.
        dgu_ptr: bf16 [2, arena rows, inter], gradients of gate and up.
        y2_ptr: bf16 [arena rows, hidden], gradients of the arena's token rows.
        partials_ptr: fp32 [columns, arena rows], parts of dw.
        shared_h_ptr, shared_dgu_ptr, shared_y_ptr: likewise of the shared expert.
        dlogits_ptr: fp32 [tokens, experts].
        router_dx_ptr: fp32 [tokens, hidden].
    """

    dy_ptr: tl.tensor
    dloss_ptr: tl.tensor
    x_ptr: tl.tensor
    router_ptr: tl.tensor
    bias_ptr: tl.tensor
    padding_ptr: tl.tensor
    w1_ptr: tl.tensor
    w2_ptr: tl.tensor
    shared1_ptr: tl.tensor
    shared2_ptr: tl.tensor
    ids_ptr: tl.tensor
    weights_ptr: tl.tensor
    places_ptr: tl.tensor
    act_ptr: tl.tensor
    shared_act_ptr: tl.tensor
    logits_ptr: tl.tensor
    list_ptr: tl.tensor
    tables_ptr: tl.tensor
    y_ptr: tl.tensor
    drouter_ptr: tl.tensor
    dweights_ptr: tl.tensor
    dw1_ptr: tl.tensor
    dw2_ptr: tl.tensor
    dshared1_ptr: tl.tensor
    dshared2_ptr: tl.tensor
    h_ptr: tl.tensor
    dgu_ptr: tl.tensor
    y2_ptr: tl.tensor
    partials_ptr: tl.tensor
    shared_h_ptr: tl.tensor
    shared_dgu_ptr: tl.tensor
    shared_y_ptr: tl.tensor
    dlogits_ptr: tl.tensor
    router_dx_ptr: tl.tensor
