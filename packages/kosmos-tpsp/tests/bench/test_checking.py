"""What counts as the same result."""

from __future__ import annotations

import torch
from kosmos_tpsp.bench import checking


def test_rounding_passes_and_a_lost_step_of_the_contraction_does_not() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(128, 4096).bfloat16(), torch.randn(96, 4096).bfloat16()
    exact = x.double() @ w.double().t()
    right = exact.bfloat16()
    other = sum(x[:, i::4].float() @ w[:, i::4].float().t() for i in range(4)).bfloat16()
    assert checking.compare(other, right).wrong == 0
    lost = (exact - x[:, :64].double() @ w[:, :64].double().t()).bfloat16()
    assert checking.compare(lost, right).wrong > right.numel() / 2
    assert checking.fp64_error(right, x, w, "tn") < 3e-3
    assert checking.fp64_error(lost, x, w, "tn") > 0.05
    right[3, 5] = float("nan")
    assert checking.compare(right, exact.bfloat16()).wrong == 1
