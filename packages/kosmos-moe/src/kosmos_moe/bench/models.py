"""The layers that are timed: nine models, their experts scaled to the ranks at hand."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kosmos_moe.router import RouterOptions

TOKENS = 8192
# Expert-parallel ranks that the models' numbers of experts are for.
FULL_RANKS = 8
# Standard deviation of a Gumbel variable: noise of that size makes top-k follow the offsets.
NOISE = math.pi / math.sqrt(6)
ROUTINGS = ("balanced", "skewed")


@dataclass(frozen=True)
class Model:
    """An MoE layer.

    Attributes:
        name: of the model.
        hidden, inter: sizes of a token and of an expert.
        topk: experts that a token chooses.
        experts: at `FULL_RANKS` ranks.
        shared: shared experts.
    """

    name: str
    hidden: int
    inter: int
    topk: int
    experts: int
    shared: int

    def experts_on(self, ranks: int) -> int:
        """Experts over so many ranks, each with as many as it has at `FULL_RANKS`."""
        return self.experts // FULL_RANKS * ranks

    def flops(self, tokens: int) -> float:
        """Work of the forward's expert GEMMs on a rank, shared experts included."""
        return 6.0 * tokens * self.hidden * self.inter * (self.topk + self.shared)


MODELS = {
    model.name: model
    for model in (
        Model("DeepSeek-V3", 7168, 2048, 8, 256, 1),
        Model("Kimi-K2", 7168, 2048, 8, 384, 1),
        Model("DeepSeek-V4-Pro", 7168, 3072, 6, 384, 1),
        Model("GLM-5", 6144, 2048, 8, 256, 1),
        Model("Qwen3-235B", 4096, 1536, 8, 128, 0),
        Model("Qwen3-30B", 2048, 768, 8, 128, 0),
        Model("Qwen3.5-397B", 4096, 1024, 10, 512, 1),
        Model("Llama-4-Scout", 5120, 8192, 1, 16, 1),
        Model("Llama-4-Maverick", 5120, 8192, 1, 128, 1),
    )
}


@dataclass(frozen=True)
class Weights:
    """Operands of one rank's layer, bf16 but for the router's FP32."""

    def requires_grad(self) -> Weights:
        """The same operands, as leaves that gradients are asked for."""
        shared = self.shared
        if shared is not None:
            shared = shared[0].detach().requires_grad_(), shared[1].detach().requires_grad_()
        x, router, w1, w2 = (
            t.detach().requires_grad_() for t in (self.x, self.router, self.w1, self.w2)
        )
        return Weights(x, router, w1, w2, shared)

    x: torch.Tensor
    router: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor
    shared: tuple[torch.Tensor, torch.Tensor] | None


def router_of(model: Model, routing: str) -> RouterOptions:
    """Balanced routing is forced; skewed routing comes from the logits."""
    forced = "uniform" if routing == "balanced" else None
    return RouterOptions(model.topk, normalize=True, forced=forced)


def draw(
    model: Model, rank: int, ranks: int, device: torch.device, zipf: float, seed: int
) -> Weights:
    """Random operands. A first feature that all tokens share carries the experts' popularity.

    Args:
        model: sizes.
        rank: this rank.
        ranks: how many there are.
        device: where to draw.
        zipf: popularity of the n-th expert is n^-zipf; which expert is n-th is drawn.
        seed: of everything.
    """
    experts = model.experts_on(ranks)
    local = experts // ranks
    everywhere = torch.Generator(device).manual_seed(seed)
    own = torch.Generator(device).manual_seed(seed + 1 + rank)

    def normal(shape: tuple[int, ...], scale: float, generator: torch.Generator) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device) * scale

    x = normal((TOKENS, model.hidden), 1.0, own)
    x[:, 0] = 1.0
    router = normal((experts, model.hidden), NOISE * model.hidden**-0.5, everywhere)
    place = torch.randperm(experts, generator=everywhere, device=device)
    router[:, 0] = -zipf * (place + 1).float().log()
    inter = model.inter * model.shared
    shared = None
    if inter:
        shared = (
            normal((2 * inter, model.hidden), model.hidden**-0.5, everywhere).bfloat16(),
            normal((model.hidden, inter), inter**-0.5, everywhere).bfloat16(),
        )
    w1 = torch.empty((local, 2 * model.inter, model.hidden), dtype=torch.bfloat16, device=device)
    w2 = torch.empty((local, model.hidden, model.inter), dtype=torch.bfloat16, device=device)
    for expert in range(local):
        w1[expert] = normal(w1.shape[1:], model.hidden**-0.5, own)
        w2[expert] = normal(w2.shape[1:], model.inter**-0.5, own)
    return Weights(x.bfloat16(), router, w1, w2, shared)
