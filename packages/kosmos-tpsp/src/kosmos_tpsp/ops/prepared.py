"""What the ops have in common: a prepared call, how it is found again, refused and launched."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
import triton.language as tl
from kosmos_core.arguments import TellingPeers, agreed_hash, chosen_options
from kosmos_core.device import roles
from kosmos_core.device.gemm import store_splits
from kosmos_core.errors import ArgumentError, WorkspaceError
from kosmos_core.launch import intern_key
from kosmos_heuristics import HeuristicsError, Machine, can_fuse

from kosmos_tpsp.device import config as codes
from kosmos_tpsp.ops import mx, validate
from kosmos_tpsp.ops.validate import Rejected
from kosmos_tpsp.workspaces import TpSpWorkspace

LOG = logging.getLogger("kosmos_tpsp")
# Declined calls are logged once, not once a rank or for every number of tokens.
_LOGGED: set[tuple[str, str]] = set()
LAYOUTS = {"tn": 0, "nn": 1}
POLICIES = {
    "one_way": roles.ONE_WAY,
    "two_way": roles.TWO_WAY,
    "fixed": roles.FIXED,
    "serial": roles.ONE_WAY,
}
TRANSPORTS = {"pull": codes.PULL, "push": codes.PUSH}
XCD_RUN = 4
MAX_PREPARED = 1024  # calls of a workspace whose plans are remembered
CALL_HASH = -2  # its place among a kernel's arguments, before the constants


@dataclass(frozen=True)
class Prepared:
    """Everything about a call that depends on shapes and options only.

    Attributes:
        problem: the GEMM's dimensions.
        plan: how it runs.
        decline: why the fused path is not taken, or None.
        call_hash: what every rank must agree on, 31 bits.
        configs: constants of each launch, one when fused, two when serial.
        keys: launch key of each.
        label: the call as error messages show it.
    """

    problem: Any
    plan: Any
    decline: str | None
    call_hash: int
    configs: tuple[Any, ...]
    keys: tuple[int, ...]
    label: str


# (*operands, workspace, options, *facts): checks the choices of an op and plans its call.
Planner = Callable[..., Prepared]


def prepare(
    plan: Planner,
    given: dict[str, Any],
    workspace: TpSpWorkspace,
    options: Any,
    *facts: Hashable,
) -> Prepared:
    """The prepared call of an op, planned once for equal shapes, options and facts.

    Args:
        plan: plans it.
        given: the operands by name, in the order that `plan` takes them.
        workspace: of the group.
        options: the choices, of a type that no other op has.
        *facts: what else the plan depends on.
    """
    try:
        workspace.ensure_usable()
    except WorkspaceError as error:
        raise Rejected(validate.WORKSPACE, error) from error
    device = workspace.world.device
    for name, operand in given.items():
        validate.check_operand(name, operand, device)
    key = (*(mx.key_of(operand) for operand in given.values()), options, *facts)

    def make() -> Prepared:
        if options.traced is True and workspace.trace_events == 0:
            raise validate.reject(
                validate.ARGUMENT,
                "traced: got True, but the workspace has no room for events; create it with "
                "trace_events",
            )
        return plan(*given.values(), workspace, options, *facts)

    return _remembered(workspace, key, make)


@contextmanager
def raised_here() -> Iterator[None]:
    """Raises what is refused, and tells nobody."""
    try:
        yield
    except Rejected as rejected:
        raise rejected.error from None


def describe(
    plan: Planner,
    given: dict[str, Any],
    workspace: TpSpWorkspace,
    options: Any,
    *facts: Hashable,
) -> Prepared:
    """As `prepare`, for a caller whose peers make no call: nobody is told of what is refused.

    Raises:
        ArgumentError, WorkspaceError, PeerError: as the op.
    """
    with raised_here():
        return prepare(plan, given, workspace, options, *facts)


def warm(
    op: Callable[..., Any],
    shapes: Iterable[tuple[int, int]],
    workspace: TpSpWorkspace,
    options: Any,
    axes: Iterable[str | None] = (),
) -> None:
    """Collective: compiles and loads what a call on operands of these shapes needs.

    axes: along which an operand is quantised; None, or no more of them, for bf16.
    Ends in a barrier.
    """
    device = workspace.world.device
    given = [
        torch.zeros(shape, dtype=torch.bfloat16, device=device)
        if axis is None
        else mx.zeros(shape, axis, device)
        for shape, axis in zip_longest(shapes, axes)
    ]
    op(*given, workspace, options=options)
    workspace.synchronize()
    workspace.world.barrier()


@contextmanager
def refusals() -> Iterator[None]:
    """Gives what plans and workspaces refuse the code that the peers are told."""
    try:
        yield
    except HeuristicsError as error:
        raise Rejected(validate.ARGUMENT, ArgumentError(str(error))) from error
    except WorkspaceError as error:
        raise Rejected(validate.WORKSPACE, error) from error


def plan_and_judge(
    make: Callable[..., Any], workspace: TpSpWorkspace, cap: int | None
) -> tuple[Any, Any]:
    """The plan of a call, with room reserved for its partials, and the one its verdict is of.

    Caps may differ between ranks, and all must decide alike: the second one has none.
    """
    most = workspace.world.num_wgs or 2
    plan, judged = make(cap=min(cap or most, most)), make(cap=None)
    workspace.reserve_partials(plan.split_tiles, plan.split_k, plan.block_m, plan.block_n)
    return plan, judged


def transport_of(workspace: TpSpWorkspace, options: Any) -> str | None:
    """The transport that is chosen, or the only one there is; None leaves it to the plan."""
    if options.transport is None and len(workspace.transports) == 1:
        return workspace.transports[0]
    chosen: str | None = options.transport
    return chosen


def shared_constants(problem: Any, plan: Any) -> dict[str, tl.constexpr]:
    """Constants that every kernel takes from its plan alike."""
    return {
        "TRANSPORT": TRANSPORTS[plan.transport],
        "POLICY": POLICIES[plan.policy],
        "BLOCK_M": tl.constexpr(plan.block_m),
        "BLOCK_N": tl.constexpr(plan.block_n),
        "BLOCK_K": tl.constexpr(plan.block_k),
        "STAGES": tl.constexpr(plan.num_stages),
        "SPLIT_K": tl.constexpr(plan.split_k),
        "CLAIM_RUN": tl.constexpr(plan.claim_run),
        "XCDS": tl.constexpr(plan.num_xcds if plan.xcd_bucketing else 1),
        "XCD_RUN": tl.constexpr(XCD_RUN),
        "STORE_SPLITS": tl.constexpr(store_splits(plan.block_n)),
        "EVEN_K": tl.constexpr(int(problem.k % plan.block_k == 0)),
        "EVEN_N": tl.constexpr(int(problem.n % plan.block_n == 0)),
    }


def row_shift(problem: Any) -> int:
    """Power of two that k is known to be a multiple of: what it says of alignment."""
    if problem.dtype == "bf16":
        return 3  # 16 bytes
    # Whole groups; or rows whose scales are 16 bytes, too.
    return 9 if problem.k % 512 == 0 else 5


def _remembered(workspace: TpSpWorkspace, key: Hashable, make: Callable[[], Prepared]) -> Prepared:
    """The prepared call of a key, made when it is not there."""
    try:
        call: Prepared | None = workspace.prepared.get(key)
    except TypeError:
        call = None  # a choice that has no hash: the plan refuses it by name
    if call is None:
        call = make()
        if len(workspace.prepared) >= MAX_PREPARED:
            # Threads may do so at the same time: autograd plans in threads of its own.
            workspace.prepared.pop(next(iter(workspace.prepared), None), None)
        workspace.prepared[key] = call
    return call


def decline_reason(
    problem: Any, plan: Any, workspace: TpSpWorkspace, force: bool, label: str
) -> str | None:
    """Why a call takes the reference path, logged once; None if it runs fused."""
    world = workspace.world
    if not world.fused:
        reason: str | None = world.why_not_fused
    else:
        virtual = world.describe() != "group"
        machine: Machine = workspace.machine
        verdict = can_fuse(problem, machine, plan, speed=not (virtual or force))
        reason = None if verdict is None else verdict.reason
    if reason is not None and problem.tokens > 0:
        # Of what differs with the number of tokens, which may change from call to call, the first.
        of_tokens = label.replace(f"={problem.tokens}", "")
        kind = (of_tokens, re.sub(r"[\d.,]+", "", reason))
        if kind not in _LOGGED:
            _LOGGED.add(kind)
            LOG.warning("%s takes the reference path: %s", label, reason)
    return reason


def launch_keys(
    configs: Sequence[Any], plan: Any, n: int, k: int, traced: bool, workspace: TpSpWorkspace
) -> tuple[int, ...]:
    """A key for each launch.

    Not of m, which the compiled code does not depend on: training may vary it from call to call.
    """
    built_for = (n, k, plan.num_warps, plan.num_stages, traced, workspace.context_key)
    return tuple(intern_key((*(v.value for v in c), type(c), built_for)) for c in configs)


def launch_all(
    kernel: Any, call: Prepared, launches: Sequence[tuple[Any, ...]], workspace: TpSpWorkspace
) -> None:
    """Launches a call, in one launch or two; the peers hear of one that cannot be launched."""
    plan, world = call.plan, workspace.world
    warps, stages = plan.num_warps, plan.num_stages
    try:
        if len(launches) > 1:
            # All of them before the first one runs: see `World.load`.
            for args, key in zip(launches, call.keys, strict=True):
                world.load(kernel, args, key, num_warps=warps, num_stages=stages)
        for i, (args, key) in enumerate(zip(launches, call.keys, strict=True)):
            # The second launch is made even if the first has failed by now: it leaves NaN.
            workspace.begin(call.label, args[CALL_HASH], checks=i == 0)
            world.launch(kernel, plan.cap, args, key, num_warps=warps, num_stages=stages)
            workspace.launches[kernel.__name__.removesuffix("_kernel")] += 1
    except Exception as error:
        workspace.launch_failed(error)
        raise


def shown_call(op: str, *operands: Any) -> str:
    """A refused call as error messages show it."""
    kinds = (
        str(tuple(t.shape))
        if isinstance(t, torch.Tensor)
        else f"MXFP8 {t.shape}"
        if mx.is_mx(t)
        else type(t).__name__
        for t in operands
    )
    return f"{op}({', '.join(kinds)})"


def features(x: Any, w: Any, layout: str, name: str = "x") -> tuple[int, int]:
    """(n, k) of a call whose operands fit together; `name` is that of the left one."""
    k = x.shape[1]
    n, wanted = (w.shape[0], w.shape[1]) if layout == "tn" else (w.shape[1], w.shape[0])
    if wanted != k:
        raise validate.reject(
            validate.SHAPE,
            f"w: got shape {tuple(w.shape)} for layout {layout!r}, "
            f"wanted a contraction of {k} as in {name} {tuple(x.shape)}",
        )
    if k == 0 or n == 0:
        raise validate.reject(
            validate.SIZE, f"features: got k = {k} and n = {n}, wanted positive sizes"
        )
    return n, k


__all__ = ["TellingPeers", "agreed_hash", "chosen_options"]
