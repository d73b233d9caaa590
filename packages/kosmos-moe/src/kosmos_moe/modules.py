"""The MoE layer as a module."""

from __future__ import annotations

import torch
from kosmos_core.errors import ArgumentError
from kosmos_core.worlds import World
from torch import nn

from kosmos_moe.functions import MoeCall, MoeOptions
from kosmos_moe.router import RouterOptions
from kosmos_moe.workspaces import MoEWorkspace


class MoELayer(nn.Module):
    """Router, experts spread over the ranks of a group, and shared experts, in one launch.

    Parameters are plain: `router` [experts, hidden] float32, `w1` [experts of this rank, 2 * inter,
    hidden], gate first, `w2` [experts of this rank, hidden, inter], `shared1` and `shared2` without
    the first dimension. Gradients of `router`, `shared1` and `shared2` are of this rank's tokens:
    data parallelism sums them.

    Args:
        hidden: width of a token.
        inter: width of an expert.
        experts: over all ranks.
        router: how tokens choose.
        workspace: of the group, made with `training=True`; layers share it.
        shared: shared experts, computed as one of so many times the width.
        options: choices of its calls: cap, switching, order, main_grad ...
        device: of the parameters; None takes the world's.

    Raises:
        ArgumentError: the sizes do not go together.

    Attributes:
        aux_loss: auxiliary loss of the last forward, to be added to the loss.
    """

    aux_loss: torch.Tensor | None

    def __init__(
        self,
        hidden: int,
        inter: int,
        experts: int,
        router: RouterOptions,
        workspace: MoEWorkspace,
        *,
        shared: int = 0,
        options: MoeOptions | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        world: World = workspace.world
        router.check_experts(experts, world.size)
        if shared < 0:
            raise ArgumentError(f"shared: got {shared}, wanted 0 or more shared experts")
        self.options = router
        self.workspace = workspace
        self.call = MoeCall(workspace, router, options)
        device = device or world.device
        local = experts // world.size

        def weight(*shape: int, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
            drawn = torch.randn(*shape, device=device) * shape[-1] ** -0.5
            return nn.Parameter(drawn.to(dtype))

        self.router = weight(experts, hidden, dtype=torch.float32)
        self.w1 = weight(local, 2 * inter, hidden)
        self.w2 = weight(local, hidden, inter)
        self.shared1 = weight(2 * inter * shared, hidden) if shared else None
        self.shared2 = weight(hidden, inter * shared) if shared else None
        self.aux_loss = None

    def forward(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None = None,
        padding: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[tokens, hidden] bfloat16 of [tokens, hidden] bfloat16; leaves `aux_loss`.

        Args:
            x: this rank's tokens; ranks may have different numbers, 0 included.
            bias: [experts] float32, for the choice of experts only.
            padding: [tokens] bool, True for tokens that go to no expert.
        """
        found = self.call(
            x, self.router, self.w1, self.w2, bias, padding, None, None, self.shared1, self.shared2
        )
        self.aux_loss = found.aux_loss
        return found.y

    def saved_bytes(self, tokens: int) -> int:
        """Bytes that one forward of so many tokens keeps for its backward, operands not counted.

        0 where calls take the reference path, which keeps nothing of its own.
        """
        limits, needs = self.workspace.limits, self.workspace.needs
        if not self.workspace.world.fused:
            return 0
        rows = limits.arena_blocks(self.workspace.machine.tile.block_m)
        rows *= self.workspace.machine.tile.block_m
        inter, experts = self.w2.shape[2], self.router.shape[0]
        shared = 0 if self.shared2 is None else self.shared2.shape[1]
        choices = tokens * self.options.topk
        bf16 = 2 * rows * inter + 2 * tokens * max(8, shared)
        # ids, weights, places, list; logits; tables.
        words = 4 * choices + tokens * experts + needs.scratch["tables"][0]
        return 2 * bf16 + 4 * words

    def extra_repr(self) -> str:
        """Sizes, and bytes that a forward of the most tokens keeps."""
        hidden, inter = self.w2.shape[1:]
        kept = self.saved_bytes(self.workspace.limits.max_tokens)
        return (
            f"hidden={hidden}, inter={inter}, experts={self.router.shape[0]}, "
            f"topk={self.options.topk}, saved_bytes={kept}"
        )
