"""`ag_gemm`: all-gather of a sequence-sharded activation fused with its column-parallel GEMM."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton.language as tl
from kosmos_core.device import layout as words
from kosmos_heuristics import AgGemmPlan, AgGemmProblem, plan_ag_gemm

from kosmos_tpsp import reference
from kosmos_tpsp.device import config as codes
from kosmos_tpsp.device.config import AgGemmConfig, Operands
from kosmos_tpsp.kernels.ag_gemm import ag_gemm_kernel
from kosmos_tpsp.ops import mx, prepared, validate
from kosmos_tpsp.ops.mx import Operand
from kosmos_tpsp.ops.prepared import LAYOUTS, POLICIES, Prepared
from kosmos_tpsp.workspaces import TpSpWorkspace

ORDERS = {"local_first": 0, "chunk_major": 1, "naive": 2}


@dataclass(frozen=True)
class AgGemmOptions:
    """What a caller may choose besides the operands; None leaves it to the plan.

    Attributes:
        layout: "tn" or "nn".
        keep_gathered: also return the gathered input; None keeps it for "nn" in bf16. One in MXFP8
            can be kept where it is dequantised on arrival.
        cap: most workgroups to use.
        policy: "one_way", "two_way", "fixed" or "serial".
        order: "local_first", "chunk_major" or "naive".
        transport: "pull" or "push".
        movers_per_peer: crew size for each peer.
        split_k: parts of the contraction of every tile: 1, 2 or 4.
        traced: record role spans into the workspace's trace buffer.
        force: run fused although the plan would decline for speed.
        block_scaled: MXFP8 operands: whether the matrix units apply the scales, or rows are
            dequantised on arrival. None takes what the device has.
    """

    layout: str = "tn"
    keep_gathered: bool | None = None
    cap: int | None = None
    policy: str = "one_way"
    order: str = "local_first"
    transport: str | None = None
    movers_per_peer: int | None = None
    split_k: int | None = None
    traced: bool = False
    force: bool = False
    block_scaled: bool | None = None

    @property
    def keeps_gathered(self) -> bool:
        """Whether a gathered bf16 input is returned, too; one in MXFP8 only if asked for."""
        return self.layout == "nn" if self.keep_gathered is None else self.keep_gathered


def ag_gemm(
    x: Operand,
    w: Operand,
    workspace: TpSpWorkspace,
    *,
    out: torch.Tensor | None = None,
    options: AgGemmOptions | None = None,
    **choices: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Gathers every rank's rows and multiplies them by this rank's weights, in one launch.

    Args:
        x: [chunk_rows, k] bfloat16, this rank's contiguous chunk of the m = chunk_rows * world
            size rows.
        w: [n, k] bfloat16 (layout "tn": out = gathered @ w.T) or [k, n] ("nn": out = gathered @ w).
        workspace: of the group; every rank makes the same calls on it in the same order.
        out: [m, n] bfloat16 to write into, apart from x and w; allocated when None.
        options: a prepared set of choices, instead of `choices`.
        **choices: fields of `AgGemmOptions`, when `options` is not given.

    Returns:
        out [m, n]; with the gathered input kept, (out, gathered [m, k]). An MXFP8 input is kept
        only where that is asked for, dequantised: the weight gradient reads a column-wise copy.

    Raises:
        ArgumentError: wrong type, dtype, device, shape or choice; the peers are told, as they are
            of any other error before the launch.
        WorkspaceError: the workspace is destroyed or too small.
        PeerError: an earlier call on the workspace was given up.

    Autograd: none, fused or declined alike: no result requires grad, whatever x and w do.

    Communication: all-gather of x, (world size - 1) * chunk_rows * k * 2 bytes into each rank; in
    MXFP8 33/32 bytes an element, k padded to 32.
    Synchronizes: no host synchronisation; a declined call waits for its peers on the host.

    Source: paper, section 3.2.1.
    """
    validate.check_workspace(workspace)
    with prepared.TellingPeers(workspace, lambda: prepared.shown_call("ag_gemm", x, w)):
        options = prepared.chosen_options(AgGemmOptions, options, choices)
        call = prepared.prepare(_plan, {"x": x, "w": w}, workspace, options)
        m, n, k = call.problem.m, call.problem.n, call.problem.k
        if out is None:
            out = torch.empty((m, n), dtype=torch.bfloat16, device=x.device)
        else:
            validate.check_out("out", out, (m, n), workspace, {"x": x, "w": w})
        kept = None
        if call.decline is None or m == 0:
            inputs = _inputs(x, w, call.configs[0])
            if call.problem.keeps_gathered:
                kept = torch.empty((m, k), dtype=torch.bfloat16, device=x.device)
    if m == 0:
        workspace.pass_over()
    elif call.decline is not None:
        workspace.agree(call.label, workspace.start_hash(call.call_hash))
        # As in the fused path, which records nothing either.
        with torch.no_grad():
            product, gathered = reference.ag_gemm(x, w, workspace.world, options.layout)
            out.copy_(product)
        kept = gathered if call.problem.keeps_gathered else None
    else:
        launches = [
            _arguments(inputs, out, kept, workspace, call, config, options.traced)
            for config in call.configs
        ]
        prepared.launch_all(ag_gemm_kernel, call, launches, workspace)
    if kept is None:
        return out
    # In MXFP8 its rows may have been padded to whole groups.
    return out, kept if kept.shape[1] == x.shape[1] else kept[:, : x.shape[1]]


def prepare_ag_gemm(
    workspace: TpSpWorkspace, chunk_rows: int, n: int, k: int, options: AgGemmOptions
) -> None:
    """Collective: compiles and loads what a bf16 call of this shape needs; ends in a barrier."""
    w_shape = (n, k) if options.layout == "tn" else (k, n)
    prepared.warm(ag_gemm, ((chunk_rows, k), w_shape), workspace, options)


def describe_call(
    x: Operand, w: Operand, workspace: TpSpWorkspace, options: AgGemmOptions
) -> Prepared:
    """The plan and verdict of a call without making it.

    Raises:
        ArgumentError: as `ag_gemm`.
    """
    return prepared.describe(_plan, {"x": x, "w": w}, workspace, options)


def _plan(x: Operand, w: Operand, workspace: TpSpWorkspace, options: AgGemmOptions) -> Prepared:
    validate.check_flag("keep_gathered", options.keep_gathered, optional=True)
    validate.check_types(options, "movers_per_peer")
    validate.check_choice("layout", options.layout, tuple(LAYOUTS))
    validate.check_choice("policy", options.policy, tuple(POLICIES))
    validate.check_choice("order", options.order, tuple(ORDERS))
    validate.check_choice("transport", options.transport, workspace.transports, optional=True)
    validate.check_split_k(options.split_k)
    world = workspace.world
    validate.check_flag("block_scaled", options.block_scaled, optional=True)
    form = mx.format_of(x, workspace, options.block_scaled)
    layout, dtype, keeps = options.layout, "bf16", options.keeps_gathered
    if form is codes.BF16 and not mx.is_mx(w):
        n, k = prepared.features(x, w, layout)
    else:
        n, k, layout = mx.features(x, w, layout, form)
        dtype, keeps = "mxfp8", bool(options.keep_gathered)
        if keeps and form is codes.SCALED:
            raise validate.reject(
                validate.ARGUMENT,
                "keep_gathered: got True for MXFP8 that is multiplied as it is, wanted False: the "
                "weight gradient reads the column-wise copy; gather that one",
            )
    m = x.shape[0] * world.size
    validate.check_room(workspace, m, k)
    with prepared.refusals():
        problem = AgGemmProblem(m, n, k, world.size, options.layout, dtype, keep_gathered=keeps)
        make = partial(
            plan_ag_gemm, problem, workspace.machine,
            transport=prepared.transport_of(workspace, options), policy=options.policy,
            order=options.order, movers_per_peer=options.movers_per_peer, split_k=options.split_k,
            **mx.tile_fields(form, layout, workspace),
        )  # fmt: skip
        plan, judged = prepared.plan_and_judge(make, workspace, options.cap)
        if form is codes.UNPACKED and not keeps and (plan.transport == "push" or world.size == 1):
            workspace.reserve_unpacked()
    precision = "" if form is codes.BF16 else " mxfp8"
    label = f"ag_gemm {options.layout}{precision} m={m} n={n} k={k}"
    decline = prepared.decline_reason(problem, judged, workspace, options.force, label)
    call_hash = prepared.agreed_hash(
        "ag_gemm", problem, plan.transport, plan.slices, plan.tile_row_rows,
        options.policy == "serial", decline is None, form.value,
        x.shape[1],
    )  # fmt: skip
    configs = _configs(problem, plan, options, form, layout)
    keys = prepared.launch_keys(configs, plan, n, k, options.traced, workspace)
    return Prepared(problem, plan, decline, call_hash, configs, keys, label)


def _configs(
    problem: AgGemmProblem, plan: AgGemmPlan, options: AgGemmOptions, form: Any, layout: str
) -> tuple[AgGemmConfig, ...]:
    fused = AgGemmConfig(
        **prepared.shared_constants(problem, plan),
        FORMAT=form,
        COPIES=codes.ROWS,
        ROW_SHIFT=tl.constexpr(prepared.row_shift(problem)),
        LAYOUT=tl.constexpr(LAYOUTS[layout]),
        ORDER=tl.constexpr(ORDERS[plan.order]),
        PHASE=codes.FUSED,
        # What is dequantised lies in the output at once: nothing is left to complete.
        KEEP_GATHERED=tl.constexpr(int(problem.keeps_gathered and form is codes.BF16)),
        SCATTERS=tl.constexpr(0),
        SLICES=tl.constexpr(plan.slices),
        COPY_ELEMENTS=tl.constexpr(plan.copy_elements),
        COPY_DEPTH=tl.constexpr(plan.copy_depth),
        TILE_ROW_ROWS=tl.constexpr(plan.tile_row_rows),
        GROUP_M=tl.constexpr(plan.group_m),
        GROUP_ROWS=tl.constexpr(plan.group_rows),
    )
    if options.policy != "serial":
        return (fused,)
    return fused._replace(PHASE=codes.GATHER_ONLY), fused._replace(PHASE=codes.BUILD_ONLY)


def _inputs(
    x: Any, w: Any, config: AgGemmConfig
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x, its scales, w, its scales) as the kernel takes them; x or w stand for scales not used."""
    if config.FORMAT is codes.BF16:
        x, w = validate.dense(x), validate.dense(w)
        return x, x, w, w
    elements, scales = mx.as_stored(x)
    if config.FORMAT is codes.UNPACKED:
        w = validate.dense(mx.as_operand(w, scaled=False))
        return elements, scales, w, w
    # [n, k] where the contraction lies together, whatever the layout is called.
    turned = config.LAYOUT.value == LAYOUTS["tn"] and w.axis == "col"
    return elements, scales, *mx.as_stored(w, turned)


def _arguments(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    kept: torch.Tensor | None,
    workspace: TpSpWorkspace,
    call: Prepared,
    config: AgGemmConfig,
    traced: bool,
) -> tuple[Any, ...]:
    """Arguments of one launch of `ag_gemm_kernel`."""
    plan, problem = call.plan, call.problem
    gathered = _gathered(inputs[0], kept, workspace, plan, config)
    ops = Operands(*inputs, out, gathered, gathered if kept is None else kept, workspace.partials)
    # A launch that only gathers has no use for builders.
    movers = plan.cap if config.PHASE is codes.GATHER_ONLY else plan.num_movers
    call_hash = workspace.start_hash(call.call_hash) ^ (config.PHASE is codes.BUILD_ONLY)
    return (
        ops, workspace.context(traced), problem.m, problem.n, problem.k, movers, plan.split_tiles,
        call_hash, config,
    )  # fmt: skip


def _gathered(
    x: torch.Tensor,
    kept: torch.Tensor | None,
    workspace: TpSpWorkspace,
    plan: AgGemmPlan,
    config: AgGemmConfig,
) -> torch.Tensor:
    """Where builders read gathered rows."""
    alone, pulls = workspace.world.size == 1, plan.transport == "pull"
    dequantises = config.FORMAT is codes.UNPACKED
    if kept is not None and (pulls or dequantises):
        return kept
    if dequantises and (alone or not pulls):
        return workspace.unpacked()
    if alone:
        return x
    region = workspace.buffer(int(words.GATHER.value))
    return region.view(torch.uint8) if config.FORMAT is codes.SCALED else region


__all__ = ["AgGemmOptions", "Prepared", "ag_gemm", "describe_call", "prepare_ag_gemm"]
