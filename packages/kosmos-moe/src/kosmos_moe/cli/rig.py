"""Runs a sequence of calls on one workspace, in any world, and judges every output."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from kosmos_core.errors import KosmosError
from kosmos_core.testing.faults import is_reported
from kosmos_core.testing.schedules import Schedule
from kosmos_core.worlds import World, cpu_world

from kosmos_moe.cli.calls import Call, Operands
from kosmos_moe.ops.moe_backward import MoeGradients, moe_backward
from kosmos_moe.ops.moe_forward import Inputs, MoeResult, MoeSaved, run_forward
from kosmos_moe.workspaces import MoEWorkspace

if TYPE_CHECKING:
    from kosmos_core.executor import Mutation

# Calls that are issued before the host waits for any of them, where launches do not block.
ROUND = 8
T = TypeVar("T")


@dataclass(frozen=True)
class Verdict:
    """What one call gave on one rank.

    Attributes:
        call: the call.
        rank: the rank.
        rel_err: ||y - reference|| / ||reference||, reference in FP64.
        repeated: whether an earlier call on the same operands gave the same bits; None: no such.
        problem: what is wrong, "" if nothing is.
    """

    call: Call
    rank: int
    rel_err: float
    repeated: bool | None
    problem: str


class Ledger:
    """First results of each call and rank, to compare later ones with bit by bit."""

    def __init__(self) -> None:
        self._first: dict[tuple[Call, int], list[torch.Tensor]] = {}

    def repeats(self, call: Call, rank: int, found: list[torch.Tensor]) -> bool | None:
        """Whether `found` has the bits of the call's first results; None for the first ones."""
        first = self._first.get((call, rank))
        if first is None:
            self._first[call, rank] = [t.clone() for t in found]
            return None
        return all(_same_bits(a, b) for a, b in zip(first, found, strict=True))


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(
        a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8)
    )


@dataclass
class Rig:
    """A sequence of calls on one workspace.

    Attributes:
        calls: what every rank calls, in order.
        seed: of the operands.
        capacity: of the workspace.
        first_epoch: epoch of the first call.
        timeout_s: bound of every wait.
        delay: called with (rank, index of the call) before each call.
        victim: rank whose host code fails before the third call; None: nobody's does.
        ledger: first results, shared by rigs whose results must be equal.
    """

    calls: Sequence[Call]
    seed: int = 0
    capacity: float | None = None
    first_epoch: int = 1
    timeout_s: float = 120.0
    delay: Callable[[int, int], None] | None = None
    victim: int | None = None
    ledger: Ledger = field(default_factory=Ledger)

    def workspace(self, world: World) -> MoEWorkspace:
        """Collective: a workspace that all calls fit in, its regions full of NaN."""
        calls = self.calls
        workspace = MoEWorkspace(
            world,
            max(1, *(t for call in calls for t in call.tokens)),
            max(call.hidden for call in calls),
            max(call.inter for call in calls),
            max(call.experts for call in calls),
            max(call.router.topk for call in calls),
            shared_inter=max(call.shared_inter for call in calls),
            capacity=self.capacity,
            training=any(call.options.save for call in calls),
            timeout_s=self.timeout_s,
            first_epoch=self.first_epoch,
        )
        # Whatever is read before it has been written shows.
        for region in workspace.regions if world.fused else ():
            if region.dtype.is_floating_point:
                workspace.buffer(region.row).fill_(float("nan"))
        world.barrier()
        return workspace

    def host(self, rank: int, world: World) -> list[Verdict]:
        """What one rank does: all calls in rounds, and a look at every output after each round.

        Raises:
            PeerError: a call was given up.
        """
        operands = Operands(self.seed, world.device)
        if world.device.type == "cuda":
            self._prepare(world, operands)
        verdicts: list[Verdict] = []
        workspace = self.workspace(world)
        # An exception of the executor is told by nobody to nobody.
        with contextlib.nullcontext() if self.victim is None else workspace:
            for first in range(0, len(self.calls), ROUND):
                verdicts += self._round(rank, workspace, operands, first)
        workspace.destroy()
        return verdicts

    def _prepare(self, world: World, operands: Operands) -> None:
        """Collective: compiles and loads, on devices, whatever the calls need.

        Among virtual ranks of one GPU a module that is loaded while a peer's kernel waits for this
        rank would wait for that kernel.
        """
        with self.workspace(world) as workspace:
            for call in dict.fromkeys(self.calls):
                made = make(call, operands.inputs(call, world.rank), workspace)
                workspace.synchronize()
                world.barrier()
                make_back(call, operands, world.rank, made[1], workspace)
                workspace.synchronize()
                world.barrier()

    def _round(
        self, rank: int, workspace: MoEWorkspace, operands: Operands, first: int
    ) -> list[Verdict]:
        calls = self.calls[first : first + ROUND]
        given = [operands.inputs(call, rank) for call in calls]
        # Nobody calls before all have made their operands, which may load modules, too.
        workspace.synchronize()
        workspace.world.barrier()
        found = []
        for i, (call, inputs) in enumerate(zip(calls, given, strict=True)):
            if self.delay is not None:
                self.delay(rank, first + i)
            if self.victim == rank and first + i == 2:
                raise RuntimeError("this rank was told to fail")
            found.append(make(call, inputs, workspace))
        # Backwards come in the order in which autograd would make them.
        grads: list[MoeGradients | None] = [
            make_back(call, operands, rank, saved, workspace)
            for call, (_, saved) in zip(calls[::-1], found[::-1], strict=True)
        ][::-1]
        workspace.synchronize()
        return [
            self._judge(rank, operands, call, inputs, *made, gradients, workspace.world)
            for call, inputs, made, gradients in zip(calls, given, found, grads, strict=True)
        ]

    def _judge(
        self,
        rank: int,
        operands: Operands,
        call: Call,
        given: Inputs,
        found: MoeResult,
        saved: MoeSaved,
        gradients: MoeGradients | None,
        world: World,
    ) -> Verdict:
        error, problem = operands.judge(call, rank, given, found)
        results = list(found)
        if gradients is not None:
            wrong = operands.judge_gradients(call, rank, saved, gradients, world)
            problem = problem or wrong
            results += [t for t in gradients if isinstance(t, torch.Tensor)]
            results += list(gradients.shared or ())
        repeated = self.ledger.repeats(call, rank, results)
        if not problem and repeated is False:
            problem = "other bits than the same call before"
        return Verdict(call, rank, error, repeated, problem)


def make(call: Call, given: Inputs, workspace: MoEWorkspace) -> tuple[MoeResult, MoeSaved]:
    """Makes a call."""
    return run_forward(given, workspace, call.router, call.options, {})


def make_back(
    call: Call, operands: Operands, rank: int, saved: MoeSaved, workspace: MoEWorkspace
) -> MoeGradients | None:
    """Makes the backward of a call that saves for it."""
    if not call.options.save:
        return None
    dy, dloss = operands.dy(call, rank), operands.dloss(call)
    return moe_backward(dy, saved, workspace, dloss=dloss, options=call.options)


@dataclass
class Run:
    """What one schedule gave.

    Attributes:
        verdicts: of all ranks' calls.
        failure: what ended the run early, or None.
        schedule_hash: identifies the schedule and all decisions about visibility; "" on devices.
        schedule: that schedule, None on devices.
    """

    verdicts: list[Verdict]
    failure: Exception | None = None
    schedule_hash: str = ""
    schedule: Schedule | None = None

    @property
    def problems(self) -> list[str]:
        """What is wrong, a line each."""
        found = [f"rank {v.rank}, {v.call}: {v.problem}" for v in self.verdicts if v.problem]
        return found if self.failure is None else [str(self.failure), *found]


def run_on_cpu(
    ranks: int,
    rig: Rig,
    schedule: Schedule,
    *,
    wgs: int = 4,
    vendor: str = "nvidia",
    mutations: Sequence[Mutation] = (),
    **options: Any,
) -> Run:
    """Runs a rig on virtual ranks of the executor; a fault that the executor finds ends the run.

    Args:
        ranks: number of ranks.
        rig: what they do.
        schedule: who runs when.
        wgs: workgroups of a rank.
        vendor: whose code path runs.
        mutations: defects planted in the kernels.
        **options: of the executor, in place of those of the schedule.
    """
    # A wait that nobody ends is to be reported at once, with all that wait, not after its bound.
    settings = {"jump_clock": False, **schedule.options(), **options}
    verdicts: list[Verdict] = []
    failure: Exception | None = None
    with cpu_world(ranks, wgs=wgs, vendor=vendor, mutations=mutations, **settings) as world:
        try:
            for found in world.spmd(rig.host, world):
                verdicts += found
        except Exception as error:
            if not is_reported(error):
                raise
            failure = error
        schedule_hash = world.executor.schedule_hash  # type: ignore[attr-defined]
    return Run(verdicts, failure, schedule_hash, schedule)


def run_on_devices(world: World, rig: Rig) -> Run:
    """Runs a rig on the ranks of a group, or of one GPU; every rank gets the whole run."""

    def host(rank: int) -> tuple[list[Verdict], KosmosError | None]:
        try:
            return rig.host(rank, world), None
        except KosmosError as error:
            return [], error

    if world.describe() in ("group", "reference"):
        found = world.all_gather_object(host(world.rank))
    else:
        found = world.spmd(host)
    verdicts = [verdict for part, _ in found for verdict in part]
    return Run(verdicts, next((error for _, error in found if error is not None), None))
