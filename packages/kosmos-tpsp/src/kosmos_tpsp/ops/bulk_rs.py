"""`bulk_rs`: reduce-scatter of an input gradient beside the weight gradient of the same layer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton.language as tl
from kosmos_core.device import layout as words
from kosmos_core.device import roles
from kosmos_core.device.gemm import NT
from kosmos_heuristics import BulkRsPlan, BulkRsProblem, plan_bulk_rs

from kosmos_tpsp import reference
from kosmos_tpsp.device import config as codes
from kosmos_tpsp.device.config import BulkRsConfig, GradientOperands
from kosmos_tpsp.kernels.bulk_rs import bulk_rs_kernel
from kosmos_tpsp.ops import mx, prepared, validate
from kosmos_tpsp.ops.gemm_rs import REDUCED_OF_ALL, REDUCED_OF_EACH
from kosmos_tpsp.ops.mx import Operand
from kosmos_tpsp.ops.outputs import put_gradient, take_outputs
from kosmos_tpsp.ops.prepared import POLICIES, Prepared
from kosmos_tpsp.workspaces import TpSpWorkspace

BULK_RS_TRANSPORTS = ("pull", "push")


@dataclass(frozen=True)
class BulkRsOptions:
    """What a caller may choose besides the operands; None leaves it to the plan.

    Attributes:
        cap: most workgroups to use.
        policy: "one_way", "two_way", "fixed" or "serial".
        transport: "pull", which only the workspace's handover can be, or "push"; None pulls what
            lies in the handover and pushes anything else.
        reducers_per_peer: crew size for each peer.
        split_k: parts of the contraction of every tile: 1, 2 or 4.
        traced: record role spans into the workspace's trace buffer.
        force: run fused although the plan would decline for speed.
    """

    cap: int | None = None
    policy: str = "one_way"
    transport: str | None = None
    reducers_per_peer: int | None = None
    split_k: int | None = None
    traced: bool = False
    force: bool = False


def bulk_rs(
    dx: torch.Tensor,
    dy: Operand,
    x: Operand,
    workspace: TpSpWorkspace,
    *,
    out: torch.Tensor | None = None,
    dw: torch.Tensor | None = None,
    main_grad: torch.Tensor | None = None,
    options: BulkRsOptions | None = None,
    **choices: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Sums an input gradient over ranks beside the weight gradient, in one launch.

    Backward of a column-parallel linear, once `bulk_ag` has made dx and gathered x.

    Args:
        dx: [k, n] bfloat16, this rank's part of the gradient of all k tokens; k is a multiple of
            the world size. In `workspace.handover(k, n)` it is read in place by the peers.
        dy: [k, m] bfloat16, the gradient of this rank's part of the output.
        x: [k, n] bfloat16, the gathered input. It and dy may be `MXTensor` quantised along their
            columns (the tokens), which takes a launch each to dequantise.
        workspace: of the group, with room for [k, n]; every rank makes the same calls on it in the
            same order.
        out: [k / world size, n] bfloat16 to write the sum into; allocated when None.
        dw: [m, n] bfloat16 to write the weight gradient into; allocated when None.
        main_grad: [m, n] float32 that the weight gradient is added to, instead of being returned.
        options: a prepared set of choices, instead of `choices`.
        **choices: fields of `BulkRsOptions`, when `options` is not given.

    Returns:
        (dx_shard [k / world size, n], dw [m, n]): this rank's rows of the sum, taken in FP32 with
        rank 0 first and rounded once; and dy.T @ x, rounded once. With `main_grad` dw is None: the
        FP32 sum is added there unrounded, but rounded to bfloat16 first where the call is declined.
        A call that is given up leaves NaN in its outputs, and in `main_grad` too: what was gathered
        there is lost, so zero it, or restore it, before the call is made again.

    Raises:
        ArgumentError: wrong type, dtype, device, shape or choice; the peers are told, as they are
            of any other error before the launch.
        WorkspaceError: the workspace is destroyed or too small.
        PeerError: an earlier call on the workspace was given up.

    Autograd: none, fused or declined alike: no result requires grad, whatever the operands do.

    Communication: reduce-scatter of dx, (world size - 1) * k / world size * n * 2 bytes out of each
    rank.
    Synchronizes: no host synchronisation; a declined call waits for its peers on the host.

    Source: paper, section 3.2.3.
    """
    validate.check_workspace(workspace)
    with prepared.TellingPeers(workspace, lambda: prepared.shown_call("bulk_rs", dx, dy, x)):
        options = prepared.chosen_options(BulkRsOptions, options, choices)
        dy, x = mx.values("dy", dy, "col"), mx.values("x", x, "col")
        adds = main_grad is not None
        call = _prepare(prepared.prepare, dx, dy, x, workspace, options, adds)
        problem = call.problem
        rows, m, n = problem.k // workspace.world.size, problem.m, problem.n
        given = {"dx": dx, "dy": dy, "x": x}
        out, gradient = take_outputs(out, (rows, n), dw, main_grad, (m, n), workspace, given)
        if call.decline is None:
            dx, dy, x = validate.dense(dx), validate.dense(dy), validate.dense(x)
    if rows == 0:
        workspace.pass_over()
        if not adds:
            gradient.zero_()
    elif call.decline is not None:
        workspace.agree(call.label, workspace.start_hash(call.call_hash))
        # As in the fused path, which records nothing either.
        with torch.no_grad():
            summed, product = reference.bulk_rs(dx, dy, x, workspace.world)
            out.copy_(summed)
            put_gradient(product, gradient, adds)
    else:
        launches = [
            _arguments(dx, dy, x, out, gradient, workspace, call, config, options.traced)
            for config in call.configs
        ]
        prepared.launch_all(bulk_rs_kernel, call, launches, workspace)
    return out, None if adds else gradient


def prepare_bulk_rs(
    workspace: TpSpWorkspace, m: int, n: int, k: int, options: BulkRsOptions, adds: bool = False
) -> None:
    """Collective: compiles and loads what a call of this shape needs, then ends in a barrier.

    Args:
        workspace: of the group.
        m: local width.
        n: hidden size.
        k: tokens.
        options: of the calls; without a transport, those of calls on the handover, where there is
            one.
        adds: whether the calls have a `main_grad`.
    """
    device = workspace.world.device
    main_grad = torch.zeros((m, n), dtype=torch.float32, device=device) if adds else None

    def call(dy: torch.Tensor, x: torch.Tensor, workspace: TpSpWorkspace, options: Any) -> None:
        pushed = options.transport == "push" or not workspace.hands_over
        dx = torch.zeros_like(x) if pushed else workspace.handover(k, n)
        bulk_rs(dx, dy, x, workspace, main_grad=main_grad, options=options)

    prepared.warm(call, ((k, m), (k, n)), workspace, options)


def describe_bulk_rs(
    dx: torch.Tensor,
    dy: Operand,
    x: Operand,
    workspace: TpSpWorkspace,
    options: BulkRsOptions,
    adds: bool = False,
) -> Prepared:
    """The plan and verdict of a call without making it.

    Raises:
        ArgumentError: as `bulk_rs`.
    """
    with prepared.raised_here():
        dy, x = mx.values("dy", dy, "col"), mx.values("x", x, "col")
    return _prepare(prepared.describe, dx, dy, x, workspace, options, adds)


def _prepare(
    how: Any,
    dx: torch.Tensor,
    dy: torch.Tensor,
    x: torch.Tensor,
    workspace: TpSpWorkspace,
    options: BulkRsOptions,
    adds: bool,
) -> Prepared:
    # None: it lies there, but not as what was handed over last.
    handed: bool | None = isinstance(dx, torch.Tensor) and workspace.is_handover(dx)
    if not handed and isinstance(dx, torch.Tensor) and workspace.in_handover(dx):
        handed = None
    call: Prepared = how(_plan, {"dx": dx, "dy": dy, "x": x}, workspace, options, handed, adds)
    return call


def _plan(
    dx: torch.Tensor,
    dy: torch.Tensor,
    x: torch.Tensor,
    workspace: TpSpWorkspace,
    options: BulkRsOptions,
    handed: bool | None,
    adds: bool,
) -> Prepared:
    if handed is None:
        raise validate.reject(
            validate.ARGUMENT,
            "dx: got memory of the handover that bulk_ag did not give last, or a view, wanted "
            "the tensor that the last bulk_ag returned; take dx_to='tensor' to keep one for longer",
        )
    validate.check_types(options, "reducers_per_peer")
    validate.check_choice("policy", options.policy, tuple(POLICIES))
    validate.check_choice("transport", options.transport, BULK_RS_TRANSPORTS, optional=True)
    validate.check_split_k(options.split_k)
    world = workspace.world
    m, n, k = _sizes(dx, dy, x, world.size)
    validate.check_room(workspace, k, n)
    elsewhere = k > 0 and not handed and world.size > 1 and world.fused
    if options.transport == "pull" and elsewhere:
        raise validate.reject(
            validate.ARGUMENT,
            "transport: got 'pull' for a dx of its own memory, wanted dx in workspace.handover(k, "
            "n), where the peers can read it; leave the transport to the call or take 'push'",
        )
    with prepared.refusals():
        problem = BulkRsProblem(m, n, k, world.size)
        make = partial(
            plan_bulk_rs, problem, workspace.machine,
            transport=options.transport or ("pull" if handed else "push"), policy=options.policy,
            reducers_per_peer=options.reducers_per_peer, split_k=options.split_k,
        )  # fmt: skip
        plan, judged = prepared.plan_and_judge(make, workspace, options.cap)
    label = f"bulk_rs m={m} n={n} k={k}"
    decline = prepared.decline_reason(problem, judged, workspace, options.force, label)
    call_hash = prepared.agreed_hash(
        "bulk_rs", problem, plan.transport, plan.unit_rows, workspace.machine.tile_row_rows,
        options.policy == "serial", decline is None,
    )  # fmt: skip
    configs = _configs(problem, plan, workspace, options, adds)
    keys = prepared.launch_keys(configs, plan, n, m, options.traced, workspace)
    return Prepared(problem, plan, decline, call_hash, configs, keys, label)


def _sizes(dx: torch.Tensor, dy: torch.Tensor, x: torch.Tensor, size: int) -> tuple[int, int, int]:
    """(m, n, k) of operands that fit together."""
    (k, n), m = dx.shape, dy.shape[1]
    for name, t, wanted in (("dy", dy, (k, m)), ("x", x, (k, n))):
        if t.shape != wanted:
            raise validate.reject(
                validate.SHAPE,
                f"{name}: got shape {tuple(t.shape)}, wanted {wanted}: the tokens and features of "
                f"dx {tuple(dx.shape)}",
            )
    if m == 0 or n == 0:
        raise validate.reject(
            validate.SIZE, f"features: got m = {m} and n = {n}, wanted positive sizes"
        )
    if k % size:
        raise validate.reject(
            validate.SHAPE,
            f"dx: got {k} rows, wanted a multiple of the {size} ranks; pad the tokens",
        )
    return m, n, k


def reduce_elements(world_size: int, unit: int) -> int:
    """Elements of each source that a mover adds up at once, of a unit of so many.

    A step's are in registers beside those of the next one.
    """
    of_all = REDUCED_OF_ALL // 2 >> (world_size - 1).bit_length()
    return min(REDUCED_OF_EACH, of_all, unit)


def _configs(
    problem: BulkRsProblem,
    plan: BulkRsPlan,
    workspace: TpSpWorkspace,
    options: BulkRsOptions,
    adds: bool,
) -> tuple[BulkRsConfig, ...]:
    constants = prepared.shared_constants(problem, plan)
    if problem.world_size == 1:
        # Nobody starts as a mover then, and somebody must copy the rows.
        constants["POLICY"] = roles.ONE_WAY
    splits = codes.gradient_splits(plan.block_n, adds, workspace.world.target)
    constants["STORE_SPLITS"] = tl.constexpr(splits)
    unit, tile_row_rows = plan.unit_rows * plan.unit_cols, workspace.machine.tile_row_rows
    fused = BulkRsConfig(
        **constants,
        LAYOUT=NT,
        PHASE=codes.FUSED,
        MAIN_GRAD=tl.constexpr(int(adds)),
        FORMAT=codes.BF16,
        COPIES=codes.ROWS,
        SCATTERS=tl.constexpr(1),
        SLICES=tl.constexpr(max(1, tile_row_rows // plan.unit_rows)),
        COPY_ELEMENTS=tl.constexpr(plan.copy_elements),
        COPY_DEPTH=tl.constexpr(plan.copy_depth),
        REDUCE_ELEMENTS=tl.constexpr(reduce_elements(problem.world_size, unit)),
        TILE_ROW_ROWS=tl.constexpr(tile_row_rows),
        GROUP_M=tl.constexpr(plan.group_m),
        EVEN_M=tl.constexpr(int(problem.m % plan.block_m == 0)),
    )
    if options.policy != "serial":
        return (fused,)
    return fused._replace(PHASE=codes.REDUCE_ONLY), fused._replace(PHASE=codes.BUILD_ONLY)


def _arguments(
    dx: torch.Tensor,
    dy: torch.Tensor,
    x: torch.Tensor,
    out: torch.Tensor,
    gradient: torch.Tensor,
    workspace: TpSpWorkspace,
    call: Prepared,
    config: BulkRsConfig,
    traced: bool,
) -> tuple[Any, ...]:
    """Arguments of one launch of `bulk_rs_kernel`."""
    plan, problem = call.plan, call.problem
    alone = workspace.world.size == 1
    landing = dx if alone else workspace.buffer(int(words.GATHER.value))
    ops = GradientOperands(dx, out, landing, dy, x, gradient, workspace.partials)
    # A launch that only builds, or only adds up, has all its workgroups do it; alone, whoever finds
    # no tile left copies.
    movers, most = {
        codes.FUSED: (plan.num_movers, plan.cap if alone else plan.max_movers),
        codes.BUILD_ONLY: (0, 0),
        codes.REDUCE_ONLY: (plan.cap, plan.cap),
    }[config.PHASE]
    call_hash = workspace.start_hash(call.call_hash) ^ (config.PHASE is codes.BUILD_ONLY)
    return (
        ops, workspace.context(traced), problem.m, problem.n, problem.k, movers, most,
        plan.split_tiles, call_hash, config,
    )  # fmt: skip


__all__ = ["BulkRsOptions", "bulk_rs", "describe_bulk_rs", "prepare_bulk_rs"]
