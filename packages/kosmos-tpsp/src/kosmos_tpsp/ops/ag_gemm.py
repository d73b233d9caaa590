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
from kosmos_tpsp.ops import prepared, validate
from kosmos_tpsp.ops.prepared import LAYOUTS, POLICIES, Prepared
from kosmos_tpsp.workspaces import TpSpWorkspace

ORDERS = {"local_first": 0, "chunk_major": 1, "naive": 2}


@dataclass(frozen=True)
class AgGemmOptions:
    """What a caller may choose besides the operands; None leaves it to the plan.

    Attributes:
        layout: "tn" or "nn".
        keep_gathered: also return the gathered input; None keeps it for "nn".
        cap: most workgroups to use.
        policy: "one_way", "two_way", "fixed" or "serial".
        order: "local_first", "chunk_major" or "naive".
        transport: "pull" or "push".
        movers_per_peer: crew size for each peer.
        split_k: parts of the contraction of every tile: 1, 2, 4 or 8.
        traced: record role spans into the workspace's trace buffer.
        force: run fused although the plan would decline for speed.
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

    @property
    def keeps_gathered(self) -> bool:
        """Whether the gathered input is returned, too."""
        return self.layout == "nn" if self.keep_gathered is None else self.keep_gathered


def ag_gemm(
    x: torch.Tensor,
    w: torch.Tensor,
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
        out [m, n]; with the gathered input kept, (out, gathered [m, k]).

    Raises:
        ArgumentError: wrong type, dtype, device, shape or choice; the peers are told, as they are
            of any other error before the launch.
        WorkspaceError: the workspace is destroyed or too small.
        PeerError: an earlier call on the workspace was given up.

    Autograd: none, fused or declined alike: no result requires grad, whatever x and w do.

    Communication: all-gather of x, (world size - 1) * chunk_rows * k * 2 bytes into each rank.
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
            validate.check_out("out", out, (m, n), x.device, {"x": x, "w": w})
        kept = None
        if call.decline is None or m == 0:
            x, w = validate.dense(x), validate.dense(w)
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
            _arguments(x, w, out, kept, workspace, call, config, options.traced)
            for config in call.configs
        ]
        prepared.launch_all(ag_gemm_kernel, call, launches, workspace)
    return (out, kept) if kept is not None else out


def prepare_ag_gemm(
    workspace: TpSpWorkspace, chunk_rows: int, n: int, k: int, options: AgGemmOptions
) -> None:
    """Collective: compiles and loads what a call of this shape needs, then ends in a barrier."""
    w_shape = (n, k) if options.layout == "tn" else (k, n)
    prepared.warm(ag_gemm, ((chunk_rows, k), w_shape), workspace, options)


def describe_call(
    x: torch.Tensor, w: torch.Tensor, workspace: TpSpWorkspace, options: AgGemmOptions
) -> Prepared:
    """The plan and verdict of a call without making it.

    Raises:
        ArgumentError: as `ag_gemm`.
    """
    return prepared.describe(_plan, {"x": x, "w": w}, workspace, options)


def _plan(
    x: torch.Tensor, w: torch.Tensor, workspace: TpSpWorkspace, options: AgGemmOptions
) -> Prepared:
    validate.check_flag("keep_gathered", options.keep_gathered, optional=True)
    validate.check_types(options, "movers_per_peer")
    validate.check_choice("layout", options.layout, tuple(LAYOUTS))
    validate.check_choice("policy", options.policy, tuple(POLICIES))
    validate.check_choice("order", options.order, tuple(ORDERS))
    validate.check_choice("transport", options.transport, workspace.transports, optional=True)
    validate.check_split_k(options.split_k)
    world = workspace.world
    n, k = prepared.features(x, w, options.layout)
    m = x.shape[0] * world.size
    validate.check_room(workspace, m, k)
    with prepared.refusals():
        problem = AgGemmProblem(
            m, n, k, world.size, options.layout, keep_gathered=options.keeps_gathered
        )
        make = partial(
            plan_ag_gemm, problem, workspace.machine,
            transport=prepared.transport_of(workspace, options), policy=options.policy,
            order=options.order, movers_per_peer=options.movers_per_peer, split_k=options.split_k,
        )  # fmt: skip
        plan, judged = prepared.plan_and_judge(make, workspace, options.cap)
    label = f"ag_gemm {options.layout} m={m} n={n} k={k}"
    decline = prepared.decline_reason(problem, judged, workspace, options.force, label)
    call_hash = prepared.agreed_hash(
        "ag_gemm", problem, plan.transport, plan.slices, plan.tile_row_rows,
        options.policy == "serial", decline is None,
    )  # fmt: skip
    configs = _configs(problem, plan, options)
    keys = prepared.launch_keys(configs, plan, n, k, options.traced, workspace)
    return Prepared(problem, plan, decline, call_hash, configs, keys, label)


def _configs(
    problem: AgGemmProblem, plan: AgGemmPlan, options: AgGemmOptions
) -> tuple[AgGemmConfig, ...]:
    fused = AgGemmConfig(
        **prepared.shared_constants(problem, plan),
        LAYOUT=tl.constexpr(LAYOUTS[options.layout]),
        ORDER=tl.constexpr(ORDERS[plan.order]),
        PHASE=codes.FUSED,
        KEEP_GATHERED=tl.constexpr(int(problem.keeps_gathered)),
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


def _arguments(
    x: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor,
    kept: torch.Tensor | None,
    workspace: TpSpWorkspace,
    call: Prepared,
    config: AgGemmConfig,
    traced: bool,
) -> tuple[Any, ...]:
    """Arguments of one launch of `ag_gemm_kernel`."""
    plan, problem = call.plan, call.problem
    gathered = workspace.buffer(int(words.GATHER.value)) if workspace.world.size > 1 else x
    if kept is not None and plan.transport == "pull":
        gathered = kept
    ops = Operands(
        x, w, out, gathered, gathered if kept is None else kept,
        workspace.partials,
    )  # fmt: skip
    # A launch that only gathers has no use for builders.
    movers = plan.cap if config.PHASE is codes.GATHER_ONLY else plan.num_movers
    call_hash = workspace.start_hash(call.call_hash) ^ (config.PHASE is codes.BUILD_ONLY)
    return (
        ops, workspace.context(traced), problem.m, problem.n, problem.k, movers, plan.split_tiles,
        call_hash, config,
    )  # fmt: skip


__all__ = ["AgGemmOptions", "Prepared", "ag_gemm", "describe_call", "prepare_ag_gemm"]
