"""The operator `kosmos::moe_forward`: schema, fake, and the same results as the function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kosmos_core.errors import WorkspaceError
from kosmos_core.handles import call_handle
from kosmos_core.worlds import World
from kosmos_moe import MoeOptions, RouterOptions
from kosmos_moe.cli.calls import Call, Operands
from kosmos_moe.cli.rig import Rig, make
from kosmos_moe.ops.custom import moe_forward_op

CALL = Call((9,), 40, 24, 6, RouterOptions(2, aux_coefficient=0.1), shared_inter=16)


def host(rank: int, world: World) -> None:
    workspace = Rig([CALL]).workspace(world)
    given = Operands(0, world.device).inputs(CALL, rank)
    call = call_handle(workspace, (CALL.router, MoeOptions()))
    assert call == call_handle(workspace, (CALL.router, MoeOptions()))
    assert given.shared is not None
    operands = (given.x, given.router, given.w1, given.w2, None, None, None, None, *given.shared)
    torch.library.opcheck(moe_forward_op, (*operands, call))
    found, wanted = moe_forward_op(*operands, call), make(CALL, given, workspace)[0]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    workspace.destroy()
    del workspace
    with pytest.raises(WorkspaceError, match="no longer exists"):
        moe_forward_op(*operands, call)


def test_the_operator(on_cpu: Callable[..., Any]) -> None:
    on_cpu(1, host)
