"""Calls that the checks make: sizes, random operands, what they must give, and verdicts."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from kosmos_core.errors import ArgumentError
from kosmos_core.worlds import World, reference_world

from kosmos_moe import reference
from kosmos_moe.ops.moe_backward import MoeGradients, reference_backward
from kosmos_moe.ops.moe_forward import Inputs, MoeResult, MoeSaved
from kosmos_moe.ops.options import MoeOptions
from kosmos_moe.router import RouterOptions

# Rounding h and an expert's result to bf16, and the sum of them once more, each less than half an
# ulp: 2**-9 relative. Errors of elements are independent, and the norm of each is well below it.
TOLERANCE = 4e-3
# Of whole gradients. Each is rounded to bf16 up to three times on its way.
GRADIENT_TOLERANCE = 1e-2
# Of the router's: differences between a token's dw, each of which is known to about 4e-3, so that
# what those errors make of them counts besides (`Operands._router_noise`).
ROUTER_TOLERANCE = 5e-2
WEIGHT_TOLERANCE = 1e-5
LOSS_TOLERANCE = 1e-4
# Keys closer than this may be ordered either way: scores are exponentials, computed in another way.
KEY_TOLERANCE = 1e-5
ROUTINGS = ("random", "uniform", "one-expert", "ties")


@dataclass(frozen=True)
class Call:
    """One collective call.

    Attributes:
        tokens: of each rank.
        hidden, inter, experts, shared_inter: sizes of the layer.
        router: how tokens choose.
        routing: "random" (the router's, on random weights), "uniform" (forced), "one-expert" (all
            tokens choose expert 0, and others), "ties" (all logits are equal), "zipf:A" (given;
            expert e with a probability of (e + 1)^-A), or the name of a JSON file of
            [rank][token][k] experts (given).
        biased, padded: whether there are a bias and a padding mask.
        data: which random operands; equal numbers give equal operands.
        options: choices of the call; with `save` the backward is run, too.
    """

    tokens: tuple[int, ...]
    hidden: int
    inter: int
    experts: int
    router: RouterOptions
    shared_inter: int = 0
    routing: str = "random"
    biased: bool = False
    padded: bool = False
    data: int = 0
    options: MoeOptions = field(default_factory=MoeOptions)

    @property
    def is_given(self) -> bool:
        """Whether the routing comes with the call."""
        return self.routing not in ROUTINGS

    def __str__(self) -> str:
        shared = f" shared={self.shared_inter}" if self.shared_inter else ""
        extras = "".join(f" {n}" for n in ("biased", "padded") if getattr(self, n))
        return (
            f"moe_forward tokens={','.join(map(str, self.tokens))} hidden={self.hidden} "
            f"inter={self.inter} experts={self.experts} topk={self.router.topk}{shared} "
            f"{self.router.score} {self.routing}{extras} {self.options.policy} {self.options.order}"
        )


class Operands:
    """Random operands by seed: every rank can make every rank's, so no exchange is needed.

    Tokens and router weights are multiples of 1/16 and 1/8: their products add up exactly in FP32
    in any order, and ties are ties everywhere.

    Args:
        seed: of all operands.
        device: where they live; equal devices draw equal numbers.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._device = device

    def _generator(self, *name: object) -> torch.Generator:
        generator = torch.Generator(self._device)
        return generator.manual_seed(zlib.crc32(repr((self._seed, *name)).encode()))

    def _normal(self, shape: tuple[int, ...], scale: float, *name: object) -> torch.Tensor:
        generator = self._generator(*name, shape)
        drawn = torch.randn(shape, generator=generator, device=self._device)
        return (drawn * scale).to(torch.bfloat16)

    def _grid(self, shape: tuple[int, ...], steps: int, *name: object) -> torch.Tensor:
        generator = self._generator(*name, shape)
        drawn = torch.randint(-steps, steps + 1, shape, generator=generator, device=self._device)
        return drawn.float() / steps

    def x(self, call: Call, rank: int) -> torch.Tensor:
        """[tokens, hidden] bf16."""
        x = self._grid((call.tokens[rank], call.hidden), 16, "x", call.data, rank)
        if call.routing == "one-expert":
            # A first feature that nothing else has, and only the first expert's weights answer to.
            x[:, 0] = 1.0
        return x.to(torch.bfloat16)

    def router(self, call: Call) -> torch.Tensor:
        """[experts, hidden] fp32."""
        weight = self._grid((call.experts, call.hidden), 8, "router", call.data)
        if call.routing == "ties":
            weight[:] = weight[:1].clone()
        elif call.routing == "one-expert":
            weight[:, 0] = 0.0
            weight[0] = 0.0
            weight[0, 0] = 8.0 * call.hidden
        return weight

    def expert(self, call: Call, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """([2 * inter, hidden], [hidden, inter]) bf16 of an expert; -1: of the shared one."""
        inter = call.shared_inter if expert < 0 else call.inter
        first = self._normal((2 * inter, call.hidden), call.hidden**-0.5, "w1", call.data, expert)
        second = self._normal((call.hidden, inter), inter**-0.5, "w2", call.data, expert)
        return first, second

    def given_routing(self, call: Call, rank: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(ids [tokens, k] int32, weights [tokens, k] fp32), or None where the router chooses.

        Raises:
            ArgumentError: the file of a routing holds something else.
        """
        if not call.is_given:
            return None
        tokens, topk = call.tokens[rank], call.router.topk
        if call.routing.startswith("zipf:"):
            power = float(call.routing.partition(":")[2])
            chances = torch.arange(1, call.experts + 1, device=self._device).double() ** -power
            if tokens == 0:
                ids = torch.zeros((0, topk), dtype=torch.int64, device=self._device)
            else:
                generator = self._generator("zipf", call.data, rank)
                ids = torch.multinomial(
                    chances.expand(tokens, -1), topk, replacement=False, generator=generator
                )
        else:
            ids = _routing_of_file(call, rank).to(self._device)
        weights = self._grid((tokens, topk), 16, "weights", call.data, rank).abs() + 0.125
        return ids.to(torch.int32), weights

    def inputs(self, call: Call, rank: int) -> Inputs:
        """Everything that a rank passes to its call."""
        local = call.experts // len(call.tokens)
        own = [self.expert(call, rank * local + e) for e in range(local)]
        bias = padding = None
        if call.biased:
            bias = self._grid((call.experts,), 4, "bias", call.data)
        if call.padded:
            padding = self._grid((call.tokens[rank],), 2, "padding", call.data, rank) > 0.6
        return Inputs(
            self.x(call, rank),
            self.router(call),
            torch.stack([w1 for w1, _ in own]),
            torch.stack([w2 for _, w2 in own]),
            bias,
            padding,
            self.given_routing(call, rank),
            self.expert(call, -1) if call.shared_inter else None,
        )

    def judge(self, call: Call, rank: int, given: Inputs, found: MoeResult) -> tuple[float, str]:
        """Relative error against FP64, and what is wrong ("" if nothing).

        Experts are judged by the router's keys, results by the experts chosen.
        """
        problem = _routing_problem(given, call, found)
        if problem:
            return float("inf"), problem
        wanted, size = self._wanted(call, given, found)
        if wanted.numel() == 0:
            return 0.0, ""
        difference = (found.y.double() - wanted).norm(dim=1)
        tiny = torch.finfo(torch.float64).tiny
        rows = (difference / size.clamp_min(tiny)).nan_to_num(float("inf"), float("inf"))
        rows = torch.where((difference == 0) & (size == 0), 0.0, rows)
        total = float(difference.norm() / wanted.norm().clamp_min(tiny))
        if float(rows.max()) > TOLERANCE:
            count, row = int((rows > TOLERANCE).sum()), int(rows.argmax())
            return total, f"{count} of {len(rows)} rows wrong, row {row} by {float(rows[row]):.3g}"
        return total, ""

    def dy(self, call: Call, rank: int) -> torch.Tensor:
        """[tokens, hidden] bf16."""
        return self._normal((call.tokens[rank], call.hidden), 1.0, "dy", call.data, rank)

    def dloss(self, call: Call) -> torch.Tensor:
        """[1] fp32."""
        return self._grid((1,), 4, "dloss", call.data) + 0.5

    def judge_gradients(
        self, call: Call, rank: int, saved: MoeSaved, found: MoeGradients, world: World
    ) -> str:
        """What is wrong with gradients, against FP64 on the same operands ("" if nothing).

        Collective: gradients of experts are sums over all ranks' tokens.
        """
        given = saved.inputs
        # Choices of all but those near ties are the reference's; a routing that is given cannot
        # differ, and gradients by way of the score function need the router's own.
        wide = replace(
            given,
            x=given.x.double(),
            router=given.router.double(),
            w1=given.w1.double(),
            w2=given.w2.double(),
            bias=None if given.bias is None else given.bias.double(),
            routing=None
            if given.routing is None
            else (given.routing[0], given.routing[1].double()),
            shared=None
            if given.shared is None
            else (given.shared[0].double(), given.shared[1].double()),
        )
        wanted = reference_backward(
            self.dy(call, rank).double(), self.dloss(call).double(), replace(saved, inputs=wide),
            world,
        )  # fmt: skip
        for name, own, other in _pairs(found, wanted):
            scale = float(other.double().norm())
            off = float((own.double() - other.double()).norm())
            bound = GRADIENT_TOLERANCE * scale + 1e-6 * other.numel() ** 0.5
            if name == "router":
                bound += ROUTER_TOLERANCE * scale + self._router_noise(call, rank, saved)
            if not off <= bound:
                return f"gradient of {name} differs by {off / max(scale, 1e-30):.3g}"
        return ""

    def _rows(
        self, call: Call, ids: torch.Tensor, x: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """(tokens, which of their choices, [tokens, hidden] results) of every expert chosen."""
        for expert in sorted(set(ids.flatten().tolist()) - {-1}):
            token, choice = (ids == expert).nonzero().unbind(1)
            weights = [w.double() for w in self.expert(call, int(expert))]
            yield token, choice, reference.run_expert(x[token], *weights)

    def _router_noise(self, call: Call, rank: int, saved: MoeSaved) -> float:
        """Norm of what errors of dw, `TOLERANCE` of its usual size, make of the router's gradient.

        The dw of a token may nearly cancel: then their errors do not.
        """
        x, dy = saved.inputs.x.double(), self.dy(call, rank).double()
        size = x.new_zeros(len(x))
        if saved.fused:
            for token, _, rows in self._rows(call, saved.tensors["ids_ptr"], x):
                size[token] = torch.maximum(size[token], rows.norm(dim=1))
        size = size * x.norm(dim=1) * dy.norm(dim=1) * call.hidden**-0.5
        return 2 * TOLERANCE * call.router.scaling * float(size.norm())

    def _wanted(
        self, call: Call, given: Inputs, found: MoeResult
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[tokens, hidden] float64, and for each row the norm of all that is rounded on its way."""
        x = given.x.double()
        y = torch.zeros_like(x)
        size = y.new_zeros(len(x))
        ids = found.ids
        if given.padding is not None:
            ids = torch.where(given.padding[:, None], -1, ids)
        for token, choice, rows in self._rows(call, ids, x):
            rows = rows * found.weights[token, choice, None].double()
            y.index_add_(0, token, rows)
            size.index_add_(0, token, rows.norm(dim=1))
        if given.shared is not None:
            rows = reference.run_expert(x, *(w.double() for w in given.shared))
            y += rows
            size += rows.norm(dim=1)
        return y, size + y.norm(dim=1)


def _pairs(
    found: MoeGradients, wanted: MoeGradients
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """(name, found, wanted) of every gradient that there is."""
    for name in ("x", "router", "w1", "w2", "weights"):
        own, other = getattr(found, name), getattr(wanted, name)
        if own is not None and other is not None:
            yield name, own, other
    for place, (own, other) in enumerate(zip(found.shared or (), wanted.shared or (), strict=True)):
        yield f"shared w{place + 1}", own, other


def _routing_of_file(call: Call, rank: int) -> torch.Tensor:
    try:
        ids = torch.tensor(json.loads(Path(call.routing).read_text(encoding="utf-8"))[rank])
    except (OSError, ValueError, IndexError, TypeError, KeyError) as error:
        raise ArgumentError(
            f"routing: got {call.routing!r} ({error}), wanted {', '.join(ROUTINGS)}, zipf:A, or a "
            "JSON file of [rank][token][k] experts"
        ) from error
    wanted = (call.tokens[rank], call.router.topk)
    if tuple(ids.shape) != wanted:
        raise ArgumentError(
            f"routing: got {tuple(ids.shape)} experts for rank {rank}, wanted {wanted}"
        )
    reference.check_routing(ids, call.experts)
    return ids


def _routing_problem(given: Inputs, call: Call, found: MoeResult) -> str:
    """What is wrong with experts, weights or loss ("" if nothing)."""
    shape = (len(given.x), call.router.topk)
    if tuple(found.ids.shape) != shape or tuple(found.weights.shape) != shape:
        return f"routing of {tuple(found.ids.shape)} instead of {shape}"
    if given.routing is not None:
        ids, weights = given.routing
        if not (torch.equal(ids, found.ids) and torch.equal(weights, found.weights)):
            return "the routing that was given has changed"
        return ""
    routed = reference.route(
        given.x, given.router, call.router, bias=given.bias, padding=given.padding
    )
    differs = (routed.ids != found.ids.long()).any(dim=1)
    if bool(differs.any()):
        problem = _choice_problem(given, call, found, routed.ids)
        if problem:
            return problem
    # Weights of the experts that were chosen, whichever they are.
    same = ~differs
    off = (routed.weights[same] - found.weights[same]).abs()
    bound = WEIGHT_TOLERANCE * routed.weights[same].abs().clamp_min(1e-3)
    if bool((off > bound).any()):
        return f"weights differ by up to {float(off.max()):.3g}"
    loss, wanted = float(found.aux_loss), float(routed.aux_loss)
    if not abs(loss - wanted) <= LOSS_TOLERANCE * max(abs(wanted), 1e-3):
        return f"auxiliary loss {loss:.6g} instead of {wanted:.6g}"
    return ""


def _choice_problem(given: Inputs, call: Call, found: MoeResult, wanted: torch.Tensor) -> str:
    """What is wrong with choices that are not the reference's: only close keys may change places.

    Keys of the chosen experts are compared in order, in FP64: scores are exponentials, which even
    the lanes of one vector unit may round differently. Equal logits go to the lowest expert.
    """
    router = call.router
    keys = given.x.double() @ given.router.double().t()
    scored = router.score_first and (given.bias is not None or router.groups > 1)
    if scored:
        keys = reference.score_of(keys, router)
    if given.bias is not None:
        keys = keys + given.bias.double()
    own = keys.gather(1, found.ids.long().clamp_min(0))
    off = (own - keys.gather(1, wanted.clamp_min(0))).abs()
    if not scored:
        off = torch.where((off == 0) & (found.ids != wanted), torch.inf, off)
    off = torch.where((found.ids < 0) == (wanted < 0), off, torch.inf).amax(dim=1)
    token = int(off.argmax())
    if float(off[token]) > KEY_TOLERANCE or router.forced:
        ids = found.ids[token].tolist()
        return f"token {token} went to experts {ids} instead of {wanted[token].tolist()}"
    return ""


def reference_result(call: Call, operands: Operands) -> MoeResult:
    """The layer of a group of one by plain PyTorch, for tests of the judgement itself."""
    given = operands.inputs(call, 0)
    out = reference.moe_layer(
        given.x, given.router, reference.Experts(given.w1, given.w2), reference_world(),
        call.router, bias=given.bias, padding=given.padding, routing=given.routing,
        shared=None if given.shared is None else reference.Experts(*given.shared),
    )  # fmt: skip
    return MoeResult(out.y, out.aux_loss, out.ids.to(torch.int32), out.weights)
