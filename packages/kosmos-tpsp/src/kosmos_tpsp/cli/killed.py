"""A rank that fails in its host code: the others must be told, leave, and revive by a reset."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from kosmos_core.errors import PeerError, PeerTimeoutError
from kosmos_core.executor import Executor, ExecutorError
from kosmos_core.worlds import World, cpu_world

from kosmos_tpsp.cli.calls import Call, Operands, compare, same_bits
from kosmos_tpsp.cli.cases import shapes
from kosmos_tpsp.cli.report import Report, case_of
from kosmos_tpsp.cli.request import Request
from kosmos_tpsp.cli.rig import Meter, Rig, Run, on_all_ranks
from kosmos_tpsp.cli.schedules import Schedule
from kosmos_tpsp.ops.ag_gemm import AgGemmOptions, ag_gemm, describe_call

# Bound of every wait, in seconds of device time: short, since the check waits for it to pass.
TIMEOUT_S = 0.5
# What leaving may take beyond the bound: the executor's clock moves by whole seconds when all wait,
# and workgroups that come late to a wait begin to count late.
GRACE_S = 4.0


@dataclass
class Witness:
    """What one rank saw.

    Attributes:
        rank: the rank.
        problems: what was not as it must be.
        error: largest error of the calls that must succeed.
        launches: kernels that the first call launched.
        transport: what the plan of the first call chose.
        repeated: whether the calls after the reset gave the bits of those before the failure.
        told: the message that named the killed rank, "" on that rank itself.
    """

    rank: int
    problems: list[str]
    error: float = 0.0
    launches: int = 0
    transport: str = ""
    repeated: bool = True
    told: str = ""


@dataclass
class KilledRank:
    """Two calls that succeed, one that `victim` never makes, one after it, a reset, and all again.

    Attributes:
        calls: the two shapes, by turns.
        victim: the rank that fails.
        seed: of the operands.
    """

    calls: Sequence[Call]
    victim: int
    seed: int

    def host(self, rank: int, world: World, meter: Meter) -> Witness:
        """What one rank does and what it must see."""
        seen = Witness(rank, [])
        operands = Operands(self.seed, world.size, world.device)
        rig = Rig(self.calls, timeout_s=TIMEOUT_S)
        workspace = rig.workspace(world)
        with workspace:

            def call(index: int) -> tuple[Call, torch.Tensor, BaseException | None]:
                """Makes a call and waits for it; a failed one leaves its output too."""
                wanted = self.calls[index % len(self.calls)]
                out = torch.zeros((wanted.m, wanted.n), dtype=torch.bfloat16, device=world.device)
                x, w = operands.x(wanted, rank), operands.w(wanted, rank)
                try:
                    ag_gemm(x, w, workspace, out=out, options=wanted.options)
                    workspace.synchronize()
                except PeerError as error:
                    return wanted, out, error
                return wanted, out, None

            before = [call(0), call(1)]
            self._expect_right(seen, "before", before, operands)
            seen.launches = meter.launches[rank]
            world.barrier()
            if rank == self.victim:
                try:
                    raise RuntimeError("the host code of this rank fails")
                except RuntimeError:
                    pass
            else:
                begin = _seconds(world)
                wanted, out, error = call(0)
                self._expect_told(seen, error, _seconds(world) - begin)
                self._expect_right_or_nan(seen, wanted, out, operands)
            world.barrier()
            begin, launches = _seconds(world), meter.launches[rank]
            wanted, out, error = call(1)
            if not isinstance(error, PeerError):
                seen.problems.append("a call after the failure raised nothing")
            if _seconds(world) - begin > TIMEOUT_S:
                seen.problems.append("a call after the failure did not raise at once")
            if rank != self.victim and meter.launches[rank] != launches:
                seen.problems.append("a call after the failure launched a kernel")
            workspace.reset()
            after = [call(0), call(1)]
            self._expect_right(seen, "after reset", after, operands)
            pairs = zip(before, after, strict=True)
            seen.repeated = all(same_bits(a[1], b[1]) for a, b in pairs)
            if not seen.repeated:
                seen.problems.append("after reset: other bits than before")
            x, w = operands.x(self.calls[0], rank), operands.w(self.calls[0], rank)
            plan = describe_call(x, w, workspace, self.calls[0].options).plan
            seen.transport = plan.transport
        return seen

    def _expect_right(
        self,
        seen: Witness,
        when: str,
        results: list[tuple[Call, torch.Tensor, BaseException | None]],
        operands: Operands,
    ) -> None:
        for wanted, out, error in results:
            if error is not None:
                seen.problems.append(f"{when}: {error}")
                continue
            off, problem = compare(out, operands.product(wanted, seen.rank))
            seen.error = max(seen.error, off)
            if problem:
                seen.problems.append(f"{when}: {problem}")

    def _expect_told(self, seen: Witness, error: BaseException | None, took_s: float) -> None:
        if not isinstance(error, PeerTimeoutError):
            seen.problems.append(f"wanted PeerTimeoutError, got {error!r}")
            return
        seen.told = str(error)
        if error.peer != self.victim:
            seen.problems.append(f"the error names rank {error.peer}, not {self.victim}: {error}")
        if "ag_gemm" not in error.op or error.phase == "?" or error.flag == "?":
            seen.problems.append(f"the error does not name operation, phase and flag: {error}")
        if took_s > TIMEOUT_S + GRACE_S:
            seen.problems.append(f"left after {took_s:.1f} s, bound {TIMEOUT_S} s")

    def _expect_right_or_nan(
        self, seen: Witness, wanted: Call, out: torch.Tensor, operands: Operands
    ) -> None:
        product = operands.product(wanted, seen.rank)
        missing = out.isnan()
        if not missing.any():
            seen.problems.append("the failed call left no NaN in its output")
        _, problem = compare(torch.where(missing, product.to(out.dtype), out), product)
        if problem:
            seen.problems.append(f"the failed call left wrong values: {problem}")


def _seconds(world: World) -> float:
    """Device time on the executor, wall time elsewhere."""
    executor = getattr(world, "executor", None)
    return executor.clock.ns * 1e-9 if isinstance(executor, Executor) else time.monotonic()


def check_killed_rank(request: Request, options: AgGemmOptions, world: World | None) -> Report:
    """Report of one case, the wanted shape with a rank that fails; no `world`: the executor."""
    found_shapes = shapes(request.m, request.n, request.k, request.size)
    wanted = [Call(*shape, 0, options) for shape in found_shapes]
    killed = KilledRank(wanted[:2], request.kill_rank or 0, request.seed)
    runs: list[Run] = []
    witnesses: list[Witness] = []
    for i in range(request.num_schedules):
        if world is None:
            schedule = Schedule.draw(request.seed + i, request.size, 4)
            run, found = _on_cpu(request, killed, schedule)
        else:
            run, found = Run([]), _on_devices(killed, world)
        runs.append(run)
        witnesses += found
    report = Report()
    case = case_of(wanted[0], request.world, request.size, len(wanted), runs, allow_decline=False)
    case.calls = 2
    case.kernel_launches = max((w.launches for w in witnesses), default=0) // 2
    case.transport = witnesses[0].transport if witnesses else options.transport
    case.bitwise_repeat = all(w.repeated for w in witnesses) if witnesses else None
    case.max_rel_err = max((w.error for w in witnesses), default=None)
    report.problems += [str(run.failure) for run in runs if run.failure is not None]
    report.problems += [f"rank {w.rank}: {text}" for w in witnesses for text in w.problems]
    case.passed = not report.problems
    report.cases.append(case)
    report.extra["errors"] = sorted({w.told for w in witnesses if w.told})
    return report


def _on_devices(killed: KilledRank, world: World) -> list[Witness]:
    meter = Meter(world)
    return on_all_ranks(world, lambda rank: killed.host(rank, world, meter))


def _on_cpu(request: Request, killed: KilledRank, schedule: Schedule) -> tuple[Run, list[Witness]]:
    settings: dict[str, Any] = schedule.options()
    with cpu_world(request.size, wgs=4, **settings) as world:
        meter = Meter(world)
        failure: Exception | None = None
        found: list[Witness] = []
        try:
            found = world.spmd(killed.host, world, meter)
        except ExecutorError as error:
            failure = error
        executor: Executor = world.executor  # type: ignore[attr-defined]
        return Run([], failure, executor.schedule_hash), found
