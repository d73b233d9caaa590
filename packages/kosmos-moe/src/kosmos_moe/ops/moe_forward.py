"""`moe_forward`: a whole MoE layer, from router to fold, in one launch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from kosmos_core.arguments import (
    ARGUMENT,
    DEVICE,
    DTYPE,
    SHAPE,
    WORKSPACE,
    Rejected,
    TellingPeers,
    check_tensor,
    chosen_options,
    dense,
    reject,
)
from kosmos_core.errors import ArgumentError, WorkspaceError

from kosmos_moe import reference
from kosmos_moe.device.config import ForwardOperands
from kosmos_moe.kernels.forward import moe_forward_kernel
from kosmos_moe.ops.call import Layer, Prepared, prepare
from kosmos_moe.ops.launching import launch
from kosmos_moe.ops.options import MoeOptions
from kosmos_moe.router import RouterOptions
from kosmos_moe.workspaces import MoEWorkspace


class MoeResult(NamedTuple):
    """What a forward gives.

    Attributes:
        y: [tokens, hidden] bf16.
        aux_loss: fp32 scalar, to be added to the loss.
        ids: [tokens, k] int32, experts chosen; -1 for padding.
        weights: [tokens, k] fp32, weights of them; 0 for padding.
    """

    y: torch.Tensor
    aux_loss: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True)
class MoeSaved:
    """What one forward keeps for its backward; it belongs to the call.

    Attributes:
        inputs: operands.
        layer: sizes.
        router: how tokens chose.
        fused: whether the kernel made the forward; else a backward computes it anew.
        tensors: what the kernel left, by name of its operand; means nothing unless `fused`.
    """

    inputs: Inputs
    layer: Layer
    router: RouterOptions
    fused: bool
    tensors: dict[str, torch.Tensor]

    def num_bytes(self) -> int:
        """Bytes that are kept besides the operands."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())


@dataclass(frozen=True)
class Inputs:
    """The operands of a call, checked.

    Attributes:
        x: [tokens, hidden] bf16.
        router: [experts, hidden] bf16 or fp32.
        w1: [local experts, 2 * inter, hidden] bf16.
        w2: [local experts, hidden, inter] bf16.
        bias: [experts] fp32 or None.
        padding: [tokens] bool or None.
        routing: (ids [tokens, k] int32, weights [tokens, k] fp32) or None.
        shared: ([2 * inter, hidden], [hidden, inter]) bf16 or None.
    """

    x: torch.Tensor
    router: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor
    bias: torch.Tensor | None
    padding: torch.Tensor | None
    routing: tuple[torch.Tensor, torch.Tensor] | None
    shared: tuple[torch.Tensor, torch.Tensor] | None


def moe_forward(
    x: torch.Tensor,
    router_weight: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    workspace: MoEWorkspace,
    router: RouterOptions,
    *,
    bias: torch.Tensor | None = None,
    padding: torch.Tensor | None = None,
    routing: tuple[torch.Tensor, torch.Tensor] | None = None,
    shared: tuple[torch.Tensor, torch.Tensor] | None = None,
    options: MoeOptions | None = None,
    **choices: Any,
) -> MoeResult:
    """Routes tokens to experts on all ranks, runs the experts, and sums what comes back.

    Args:
        x: [tokens, hidden] bfloat16; every rank may have another number of tokens, 0 included.
        router_weight: [experts, hidden] bfloat16 or float32, the same on all ranks.
        w1: [experts of this rank, 2 * inter, hidden] bfloat16, gate first.
        w2: [experts of this rank, hidden, inter] bfloat16.
        workspace: of the group; every rank makes the same calls on it in the same order.
        router: how tokens choose.
        bias: [experts] float32, for the choice of experts only.
        padding: [tokens] bool, True for tokens that go to no expert.
        routing: (ids [tokens, k], weights [tokens, k]) instead of the router's.
        shared: (w1 [2 * inter, hidden], w2 [hidden, inter]) of an expert that all tokens go to.
        options: a prepared set of choices, instead of `choices`.
        **choices: fields of `MoeOptions`, when `options` is not given.

    Returns:
        y, the auxiliary loss of this rank's tokens, and the routing.

    Raises:
        ArgumentError: an operand or a choice is wrong; the peers are told.
        WorkspaceError: the workspace is destroyed or too small, or the routing did not fit its
            arena and `overflow` is "raise".
        PeerError: an earlier call on the workspace was given up. A routing that is given and names
            experts that do not exist, or one twice, is found on the host where the tokens are on
            the CPU, else by the kernel, which gives the call up on all ranks.

    Autograd: none; no result requires grad.

    Communication: counts to all ranks; tokens * k rows of hidden * 2 bytes there and back.
    Synchronizes: no host synchronisation where the arena has room for the worst case; otherwise the
        host reads one word after each call.

    Source: paper, section 3.3.1.
    """
    given = Inputs(x, router_weight, w1, w2, bias, padding, routing, shared)
    return run_forward(given, workspace, router, options, choices)[0]


def run_forward(
    given: Inputs,
    workspace: MoEWorkspace,
    router: RouterOptions,
    options: MoeOptions | None,
    choices: dict[str, Any],
) -> tuple[MoeResult, MoeSaved]:
    """`moe_forward`, and what it kept; with `save` that is enough for a backward."""
    if not isinstance(workspace, MoEWorkspace):
        raise ArgumentError(
            f"workspace: got {type(workspace).__name__}, wanted the MoEWorkspace of the group"
        )
    with TellingPeers(workspace, lambda: "moe_forward"):
        options = chosen_options(MoeOptions, options, choices)
        try:
            workspace.ensure_usable()
        except WorkspaceError as error:
            raise Rejected(WORKSPACE, error) from error
        layer = check_inputs(given, workspace, router)
        call = prepare(layer, workspace, options)
        if call.can_overflow and workspace.world.is_capturing():
            raise Rejected(
                WORKSPACE,
                WorkspaceError(
                    "capacity: after each call the host reads whether it fitted, which a capture "
                    "does not allow; create the workspace with capacity=None"
                ),
            )
        given = _dense(given)
    if call.decline is not None:
        workspace.agree(call.label, call.call_hash)
        return run_reference(given, workspace, router), MoeSaved(given, layer, router, False, {})
    result, saved = _launch(given, workspace, call, options)
    if call.can_overflow and int(workspace.scratch("verdict")[0]):
        # Every rank has come to the same verdict.
        workspace.check()
        if options.overflow == "raise":
            raise WorkspaceError(
                "capacity: the routing sends some rank more rows than its arena holds; create the "
                "workspace with a larger capacity, or None for the worst case"
            )
        return run_reference(given, workspace, router), replace(saved, fused=False)
    return result, saved


def _expect(name: str, t: object, kinds: tuple[torch.dtype, ...], dims: int, like: Any) -> None:
    check_tensor(name, t)
    assert isinstance(t, torch.Tensor)
    if t.dtype not in kinds:
        wanted = " or ".join(str(kind) for kind in kinds)
        raise reject(DTYPE, f"{name}: got dtype {t.dtype}, wanted {wanted}; cast it first")
    if t.device != like:
        raise reject(DEVICE, f"{name}: got device {t.device}, wanted {like}; move it there")
    if t.dim() != dims:
        raise reject(SHAPE, f"{name}: got shape {tuple(t.shape)}, wanted {dims} dimensions")


def _expect_shape(name: str, t: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(t.shape) != shape:
        raise reject(SHAPE, f"{name}: got shape {tuple(t.shape)}, wanted {shape}")


def check_inputs(given: Inputs, workspace: MoEWorkspace, router: RouterOptions) -> Layer:
    """The layer that the operands make.

    Raises:
        Rejected: an operand has a wrong type, dtype, device or shape.
    """
    device, bf16 = workspace.world.device, (torch.bfloat16,)
    if not isinstance(router, RouterOptions):
        raise reject(ARGUMENT, f"router: got {type(router).__name__}, wanted RouterOptions")
    _expect("x", given.x, bf16, 2, device)
    _expect("router_weight", given.router, (torch.bfloat16, torch.float32), 2, device)
    _expect("w1", given.w1, bf16, 3, device)
    _expect("w2", given.w2, bf16, 3, device)
    tokens, hidden = given.x.shape
    experts, inter = given.router.shape[0], given.w2.shape[2]
    if experts % workspace.world.size:
        raise reject(
            SHAPE,
            f"router_weight: got {experts} experts, wanted a multiple of the "
            f"{workspace.world.size} ranks",
        )
    local = experts // workspace.world.size
    _expect_shape("router_weight", given.router, (experts, hidden))
    _expect_shape("w1", given.w1, (local, 2 * inter, hidden))
    _expect_shape("w2", given.w2, (local, hidden, inter))
    if min(hidden, inter, experts) == 0:
        raise reject(SHAPE, f"w1: got shape {tuple(given.w1.shape)}, wanted positive sizes")
    if given.bias is not None:
        _expect("bias", given.bias, (torch.float32,), 1, device)
        _expect_shape("bias", given.bias, (experts,))
    if given.padding is not None:
        _expect("padding", given.padding, (torch.bool,), 1, device)
        _expect_shape("padding", given.padding, (tokens,))
    if given.shared is not None:
        first, second = given.shared
        _expect("shared w1", first, bf16, 2, device)
        _expect("shared w2", second, bf16, 2, device)
        shared_inter = second.shape[1]
        _expect_shape("shared w1", first, (2 * shared_inter, hidden))
        _expect_shape("shared w2", second, (hidden, shared_inter))
    if given.routing is not None:
        ids, weights = given.routing
        _expect("ids", ids, (torch.int32, torch.int64), 2, device)
        _expect("weights", weights, (torch.float32,), 2, device)
        _expect_shape("ids", ids, (tokens, router.topk))
        _expect_shape("weights", weights, (tokens, router.topk))
        if device.type == "cpu":
            try:
                reference.check_routing(ids, experts)
            except ArgumentError as error:
                raise Rejected(ARGUMENT, error) from error
    if tokens > workspace.limits.max_tokens:
        raise Rejected(
            WORKSPACE,
            WorkspaceError(
                f"workspace: {tokens} tokens need more than its {workspace.limits.max_tokens}; "
                "create it with a larger max_tokens on every rank"
            ),
        )
    return layer_of(given, router)


def layer_of(given: Inputs, router: RouterOptions) -> Layer:
    """The layer that operands make, whose shapes fit together."""
    shared_inter = 0 if given.shared is None else given.shared[1].shape[1]
    return Layer(
        int(given.x.shape[1]), int(given.w2.shape[2]), int(given.router.shape[0]),
        int(shared_inter), router, given.router.dtype, given.bias is not None,
        given.padding is not None, given.routing is not None,
    )  # fmt: skip


def _dense(given: Inputs) -> Inputs:
    """The operands row-major and aligned, as kernels read them."""
    routing = given.routing
    if routing is not None:
        routing = dense(routing[0].to(torch.int32)), dense(routing[1])
    return Inputs(
        dense(given.x),
        dense(given.router),
        dense(given.w1),
        dense(given.w2),
        None if given.bias is None else dense(given.bias),
        None if given.padding is None else dense(given.padding),
        routing,
        None if given.shared is None else (dense(given.shared[0]), dense(given.shared[1])),
    )


def run_reference(given: Inputs, workspace: MoEWorkspace, router: RouterOptions) -> MoeResult:
    """The layer in plain PyTorch, without gradients."""
    shared = None if given.shared is None else reference.Experts(*given.shared)
    # As in the fused path, which records nothing either.
    with torch.no_grad():
        out = reference.moe_layer(
            given.x, given.router, reference.Experts(given.w1, given.w2), workspace.world, router,
            bias=given.bias, padding=given.padding, routing=given.routing, shared=shared,
        )  # fmt: skip
    return MoeResult(out.y, out.aux_loss.float(), out.ids.to(torch.int32), out.weights.float())


def kept_tensors(
    call: Prepared, workspace: MoEWorkspace, x: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """(gate and up, those of the shared expert, logits, send list, tables) for a backward."""
    layer, tokens = call.layer, x.shape[0]
    rows = workspace.needs.arena_blocks * call.plan.block_m
    return (
        x.new_empty((2, rows, layer.inter)),
        x.new_empty((2, tokens, max(8, layer.shared_inter))),
        x.new_empty((tokens, layer.experts), dtype=torch.float32),
        x.new_empty((tokens, layer.router.topk), dtype=torch.int32),
        x.new_empty(workspace.needs.scratch["tables"][0], dtype=torch.int32),
    )


def _launch(
    given: Inputs, workspace: MoEWorkspace, call: Prepared, options: MoeOptions
) -> tuple[MoeResult, MoeSaved]:
    """One launch of the kernel, and what it leaves."""
    x, layer = given.x, call.layer
    tokens, device = x.shape[0], x.device
    choices = (tokens, layer.router.topk)
    y = torch.empty_like(x)
    loss = torch.empty((), dtype=torch.float32, device=device)
    if given.routing is None:
        ids = torch.empty(choices, dtype=torch.int32, device=device)
        weights = torch.empty(choices, dtype=torch.float32, device=device)
    else:
        ids, weights = given.routing
    places = torch.empty(choices, dtype=torch.int32, device=device)
    scratch = workspace.scratch
    act, shared_act = scratch("h"), scratch("shared_h")
    logits, order, tables = scratch("logits"), scratch("list"), scratch("tables")
    if options.save:
        act, shared_act, logits, order, tables = kept_tensors(call, workspace, x)
    shared1, shared2 = given.shared or (given.w1, given.w2)
    padding = x if given.padding is None else given.padding.view(torch.uint8)
    ops = ForwardOperands(
        x, given.router, loss if given.bias is None else given.bias, padding, given.w1, given.w2,
        shared1, shared2, y, loss, ids, weights, places, act, shared_act, scratch("h"),
        scratch("y2"), scratch("shared_h"), scratch("shared_y"), logits, scratch("sums"),
        scratch("route_counts"), order, tables, scratch("verdict"),
    )  # fmt: skip
    launch(moe_forward_kernel, ops, call, workspace, options, tokens)
    kept = {
        "ids_ptr": ids, "weights_ptr": weights, "places_ptr": places, "act_ptr": act,
        "shared_act_ptr": shared_act, "logits_ptr": logits, "list_ptr": order,
        "tables_ptr": tables,
    }  # fmt: skip
    saved = MoeSaved(given, layer, layer.router, True, kept if options.save else {})
    return MoeResult(y, loss, ids, weights), saved


__all__ = [
    "Inputs",
    "MoeOptions",
    "MoeResult",
    "MoeSaved",
    "moe_forward",
    "run_forward",
    "run_reference",
]
