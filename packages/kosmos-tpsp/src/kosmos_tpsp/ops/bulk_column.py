"""`bulk_column`: the backward of a column-parallel linear layer, `bulk_ag` and then `bulk_rs`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from kosmos_tpsp.ops import prepared, validate
from kosmos_tpsp.ops.bulk_ag import BulkAgOptions, bulk_ag, describe_bulk_ag
from kosmos_tpsp.ops.bulk_rs import BulkRsOptions, bulk_rs, describe_bulk_rs
from kosmos_tpsp.ops.prepared import Prepared
from kosmos_tpsp.workspaces import TpSpWorkspace


@dataclass(frozen=True)
class BulkColumnOptions:
    """What a caller may choose besides the operands, for both calls; None leaves it to the plans.

    Attributes:
        cap: most workgroups to use.
        policy: "one_way", "two_way", "fixed" or "serial".
        transport: "pull" or "push"; None takes the gather's by the rules, and pulls dx.
        movers_per_peer: crew size for each peer.
        split_k: parts of the contraction of every tile: 1, 2 or 4.
        traced: record role spans into the workspace's trace buffer.
        force: run fused although the plans would decline for speed.
    """

    cap: int | None = None
    policy: str = "one_way"
    transport: str | None = None
    movers_per_peer: int | None = None
    split_k: int | None = None
    traced: bool = False
    force: bool = False

    @cached_property
    def gather(self) -> BulkAgOptions:
        """Choices of the first call."""
        return BulkAgOptions(
            cap=self.cap, policy=self.policy, transport=self.transport,
            movers_per_peer=self.movers_per_peer, split_k=self.split_k, traced=self.traced,
            force=self.force,
        )  # fmt: skip

    @cached_property
    def reduce(self) -> BulkRsOptions:
        """Choices of the second call."""
        return BulkRsOptions(
            # What it finds in the handover it pulls by itself; elsewhere it cannot.
            cap=self.cap, policy=self.policy,
            transport="push" if self.transport == "push" else None,
            reducers_per_peer=self.movers_per_peer, split_k=self.split_k, traced=self.traced,
            force=self.force,
        )  # fmt: skip


def bulk_column(
    x: torch.Tensor,
    dy: torch.Tensor,
    w: torch.Tensor,
    workspace: TpSpWorkspace,
    *,
    out: torch.Tensor | None = None,
    dw: torch.Tensor | None = None,
    main_grad: torch.Tensor | None = None,
    options: BulkColumnOptions | None = None,
    **choices: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients of a column-parallel linear layer, in two launches that hand dx over in place.

    Args:
        x: [m / world size, n] bfloat16, this rank's chunk of the layer's input.
        dy: [m, k] bfloat16, the gradient of this rank's part of its output.
        w: [k, n] bfloat16, its local weights.
        workspace: of the group, with room for [m, n]; every rank makes the same calls on it in the
            same order.
        out: [m / world size, n] bfloat16 to write dx_shard into; allocated when None.
        dw: [k, n] bfloat16 to write the weight gradient into; allocated when None.
        main_grad: [k, n] float32 that the weight gradient is added to, instead of being returned.
        options: a prepared set of choices, instead of `choices`.
        **choices: fields of `BulkColumnOptions`, when `options` is not given.

    Returns:
        (dx_shard [m / world size, n], dw [k, n]), as `bulk_rs` gives them of dx = dy @ w, rounded
        once, and of the gathered x.

    Raises:
        ArgumentError, WorkspaceError, PeerError: as `bulk_ag` and `bulk_rs`.

    Autograd: none, fused or declined alike: no result requires grad, whatever the operands do.

    Communication: all-gather of x, and reduce-scatter of dx: each (world size - 1) * m / world size
    * n * 2 bytes into and out of each rank.
    Synchronizes: no host synchronisation; a declined call waits for its peers on the host.

    Source: paper, section 3.2.3 and Figure 5.
    """
    validate.check_workspace(workspace)
    with prepared.TellingPeers(workspace, lambda: prepared.shown_call("bulk_column", x, dy, w)):
        options = prepared.chosen_options(BulkColumnOptions, options, choices)
    gathered, dx = bulk_ag(x, dy, w, workspace, options=options.gather)
    return bulk_rs(
        dx, dy, gathered, workspace, out=out, dw=dw, main_grad=main_grad, options=options.reduce
    )


def describe_bulk_column(
    x: torch.Tensor,
    dy: torch.Tensor,
    w: torch.Tensor,
    workspace: TpSpWorkspace,
    options: BulkColumnOptions,
) -> Prepared:
    """The plans of a call in one, without making it: the first call's problem, the second's plan.

    Raises:
        ArgumentError: as `bulk_ag` and `bulk_rs`.
    """
    first = describe_bulk_ag(x, dy, w, workspace, options.gather)
    m, n = first.problem.m, first.problem.n
    rows = dy.new_empty((m, n))
    handed = first.decline is None and workspace.hands_over
    dx = workspace.handover(m, n) if handed else rows
    second = describe_bulk_rs(dx, dy, rows, workspace, options.reduce)
    return replace(
        first,
        plan=second.plan,
        decline=first.decline or second.decline,
        configs=first.configs + second.configs,
        keys=first.keys + second.keys,
        label=f"{first.label}, {second.label}",
    )


__all__ = ["BulkColumnOptions", "bulk_column", "describe_bulk_column"]
