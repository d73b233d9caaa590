"""Weight gradients that go into `main_grad`, and what autograd is given in their place."""

from __future__ import annotations

from typing import Any

import torch

# Zeros that stand for the gradient of a weight whose real one went into main_grad.
_STAND_INS: dict[tuple[torch.Size, torch.dtype, torch.device], torch.Tensor] = {}


def stand_in(w: torch.Tensor) -> torch.Tensor:
    """Zeros for autograd, so that hooks fire; the same memory for all weights of a shape."""
    w.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    key = (w.shape, w.dtype, w.device)
    # A compiled graph writes over what it has read.
    shares = _in_eager_backward()
    found = _STAND_INS.get(key) if shares else None
    # Autograd adds a later gradient of the weight to what it has taken for .grad: no zeros then.
    if found is None or found._version:
        found = torch.zeros_like(w, memory_format=torch.contiguous_format)
        if shares and not (w.is_cuda and torch.cuda.is_current_stream_capturing()):
            # A captured fill has not run yet.
            _STAND_INS[key] = found
    # A tensor of its own, which autograd takes for .grad without a copy.
    return found.detach()


def _in_eager_backward() -> bool:
    """Whether autograd calls this, and no graph that was compiled."""
    node = torch._C._current_autograd_node()
    return node is not None and not node.name().startswith("CompiledFunction")


def is_executed(node: Any) -> bool:
    """Whether the backward that runs now wants the gradient that goes to a node."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return True  # a leaf that `torch.autograd.grad` was asked for
