"""The unfused MoE layer in plain PyTorch: oracle of every test, and where a declined call goes.

Any world, any floating dtype: routing is done in FP32, in FP64 where the tokens are FP64. Gradients
are autograd's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from kosmos_core.errors import ArgumentError
from kosmos_core.worlds import World

from kosmos_moe.router import RouterOptions

# Logits and keys beyond this, and NaN, count as this: every token then chooses distinct experts.
LARGEST = 3.0e38


class Routing(NamedTuple):
    """Where the tokens of a rank go.

    Attributes:
        ids: [tokens, k] int64, experts chosen; -1 for padding.
        weights: [tokens, k] FP32 or FP64; 0 for padding.
        aux_loss: scalar, load-balancing and z-loss together, coefficients included.
    """

    ids: torch.Tensor
    weights: torch.Tensor
    aux_loss: torch.Tensor


class MoeOutput(NamedTuple):
    """What the layer gives.

    Attributes:
        y: [tokens, hidden] in the tokens' dtype.
        aux_loss: scalar, to be added to the loss.
        ids: [tokens, k] int64, experts chosen; -1 for padding.
        weights: [tokens, k] weights of them.
    """

    y: torch.Tensor
    aux_loss: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


class Experts(NamedTuple):
    """Weights of SwiGLU experts: y = W2 (silu(gate) * up), gate and up being W1 x.

    Attributes:
        w1: [experts of this rank, 2 * inter, hidden], gate first; shared: [2 * inter, hidden].
        w2: [experts of this rank, hidden, inter]; shared: [hidden, inter].
    """

    w1: torch.Tensor
    w2: torch.Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of routing and of sums: FP32, or FP64 for FP64 tokens."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def tame(values: torch.Tensor) -> torch.Tensor:
    """Values kept within the largest finite ones, NaN as the smallest."""
    return torch.where(values > -LARGEST, values, -LARGEST).clamp(max=LARGEST)


def choose(keys: torch.Tensor, count: int) -> torch.Tensor:
    """[rows, count] columns of the largest keys, ties to the lowest column."""
    return torch.sort(tame(keys), dim=1, descending=True, stable=True)[1][:, :count]


def group_mask(keys: torch.Tensor, options: RouterOptions) -> torch.Tensor:
    """[tokens, experts] bool: whether the expert's group is among the token's best groups."""
    grouped = tame(keys).reshape(len(keys), options.groups, keys.shape[1] // options.groups)
    best = grouped.sort(dim=2, descending=True)[0][:, :, : options.best_of_group]
    # Added in order, as a kernel does: ties between groups are then ties there, too.
    total = best[:, :, 0]
    for place in range(1, best.shape[2]):
        total = total + best[:, :, place]
    chosen = torch.zeros_like(total, dtype=torch.bool)
    chosen.scatter_(1, choose(total, options.group_topk), True)
    return chosen.repeat_interleave(keys.shape[1] // options.groups, dim=1)


def uniform_ids(tokens: int, experts: int, topk: int, device: torch.device) -> torch.Tensor:
    """[tokens, topk] experts t + j * (experts // topk), every expert as often as any other."""
    place = torch.arange(topk, device=device) * (experts // topk)
    return (torch.arange(tokens, device=device)[:, None] + place) % experts


def score_of(logits: torch.Tensor, options: RouterOptions) -> torch.Tensor:
    """Scores of the logits along the last dimension."""
    return logits.softmax(dim=-1) if options.score == "softmax" else logits.sigmoid()


def route(
    x: torch.Tensor,
    router_weight: torch.Tensor,
    options: RouterOptions,
    *,
    bias: torch.Tensor | None = None,
    padding: torch.Tensor | None = None,
) -> Routing:
    """Chooses experts and weights for every token.

    Args:
        x: [tokens, hidden].
        router_weight: [experts, hidden].
        options: how to choose.
        bias: [experts], added to the scores for the choice only.
        padding: [tokens] bool, True for tokens that go nowhere.
    """
    kind = wide(x.dtype)
    experts = router_weight.shape[0]
    logits = tame(x.to(kind) @ router_weight.to(kind).t())
    keys, scores = logits, score_of(logits, options)
    if bias is not None or options.groups > 1:
        keys = scores if options.score_first else logits
        keys = keys if bias is None else keys + bias.to(kind)
    if options.groups > 1:
        keys = torch.where(group_mask(keys, options), tame(keys), -torch.inf)
        order = torch.sort(keys, dim=1, descending=True, stable=True)[1]
        ids = order[:, : options.topk]
    else:
        ids = choose(keys, options.topk)
    if options.forced == "uniform":
        ids = uniform_ids(len(x), experts, options.topk, x.device)
    if options.score_first:
        weights = scores.gather(1, ids)
    else:
        weights = score_of(logits.gather(1, ids), options)
    if options.normalize:
        weights = weights / (weights.sum(dim=1, keepdim=True) + 1e-20)
    weights = weights * options.scaling
    real = torch.ones(len(x), dtype=torch.bool, device=x.device) if padding is None else ~padding
    loss = _losses(logits, scores, ids, real, options)
    ids = torch.where(real[:, None], ids, -1)
    weights = torch.where(real[:, None], weights, 0.0)
    return Routing(ids, weights, loss)


def _losses(
    logits: torch.Tensor,
    scores: torch.Tensor,
    ids: torch.Tensor,
    real: torch.Tensor,
    options: RouterOptions,
) -> torch.Tensor:
    """Load-balancing loss and z-loss over the tokens that are not padding; 0 without any."""
    tokens = int(real.sum())
    loss = logits.new_zeros(()) + 0.0 * logits.sum() if len(logits) == 0 else logits.new_zeros(())
    if tokens == 0:
        return loss
    if options.aux_coefficient:
        shares = scores
        if options.score == "sigmoid":
            shares = scores / (scores.sum(dim=1, keepdim=True) + 1e-20)
        experts = logits.shape[1]
        chosen = torch.bincount(ids[real].flatten(), minlength=experts).to(logits.dtype)
        total = (chosen * shares[real].sum(dim=0)).sum()
        loss = loss + options.aux_coefficient * experts / (options.topk * tokens**2) * total
    if options.z_coefficient:
        loss = loss + options.z_coefficient * logits[real].logsumexp(dim=1).square().mean()
    return loss


def check_routing(ids: torch.Tensor, experts: int) -> None:
    """Checks a routing that was given.

    Args:
        ids: [tokens, k] integers.
        experts: over all ranks.

    Raises:
        ArgumentError: an expert is out of range, or a token names one twice.
    """
    if ids.numel() == 0:
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= experts:
        raise ArgumentError(f"ids: got experts {low} to {high}, wanted 0 to {experts - 1}")
    ordered = ids.sort(dim=1)[0]
    twice = (ordered[:, 1:] == ordered[:, :-1]).any(dim=1)
    if bool(twice.any()):
        token = int(twice.to(torch.int32).argmax())
        raise ArgumentError(
            f"ids: got {ids[token].tolist()} for token {token}, wanted distinct experts; add the "
            "weights of equal ones up"
        )


class _Exchange(torch.autograd.Function):
    """Rows to the ranks that they are for; backward, their gradients back to where they came from.

    Args of `apply`: rows, world, rows for each rank, rows from each rank.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, world: World, sent: Sequence[int], received: Sequence[int]
    ) -> torch.Tensor:
        ctx.world, ctx.sent, ctx.received = world, sent, received
        return world.all_to_all_rows(rows, sent, received)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        back = ctx.world.all_to_all_rows(grad.contiguous(), ctx.received, ctx.sent)
        return back, None, None, None


def exchange(
    rows: torch.Tensor, world: World, sent: Sequence[int], received: Sequence[int]
) -> torch.Tensor:
    """`World.all_to_all_rows`, with a gradient."""
    arrived: torch.Tensor = _Exchange.apply(  # type: ignore[no-untyped-call]
        rows, world, sent, received
    )
    return arrived


def run_expert(rows: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """[rows, hidden] of one SwiGLU expert, in the rows' dtype; h is rounded to it once.

    Args:
        rows: [rows, hidden].
        w1: [2 * inter, hidden], gate first.
        w2: [hidden, inter].
    """
    gate, up = (rows @ w1.t()).to(wide(rows.dtype)).chunk(2, dim=1)
    return (F.silu(gate) * up).to(rows.dtype) @ w2.t()


def moe_layer(
    x: torch.Tensor,
    router_weight: torch.Tensor,
    experts: Experts,
    world: World,
    options: RouterOptions,
    *,
    bias: torch.Tensor | None = None,
    padding: torch.Tensor | None = None,
    routing: tuple[torch.Tensor, torch.Tensor] | None = None,
    shared: Experts | None = None,
) -> MoeOutput:
    """One MoE layer, expert-parallel over the ranks of `world`.

    Args:
        x: [tokens, hidden], this rank's tokens; ranks may have different numbers, 0 included.
        router_weight: [experts, hidden], the same on all ranks.
        experts: of this rank; experts are spread over the ranks in order, equally many on each.
        world: the ranks.
        options: of the router.
        bias: [experts], for the choice of experts only.
        padding: [tokens] bool, True for tokens that go to no expert.
        routing: (ids [tokens, k], weights [tokens, k]) instead of the router's; the auxiliary loss
            is 0 then.
        shared: an expert that every token goes to.

    Returns:
        y, the auxiliary loss, and the routing.

    Raises:
        ArgumentError: the number of experts, or a routing that was given, is not allowed.

    Communication: an all-gather of counts, an all-to-all of token rows there and one back, over
        variable numbers of rows.
    Synchronizes: the host, which learns the counts.
    """
    count = router_weight.shape[0]
    options.check_experts(count, world.size)
    kind = wide(x.dtype)
    if routing is None:
        routed = route(x, router_weight, options, bias=bias, padding=padding)
    else:
        ids, weights = routing
        check_routing(ids, count)
        ids, weights = ids.long(), weights.to(kind)
        if padding is not None:
            ids = torch.where(padding[:, None], -1, ids)
            weights = torch.where(padding[:, None], 0.0, weights)
        routed = Routing(ids, weights, weights.new_zeros(()))
    y = _routed_experts(x, routed, experts, world, count)
    if shared is not None:
        y = y + run_expert(x, *shared).to(kind)
    return MoeOutput(y.to(x.dtype), routed.aux_loss, routed.ids, routed.weights)


def _routed_experts(
    x: torch.Tensor, routed: Routing, experts: Experts, world: World, count: int
) -> torch.Tensor:
    """[tokens, hidden] in the wide dtype: the weighted sum over each token's experts."""
    local = count // world.size
    flat = routed.ids.flatten()
    # Send list: by expert, tokens in order; padding, whose id is -1, comes first and is left out.
    order = torch.sort(flat, stable=True)[1][int((flat < 0).sum()) :]
    counts = torch.bincount(flat[order], minlength=count)
    matrix = world.all_gather_tensor(counts).reshape(world.size, world.size, local).cpu()
    sent = matrix[world.rank].sum(dim=1).tolist()
    received = matrix[:, world.rank].sum(dim=1).tolist()
    token = order // routed.ids.shape[1]
    arrived = exchange(x[token], world, sent, received)
    # What arrives is ordered by source, then by expert; experts work on all sources at once.
    owner = torch.arange(local).repeat(world.size)
    of_expert = owner.repeat_interleave(matrix[:, world.rank].flatten()).to(x.device)
    results, places = [], []
    for expert in range(local):
        place = (of_expert == expert).nonzero()[:, 0]
        places.append(place)
        results.append(run_expert(arrived[place], experts.w1[expert], experts.w2[expert]))
    rows = torch.cat(results)[torch.argsort(torch.cat(places))]
    returned = exchange(rows, world, received, sent).to(wide(x.dtype))
    y = torch.zeros(x.shape, dtype=returned.dtype, device=x.device)
    # One product a choice, added in the order of the choices.
    place = torch.full((flat.numel(),), -1, dtype=torch.long, device=x.device)
    place[order] = torch.arange(len(order), device=x.device)
    for choice, column in enumerate(place.reshape(routed.ids.shape).t()):
        real = (column >= 0).nonzero()[:, 0]
        weighted = routed.weights[real, choice, None] * returned[column[real]]
        y = y.index_add(0, real, weighted)
    return y
