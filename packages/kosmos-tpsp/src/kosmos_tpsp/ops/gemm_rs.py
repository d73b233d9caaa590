"""`gemm_rs`: a row-parallel GEMM fused with the reduce-scatter of its output."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton.language as tl
from kosmos_core.device import layout as words
from kosmos_heuristics import GemmRsPlan, GemmRsProblem, plan_gemm_rs

from kosmos_tpsp import reference
from kosmos_tpsp.device import config as codes
from kosmos_tpsp.device.config import GemmRsConfig, ScatterOperands
from kosmos_tpsp.kernels.gemm_rs import gemm_rs_kernel
from kosmos_tpsp.ops import mx, prepared, validate
from kosmos_tpsp.ops.mx import Operand
from kosmos_tpsp.ops.prepared import LAYOUTS, POLICIES, Prepared
from kosmos_tpsp.workspaces import TpSpWorkspace

LAYOUT = "tn"
ORDERS = {"band_major": 0, "row_major": 1}
GEMM_RS_TRANSPORTS = ("pull", "push")
# Elements that a mover adds up at once: of each source, and of all; more would spill registers.
REDUCED_OF_EACH = 8192
REDUCED_OF_ALL = 32768


@dataclass(frozen=True)
class GemmRsOptions:
    """What a caller may choose besides the operands; None leaves it to the plan.

    Attributes:
        cap: most workgroups to use.
        policy: "one_way", "two_way", "fixed" or "serial".
        order: "band_major" or "row_major".
        transport: "pull" or "push".
        reducers_per_peer: crew size for each peer.
        split_k: parts of the contraction of every tile: 1, 2 or 4.
        traced: record role spans into the workspace's trace buffer.
        force: run fused although the plan would decline for speed.
    """

    cap: int | None = None
    policy: str = "one_way"
    order: str = "band_major"
    transport: str | None = None
    reducers_per_peer: int | None = None
    split_k: int | None = None
    traced: bool = False
    force: bool = False


def most_reduced(world_size: int, source_unroll: int, pulls: bool) -> int:
    """Elements of each source that a mover adds up at once, a power of two.

    Pushed, it loads all sources at once; pulled, `source_unroll`, and where those are all there is
    no sum beside them yet.
    """
    if not pulls:
        return min(REDUCED_OF_EACH, REDUCED_OF_ALL >> (world_size - 1).bit_length())
    return 2 * REDUCED_OF_EACH if world_size <= source_unroll <= 2 else REDUCED_OF_EACH


def gemm_rs(
    x: Operand,
    w: Operand,
    workspace: TpSpWorkspace,
    *,
    out: torch.Tensor | None = None,
    options: GemmRsOptions | None = None,
    **choices: Any,
) -> torch.Tensor:
    """Multiplies by this rank's weights and sums over ranks the rows that each rank owns.

    Args:
        x: [m, k] bfloat16, all m tokens with this rank's part of the features; m is a multiple of
            the world size.
        w: [n, k] bfloat16; the products are x @ w.T. Either may be an `MXTensor` quantised along
            its rows, which takes a launch to dequantise; its product crosses ranks in bfloat16.
        workspace: of the group, with room for [m, n]; every rank makes the same calls on it in the
            same order.
        out: [m / world size, n] bfloat16 to write into, apart from x and w; allocated when None.
        options: a prepared set of choices, instead of `choices`.
        **choices: fields of `GemmRsOptions`, when `options` is not given.

    Returns:
        out [m / world size, n]: this rank's chunk of the rows, in rank order. Each product is
        rounded once to bfloat16; they are summed in FP32, rank 0 first, and rounded once more.

    Raises:
        ArgumentError: wrong type, dtype, device, shape or choice; the peers are told, as they are
            of any other error before the launch.
        WorkspaceError: the workspace is destroyed or too small.
        PeerError: an earlier call on the workspace was given up.

    Autograd: none, fused or declined alike: no result requires grad, whatever x and w do.

    Communication: reduce-scatter of [m, n], (world size - 1) * m / world size * n * 2 bytes out of
    each rank.
    Synchronizes: no host synchronisation; a declined call waits for its peers on the host.

    Source: paper, section 3.2.2.
    """
    validate.check_workspace(workspace)
    with prepared.TellingPeers(workspace, lambda: prepared.shown_call("gemm_rs", x, w)):
        options = prepared.chosen_options(GemmRsOptions, options, choices)
        x, w = mx.values("x", x, "row"), mx.values("w", w, "row")
        call = prepared.prepare(_plan, {"x": x, "w": w}, workspace, options)
        rows, n = x.shape[0] // workspace.world.size, call.problem.n
        if out is None:
            out = torch.empty((rows, n), dtype=torch.bfloat16, device=x.device)
        else:
            validate.check_out("out", out, (rows, n), workspace, {"x": x, "w": w})
        if call.decline is None:
            x, w = validate.dense(x), validate.dense(w)
    if rows == 0:
        workspace.pass_over()
    elif call.decline is not None:
        workspace.agree(call.label, workspace.start_hash(call.call_hash))
        # As in the fused path, which records nothing either.
        with torch.no_grad():
            out.copy_(reference.gemm_rs(x, w, workspace.world))
    else:
        launches = [
            _arguments(x, w, out, workspace, call, config, options.traced)
            for config in call.configs
        ]
        prepared.launch_all(gemm_rs_kernel, call, launches, workspace)
    return out


def prepare_gemm_rs(
    workspace: TpSpWorkspace, m: int, n: int, k: int, options: GemmRsOptions
) -> None:
    """Collective: compiles and loads what a call of this shape needs, then ends in a barrier."""
    prepared.warm(gemm_rs, ((m, k), (n, k)), workspace, options)


def describe_gemm_rs(
    x: Operand, w: Operand, workspace: TpSpWorkspace, options: GemmRsOptions
) -> Prepared:
    """The plan and verdict of a call without making it.

    Raises:
        ArgumentError: as `gemm_rs`.
    """
    with prepared.raised_here():
        x, w = mx.values("x", x, "row"), mx.values("w", w, "row")
    return prepared.describe(_plan, {"x": x, "w": w}, workspace, options)


def _plan(
    x: torch.Tensor, w: torch.Tensor, workspace: TpSpWorkspace, options: GemmRsOptions
) -> Prepared:
    validate.check_types(options, "reducers_per_peer")
    validate.check_choice("policy", options.policy, tuple(POLICIES))
    validate.check_choice("order", options.order, tuple(ORDERS))
    validate.check_choice(
        "transport", options.transport, workspace.reduce_transports, optional=True
    )
    validate.check_split_k(options.split_k)
    world, m = workspace.world, x.shape[0]
    n, k = prepared.features(x, w, LAYOUT)
    if m % world.size:
        raise validate.reject(
            validate.SHAPE,
            f"x: got {m} rows, wanted a multiple of the {world.size} ranks; pad the tokens",
        )
    validate.check_room(workspace, m, n)
    with prepared.refusals():
        problem = GemmRsProblem(m, n, k, world.size)
        make = partial(
            plan_gemm_rs, problem, workspace.machine,
            transport=_transport(workspace, options), policy=options.policy, order=options.order,
            reducers_per_peer=options.reducers_per_peer, split_k=options.split_k,
        )  # fmt: skip
        plan, judged = prepared.plan_and_judge(make, workspace, options.cap)
    label = f"gemm_rs {LAYOUT} m={m} n={n} k={k}"
    decline = prepared.decline_reason(problem, judged, workspace, options.force, label)
    call_hash = prepared.agreed_hash(
        "gemm_rs", problem, plan.transport, plan.block_m, plan.block_n,
        workspace.machine.tile_row_rows, options.policy == "serial", decline is None,
    )  # fmt: skip
    configs = _configs(problem, plan, workspace.machine.tile_row_rows, options)
    keys = prepared.launch_keys(configs, plan, n, k, options.traced, workspace)
    return Prepared(problem, plan, decline, call_hash, configs, keys, label)


def _transport(workspace: TpSpWorkspace, options: GemmRsOptions) -> str | None:
    if options.transport is None and len(workspace.reduce_transports) == 1:
        return workspace.reduce_transports[0]
    return options.transport


def _configs(
    problem: GemmRsProblem, plan: GemmRsPlan, tile_row_rows: int, options: GemmRsOptions
) -> tuple[GemmRsConfig, ...]:
    fused = GemmRsConfig(
        **prepared.shared_constants(problem, plan),
        LAYOUT=tl.constexpr(LAYOUTS[LAYOUT]),
        ORDER=tl.constexpr(ORDERS[plan.order]),
        PHASE=codes.FUSED,
        SLICES=tl.constexpr(max(1, tile_row_rows // plan.unit_rows)),
        REDUCE_ELEMENTS=tl.constexpr(
            min(
                most_reduced(problem.world_size, plan.source_unroll, plan.transport == "pull"),
                plan.unit_rows * plan.unit_cols,
            )
        ),
        SOURCE_UNROLL=tl.constexpr(plan.source_unroll),
        TILE_ROW_ROWS=tl.constexpr(tile_row_rows),
        BAND_ROWS=tl.constexpr(max(1, plan.band_rows // tile_row_rows)),
    )
    if options.policy != "serial":
        return (fused,)
    return fused._replace(PHASE=codes.BUILD_ONLY), fused._replace(PHASE=codes.REDUCE_ONLY)


def _arguments(
    x: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor,
    workspace: TpSpWorkspace,
    call: Prepared,
    config: GemmRsConfig,
    traced: bool,
) -> tuple[Any, ...]:
    """Arguments of one launch of `gemm_rs_kernel`."""
    plan, problem = call.plan, call.problem
    landing = workspace.buffer(int(words.GATHER.value)) if workspace.world.size > 1 else out
    ops = ScatterOperands(x, w, out, landing, workspace.partials)
    movers, most = plan.num_movers, plan.max_movers
    # A launch that only builds, or only adds up, has all its workgroups do it.
    if config.PHASE is codes.BUILD_ONLY:
        movers = most = 0
    elif config.PHASE is codes.REDUCE_ONLY:
        movers = most = plan.cap
    call_hash = workspace.start_hash(call.call_hash) ^ (config.PHASE is codes.REDUCE_ONLY)
    return (
        ops, workspace.context(traced), problem.m, problem.n, problem.k, movers, most,
        plan.split_tiles, call_hash, config,
    )  # fmt: skip


__all__ = ["GemmRsOptions", "describe_gemm_rs", "gemm_rs", "prepare_gemm_rs"]
