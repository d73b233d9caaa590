"""Parallel linear layers as modules, and the two pairs of them in a transformer block.

Activations between blocks are sharded along the sequence; inside a pair, along the features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from kosmos_core.errors import ArgumentError, WorkspaceError
from kosmos_core.worlds import World
from torch import nn

from kosmos_tpsp import sharding
from kosmos_tpsp.functions import (
    MXFP8,
    LinearCall,
    column_parallel_linear,
    row_parallel_linear,
    with_scales,
)
from kosmos_tpsp.sharing import SharedWorkspace, shared_workspace, world_of
from kosmos_tpsp.workspaces import TpSpWorkspace

# (queries, keys), each [batch, heads, sequence, head_dim], to the same with positions in them.
Rotate = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class ParallelLinear(nn.Module):
    """What the column- and the row-parallel layer have in common; not used by itself.

    Collective where `seed` is None: every rank constructs the same layers in the same order.

    Args:
        in_features: of the full weight.
        out_features: of the full weight.
        bias: whether there is one.
        splits: sizes, adding up to `out_features`, of logical matrices that lie behind one another
            in the weight, each sharded for itself, such as gate and up; column-parallel only.
        group: process group, None for the default one, or a `World`.
        workspace: memory of the calls; None for the one that all layers of the group share.
        max_tokens: most tokens of a call, over all ranks; sizes the shared workspace.
        cap: most workgroups that a call uses.
        main_grad: add weight gradients into `weight.main_grad` where there is one in FP32.
        force: run fused although a plan would decline for speed.
        precision: of the GEMMs: "bf16", "mxfp8", or an `MXFP8`; parameters are BF16 all the same.
        init: fills rows of the full weight and bias from a generator; None for `nn.Linear`'s own.
        seed: of the full weight, which does not depend on the number of ranks (but on the kind of
            device); None draws one from rank 0's default generator.
        device: of the parameters; None for the group's.
        dtype: of the parameters, bfloat16.

    Raises:
        ArgumentError: sizes that the ranks do not divide, or another argument out of range.
        WorkspaceError: neither `workspace` nor `max_tokens` is given, or both are.

    Attributes:
        weight: this rank's part, [out / ranks, in] or [out, in / ranks].
        bias: [out / ranks] or [out], or None.
        call: where and how calls run; replace it to change the cap.
    """

    sharded_dim: ClassVar[int]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        splits: Sequence[int] | None = None,
        group: dist.ProcessGroup | World | None = None,
        workspace: TpSpWorkspace | None = None,
        max_tokens: int | None = None,
        cap: int | None = None,
        main_grad: bool = True,
        force: bool = False,
        precision: str | MXFP8 = "bf16",
        init: sharding.Init | None = None,
        seed: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        if dtype != torch.bfloat16:
            raise ArgumentError(
                f"dtype: got {dtype}, wanted torch.bfloat16; keep FP32 copies in the optimizer"
            )
        world = world_of(group) if workspace is None else workspace.world
        self.world_size = world.size
        shape = [out_features, in_features]
        sharding.check_features("in_features", in_features)
        sharding.check_features("out_features", out_features)
        if self.sharded_dim == 0:
            self.splits = sharding.check_splits(splits, out_features, world.size)
        else:
            if splits is not None:
                raise ArgumentError(f"splits: got {splits} for a row-parallel layer, wanted None")
            self.splits = (out_features,)
            sharding.check_divides("in_features", in_features, world.size)
        # The rows that cross ranks are as wide as the dimension that is not sharded.
        width = shape[1 - self.sharded_dim]
        if workspace is None and precision != "bf16":
            width = with_scales(width)
        room = _room(workspace, world, group, max_tokens, width)
        self.call = LinearCall(room, cap=cap, main_grad=main_grad, force=force, precision=precision)
        self.in_features, self.out_features = in_features, out_features
        self.init = init or sharding.linear_init(in_features)
        shape[self.sharded_dim] //= world.size
        device = world.device if device is None else device
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = nn.Parameter(torch.empty(shape[0], device=device, dtype=dtype))
            if self.sharded_dim == 1:
                # As Megatron marks parameters whose gradient each rank has of its own rows.
                self.bias.sequence_parallel = True  # type: ignore[attr-defined]
        self.reset_parameters(seed)

    def reset_parameters(self, seed: int | None = None) -> None:
        """Draws weight and bias anew. Collective where `seed` is None."""
        if self.weight.is_meta:
            return
        world = self.call.workspace.world
        if seed is None:
            drawn = int(torch.randint(2**62, (), device="cpu"))
            seed = int(world.all_gather_object(drawn)[0])
        generator = torch.Generator(self.weight.device).manual_seed(seed)
        dim = self.sharded_dim
        with torch.no_grad():
            sharding.draw(
                self.weight, self.in_features, dim, self.splits, world, self.init, generator
            )
            if self.bias is not None:
                # Of the row-parallel layer every rank holds the whole bias.
                sharding.draw(
                    self.bias[:, None], 1, None if dim else 0, self.splits, world, self.init,
                    generator,
                )  # fmt: skip

    def load_full(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Takes this rank's part of an `nn.Linear`'s weight and bias.

        Args:
            weight: [out_features, in_features], splits behind one another.
            bias: [out_features], if the layer has one.

        Raises:
            ArgumentError: a shape is another, or there is a bias on one side only.
        """
        if (bias is None) != (self.bias is None):
            raise ArgumentError(
                f"bias: got {'none' if bias is None else 'one'}, wanted "
                f"{'none' if self.bias is None else 'one'}, as the layer has"
            )
        for name, full, wanted in (
            ("weight", weight, (self.out_features, self.in_features)),
            ("bias", bias, (self.out_features,)),
        ):
            if full is not None and tuple(full.shape) != wanted:
                raise ArgumentError(f"{name}: got shape {tuple(full.shape)}, wanted {wanted}")
        world, dim = self.call.workspace.world, self.sharded_dim
        with torch.no_grad():
            own = torch.split(weight, list(self.splits)) if dim == 0 else (weight,)
            self.weight.copy_(sharding.part_of(own, dim, world))
            if self.bias is not None and bias is not None:
                own = torch.split(bias, list(self.splits))
                self.bias.copy_(bias if dim else sharding.part_of(own, 0, world))

    def gather_full(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The full weight [out_features, in_features] and bias, as `load_full` takes them.

        Collective.
        """
        world, dim = self.call.workspace.world, self.sharded_dim
        sizes = self.splits if dim == 0 else (self.in_features,)
        weight = sharding.whole_of(self.weight, dim, sizes, world)
        if self.bias is None:
            return weight, None
        if dim:
            return weight, self.bias.detach().clone()
        return weight, sharding.whole_of(self.bias, 0, sizes, world)

    def prepare(self, tokens: int) -> None:
        """Compiles and loads what a forward and backward of so many tokens need.

        Before a graph capture, and lest a first step compile. Collective.

        Args:
            tokens: over all ranks, a multiple of them.

        Raises:
            ArgumentError: it is none; what would be prepared is another call.
        """
        world = self.call.workspace.world
        if not isinstance(tokens, int) or tokens < 0 or tokens % world.size:
            raise ArgumentError(
                f"tokens: got {tokens!r}, wanted a multiple of the {world.size} ranks"
            )
        rows, features = tokens, self.in_features
        if self.sharded_dim == 0:
            rows //= world.size
        else:
            features //= world.size
        with torch.inference_mode(False), torch.enable_grad():
            self._prepare(rows, features)
        world.synchronize()
        world.barrier()

    def _prepare(self, rows: int, features: int) -> None:
        """A forward and backward of zeros."""
        # With a frozen weight the backward makes other calls.
        weight = self.weight.detach().requires_grad_(self.weight.requires_grad)
        main_grad = getattr(self.weight, "main_grad", None)
        if main_grad is not None:
            weight.main_grad = torch.zeros_like(main_grad)  # type: ignore[attr-defined]
        x = torch.zeros(rows, features, device=weight.device, dtype=weight.dtype)
        y = self._linear(x.requires_grad_(), weight, None)
        needed = [t for t in (x, weight) if t.requires_grad]
        torch.autograd.grad(y, needed, torch.zeros_like(y))

    def _linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See `column_parallel_linear` and `row_parallel_linear`."""
        return self._linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        """What printing shows."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, ranks={self.world_size}"
            + (", precision=mxfp8" if self.call.mx is not None else "")
        )


class ColumnParallelLinear(ParallelLinear):
    """`nn.Linear` whose output features are sharded and whose input is sharded by sequence.

    x [tokens / ranks, ..., in] -> [tokens, ..., out / ranks]. Arguments: see `ParallelLinear`.
    """

    sharded_dim = 0

    def _linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return column_parallel_linear(x, weight, bias, self.call)


class RowParallelLinear(ParallelLinear):
    """`nn.Linear` whose input features are sharded and whose output is sharded by sequence.

    x [tokens, ..., in / ranks] -> [tokens / ranks, ..., out]. Arguments: see `ParallelLinear`.
    The bias is added once, after the sum; its gradient is of the own rows, so pass the parameters
    to `reduce_replicated_grads` before the optimizer.
    """

    sharded_dim = 1

    def _linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return row_parallel_linear(x, weight, bias, self.call)


class ParallelMLP(nn.Module):
    """SwiGLU between a column- and a row-parallel layer: down(silu(gate(x)) * up(x)).

    x [tokens / ranks, ..., hidden] -> the same shape.

    Args:
        hidden: features of a token.
        intermediate: features of gate and of up.
        bias: of both layers.
        seed: of the gate and up layer; the down layer takes the next. None as in `ParallelLinear`.
        **layer: other arguments of `ParallelLinear`, for both.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        *,
        bias: bool = False,
        seed: int | None = None,
        **layer: Any,
    ) -> None:
        super().__init__()
        layer["bias"] = bias
        self.gate_up = ColumnParallelLinear(
            hidden, 2 * intermediate, splits=(intermediate, intermediate), seed=seed, **layer
        )
        self.down = RowParallelLinear(intermediate, hidden, seed=_next(seed), **layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens / ranks, ..., hidden] -> the same shape."""
        gate, up = self.gate_up(x).chunk(2, -1)
        out: torch.Tensor = self.down(F.silu(gate) * up)
        return out


class ParallelAttention(nn.Module):
    """Attention between a column- and a row-parallel layer, heads sharded over the ranks.

    x [sequence / ranks, batch, hidden], or [sequence / ranks, hidden] -> the same shape.

    Args:
        hidden: features of a token.
        num_heads: query heads over all ranks, a multiple of them.
        num_kv_heads: key and value heads over all ranks, a multiple of them; None for `num_heads`.
        head_dim: features of a head; None for hidden / num_heads.
        causal: whether a token sees earlier ones only.
        bias: of both layers.
        seed: as in `ParallelMLP`.
        **layer: other arguments of `ParallelLinear`, for both.

    Raises:
        ArgumentError: heads that the ranks do not divide.
    """

    def __init__(
        self,
        hidden: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        causal: bool = True,
        bias: bool = False,
        seed: int | None = None,
        **layer: Any,
    ) -> None:
        super().__init__()
        layer["bias"] = bias
        workspace = layer.get("workspace")
        world = world_of(layer.get("group")) if workspace is None else workspace.world
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        for name, heads in (("num_heads", num_heads), ("num_kv_heads", kv_heads)):
            sharding.check_features(name, heads)
            sharding.check_divides(name, heads, world.size)
        if num_heads % kv_heads:
            raise ArgumentError(
                f"num_kv_heads: got {kv_heads}, wanted a divisor of the {num_heads} query heads"
            )
        self.head_dim = hidden // num_heads if head_dim is None else head_dim
        self.heads, self.kv_heads = num_heads // world.size, kv_heads // world.size
        self.causal = causal
        sizes = tuple(heads * self.head_dim for heads in (num_heads, kv_heads, kv_heads))
        self.qkv = ColumnParallelLinear(hidden, sum(sizes), splits=sizes, seed=seed, **layer)
        self.out = RowParallelLinear(sizes[0], hidden, seed=_next(seed), **layer)

    def forward(self, x: torch.Tensor, rotate: Rotate | None = None) -> torch.Tensor:
        """[sequence / ranks, batch, hidden] -> the same shape.

        Args:
            x: own part of the sequence; the batch may be left out.
            rotate: puts positions into queries and keys [batch, heads, sequence, head_dim].
        """
        qkv = self.qkv(x if x.dim() == 3 else x.unsqueeze(1))
        sequence, batch = qkv.shape[:2]
        widths = [heads * self.head_dim for heads in (self.heads, self.kv_heads, self.kv_heads)]
        # [batch, heads, sequence, head_dim] each; split first, so that gradients are joined once.
        q, k, v = (
            part.view(sequence, batch, -1, self.head_dim).permute(1, 2, 0, 3)
            for part in torch.split(qkv, widths, -1)
        )
        if rotate is not None:
            q, k = rotate(q, k)
        attended = F.scaled_dot_product_attention(
            q, k, v, is_causal=self.causal, enable_gqa=self.heads != self.kv_heads
        )
        attended = attended.permute(2, 0, 1, 3).reshape(sequence, batch, -1)
        out: torch.Tensor = self.out(attended)
        # Not out[:, 0], whose gradient is copied into zeros.
        return out if x.dim() == 3 else out.squeeze(1)


def _next(seed: int | None) -> int | None:
    return None if seed is None else seed + 1


def _room(
    workspace: TpSpWorkspace | None,
    world: World,
    group: dist.ProcessGroup | World | None,
    max_tokens: int | None,
    width: int,
) -> TpSpWorkspace | SharedWorkspace:
    """The workspace of a layer whose rows that cross ranks have so many features."""
    if workspace is None:
        if max_tokens is None:
            raise WorkspaceError(
                "max_tokens: got none, wanted the most tokens of a call over all ranks, which "
                "sizes the workspace; or pass a workspace"
            )
        return shared_workspace(world, max_tokens, width)
    if max_tokens is not None or group is not None:
        raise WorkspaceError(
            "workspace: got one together with max_tokens or group, which it has; leave those out"
        )
    if workspace.max_features < width:
        raise WorkspaceError(
            f"workspace: got one for rows of {workspace.max_features} features, wanted {width}; "
            "create it with a larger max_features on every rank"
        )
    return workspace
