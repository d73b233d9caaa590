"""Runs a sequence of calls on one workspace, in any world, and judges every output."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from kosmos_core.device.barrier import agree_kernel
from kosmos_core.errors import KosmosError
from kosmos_core.testing.faults import is_reported
from kosmos_core.testing.schedules import Schedule
from kosmos_core.workspace import DEFAULT_TIMEOUT_S
from kosmos_core.worlds import World, cpu_world
from kosmos_heuristics import Machine

from kosmos_tpsp.cli.calls import Call, Ledger, Operands, Verdict, compare_all, lasting
from kosmos_tpsp.ops.prepared import Prepared
from kosmos_tpsp.workspaces import TRANSPORTS, TpSpWorkspace

if TYPE_CHECKING:
    from kosmos_core.executor import Executor, Mutation

# Calls that are issued before the host waits for any of them, where launches do not block.
ROUND = 8
# Regions whose traffic between ranks is the transport; the rest are words and records.
TRANSPORT_REGIONS = ("shard0", "shard1", "gather", "staging0", "staging1", "handover")

T = TypeVar("T")


class Meter:
    """Counts, by rank, the launches of a world and, on the executor, bytes moved between ranks.

    Attributes:
        launches: by each rank, of kernels that move something.
        measures: whether bytes are counted.

    Args:
        world: its `launch` is replaced, for as long as the world lives.
    """

    def __init__(self, world: World) -> None:
        self.launches = [0] * world.size
        self.measures = False
        self._bytes = [0] * world.size
        self._polled: list[set[tuple[Any, ...]]] = [set() for _ in range(world.size)]
        self._world = world
        self._launch = world.launch
        world.launch = self._count_launch  # type: ignore[method-assign]
        executor = getattr(world, "executor", None)
        if executor is not None:
            self.measures = True
            # Where accesses are made, not where they are carried out: what runs then belongs to the
            # kernel, so that reports name its lines.
            memory = executor.memory
            for maker in ("block", "_list"):
                setattr(memory, maker, self._counted(getattr(memory, maker), executor.scheduler))

    def moved(self, rank: int) -> int:
        """Bytes that this rank's kernels have moved from or to other ranks; none of them runs."""
        self._polled[rank].clear()
        return self._bytes[rank]

    def _count_launch(
        self,
        kernel: Any,
        num_wgs: int,
        args: Sequence[Any],
        key: Hashable,
        *,
        num_warps: int,
        num_stages: int,
    ) -> None:
        # What moves nothing stands between calls.
        if kernel is not agree_kernel:
            self.launches[self._world.rank] += 1
        self._launch(kernel, num_wgs, args, key, num_warps=num_warps, num_stages=num_stages)

    def _counted(self, make: Callable[..., Any], scheduler: Any) -> Callable[..., Any]:
        counts, polled = self._bytes, self._polled

        def count(*arguments: Any) -> Any:
            access = make(*arguments)
            region, wg = access.region, scheduler.current
            if region.name in TRANSPORT_REGIONS and wg.rank != region.rank:
                # What is polled in its data is read until it is there, and moved once.
                poll = (wg, region, access.lo, access.hi)
                if region.sentinel is None or poll not in polled[wg.rank]:
                    counts[wg.rank] += access.nbytes
                    polled[wg.rank].add(poll)
            return access

        return count


@dataclass
class Rig:
    """A sequence of calls on one workspace.

    Attributes:
        calls: what every rank calls, in order.
        seed: of the operands.
        caps: cap of each rank's calls where it is not that of the call's options.
        first_epoch: epoch of the first call.
        timeout_s: bound of every wait.
        machine: machine model for the plans; None takes the world's.
        queued: on the executor, launches wait in a stream's queue and do not block the host.
        keep: calls of which is kept what they must give, for later ones on the same operands.
        delay: called with (rank, index of the call) before each call.
        ledger: first outputs, shared by rigs whose outputs must be equal.
        progress: index of the call each rank has come to.
    """

    calls: Sequence[Call]
    seed: int = 0
    caps: Sequence[int | None] | None = None
    first_epoch: int = 1
    timeout_s: float = 120.0
    machine: Machine | None = None
    queued: bool = False
    keep: int = 0
    delay: Callable[[int, int], None] | None = None
    ledger: Ledger = field(default_factory=Ledger)
    progress: dict[int, int] = field(default_factory=dict)

    def shape_in_progress(self) -> tuple[int, int, int] | None:
        """Shape of the call of the rank that is furthest behind; None before the first call."""
        return self.calls[min(self.progress.values())].shape if self.progress else None

    def workspace(self, world: World) -> TpSpWorkspace:
        """Collective: a workspace that all calls fit in, its regions full of NaN."""
        reduces = any(call.op == "gemm_rs" for call in self.calls)
        workspace = TpSpWorkspace(
            world,
            max([world.size, *(call.tokens for call in self.calls)]),
            max([8, *(call.room for call in self.calls)]),
            reduce_transports=TRANSPORTS if reduces else None,
            machine=self.machine,
            timeout_s=self.timeout_s,
            first_epoch=self.first_epoch,
        )
        # Whatever is read before it has been written shows.
        for region in workspace.regions if world.fused else ():
            if region.poison is not None:
                continue  # what is missing there shows anyhow
            for copy in range(region.depth):
                workspace.buffer(region.row + copy).fill_(float("nan"))
        world.barrier()
        return workspace

    def options(self, call: Call, rank: int) -> Any:
        """The call's options as `rank` gives them."""
        if self.caps is None:
            return call.options
        return replace(call.options, cap=self.caps[rank])

    def host(self, rank: int, world: World, meter: Meter) -> list[Verdict]:
        """What one rank does: all calls in rounds, and a look at every output after each round.

        Raises:
            PeerError: a call was given up.
        """
        operands = Operands(self.seed, world.size, world.device, self.keep)
        verdicts: list[Verdict] = []
        self.prepare(rank, world)
        workspace = self.workspace(world)
        for first in range(0, len(self.calls), ROUND):
            verdicts += self._round(rank, workspace, operands, meter, first)
        workspace.destroy()
        return verdicts

    def prepare(self, rank: int, world: World) -> None:
        """Collective: compiles and loads, on devices, whatever the calls need.

        Compiling takes longer on some ranks than on others, perhaps longer than the bound. And
        among virtual ranks of one GPU a module that is loaded while a peer's kernel waits for this
        rank would wait for that kernel.
        """
        if world.device.type != "cuda":
            return
        patient = replace(self, timeout_s=DEFAULT_TIMEOUT_S).workspace(world)
        for call in dict.fromkeys(replace(call, data=0) for call in self.calls):
            call.driver.prepare(patient, call.shape, self.options(call, rank), call.dtype)
        patient.destroy()

    def _round(
        self, rank: int, workspace: TpSpWorkspace, operands: Operands, meter: Meter, first: int
    ) -> list[Verdict]:
        calls = self.calls[first : first + ROUND]
        given = [operands.given(c, rank) for c in calls]
        memory = [operands.memory(c) for c in calls]
        # Nobody calls before all have made their operands, which may load modules, too.
        workspace.synchronize()
        workspace.world.barrier()
        results, launches = [], []
        moved = meter.moved(rank)
        for i, (call, tensors, outs) in enumerate(zip(calls, given, memory, strict=True)):
            self.progress[rank] = first + i
            if self.delay is not None:
                self.delay(rank, first + i)
            before = meter.launches[rank]
            made = call.driver.call(tensors, workspace, outs, self.options(call, rank))
            results.append(lasting(made, workspace))
            launches.append(meter.launches[rank] - before)
        workspace.synchronize()
        verdicts = []
        for call, tensors, outs, count in zip(calls, given, results, launches, strict=True):
            prepared = call.driver.describe(tensors, workspace, self.options(call, rank))
            verdicts.append(self._judge(rank, operands, call, prepared, outs, count))
        moved = meter.moved(rank) - moved
        wanted = sum(v.call.remote_bytes(operands.size) for v in verdicts if v.path == "fused")
        if meter.measures and moved != wanted:
            problem = f"{moved} bytes moved between ranks instead of {wanted}"
            verdicts[-1] = replace(verdicts[-1], problem=verdicts[-1].problem or problem)
        return verdicts

    def _judge(
        self,
        rank: int,
        operands: Operands,
        call: Call,
        prepared: Prepared,
        outs: dict[str, torch.Tensor],
        launches: int,
    ) -> Verdict:
        error, problem = compare_all(outs, operands.wanted(call, rank))
        fused = prepared.decline is None
        wanted = 0 if call.tokens == 0 else len(prepared.configs)
        if not problem and fused and launches != wanted:
            problem = f"{launches} launches instead of {wanted}"
        repeated = self.ledger.repeats(call, rank, outs)
        if not problem and repeated is False:
            problem = "other bits than the same call before"
        path, transport = "fused" if fused else "reference", prepared.plan.transport
        decline = prepared.decline or ""
        return Verdict(call, rank, path, transport, launches, error, repeated, problem, decline)


@dataclass
class Run:
    """What one schedule gave.

    Attributes:
        verdicts: of all ranks' calls.
        failure: what ended the run early, or None.
        schedule_hash: identifies the schedule and all decisions about visibility; "" on devices.
        shape: of the call in which the rank that was furthest behind stood at the end.
        remarks: what else is wrong.
        replay: command that repeats the run, "" where there is none.
    """

    verdicts: list[Verdict]
    failure: Exception | None = None
    schedule_hash: str = ""
    shape: tuple[int, int, int] | None = None
    remarks: list[str] = field(default_factory=list)
    replay: str = ""

    @property
    def problems(self) -> list[str]:
        """What is wrong, a line each."""
        found = [f"rank {v.rank}, {v.call}: {v.problem}" for v in self.verdicts if v.problem]
        found += self.remarks
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
        meter = Meter(world)
        executor: Executor = world.executor  # type: ignore[attr-defined]
        try:
            with executor.stream(0) if rig.queued else contextlib.nullcontext():
                for found in world.spmd(rig.host, world, meter):
                    verdicts += found
        except Exception as error:
            if not is_reported(error):
                raise
            failure = error
        schedule_hash = executor.schedule_hash
    return Run(verdicts, failure, schedule_hash, rig.shape_in_progress())


def run_on_devices(world: World, rig: Rig) -> Run:
    """Runs a rig on the ranks of a group, or of one GPU; every rank gets the whole run."""

    def host(rank: int) -> tuple[list[Verdict], KosmosError | None]:
        try:
            return rig.host(rank, world, meter), None
        except KosmosError as error:
            return [], error

    meter = Meter(world)
    found = on_all_ranks(world, host)
    verdicts = [verdict for part, _ in found for verdict in part]
    failure = next((error for _, error in found if error is not None), None)
    return Run(verdicts, failure, "", rig.shape_in_progress())


def on_all_ranks(world: World, host: Callable[[int], T]) -> list[T]:
    """Runs `host(rank)` on every rank of any world and returns all results, on every rank."""
    if world.describe() in ("group", "reference"):
        gathered: list[T] = world.all_gather_object(host(world.rank))
        return gathered
    return world.spmd(host)
