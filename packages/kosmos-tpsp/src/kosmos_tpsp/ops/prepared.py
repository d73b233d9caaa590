"""What the ops have in common: a prepared call, how it is found again, refused and launched."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from kosmos_core.device import roles
from kosmos_core.errors import WorkspaceError
from kosmos_core.launch import intern_key
from kosmos_heuristics import Machine, can_fuse

from kosmos_tpsp.device import config as codes
from kosmos_tpsp.ops import validate
from kosmos_tpsp.ops.validate import Rejected
from kosmos_tpsp.workspaces import TpSpWorkspace

LOG = logging.getLogger("kosmos_tpsp")
_LOGGED: set[tuple[str, str]] = set()  # declined calls are logged once, not once a rank
LAYOUTS = {"tn": 0, "nn": 1}
POLICIES = {
    "fixed": roles.FIXED,
    "one_way": roles.ONE_WAY,
    "two_way": roles.TWO_WAY,
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


def check_usable(workspace: TpSpWorkspace) -> None:
    """A workspace that calls can be made on, from this rank."""
    try:
        workspace.ensure_usable()
    except WorkspaceError as error:
        raise Rejected(validate.WORKSPACE, error) from None


def remembered(workspace: TpSpWorkspace, key: Hashable, make: Callable[[], Prepared]) -> Prepared:
    """The prepared call of a key, made when it is not there."""
    try:
        call: Prepared | None = workspace.prepared.get(key)
    except TypeError:
        call = None  # a choice that has no hash: the plan refuses it by name
    if call is None:
        call = make()
        if len(workspace.prepared) >= MAX_PREPARED:
            del workspace.prepared[next(iter(workspace.prepared))]
        workspace.prepared[key] = call
    return call


@contextmanager
def telling_peers(workspace: TpSpWorkspace, shown: Callable[[], str]) -> Iterator[None]:
    """Tells the peers of whatever is raised before a launch: they must not wait for this call."""
    try:
        yield
    except Rejected as rejected:
        workspace.fault(rejected.code, shown())
        raise rejected.error from None
    except Exception:
        workspace.fault(validate.ARGUMENT, shown())
        raise


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
    if reason is not None and problem.m > 0 and (label, reason) not in _LOGGED:
        _LOGGED.add((label, reason))
        LOG.warning("%s takes the reference path: %s", label, reason)
    return reason


def agreed_hash(*agreed: object) -> int:
    """31 bits of what all ranks must have in common."""
    return zlib.crc32(repr(agreed).encode()) & 0x7FFFFFFF


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
    """Launches a call, in one launch or two."""
    plan, world = call.plan, workspace.world
    warps, stages = plan.num_warps, plan.num_stages
    if len(launches) > 1:
        # All of them before the first one runs: see `World.load`.
        for args, key in zip(launches, call.keys, strict=True):
            world.load(kernel, args, key, num_warps=warps, num_stages=stages)
    for i, (args, key) in enumerate(zip(launches, call.keys, strict=True)):
        # The second launch is made even if the first has failed by now: it leaves NaN.
        workspace.begin(call.label, args[CALL_HASH], checks=i == 0)
        world.launch(kernel, plan.cap, args, key, num_warps=warps, num_stages=stages)


def shown_call(op: str, x: object, w: object) -> str:
    """A refused call as error messages show it."""
    kinds = (
        str(tuple(t.shape)) if isinstance(t, torch.Tensor) else type(t).__name__ for t in (x, w)
    )
    return f"{op}({', '.join(kinds)})"


def chosen_options(kind: type[Any], options: Any, choices: dict[str, Any]) -> Any:
    """Options of a call, given as one object or one by one."""
    fields = kind.__dataclass_fields__
    if options is None:
        unknown = sorted(choices.keys() - fields.keys())
        if unknown:
            raise validate.reject(
                validate.ARGUMENT,
                f"{unknown[0]}: got a choice of this name, wanted one of {', '.join(fields)}",
            )
        return kind(**choices)
    if not isinstance(options, kind):
        raise validate.reject(
            validate.ARGUMENT, f"options: got {type(options).__name__}, wanted {kind.__name__}"
        )
    if choices:
        raise validate.reject(
            validate.ARGUMENT,
            f"{', '.join(sorted(choices))}: got together with options=, wanted one or the other; "
            "use dataclasses.replace(options, ...)",
        )
    return options


def features(x: torch.Tensor, w: torch.Tensor, layout: str) -> tuple[int, int]:
    """(n, k) of a call whose operands fit together."""
    k = x.shape[1]
    n, wanted = (w.shape[0], w.shape[1]) if layout == "tn" else (w.shape[1], w.shape[0])
    if wanted != k:
        raise validate.reject(
            validate.SHAPE,
            f"w: got shape {tuple(w.shape)} for layout {layout!r}, "
            f"wanted a contraction of {k} as in x {tuple(x.shape)}",
        )
    if k == 0 or n == 0:
        raise validate.reject(
            validate.SIZE, f"features: got k = {k} and n = {n}, wanted positive sizes"
        )
    return n, k
