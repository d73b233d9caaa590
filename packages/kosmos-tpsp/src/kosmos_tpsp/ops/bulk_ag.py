"""`bulk_ag`: an all-gather beside the data gradient of a column-parallel linear layer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton.language as tl
from kosmos_core.device import layout as words
from kosmos_heuristics import BulkAgPlan, BulkAgProblem, plan_bulk_ag

from kosmos_tpsp import reference
from kosmos_tpsp.device import config as codes
from kosmos_tpsp.device.config import BulkAgConfig, BulkAgOperands
from kosmos_tpsp.kernels.bulk_ag import bulk_ag_kernel
from kosmos_tpsp.ops import mx, prepared, validate
from kosmos_tpsp.ops.mx import Operand
from kosmos_tpsp.ops.prepared import LAYOUTS, POLICIES, Prepared
from kosmos_tpsp.workspaces import TpSpWorkspace

LAYOUT = "nn"
HANDOVER, TENSOR = "handover", "tensor"


@dataclass(frozen=True)
class BulkAgOptions:
    """What a caller may choose besides the operands; None leaves it to the plan.

    Attributes:
        dx_to: "handover": dx is a view of the workspace, for `bulk_rs` to reduce without a copy;
            "tensor": dx is an ordinary tensor; None takes the first where the workspace can.
        cap: most workgroups to use.
        policy: "one_way", "two_way", "fixed" or "serial".
        transport: "pull" or "push".
        movers_per_peer: crew size for each peer.
        split_k: parts of the contraction of every tile: 1, 2 or 4.
        traced: record role spans into the workspace's trace buffer.
        force: run fused although the plan would decline for speed.
    """

    dx_to: str | None = None
    cap: int | None = None
    policy: str = "one_way"
    transport: str | None = None
    movers_per_peer: int | None = None
    split_k: int | None = None
    traced: bool = False
    force: bool = False


def bulk_ag(
    x: Operand,
    dy: Operand,
    w: Operand,
    workspace: TpSpWorkspace,
    *,
    gathered: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    options: BulkAgOptions | None = None,
    **choices: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gathers every rank's rows of x while it multiplies dy by this rank's weights, in one launch.

    Args:
        x: [m / world size, n] bfloat16, this rank's chunk of the input of a column-parallel layer;
            n is its hidden size. Or an `MXTensor` quantised along its columns (the tokens), with
            whole groups on every rank: then MXFP8 crosses the link, and what is gathered is
            dequantised on arrival.
        dy: [m, k] bfloat16, gradient of the layer's local output; k is its local width.
        w: [k, n] bfloat16, the layer's local weights. Beside an MXFP8 x, dy and w may be `MXTensor`
            quantised along k, which takes a launch each to dequantise, or such matrices' bfloat16
            values.
        workspace: of the group, with room for [m, n]; every rank makes the same calls on it in the
            same order.
        gathered: [m, n] bfloat16 to gather into, apart from the operands; allocated when None.
        out: [m, n] bfloat16 to write dx into, apart from the operands; only with dx_to="tensor".
        options: a prepared set of choices, instead of `choices`.
        **choices: fields of `BulkAgOptions`, when `options` is not given.

    Returns:
        (gathered [m, n], dx = dy @ w [m, n]). Handed over (`BulkAgOptions.dx_to`), dx is a view of
        the workspace's memory that the next `bulk_ag` on it overwrites; a call that is declined, or
        has no peers, gives an ordinary tensor all the same. Read a dx handed over, but do not write
        to it once `bulk_rs` has been called on it: peers read it in place, some of them perhaps
        after this rank's call is over; what a later call on the workspace writes waits for them.
        An aborted call leaves NaN wherever rows are missing, but in a dx handed over it may leave
        what was there.

    Raises:
        ArgumentError: wrong type, dtype, device, shape or choice; the peers are told, as they are
            of any other error before the launch.
        WorkspaceError: the workspace is destroyed, too small, or has no handover region where one
            is asked for.
        PeerError: an earlier call on the workspace was given up.

    Autograd: none, fused or declined alike: no result requires grad, whatever the operands do.

    Communication: all-gather of x, (world size - 1) * m / world size * n * 2 bytes into each rank;
    in MXFP8 33/32 bytes an element.
    Synchronizes: no host synchronisation; a declined call waits for its peers on the host.

    Source: paper, section 3.2.3.
    """
    validate.check_workspace(workspace)
    with prepared.TellingPeers(workspace, lambda: prepared.shown_call("bulk_ag", x, dy, w)):
        options = prepared.chosen_options(BulkAgOptions, options, choices)
        dy, w = mx.values_beside("dy", dy, "row", x), mx.values_beside("w", w, "col", x)
        given: dict[str, Any] = {"x": x, "dy": dy, "w": w}
        call = prepared.prepare(_plan, given, workspace, options)
        shape = (call.problem.m, call.problem.n)
        fused = call.decline is None and call.problem.m > 0
        if fused:
            rows, scales = mx.dense_rows(x)
            dy, w = validate.dense(dy), validate.dense(w)
        gathered = _memory("gathered", gathered, shape, given, workspace)
        if out is not None and options.dx_to != TENSOR:
            raise validate.reject(
                validate.ARGUMENT,
                f"out: got a tensor with dx_to={options.dx_to!r}, wanted none; use dx_to='tensor'",
            )
        given["gathered"] = gathered
        if fused and out is None and _hands_over(workspace, options):
            out = workspace.handover(*shape)
            # What is not dense has been copied by now.
            for name, t in {"x": rows, "dy": dy, "w": w, "gathered": gathered}.items():
                if validate.overlap(out, t):
                    raise validate.reject(
                        validate.ARGUMENT,
                        f"{name}: got memory of the workspace's handover, where this call leaves "
                        f"dx, wanted other memory; clone {name}, or use dx_to='tensor'",
                    )
        else:
            out = _memory("out", out, shape, given, workspace)
    if call.problem.m == 0:
        workspace.pass_over()
    elif call.decline is not None:
        workspace.agree(call.label, workspace.start_hash(call.call_hash))
        # As in the fused path, which records nothing either.
        with torch.no_grad():
            every, product = reference.bulk_ag(x, dy, w, workspace.world)
            gathered.copy_(every)
            out.copy_(product)
    else:
        launches = [
            _arguments(
                (rows, scales, dy, w, out), gathered, workspace, call, config, options.traced
            )
            for config in call.configs
        ]
        prepared.launch_all(bulk_ag_kernel, call, launches, workspace)
    return gathered, out


def prepare_bulk_ag(
    workspace: TpSpWorkspace, m: int, n: int, k: int, options: BulkAgOptions
) -> None:
    """Collective: compiles and loads what a call of this shape needs, then ends in a barrier."""
    shapes = ((m // workspace.world.size, n), (m, k), (k, n))
    prepared.warm(bulk_ag, shapes, workspace, options)


def describe_bulk_ag(
    x: Operand,
    dy: Operand,
    w: Operand,
    workspace: TpSpWorkspace,
    options: BulkAgOptions,
) -> Prepared:
    """The plan and verdict of a call without making it.

    Raises:
        ArgumentError: as `bulk_ag`.
    """
    with prepared.raised_here():
        dy, w = mx.values_beside("dy", dy, "row", x), mx.values_beside("w", w, "col", x)
    return prepared.describe(_plan, {"x": x, "dy": dy, "w": w}, workspace, options)


def _memory(
    name: str,
    t: torch.Tensor | None,
    shape: tuple[int, int],
    given: dict[str, Any],
    workspace: TpSpWorkspace,
) -> torch.Tensor:
    """Memory for an output: the caller's, if it may be written to, or new."""
    if t is None:
        return torch.empty(shape, dtype=torch.bfloat16, device=given["x"].device)
    validate.check_out(name, t, shape, workspace, given)
    return t


def _hands_over(workspace: TpSpWorkspace, options: BulkAgOptions) -> bool:
    return options.dx_to != TENSOR and workspace.hands_over


def _plan(
    x: Operand,
    dy: Operand,
    w: Operand,
    workspace: TpSpWorkspace,
    options: BulkAgOptions,
) -> Prepared:
    validate.check_types(options, "movers_per_peer")
    validate.check_choice("dx_to", options.dx_to, (HANDOVER, TENSOR), optional=True)
    validate.check_choice("policy", options.policy, tuple(POLICIES))
    validate.check_choice("transport", options.transport, workspace.transports, optional=True)
    validate.check_split_k(options.split_k)
    world = workspace.world
    n, k = prepared.features(dy, w, LAYOUT, "dy")
    m = x.shape[0] * world.size
    if dy.shape[0] != m:
        raise validate.reject(
            validate.SHAPE,
            f"dy: got {dy.shape[0]} rows, wanted the {m} of x {tuple(x.shape)} on each of "
            f"{world.size} ranks",
        )
    if x.shape[1] != n:
        raise validate.reject(
            validate.SHAPE,
            f"x: got shape {tuple(x.shape)}, wanted the {n} columns of w {tuple(w.shape)}",
        )
    validate.check_room(workspace, m, n)
    form, dtype = codes.BF16, "bf16"
    if mx.is_mx(x):
        mx.check_axis("x", x, "col", contracted=False)
        if x.shape[0] != x.data.shape[0]:
            raise validate.reject(
                validate.SHAPE,
                f"x: got {x.shape[0]} rows on each rank, wanted a multiple of 32: groups lie along "
                "them; gather it in bf16",
            )
        form, dtype = codes.UNPACKED, "mxfp8"
    if options.dx_to == HANDOVER and world.fused and world.size > 1:
        with prepared.refusals():
            workspace.handover(m, n)
    with prepared.refusals():
        problem = BulkAgProblem(m, n, k, world.size, dtype=dtype)
        make = partial(
            plan_bulk_ag, problem, workspace.machine,
            transport=prepared.transport_of(workspace, options), policy=options.policy,
            movers_per_peer=options.movers_per_peer, split_k=options.split_k,
        )  # fmt: skip
        plan, judged = prepared.plan_and_judge(make, workspace, options.cap)
    label = f"bulk_ag {LAYOUT}{'' if form is codes.BF16 else ' mxfp8'} m={m} n={n} k={k}"
    decline = prepared.decline_reason(problem, judged, workspace, options.force, label)
    # Whole groups of rows arrive together.
    tile_row_rows = max(workspace.machine.tile_row_rows, plan.unit_rows)
    call_hash = prepared.agreed_hash(
        "bulk_ag", problem, plan.transport, plan.unit_rows, tile_row_rows,
        options.policy == "serial", decline is None,
    )  # fmt: skip
    configs = _configs(problem, plan, tile_row_rows, _hands_over(workspace, options), options, form)
    keys = prepared.launch_keys(configs, plan, n, k, options.traced, workspace)
    return Prepared(problem, plan, decline, call_hash, configs, keys, label)


def _configs(
    problem: BulkAgProblem,
    plan: BulkAgPlan,
    tile_row_rows: int,
    hands_over: bool,
    options: BulkAgOptions,
    form: Any,
) -> tuple[BulkAgConfig, ...]:
    fused = BulkAgConfig(
        **prepared.shared_constants(problem, plan),
        LAYOUT=tl.constexpr(LAYOUTS[LAYOUT]),
        PHASE=codes.FUSED,
        HANDOVER=tl.constexpr(int(hands_over)),
        FORMAT=form,
        COPIES=codes.ROWS if form is codes.BF16 else codes.COLUMNS,
        SCATTERS=tl.constexpr(0),
        SLICES=tl.constexpr(max(1, tile_row_rows // plan.unit_rows)),
        COPY_ELEMENTS=tl.constexpr(plan.copy_elements),
        COPY_DEPTH=tl.constexpr(plan.copy_depth),
        TILE_ROW_ROWS=tl.constexpr(tile_row_rows),
        GROUP_M=tl.constexpr(plan.group_m),
    )
    if options.policy != "serial":
        return (fused,)
    return fused._replace(PHASE=codes.GATHER_ONLY), fused._replace(PHASE=codes.BUILD_ONLY)


def _arguments(
    matrices: tuple[torch.Tensor, ...],
    gathered: torch.Tensor,
    workspace: TpSpWorkspace,
    call: Prepared,
    config: BulkAgConfig,
    traced: bool,
) -> tuple[Any, ...]:
    """Arguments of one launch of `bulk_ag_kernel`; `matrices`: x, its scales, dy, w, dx."""
    plan, problem = call.plan, call.problem
    # What is dequantised on arrival goes to its place at once, whoever brings it.
    pushed = plan.transport == "push" and workspace.world.size > 1 and config.FORMAT is codes.BF16
    landing = workspace.buffer(int(words.GATHER.value)) if pushed else gathered
    x, x_scales, dy, w, out = matrices
    ops = BulkAgOperands(x, x_scales, dy, w, out, landing, gathered, workspace.partials)
    # A launch that only gathers has no use for builders.
    movers = plan.cap if config.PHASE is codes.GATHER_ONLY else plan.num_movers
    call_hash = workspace.start_hash(call.call_hash) ^ (config.PHASE is codes.BUILD_ONLY)
    return (
        ops, workspace.context(traced), problem.m, problem.n, problem.k, movers, plan.split_tiles,
        call_hash, config,
    )  # fmt: skip


__all__ = ["BulkAgOptions", "bulk_ag", "describe_bulk_ag", "prepare_bulk_ag"]
