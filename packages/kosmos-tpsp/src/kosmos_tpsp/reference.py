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


def gemm_rs(x: torch.Tensor, w: torch.Tensor, world: World) -> torch.Tensor:
    """One GEMM, then the sum over ranks of the rows that each rank owns.

    Args:
        x: [m, k], all rows with this rank's part of the contraction.
        w: [n, k].
        world: the ranks.

    Returns:
        [m / world size, n] in x's dtype. The products are rounded to it, their sum, taken in FP32
        with rank 0 first, once more.

    Communication: one all-to-all of the products.
    """
    product = x @ w.t()
    parts = world.all_to_all_tensor(product).float().chunk(world.size)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total.to(x.dtype)


def bulk_ag(
    x: torch.Tensor, dy: torch.Tensor, w: torch.Tensor, world: World
) -> tuple[torch.Tensor, torch.Tensor]:
    """All-gather of one operand, and a GEMM of two others.

    Args:
        x: [chunk_rows, n], this rank's rows.
        dy: [m, k], all rows with this rank's part of the width.
        w: [k, n].
        world: the ranks.

    Returns:
        (gathered [chunk_rows * world size, n], dx = dy @ w [m, n]) in x's dtype.

    Communication: one all-gather of x.
    """
    return world.all_gather_tensor(x), dy @ w
