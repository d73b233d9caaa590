"""The unfused path in plain PyTorch: oracle of every test, and where a declined call goes."""

from __future__ import annotations

import torch
from kosmos_core.worlds import World


def ag_gemm(
    x: torch.Tensor, w: torch.Tensor, world: World, layout: str = "tn"
) -> tuple[torch.Tensor, torch.Tensor]:
    """All-gather, then one GEMM.

    Args:
        x: [chunk_rows, k], this rank's rows.
        w: [n, k] (layout "tn") or [k, n] ("nn").
        world: the ranks.
        layout: "tn" multiplies by the transpose of w, "nn" by w itself.

    Returns:
        (out [chunk_rows * world size, n], gathered [chunk_rows * world size, k]) in x's dtype.

    Communication: one all-gather of x.
    """
    gathered = world.all_gather_tensor(x)
    return gathered @ (w.t() if layout == "tn" else w), gathered
