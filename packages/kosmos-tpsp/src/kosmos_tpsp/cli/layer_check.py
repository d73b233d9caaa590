"""Parallel layers against the same layers unsharded in FP64: outputs and every gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from kosmos_core.worlds import World
from torch.utils.checkpoint import checkpoint

from kosmos_tpsp import sharding
from kosmos_tpsp.functions import reduce_replicated_grads
from kosmos_tpsp.modules import (
    ColumnParallelLinear,
    ParallelAttention,
    ParallelLinear,
    ParallelMLP,
    RowParallelLinear,
)

# Relative error, in the norm, of results that went through up to three roundings to BF16.
LAYER_TOLERANCE = 1e-2
# With operands in MXFP8 (normal ones are off by 2.6e-2 in the norm, a product by 3.7e-2): of one
# layer, and of a pair of them.
MX_TOLERANCE = {"column": 4.5e-2, "row": 4.5e-2, "mlp": 8e-2, "attention": 8e-2}
KINDS = ("column", "row", "mlp", "attention")


@dataclass(frozen=True)
class LayerCase:
    """A layer and how it is used.

    Attributes:
        kind: one of KINDS.
        tokens: over all ranks, for each call.
        hidden: features of a token.
        inner: output features (column), input features (row), or features of gate and of up.
        heads: query heads (attention); half as many for keys and values.
        bias: of all linear layers.
        main_grad: whether the weights have one.
        frozen: "x", "w", both or neither of them require no gradient.
        steps: forward and backward so often; gradients add up.
        uses: of the layer in one forward, on fresh data.
        checkpointed: the forward is recomputed in the backward.
        reentrant: by the older kind of checkpointing, in a backward within the backward.
        compiler: backend of torch.compile, fullgraph; None runs eagerly.
        options: of the layer.
    """

    kind: str = "mlp"
    tokens: int = 32
    hidden: int = 64
    inner: int = 96
    heads: int = 8
    bias: bool = False
    main_grad: bool = False
    frozen: str = ""
    steps: int = 1
    uses: int = 1
    checkpointed: bool = False
    reentrant: bool = False
    compiler: str | None = None
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def tolerance(self) -> float:
        """Most by which a result may be off, relative, in the norm."""
        bf16 = dict(self.options).get("precision", "bf16") == "bf16"
        return LAYER_TOLERANCE if bf16 else MX_TOLERANCE[self.kind]

    @property
    def inputs(self) -> tuple[int, ...]:
        """Features of the full input."""
        return (self.inner if self.kind == "row" else self.hidden,)


def build(case: LayerCase, world: World) -> torch.nn.Module:
    """The layer of a case. Collective."""
    common: dict[str, Any] = {
        "group": world, "max_tokens": case.tokens, "bias": case.bias, "seed": 3,
        **dict(case.options),
    }  # fmt: skip
    if common.get("workspace") is not None:
        del common["group"], common["max_tokens"]
    if case.kind == "column":
        return ColumnParallelLinear(case.hidden, case.inner, **common)
    if case.kind == "row":
        return RowParallelLinear(case.inner, case.hidden, **common)
    if case.kind == "mlp":
        return ParallelMLP(case.hidden, case.inner, **common)
    return ParallelAttention(case.hidden, case.heads, num_kv_heads=case.heads // 2, **common)


def plain(case: LayerCase, x: torch.Tensor, full: list[torch.Tensor]) -> torch.Tensor:
    """The layer unsharded.

    Args:
        case: the layer.
        x: [tokens, features], all of them.
        full: weight and bias of each linear layer; an empty bias stands for none.
    """

    def linear(x: torch.Tensor, i: int) -> torch.Tensor:
        out = x @ full[2 * i].t()
        return out + full[2 * i + 1] if full[2 * i + 1].numel() else out

    first = linear(x, 0)
    if case.kind in ("column", "row"):
        return first
    if case.kind == "mlp":
        gate, up = first.chunk(2, -1)
        return linear(F.silu(gate) * up, 1)
    head_dim = case.hidden // case.heads
    heads = first.view(len(x), -1, head_dim).transpose(0, 1)
    q, k, v = torch.split(heads, [case.heads, case.heads // 2, case.heads // 2])
    k, v = k.repeat_interleave(2, 0), v.repeat_interleave(2, 0)
    scores = q @ k.transpose(1, 2) * head_dim**-0.5
    later = torch.ones(len(x), len(x), dtype=torch.bool, device=x.device).triu(1)
    attended = scores.masked_fill(later, float("-inf")).softmax(-1) @ v
    return linear(attended.transpose(0, 1).reshape(len(x), -1), 1)


def linears(layer: torch.nn.Module) -> list[ParallelLinear]:
    """Its linear layers, in the order in which they are called."""
    return [module for module in layer.modules() if isinstance(module, ParallelLinear)]


def layer_errors(
    case: LayerCase, world: World, made: Callable[[torch.nn.Module], object] | None = None
) -> dict[str, float]:
    """Relative error of each output and gradient of this rank. Collective.

    Args:
        case: the layer and how it is used.
        world: the ranks.
        made: called with the layer before it is used.

    Returns:
        error by name; a gradient that is there and should not be, or the other way round, is inf.
    """
    layer = build(case, world)
    parts = linears(layer)
    if made is not None:
        made(layer)
    full = []
    for part in parts:
        weight, bias = part.gather_full()
        full += [t.double() for t in (weight, bias if bias is not None else weight[:0, 0])]
        part.weight.requires_grad_("w" not in case.frozen)
        if case.main_grad:
            part.weight.main_grad = torch.zeros(  # type: ignore[attr-defined]
                part.weight.shape, device=part.weight.device
            )
    for i, t in enumerate(full):
        t.requires_grad_(i % 2 == 1 or "w" not in case.frozen)  # biases are never frozen
    errors: dict[str, float] = {}
    run = _runner(case, layer)
    data = torch.Generator().manual_seed(11)
    for step in range(case.steps):
        uses = [_use(case, world, data) for _ in range(case.uses)]
        outs = [run(own) for own, _, _ in uses]
        wanted = [plain(case, x, full) for _, x, _ in uses]
        if wanted[0].requires_grad:
            own_dys = [_cut(case, dy, world, out=True).bfloat16() for _, _, dy in uses]
            torch.autograd.backward(outs, own_dys)
            torch.autograd.backward(wanted, [dy for _, _, dy in uses])
        for i, (out, (own, x, _), right) in enumerate(zip(outs, uses, wanted, strict=True)):
            name = f"step {step} use {i}"
            errors[f"{name} y"] = distance(out, _cut(case, right, world, out=True))
            right_dx = None if x.grad is None else _cut(case, x.grad, world, out=False)
            errors[f"{name} dx"] = distance(own.grad, right_dx)
    reduce_replicated_grads(layer.parameters(), world)
    for i, part in enumerate(parts):
        errors |= _weight_errors(case, world, part, full[2 * i].grad, full[2 * i + 1].grad, str(i))
    return errors


def _runner(case: LayerCase, layer: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    run: Callable[[torch.Tensor], torch.Tensor] = layer
    if case.compiler is not None:
        run = torch.compile(layer, fullgraph=True, backend=case.compiler)
    if case.checkpointed:
        return lambda x: checkpoint(run, x, use_reentrant=case.reentrant)
    return run


def _use(
    case: LayerCase, world: World, data: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(own input, full input in FP64, gradient of the full output in FP64)."""
    outputs = case.inner if case.kind == "column" else case.hidden
    x, dy = (
        torch.randn(case.tokens, features, generator=data).bfloat16().to(world.device).double()
        for features in (*case.inputs, outputs)
    )
    own = _cut(case, x, world, out=False).bfloat16()
    needs = "x" not in case.frozen
    return own.requires_grad_(needs), x.requires_grad_(needs), dy


def _cut(case: LayerCase, whole: torch.Tensor, world: World, out: bool) -> torch.Tensor:
    """This rank's part of an input or output: features within a pair, tokens outside."""
    inside = case.kind == ("column" if out else "row")
    return whole.detach().chunk(world.size, 1 if inside else 0)[world.rank].contiguous()


def _weight_errors(
    case: LayerCase,
    world: World,
    part: ParallelLinear,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    name: str,
) -> dict[str, float]:
    """Errors of the gradients of one linear layer."""
    dim = part.sharded_dim
    found = part.weight.grad
    if case.main_grad and not case.frozen.count("w"):
        stand_in = part.weight.grad
        assert stand_in is not None
        assert not stand_in.any()
        assert part.weight.grad_added_to_main_grad  # type: ignore[attr-defined]
        found = part.weight.main_grad  # type: ignore[attr-defined]
    wholes = []
    if weight is not None:
        wholes = list(torch.split(weight, list(part.splits))) if dim == 0 else [weight]
    right = sharding.part_of(wholes, dim, world) if wholes else None
    errors = {f"dw {name}": distance(found, right)}
    if part.bias is not None:
        if dim == 0 and bias is not None:
            bias = sharding.part_of(list(torch.split(bias, list(part.splits))), 0, world)
        errors[f"db {name}"] = distance(part.bias.grad, bias)
    return errors


def distance(found: torch.Tensor | None, right: torch.Tensor | None) -> float:
    """||found - right|| / ||right||; infinite where one of them is missing or has another shape."""
    if found is None or right is None:
        return 0.0 if found is right else float("inf")
    if found.shape != right.shape:
        return float("inf")
    off = float((found.detach().double() - right.detach()).norm() / right.detach().norm())
    return off if off == off else float("inf")
