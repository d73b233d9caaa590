"""Bounds so short that waits expire anywhere within calls: what is left must be right or NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from kosmos_core.device import barrier
from kosmos_core.errors import KosmosError, PeerError, PeerTimeoutError
from kosmos_core.executor import Executor, ExecutorError, Mutation
from kosmos_core.testing.schedules import Schedule
from kosmos_core.worlds import World, cpu_world

from kosmos_tpsp.cli.calls import Call, Operands, compare_all, known, lasting, owned
from kosmos_tpsp.cli.rig import Rig, Run

# A bound counted in microseconds and not in milliseconds: the executor's clock moves by one a step.
SHORT_EDIT = (barrier.call_again, "to(tl.int64) * 1000000", "to(tl.int64) * 1000")
BOUNDS_US = (5, 20, 50, 150)


@dataclass
class Left:
    """What one rank was left with.

    Attributes:
        rank: the rank.
        error: what it was told, None if all its calls succeeded.
        problems: what was not as it must be.
    """

    rank: int
    error: PeerError | None = None
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Expiry:
    """Calls under a bound that may expire.

    Attributes:
        calls: in order.
        bound_us: bound of every wait in microseconds.
    """

    calls: Sequence[Call]
    bound_us: int

    def host(self, rank: int, world: World) -> Left:
        """Makes the calls until one raises, and looks at every output."""
        left = Left(rank)
        operands = Operands(0, world.size, world.device)
        workspace = Rig(self.calls, timeout_s=self.bound_us * 1e-3).workspace(world)
        memory = [operands.memory(call, 0.0) for call in self.calls]
        made: list[tuple[set[str], dict[str, torch.Tensor]]] = []
        try:
            for call, outs in zip(self.calls, memory, strict=True):
                given = operands.given(call, rank)
                found = call.driver.call(given, workspace, outs, call.options)
                made.append((set(owned(found, workspace)), lasting(found, workspace)))
            workspace.synchronize()
        except PeerError as error:
            left.error = error
            world.synchronize()
        if left.error is not None and type(left.error) is not PeerTimeoutError:
            left.problems.append(f"wanted PeerTimeoutError, got {left.error!r}")
        for call, (own, outs) in zip(self.calls, made, strict=False):
            wanted = operands.wanted(call, rank)
            if left.error is not None:
                wanted = {name: right for name, right in wanted.items() if name in own}
            problem = compare_all(known(outs, wanted), wanted)[1]
            if problem:
                left.problems.append(f"{call}: {problem}")
            if left.error is None and any(out.isnan().any() for out in outs.values()):
                left.problems.append(f"{call}: NaN and no error")
        return left


def expire_on_cpu(
    expiry: Expiry,
    size: int,
    schedule: Schedule,
    *,
    queued: bool = True,
    wgs: int = 4,
    mutations: Sequence[Mutation] = (),
    **options: Any,
) -> tuple[Run, list[Left]]:
    """Runs it on virtual ranks of the executor.

    Args:
        expiry: the calls.
        size: ranks.
        schedule: who runs when.
        queued: the host queues all calls before it hears of the first failure.
        wgs: workgroups of a rank.
        mutations: defects planted in the kernels.
        **options: of the executor, in place of those of the schedule.
    """
    settings = {**schedule.options(), **options}
    short = Mutation(*SHORT_EDIT)
    left: list[Left] = []
    failure: Exception | None = None
    with cpu_world(size, wgs=wgs, mutations=(*mutations, short), **settings) as world:
        executor: Executor = world.executor  # type: ignore[attr-defined]
        try:
            if queued:
                with executor.stream(0):
                    left = world.spmd(expiry.host, world)
            else:
                left = world.spmd(expiry.host, world)
        except (ExecutorError, KosmosError) as error:
            failure = error
        run = Run([], failure, executor.schedule_hash)
    told = sum(one.error is not None for one in left)
    if told not in (0, len(left)):
        run.remarks.append(f"{told} of {len(left)} ranks were told")
    run.remarks += [f"rank {one.rank}: {text}" for one in left for text in one.problems]
    return run, left
