"""The end of a call in either direction: one launch, of which the peers hear if it fails."""

from __future__ import annotations

from typing import Any

from kosmos_moe.device.config import Factors
from kosmos_moe.ops.call import Prepared
from kosmos_moe.ops.options import MoeOptions
from kosmos_moe.workspaces import MoEWorkspace


def launch(
    kernel: Any, ops: Any, call: Prepared, workspace: MoEWorkspace, options: MoeOptions, tokens: int
) -> None:
    """Launches a call.

    Args:
        kernel: of the direction.
        ops: its matrices.
        call: sizes and constants.
        workspace: of the group.
        options: choices of the call.
        tokens: of this rank.
    """
    layer, plan, router = call.layer, call.plan, call.layer.router
    factors = Factors(
        float(router.scaling), float(router.aux_coefficient), float(router.z_coefficient)
    )
    args = (
        ops, workspace.context(options.traced), factors, tokens, layer.hidden, layer.inter,
        layer.shared_inter, workspace.needs.arena_blocks, *call.crews, call.call_hash, call.config,
    )  # fmt: skip
    try:
        workspace.begin(call.label, call.call_hash)
        workspace.world.launch(
            kernel, plan.cap, args, call.key, num_warps=plan.num_warps, num_stages=plan.num_stages
        )
    except Exception as error:
        workspace.launch_failed(error)
        raise


__all__ = ["launch"]
