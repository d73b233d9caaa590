"""All ranks must take the same path, whatever their own caps are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kosmos_core.worlds import World
from kosmos_tpsp import AgGemmOptions, BulkAgOptions, BulkRsOptions, GemmRsOptions, TpSpWorkspace
from kosmos_tpsp.ops.catalog import driver_of

# (tokens, n, the third of m, n, k).
SHAPES = tuple((2 * m, n, k) for m in (8, 64, 512, 4096) for n, k in ((512, 256), (4096, 512)))


@pytest.mark.parametrize("kind", [AgGemmOptions, GemmRsOptions, BulkAgOptions, BulkRsOptions])
def test_a_cap_decides_no_path(
    kind: Any, on_cpu: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def host(rank: int, world: World) -> list[list[bool]]:
        # Speed is a reason on real GPUs only.
        monkeypatch.setattr(type(world), "describe", lambda self: "group")
        workspace = TpSpWorkspace(world, 8192, 4096, machine="h200")
        found = []
        for sizes in SHAPES:
            verdicts = []
            for cap in (2, 4):
                options = kind(cap=cap)
                driver = driver_of(options)
                shapes = driver.operand_shapes(driver.shape_of(*sizes), 2, options)
                given = {
                    name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in shapes.items()
                }
                prepared = driver.describe(given, workspace, options)
                assert prepared.plan.cap == cap
                verdicts.append(prepared.decline is None)
            found.append(verdicts)
        workspace.destroy()
        return found

    for found in on_cpu(2, host):
        assert all(one == other for one, other in found), found
        assert {one for one, _ in found} == {True, False}
