"""A prepared call: everything about it that depends on sizes and choices only."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from kosmos_core.arguments import ARGUMENT, WORKSPACE, Rejected, agreed_hash
from kosmos_core.errors import ArgumentError, WorkspaceError
from kosmos_core.launch import intern_key
from kosmos_heuristics import (
    HeuristicsError,
    Machine,
    MoePlan,
    MoeProblem,
    plan_moe_backward,
    plan_moe_forward,
)
from kosmos_heuristics.tiles import copy_step_bytes

from kosmos_moe.device import config as codes
from kosmos_moe.device.config import MoeConfig
from kosmos_moe.memory import MoeLimits
from kosmos_moe.ops.options import MoeOptions
from kosmos_moe.router import RouterOptions
from kosmos_moe.workspaces import MoEWorkspace

LOG = logging.getLogger("kosmos_moe")
_LOGGED: set[tuple[str, str]] = set()  # declined calls are logged once, not once a rank
POLICIES = {
    "two_way": codes.TWO_WAY,
    "dedicated_combine": codes.DEDICATED,
    "planned_split": codes.PLANNED,
    "fixed": codes.FIXED,
    # With crews of its own: see `Prepared.crews`.
    "serial": codes.TWO_WAY,
}
ORDERS = {
    "destination_minor": codes.DESTINATION_MINOR,
    "destination_major": codes.DESTINATION_MAJOR,
}
TRANSPORTS = ("push",)
ROW_ELEMENTS = 8  # of bf16 are 16 bytes
# A unit moves about so many bytes: few enough to spread, enough that what it costs is small.
UNIT_BYTES = 1 << 19
UNIT_ROWS = (16, 128)
# Elements that a workgroup routes, or adds up the counts of, at once.
ROUTE_ELEMENTS = 1024
PIECE = 512  # elements of a row that the lanes of one warp load at once
COPY_ROWS = 4
FOLD_ROWS = 4
MAX_PARTS = 4
# The executor's sizes: more than one of everything in small calls.
TINY = {
    "UNIT_ROWS": 8,
    "PIECE": 32,
    "COPY_ROWS": 4,
    "FOLD_ROWS": 4,
    "ROUTE_ROWS": 8,
    "PARTS": 2,
}


@dataclass(frozen=True)
class Layer:
    """Sizes of a layer, the same on all ranks.

    Attributes:
        hidden: width of a token.
        inter: width of a routed expert.
        experts: over all ranks.
        shared_inter: width of the shared expert, 0 for none.
        router: its options.
        router_dtype: of its weights.
        biased, padded, given: whether a bias, a padding mask, a routing come with the call.
    """

    hidden: int
    inter: int
    experts: int
    shared_inter: int
    router: RouterOptions
    router_dtype: torch.dtype
    biased: bool
    padded: bool
    given: bool

    def __str__(self) -> str:
        shared = f" shared={self.shared_inter}" if self.shared_inter else ""
        sizes = f"hidden={self.hidden} inter={self.inter} experts={self.experts}"
        return f"{sizes} topk={self.router.topk}{shared}"


@dataclass(frozen=True)
class Prepared:
    """Everything about a call that depends on sizes and choices only.

    Attributes:
        layer: its sizes.
        plan: how it runs.
        decline: why the fused path is not taken, or None.
        call_hash: what every rank must agree on, 31 bits.
        config: constants of the launch.
        key: its launch key.
        can_overflow: whether some routing does not fit the arena.
        label: the call as error messages show it.
    """

    layer: Layer
    plan: MoePlan
    decline: str | None
    call_hash: int
    config: MoeConfig
    key: int
    can_overflow: bool
    label: str

    @property
    def crews(self) -> tuple[int, int]:
        """Workgroups that dispatch before they build, and that combine between tiles."""
        if self.plan.policy == "serial":
            return self.plan.cap, 0
        return self.plan.dispatch_crew, self.plan.combine_crew


def prepare(
    layer: Layer,
    workspace: MoEWorkspace,
    options: MoeOptions,
    backward: bool = False,
    adds: bool = False,
    with_loss: bool = True,
) -> Prepared:
    """The prepared call of a layer in one direction, planned once.

    Args:
        layer: sizes.
        workspace: of the group.
        options: choices of the call.
        backward: which direction.
        adds: whether a backward adds its weight gradients to what is there.
        with_loss: whether a backward is given a gradient of the auxiliary loss.

    Raises:
        Rejected: a choice is not allowed, or the layer does not fit the workspace.
    """
    key = (layer, options, backward, adds, with_loss)
    call: Prepared | None = workspace.prepared.get(key)
    if call is None:
        call = workspace.prepared[key] = _plan(layer, workspace, options, backward, adds, with_loss)
    return call


def _plan(
    layer: Layer,
    workspace: MoEWorkspace,
    options: MoeOptions,
    backward: bool,
    adds: bool,
    with_loss: bool,
) -> Prepared:
    options.check()
    _check_room(layer, workspace)
    world = workspace.world
    most = world.num_wgs or 2
    # Tokens differ from rank to rank and from call to call: the plan is for the largest call.
    try:
        layer.router.check_experts(layer.experts, world.size)
        problem = MoeProblem(
            workspace.limits.max_tokens, layer.hidden, layer.inter, layer.experts,
            layer.router.topk, world.size,
        )  # fmt: skip
        make = plan_moe_backward if backward else plan_moe_forward
        plan = make(
            problem, workspace.machine, cap=min(options.cap or most, most),
            transport=options.transport, policy=options.policy, order=options.order,
            **options.overrides(),
        )  # fmt: skip
    except ArgumentError as error:
        raise Rejected(ARGUMENT, error) from error
    except HeuristicsError as error:
        raise Rejected(ARGUMENT, ArgumentError(str(error))) from error
    name = "moe_backward" if backward else "moe_forward"
    label = f"{name} {layer}"
    decline = _decline(layer, workspace, label)
    config = make_config(
        layer,
        plan,
        workspace.machine,
        world.size,
        options.save,
        backward=backward,
        adds=adds,
        with_loss=with_loss,
    )
    call_hash = agreed_hash(
        name, layer, plan.block_m, config.UNIT_ROWS.value, options.save, decline is None,
    )  # fmt: skip
    built_for = (
        layer.hidden, layer.inter, layer.shared_inter, layer.router_dtype, plan.num_warps,
        plan.num_stages, options.traced, workspace.context_key,
    )  # fmt: skip
    key = intern_key((*(v.value for v in config), type(config), built_for))
    own = MoeLimits(
        world.size, workspace.limits.max_tokens, layer.hidden, layer.inter, layer.experts,
        layer.router.topk,
    )  # fmt: skip
    can_overflow = workspace.needs.arena_blocks < own.worst_blocks(plan.block_m)
    return Prepared(layer, plan, decline, call_hash, config, key, can_overflow, label)


def _check_room(layer: Layer, workspace: MoEWorkspace) -> None:
    limits = workspace.limits
    for name, wanted, room in (
        ("hidden", layer.hidden, limits.hidden),
        ("inter", layer.inter, limits.inter),
        ("experts", layer.experts, limits.experts),
        ("topk", layer.router.topk, limits.topk),
        ("shared_inter", layer.shared_inter, limits.shared_inter),
    ):
        if wanted > room:
            raise Rejected(
                WORKSPACE,
                WorkspaceError(
                    f"workspace: {name} = {wanted} needs more than its {room}; create it with a "
                    f"larger {name} on every rank"
                ),
            )


def _decline(layer: Layer, workspace: MoEWorkspace, label: str) -> str | None:
    """Why a call takes the reference path, logged once; None if it runs fused."""
    reason = None
    if not workspace.world.fused:
        reason = workspace.world.why_not_fused
    for name in ("hidden", "inter", "shared_inter"):
        width = getattr(layer, name)
        if reason is None and width % ROW_ELEMENTS:
            reason = (
                f"rows of {name} = {width} bf16 elements are not a multiple of 16 bytes; pad "
                f"{name} to a multiple of {ROW_ELEMENTS}"
            )
    if reason is not None and (label, reason) not in _LOGGED:
        _LOGGED.add((label, reason))
        LOG.warning("%s takes the reference path: %s", label, reason)
    return reason


def power_of_two(value: int) -> int:
    """The next power of two."""
    return 1 << max(0, value - 1).bit_length()


def _fitting(elements: int, columns: int, bounds: tuple[int, int]) -> int:
    """A power of two of rows, so that rows times columns is about `elements`."""
    rows = 1 << max(0, (elements // columns).bit_length() - 1)
    return max(bounds[0], min(bounds[1], rows))


def _row_cost(layer: Layer, plan: MoePlan, machine: Machine, world_size: int) -> int:
    """Time in which one of the combine crew pushes a row, in millionths of a tile's."""
    if plan.policy != "planned_split":
        return 0  # nothing asks for it, and equal code is compiled once
    gbps = machine.gbps("push", plan.combine_crew, max(1, world_size - 1)) / plan.combine_crew
    tflops = machine.tflops.at(plan.cap) / plan.cap
    row_s = 2 * layer.hidden / (gbps * 1e9)
    tile_s = plan.block_m * plan.block_n * (layer.hidden + layer.inter) / (tflops * 1e12)
    return round(1e6 * row_s / tile_s)


def make_config(
    layer: Layer,
    plan: MoePlan,
    machine: Machine,
    world_size: int,
    save: bool,
    backward: bool = False,
    adds: bool = False,
    with_loss: bool = True,
) -> MoeConfig:
    """The constants of a launch."""
    router = layer.router
    experts = max(2, power_of_two(layer.experts))
    local = layer.experts // world_size
    route_rows = _fitting(ROUTE_ELEMENTS, experts, (2, plan.router_block_m))
    routing = codes.ROUTER if router.forced is None else codes.UNIFORM
    values: dict[str, Any] = {
        "EXPERTS": layer.experts,
        "EXPERTS_P2": experts,
        "LOCAL_EXPERTS": local,
        "LOCAL_P2": max(2, power_of_two(local)),
        "WORLD_P2": max(2, power_of_two(world_size)),
        "TOPK": router.topk,
        "SCORE": codes.SIGMOID if router.score == "sigmoid" else codes.SOFTMAX,
        "SCORE_FIRST": int(router.score_first),
        "NORMALIZE": int(router.normalize),
        "GROUPS": router.groups,
        "GROUPS_P2": max(2, power_of_two(router.groups)),
        "GROUP_TOPK": router.group_topk,
        "GROUP_BEST": router.best_of_group,
        "ROUTING": codes.GIVEN if layer.given else routing,
        "BIAS": int(layer.biased),
        "PADDING": int(layer.padded),
        "LOSS": int(
            with_loss and bool(router.aux_coefficient or router.z_coefficient) and not layer.given
        ),
        "SHARED": int(layer.shared_inter > 0),
        "ROUTER_PARTS": 1 if layer.router_dtype == torch.bfloat16 else 3,
        "ROUTE_M": plan.router_block_m,
        "ROUTE_N": plan.router_block_n,
        "ROUTE_K": plan.block_k,
        "ROUTE_ROWS": route_rows,
        "PLAN_ROWS": route_rows,
        "BLOCK_M": plan.block_m,
        "BLOCK_N": plan.block_n,
        "BLOCK_K": plan.block_k,
        "STAGES": plan.num_stages,
        "EVEN_H": int(layer.hidden % plan.block_k == 0),
        "EVEN_I": int(layer.inter % plan.block_k == 0 and layer.shared_inter % plan.block_k == 0),
        "UNIT_ROWS": _fitting(UNIT_BYTES, 2 * layer.hidden, UNIT_ROWS),
        "COPY_ROWS": COPY_ROWS,
        "PIECE": PIECE,
        "BURST": plan.burst_depth,
        "COPY_ELEMENTS": copy_step_bytes(machine, plan.transport) // 2,
        "COPY_DEPTH": 1,
        "FOLD_ROWS": FOLD_ROWS,
        "POLICY": POLICIES[plan.policy],
        "ORDER": ORDERS[plan.order],
        "SAVE": int(save),
        "ROW_COST": _row_cost(layer, plan, machine, world_size),
        "BACKWARD": int(backward),
        "MAIN_GRAD": int(adds),
        "WGRAD_K": min(plan.block_k, plan.block_m),
        "PARTS": MAX_PARTS if plan.block_n >= 2 * MAX_PARTS * 32 else 1,
    }
    if machine.rule_set == "executor":
        values.update(TINY)
    return MoeConfig(
        **{k: v if isinstance(v, tl.constexpr) else tl.constexpr(v) for k, v in values.items()}
    )


__all__ = ["Layer", "Prepared", "make_config", "power_of_two", "prepare"]
