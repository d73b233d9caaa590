"""A call that goes wrong on one rank: all must be told, leave at once, and revive by a reset."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from kosmos_core.errors import (
    ArgumentError,
    KosmosError,
    PeerError,
    PeerFaultError,
    PeerMismatchError,
    PeerTimeoutError,
)
from kosmos_core.worlds import World

from kosmos_tpsp.cli.calls import (
    Call,
    Operands,
    compare,
    compare_all,
    known,
    lasting,
    owned,
    same_bits,
)
from kosmos_tpsp.cli.rig import Meter, Rig
from kosmos_tpsp.workspaces import TpSpWorkspace

# Bound of every wait where a rank is killed, in seconds of device time: the check waits for it.
TIMEOUT_S = 0.5
# What leaving may take beyond the bound: the executor's clock moves by whole seconds when all wait,
# and workgroups that come late to a wait begin to count late.
GRACE_S = 4.0

# What goes wrong on the victim, and what the other ranks must be told.
KINDS: dict[str, type[PeerError]] = {
    "killed": PeerTimeoutError,
    "other_call": PeerMismatchError,
    "bad_argument": PeerFaultError,
}


@dataclass
class Witness:
    """What one rank saw.

    Attributes:
        rank: the rank.
        problems: what was not as it must be.
        error: largest error of the calls that must succeed.
        launches: kernels that the first two calls launched.
        transport: what the plan of the first call chose.
        repeated: whether the calls after the reset gave the bits of those before the failure.
        told: the message that the failed call raised here, "" if it made none.
    """

    rank: int
    problems: list[str] = field(default_factory=list)
    error: float = 0.0
    launches: int = 0
    transport: str = ""
    repeated: bool = True
    told: str = ""


@dataclass(frozen=True)
class Outcome:
    """One call that was waited for.

    Attributes:
        call: the call.
        outs: its outputs by name, whatever is in them.
        error: what it raised.
        returned: whether the call itself raised nothing, so that its output counts.
        seconds: how long it took, device time on the executor.
    """

    call: Call
    outs: dict[str, torch.Tensor]
    error: KosmosError | None
    returned: bool
    seconds: float


@dataclass(frozen=True)
class Trouble:
    """Two calls that succeed, one that goes wrong, one after it, a reset, and the two calls again.

    Attributes:
        calls: two calls; the first is the one that goes wrong.
        victim: the rank on which it does.
        kind: "killed" (the victim's host code fails before it), "other_call" (the victim makes
            another call) or "bad_argument" (the victim's operand is refused).
        seed: of the operands.
    """

    calls: Sequence[Call]
    victim: int
    kind: str = "killed"
    seed: int = 0

    def host(self, rank: int, world: World, meter: Meter) -> Witness:
        """What one rank does and what it must see."""
        seen = Witness(rank)
        operands = Operands(self.seed, world.size, world.device)
        rig = Rig(self.calls, timeout_s=TIMEOUT_S if self.kind == "killed" else 120.0)
        rig.prepare(rank, world)
        # Made beforehand, and the products too: what takes long must not count against the bound.
        given = {call: operands.given(call, rank) for call in self._all_calls()}
        for call in self.calls:
            for wanted in operands.wanted(call, rank).values():
                compare(wanted.values.to(torch.bfloat16), wanted)
        workspace = rig.workspace(world)

        def make(call: Call, **others: torch.Tensor) -> Outcome:
            return _make(call, {**given[call], **others}, operands, workspace)

        before = [make(call) for call in self.calls]
        self._expect_right(seen, "before", before, operands)
        seen.launches = meter.launches[rank]
        # A rank that is still in an earlier call when another gives up loses that call too.
        world.barrier()
        if rank != self.victim:
            self._expect_told(seen, make(self.calls[0]), operands)
        else:
            self._go_wrong(seen, make, operands)
        world.barrier()
        self._expect_refused(seen, make, meter)
        workspace.reset()
        after = [make(call) for call in self.calls]
        self._expect_right(seen, "after reset", after, operands)
        pairs = zip(before, after, strict=True)
        seen.repeated = all(
            same_bits(a.outs[name], b.outs[name]) for a, b in pairs for name in a.outs
        )
        if not seen.repeated:
            seen.problems.append("after reset: other bits than before")
        first = self.calls[0]
        described = first.driver.describe(given[first], workspace, first.options)
        seen.transport = described.plan.transport
        workspace.destroy()
        return seen

    def _other_call(self) -> Call:
        """The first call with half of a dimension that is not the tokens."""
        first = self.calls[0]
        half = first.driver.other_of(first.shape) // 2
        m, n, k = first.driver.shape_of(first.tokens, first.n, half)
        return replace(first, m=m, n=n, k=k)

    def _all_calls(self) -> list[Call]:
        other = [self._other_call()] if self.kind == "other_call" else []
        return [*self.calls, *other]

    def _go_wrong(self, seen: Witness, make: Callable[..., Outcome], operands: Operands) -> None:
        """The victim's part."""
        call = self.calls[0]
        if self.kind == "other_call":
            self._expect_told(seen, make(self._other_call()), operands)
        elif self.kind == "bad_argument":
            name = next(iter(call.driver.operands))
            outcome = make(call, **{name: operands.one(call, name, seen.rank).float()})
            seen.told = str(outcome.error)
            if not isinstance(outcome.error, ArgumentError):
                seen.problems.append(f"wanted ArgumentError, got {outcome.error!r}")

    def _expect_right(
        self, seen: Witness, when: str, outcomes: list[Outcome], operands: Operands
    ) -> None:
        for outcome in outcomes:
            if outcome.error is not None:
                seen.problems.append(f"{when}: {outcome.error}")
                continue
            error, problem = compare_all(outcome.outs, operands.wanted(outcome.call, seen.rank))
            seen.error = max(seen.error, error)
            if problem:
                seen.problems.append(f"{when}: {problem}")

    def _expect_told(self, seen: Witness, outcome: Outcome, operands: Operands) -> None:
        """The failed call on a rank that made it: who is to blame, in time, and no wrong values."""
        error = outcome.error
        if not isinstance(error, KINDS[self.kind]):
            seen.problems.append(f"wanted {KINDS[self.kind].__name__}, got {error!r}")
            return
        assert isinstance(error, PeerError)
        seen.told = str(error)
        blamed = {
            "killed": (error.peer,),
            "other_call": (error.peer, error.raised_by),
            "bad_argument": (error.raised_by,),
        }[self.kind]
        if self.victim not in blamed:
            seen.problems.append(f"the error does not name rank {self.victim}: {error}")
        unnamed = "?" in (error.phase, error.flag) and self.kind != "bad_argument"
        names = outcome.call.driver.calls or (outcome.call.op,)
        if unnamed or not any(name in error.op for name in names):
            seen.problems.append(f"the error does not name operation, phase and flag: {error}")
        bound = (TIMEOUT_S if self.kind == "killed" else 0.0) + GRACE_S
        if outcome.seconds > bound:
            seen.problems.append(f"left after {outcome.seconds:.1f} s instead of {bound:.1f} s")
        if not outcome.returned:
            return
        wanted = operands.wanted(outcome.call, seen.rank)
        if not any(out.isnan().any() for out in outcome.outs.values()):
            seen.problems.append("the failed call left no NaN in its outputs")
        wanted = {name: wanted[name] for name in outcome.outs}
        _, problem = compare_all(known(outcome.outs, wanted), wanted)
        if problem:
            seen.problems.append(f"the failed call left wrong values: {problem}")

    def _expect_refused(self, seen: Witness, make: Callable[..., Outcome], meter: Meter) -> None:
        """A later call: an error at once, and no launch where the host knows already."""
        launches = meter.launches[seen.rank]
        outcome = make(self.calls[1])
        if not isinstance(outcome.error, PeerError):
            seen.problems.append("a call after the failure raised nothing")
        if outcome.seconds > TIMEOUT_S:
            seen.problems.append(f"a call after the failure took {outcome.seconds:.1f} s")
        if seen.rank != self.victim and meter.launches[seen.rank] != launches:
            seen.problems.append("a call after the failure launched a kernel")


def _make(
    call: Call, given: dict[str, torch.Tensor], operands: Operands, workspace: TpSpWorkspace
) -> Outcome:
    """Makes a call and waits for it."""
    world = workspace.world
    outs = operands.memory(call, 0.0)
    begin = _seconds(world)
    failed: KosmosError | None = None
    returned = False
    try:
        outs = call.driver.call(given, workspace, outs, call.options)
        returned = True
        workspace.synchronize()
    except KosmosError as error:
        failed = error
    seconds = _seconds(world) - begin
    outs = lasting(outs, workspace) if failed is None else owned(outs, workspace)
    return Outcome(call, outs, failed, returned, seconds)


def _seconds(world: World) -> float:
    executor = getattr(world, "executor", None)
    return time.monotonic() if executor is None else float(executor.clock.ns * 1e-9)
