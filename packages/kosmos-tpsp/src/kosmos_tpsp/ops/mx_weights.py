"""Weights as MXFP8 GEMMs take them: quantised once for as long as they stay what they are.

A copy holds good while its tensor lies where it lay, its version counter stands where it stood, no
optimizer has made a step, and it is read on the stream that made it. The counter alone would not
do: `weight.data.copy_()`, by which distributed optimizers hand out new weights, leaves it as it is.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from kosmos_mx import quantize
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

ROWS, COLUMNS = "row", "col"


@dataclass(frozen=True)
class _Kept:
    """Copies of one weight, and the state of it that they are of."""

    state: tuple[int, int, int, int, str]
    copies: dict[str, torch.Tensor]


# Goes with the weights.
_KEPT: MutableMapping[torch.Tensor, _Kept] = WeakTensorKeyDictionary()
_epoch = 0


def weights_changed() -> None:
    """Makes the next MXFP8 calls quantise their weights anew.

    To call after weights were changed in a way that leaves no trace: through `.data` or a raw
    pointer without a step of a `torch.optim.Optimizer`, or by the replay of a captured graph.
    """
    global _epoch
    _epoch += 1


def _after_step(*_: Any) -> None:
    weights_changed()


register_optimizer_step_post_hook(_after_step)


def weight_copies(
    w: torch.Tensor, axes: tuple[str, ...], scale_rounding: str, *, lasting: bool
) -> list[torch.Tensor]:
    """The weight's values in MXFP8, as BF16 holds them: exactly with scale codes 3 to 246.

    Args:
        w: [out, in] bfloat16.
        axes: which copies, "row" (groups along the in features) or "col" (along the out features);
            several are made in one pass. Each is made from `w`, never from the other.
        scale_rounding: as in `kosmos_mx.quantize`.
        lasting: whether copies may be kept and kept ones given. Not while a graph is captured: its
            replays must quantise what the weight is then.

    Returns:
        [out, in] bfloat16 each, in the order of `axes`; not to be written to.
    """
    if not lasting or w.is_inference():
        made = _make(w, axes, scale_rounding)
        return [made[axis] for axis in axes]
    # On another stream they might not be made yet, or their memory be used again too early.
    stream = torch.cuda.current_stream(w.device).cuda_stream if w.is_cuda else 0
    state = (w.data_ptr(), w._version, _epoch, stream, scale_rounding)
    kept = _KEPT.get(w)
    if kept is None or kept.state != state:
        kept = _KEPT[w] = _Kept(state, {})
    missing = tuple(axis for axis in axes if axis not in kept.copies)
    if missing:
        kept.copies.update(_make(w, missing, scale_rounding))
    return [kept.copies[axis] for axis in axes]


def _make(w: torch.Tensor, axes: tuple[str, ...], scale_rounding: str) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        source = w.detach().contiguous()
        axis = axes[0] if len(axes) == 1 else "both"
        made = quantize(source, axis, scale_rounding, values=axis)
        return dict(zip((ROWS, COLUMNS), made, strict=True)) if axis == "both" else {axis: made}


__all__ = ["COLUMNS", "ROWS", "weight_copies", "weights_changed"]
