"""`ag_gemm_pair`: backward of a row-parallel linear in MXFP8, behind one gather of two copies."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton.language as tl
from kosmos_core.device.gemm import NT
from kosmos_core.launch import intern_key
from kosmos_heuristics import AgGemmPairPlan, AgGemmPairProblem, plan_ag_gemm_pair

from kosmos_tpsp import reference
from kosmos_tpsp.device import config as codes
from kosmos_tpsp.device.config import AgGemmConfig, GradientConfig, PairOperands
from kosmos_tpsp.kernels.ag_gemm_pair import ag_gemm_pair_kernel
from kosmos_tpsp.ops import mx, prepared, validate
from kosmos_tpsp.ops.ag_gemm import ORDERS
from kosmos_tpsp.ops.mx import Operand
from kosmos_tpsp.ops.outputs import put_gradient, take_outputs
from kosmos_tpsp.ops.prepared import LAYOUTS, POLICIES, Prepared
from kosmos_tpsp.workspaces import TpSpWorkspace

GROUP = 32  # rows of a group that lies along columns: slices hold whole ones


@dataclass(frozen=True)
class AgGemmPairOptions:
    """What a caller may choose besides the operands; None leaves it to the plan.

    Attributes:
        cap: most workgroups to use.
        policy: "one_way", "two_way", "fixed" or "serial".
        order: of the first product, "local_first", "chunk_major" or "naive".
        transport: "pull" or "push".
        movers_per_peer: crew size for each peer.
        traced: record role spans into the workspace's trace buffer.
        force: run fused although the plan would decline for speed.
    """

    cap: int | None = None
    policy: str = "one_way"
    order: str = "local_first"
    transport: str | None = None
    movers_per_peer: int | None = None
    traced: bool = False
    force: bool = False


def ag_gemm_pair(
    dy: Operand,
    dy_columns: Operand,
    w: Operand,
    x: Operand,
    workspace: TpSpWorkspace,
    *,
    out: torch.Tensor | None = None,
    dw: torch.Tensor | None = None,
    main_grad: torch.Tensor | None = None,
    options: AgGemmPairOptions | None = None,
    **choices: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gathers both MXFP8 copies of dY, multiplies W by one and X by the other, in one launch.

    Args:
        dy: [m / world size, k] `MXTensor` quantised along rows, this rank's chunk of the gradient
            of a row-parallel layer's output; k, its hidden size, is a multiple of 32.
        dy_columns: the same gradient quantised along columns (the tokens), with whole groups on
            every rank. Both come from the high-precision gradient.
        w: [k, n], the layer's local weights, bfloat16: the values of what was quantised along k, or
            that `MXTensor`, which takes a launch to dequantise.
        x: [m, n], the layer's local input, likewise, quantised along the tokens.
        workspace: of the group, with room for [m, k + k / 32]; every rank makes the same calls on
            it in the same order.
        out: [m, n] bfloat16 to write dx into; allocated when None.
        dw: [k, n] bfloat16 to write the weight gradient into; allocated when None.
        main_grad: [k, n] float32 that the weight gradient is added to, instead of being returned.
        options: a prepared set of choices, instead of `choices`.
        **choices: fields of `AgGemmPairOptions`, when `options` is not given.

    Returns:
        (dx = dY W [m, n], dw = dY^T X [k, n]) of the dequantised copies, each rounded once; with
        `main_grad` dw is None, and the FP32 sum is added there unrounded, but rounded to bfloat16
        first where the call is declined.

    Raises:
        ArgumentError: wrong type, dtype, device, shape or choice; the peers are told, as they are
            of any other error before the launch.
        WorkspaceError: the workspace is destroyed or too small.
        PeerError: an earlier call on the workspace was given up.

    Autograd: none, fused or declined alike: no result requires grad, whatever the operands do.

    Communication: all-gather of both copies, (world size - 1) * m / world size * k * 33/16 bytes
    into each rank.
    Synchronizes: no host synchronisation; a declined call waits for its peers on the host.

    Source: paper, sections 3.2.1 and 4.2.
    """
    validate.check_workspace(workspace)
    shown = partial(prepared.shown_call, "ag_gemm_pair", dy, dy_columns, w, x)
    with prepared.TellingPeers(workspace, shown):
        options = prepared.chosen_options(AgGemmPairOptions, options, choices)
        w, x = mx.values("w", w, "col"), mx.values("x", x, "col")
        given: dict[str, Any] = {"dy": dy, "dy_columns": dy_columns, "w": w, "x": x}
        adds = main_grad is not None
        call = prepared.prepare(_plan, given, workspace, options, adds)
        m, n, k = call.problem.m, call.problem.n, call.problem.k
        out, gradient = take_outputs(out, (m, n), dw, main_grad, (k, n), workspace, given)
        if call.decline is None:
            inputs = (*mx.as_stored(dy), *mx.as_stored(dy_columns), validate.dense(w))
            right = validate.dense(x)
    if m == 0:
        workspace.pass_over()
        if not adds:
            gradient.zero_()
    elif call.decline is not None:
        workspace.agree(call.label, workspace.start_hash(call.call_hash))
        # As in the fused path, which records nothing either.
        with torch.no_grad():
            product, made = reference.ag_gemm_pair(dy, dy_columns, w, x, workspace.world)
            out.copy_(product)
            put_gradient(made, gradient, adds)
    else:
        launches = [
            _arguments((*inputs, out), (right, gradient), workspace, call, configs, options.traced)
            for configs in call.configs
        ]
        prepared.launch_all(ag_gemm_pair_kernel, call, launches, workspace)
    return out, None if adds else gradient


def prepare_ag_gemm_pair(
    workspace: TpSpWorkspace, chunk_rows: int, n: int, k: int, options: AgGemmPairOptions
) -> None:
    """Collective: compiles and loads what a call of this shape needs, then ends in a barrier."""
    chunk, m = (chunk_rows, k), chunk_rows * workspace.world.size
    shapes = (chunk, chunk, (k, n), (m, n))
    prepared.warm(ag_gemm_pair, shapes, workspace, options, ("row", "col", None, None))


def _plan(
    dy: Any,
    dy_columns: Any,
    w: torch.Tensor,
    x: torch.Tensor,
    workspace: TpSpWorkspace,
    options: AgGemmPairOptions,
    adds: bool,
) -> Prepared:
    validate.check_types(options, "movers_per_peer")
    validate.check_choice("policy", options.policy, tuple(POLICIES))
    validate.check_choice("order", options.order, tuple(ORDERS))
    validate.check_choice("transport", options.transport, workspace.transports, optional=True)
    world = workspace.world
    m, n, k = _sizes(dy, dy_columns, w, x, world.size)
    # Behind each copy lie its scales.
    validate.check_room(workspace, m, k + k // GROUP)
    with prepared.refusals():
        problem = AgGemmPairProblem(m, n, k, world.size)
        tile_row_rows = max(workspace.machine.tile_row_rows, GROUP)
        make = partial(
            plan_ag_gemm_pair, problem, workspace.machine,
            transport=prepared.transport_of(workspace, options), policy=options.policy,
            order=options.order, movers_per_peer=options.movers_per_peer,
            tile_row_rows=tile_row_rows,
        )  # fmt: skip
        slices = min(make().slices, tile_row_rows // GROUP)
        make = partial(make, slices=slices)
        plan, judged = prepared.plan_and_judge(make, workspace, options.cap)
        workspace.reserve_unpacked(2)
    label = f"ag_gemm_pair m={m} n={n} k={k}"
    decline = prepared.decline_reason(problem, judged, workspace, options.force, label)
    call_hash = prepared.agreed_hash(
        "ag_gemm_pair", problem, plan.transport, plan.slices, plan.tile_row_rows,
        options.policy == "serial", decline is None,
    )  # fmt: skip
    second = _second(problem, plan, workspace, adds)
    built_for = (n, k, plan.num_warps, plan.num_stages, options.traced, workspace.context_key)
    firsts = _firsts(problem, plan, options)
    keys = tuple(
        intern_key((*(v.value for v in (*first, *second)), type(second), built_for))
        for first in firsts
    )
    configs = tuple((first, second) for first in firsts)
    return Prepared(problem, plan, decline, call_hash, configs, keys, label)


def _sizes(
    dy: Any, dy_columns: Any, w: torch.Tensor, x: torch.Tensor, size: int
) -> tuple[int, int, int]:
    """(m, n, k) of operands that fit together."""
    for name, t, axis in (("dy", dy, "row"), ("dy_columns", dy_columns, "col")):
        if not mx.is_mx(t):
            raise validate.reject(
                validate.DTYPE,
                f"{name}: got {t.dtype}, wanted an MXTensor; in bf16 ag_gemm keeps dY for a GEMM",
            )
        mx.check_axis(name, t, axis, contracted=axis == "row")
        if tuple(t.shape) != tuple(dy.shape) or tuple(t.shape) != tuple(t.data.shape):
            raise validate.reject(
                validate.SHAPE,
                f"{name}: got shape {tuple(t.shape)}, wanted that of dy {tuple(dy.shape)}, rows "
                "and features multiples of 32; use ag_gemm",
            )
    rows, k = dy.shape
    m, n = rows * size, w.shape[1]
    for name, matrix, wanted in (("w", w, (k, n)), ("x", x, (m, n))):
        if tuple(matrix.shape) != wanted:
            raise validate.reject(
                validate.SHAPE,
                f"{name}: got shape {tuple(matrix.shape)}, wanted {wanted} beside dy "
                f"{tuple(dy.shape)} on each of {size} ranks",
            )
    if k == 0 or n == 0:
        raise validate.reject(
            validate.SIZE, f"features: got k = {k} and n = {n}, wanted positive sizes"
        )
    return m, n, k


def _firsts(
    problem: AgGemmPairProblem, plan: AgGemmPairPlan, options: AgGemmPairOptions
) -> tuple[AgGemmConfig, ...]:
    """Constants of the gather and the first product, of each launch."""
    fused = AgGemmConfig(
        **prepared.shared_constants(problem, plan),
        FORMAT=codes.UNPACKED,
        COPIES=codes.BOTH,
        ROW_SHIFT=tl.constexpr(prepared.row_shift(problem)),
        LAYOUT=tl.constexpr(LAYOUTS["nn"]),
        ORDER=tl.constexpr(ORDERS[plan.order]),
        PHASE=codes.FUSED,
        KEEP_GATHERED=tl.constexpr(0),
        SCATTERS=tl.constexpr(0),
        SLICES=tl.constexpr(plan.slices),
        COPY_ELEMENTS=tl.constexpr(plan.copy_elements),
        COPY_DEPTH=tl.constexpr(plan.copy_depth),
        TILE_ROW_ROWS=tl.constexpr(plan.tile_row_rows),
        GROUP_M=tl.constexpr(plan.group_m),
        GROUP_ROWS=tl.constexpr(plan.group_rows),
    )
    # Only whole tiles follow one another in either queue.
    fused = fused._replace(SPLIT_K=tl.constexpr(1))
    if options.policy != "serial":
        return (fused,)
    return fused._replace(PHASE=codes.GATHER_ONLY), fused._replace(PHASE=codes.BUILD_ONLY)


def _second(
    problem: AgGemmPairProblem, plan: AgGemmPairPlan, workspace: TpSpWorkspace, adds: bool
) -> GradientConfig:
    """Constants of the weight gradient, whose rows are features and whose contraction is tokens."""
    shared = prepared.shared_constants(problem, plan)
    splits = codes.gradient_splits(plan.block_n, adds, workspace.world.target)
    own = {
        "MAIN_GRAD": tl.constexpr(int(adds)),
        "LAYOUT": NT,
        "GROUP_M": tl.constexpr(plan.group_m),
        "SPLIT_K": tl.constexpr(1),
        "CLAIM_RUN": tl.constexpr(1),
        "STORE_SPLITS": tl.constexpr(splits),
        "EVEN_K": tl.constexpr(int(problem.m % plan.block_k == 0)),
        "EVEN_M": tl.constexpr(int(problem.k % plan.block_m == 0)),
    }
    kept = {name: value for name, value in shared.items() if name in GradientConfig._fields}
    return GradientConfig(**{**kept, **own})


def _arguments(
    first: tuple[torch.Tensor, ...],
    second: tuple[torch.Tensor, torch.Tensor],
    workspace: TpSpWorkspace,
    call: Prepared,
    configs: tuple[AgGemmConfig, GradientConfig],
    traced: bool,
) -> tuple[Any, ...]:
    """Arguments of one launch of `ag_gemm_pair_kernel`.

    Args:
        first: both copies of dy, w and dx.
        second: x and the weight gradient.
        workspace: of the group.
        call: the call.
        configs: constants of the gather and the first product, and of the second.
        traced: whether role spans are recorded.
    """
    plan, problem = call.plan, call.problem
    config, gradient = configs
    rooms = (workspace.unpacked(0), workspace.unpacked(1))
    ops = PairOperands._make((*first, *rooms, *second, workspace.partials))
    # A launch that only gathers has no use for builders.
    movers = plan.cap if config.PHASE is codes.GATHER_ONLY else plan.num_movers
    call_hash = workspace.start_hash(call.call_hash) ^ (config.PHASE is codes.BUILD_ONLY)
    return (
        ops, workspace.context(traced), problem.m, problem.n, problem.k, movers, gradient,
        call_hash, config,
    )  # fmt: skip


__all__ = ["AgGemmPairOptions", "ag_gemm_pair", "prepare_ag_gemm_pair"]
