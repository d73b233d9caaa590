"""Autograd of a parallel linear in every precision: over an operator, or past the dispatcher.

Compilers, tracers and other modes see operators. Where nobody but autograd looks, the functions
behind them are called directly: the dispatcher would cost half of a call's host time again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from kosmos_core.main_grad import is_executed


@dataclass(frozen=True)
class Kernel:
    """A function, and the operator of the dispatcher that calls it."""

    function: Callable[..., Any]
    op: Any


def differentiable(
    forward: Kernel, backward: Kernel, save: Callable[..., None], constants: int
) -> Callable[..., Any]:
    """A differentiable linear; gives its operator the same formula.

    Args:
        forward: takes x, w and constants.
        backward: takes what was saved of the input, dy, w, the call, and whether the gradients of x
            and of w are wanted; gives both.
        save: (ctx, arguments, result) of a forward; leaves in ctx what `backward_by` asks for.
        constants: how many arguments of a forward have no gradient.
    """
    none = (None,) * constants

    def by_operator(ctx: Any, dy: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        return *backward_by(backward.op, ctx, dy), *none

    class Direct(torch.autograd.Function):
        """The same, past the dispatcher."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, *rest: Any) -> Any:
            result = forward.function(x, w, *rest)
            save(ctx, (x, w, *rest), result)
            return result

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
            if is_observed(dy) or torch.is_grad_enabled():
                return by_operator(ctx, dy)
            return *backward_by(backward.function, ctx, dy), *none

    def linear(x: torch.Tensor, w: torch.Tensor, *rest: Any) -> Any:
        if is_observed(x, w):
            return forward.op(x, w, *rest)
        if torch.is_grad_enabled():
            return Direct.apply(x, w, *rest)  # type: ignore[no-untyped-call]
        return forward.function(x, w, *rest)

    forward.op.register_autograd(by_operator, setup_context=save)
    return linear


def is_observed(*operands: Any) -> bool:
    """Whether a compiler, tracer, transform, mode or tensor subclass is to see an operator.

    In a backward so is a graph of gradients, for which the operators have no formula and say so.
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or not all(type(t) in (torch.Tensor, torch.nn.Parameter) for t in operands)
    )


def backward_by(
    op: Any, ctx: Any, dy: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(dx, dw) by an operator, None for what is not wanted.

    Args:
        op: takes what was saved of the input, dy, w, the call, and which of the two are wanted.
        ctx: of autograd, with saved tensors, of which w is the last, `owner` (None, or w itself: a
            saved one that checkpointing hands back has its values and nothing else) and `call`.
        dy: gradient of the output.
    """
    *kept, w = ctx.saved_tensors
    needs_dx, needs_dw = ctx.needs_input_grad[:2]
    if kept[0] is None:
        kept = [dy.new_empty(0, w.shape[1])]
    if ctx.owner is not None:
        w = ctx.owner
        if getattr(w, "main_grad", None) is not None:
            # Of `torch.autograd.grad(y, x)` nothing may be left in it.
            needs_dw = needs_dw and is_executed(ctx.next_functions[1][0])
    dx, dw = op(*kept, dy, w, ctx.call, needs_dx, needs_dw)
    return dx if needs_dx else None, dw if needs_dw else None
