"""What every rank of the demonstration does, and what it brings back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from kosmos_core.device.trace import EVENT_WORDS, MOVE
from kosmos_core.testing.bench import EventTimer, time_rounds
from kosmos_core.trace import Span, decode, role_switches
from kosmos_core.worlds import World, cpu_world
from kosmos_heuristics import AgGemmPlan, Machine, load_machine

from kosmos_tpsp import reference
from kosmos_tpsp.bench import checking
from kosmos_tpsp.bench import variants as v
from kosmos_tpsp.bench.cases import Case
from kosmos_tpsp.bench.unfused import Data
from kosmos_tpsp.cli.demo_layer import Layer
from kosmos_tpsp.ops.ag_gemm import AgGemmOptions, ag_gemm, describe_call
from kosmos_tpsp.workspaces import TpSpWorkspace

if TYPE_CHECKING:
    from kosmos_core.executor import Executor

# Workgroups of a virtual rank: some movers, more builders.
WGS = 8
TRACE_EVENTS = 512
TIMEOUT_S = 60.0
# The tiles are far smaller than a GPU's; rates are scaled down with them, so that a tile and a move
# take as long beside a flag as they do there.
COST: dict[str, Any] = {"local_gbps": 50.0, "remote_gbps": 0.35, "tflops": 0.018}
OPTIONS = AgGemmOptions(traced=True, force=True)
BASELINE, FUSED = v.BASELINE, v.FUSED
MOVED = int(MOVE.value)


@dataclass(frozen=True)
class Outcome:
    """One rank's part of the demonstration.

    Attributes:
        rank: rank.
        plan: of the fused call.
        wrong: elements that differ from the unfused path beyond rounding.
        rel_err: relative error against FP64.
        rel_err_reference: the unfused path's.
        spans: what its workgroups did, by its own clock.
        lost_spans: spans that did not fit into the trace.
        unit_bytes: bytes of a unit of transport.
        times_ms: median times by variant, where they were measured.
    """

    rank: int
    plan: AgGemmPlan
    wrong: int
    rel_err: float
    rel_err_reference: float
    spans: tuple[Span, ...]
    lost_spans: int
    unit_bytes: int
    times_ms: dict[str, float]

    @property
    def right(self) -> bool:
        """Whether the fused output is what it should be."""
        return self.wrong == 0 and self.rel_err <= checking.FP64_LIMIT

    def count(self, kind: str) -> int:
        """Spans of a kind."""
        return sum(s.kind == kind for s in self.spans)

    def share(self, kind: str) -> float:
        """Share of the workgroups' time that a kind of span takes."""
        whole = sum(s.end_ns - s.begin_ns for s in self.spans if s.kind == "call")
        return sum(s.end_ns - s.begin_ns for s in self.spans if s.kind == kind) / max(whole, 1)

    @property
    def switches(self) -> list[int]:
        """Role switches of each workgroup."""
        return list(role_switches(self.spans).values())


@dataclass(frozen=True)
class Expected:
    """What one rank has to do.

    Attributes:
        units: units that it moves.
        tiles: tiles that it builds.
        steps: multiplications of a tile.
    """

    units: int
    tiles: int
    steps: int


class Progress:
    """Counts how many units have been moved and tiles built so far.

    Moves are events in the trace buffers. A builder releases nothing before it leaves, so that its
    events show only then: of tiles the multiplications count.

    Args:
        report: called with what is done and what there is to do.
    """

    def __init__(self, report: Callable[[int, int], None]) -> None:
        self._kinds: list[torch.Tensor] = []
        self._steps = 1
        self._tiles = 0
        self._total = 0
        self._report = report

    def watch(self, workspace: TpSpWorkspace, expected: Expected) -> None:
        """Also counts what is done in a workspace."""
        self._kinds.append(_trace_rows(workspace)[:, 1 :: int(EVENT_WORDS.value)])
        self._steps = expected.steps
        self._tiles += expected.tiles
        self._total += expected.tiles + expected.units

    def __call__(self, executor: Executor) -> None:
        """Reports how far the ranks have come."""
        moved = sum(int((kinds == MOVED).sum()) for kinds in self._kinds)
        built = min(executor.num_dots // self._steps, self._tiles)
        self._report(moved + built, self._total)


def _trace_rows(workspace: TpSpWorkspace) -> torch.Tensor:
    return workspace.trace_buffer.view(-1, 1 + int(EVENT_WORDS.value) * TRACE_EVENTS)


def executor_world(size: int, seed: int, progress: Progress) -> World:
    """Virtual ranks on the CPU with all checks on, in simulated time."""
    from kosmos_core.executor import CostModel

    return cpu_world(
        size, wgs=WGS, cost=CostModel(**COST), race="raise", strict=True, weak="late", seed=seed,
        progress=progress, progress_every=50,
    )  # fmt: skip


def executor_machine() -> Machine:
    """The executor's machine model with as many workgroups as the demonstration's ranks have."""
    return replace(load_machine("executor"), num_wgs=WGS)


def run_rank(
    world: World,
    layer: Layer,
    text: bytes,
    machine: Machine | None = None,
    watch: Callable[[TpSpWorkspace, Expected], None] = lambda workspace, expected: None,
) -> Outcome:
    """Computes the layer fused and unfused and compares. Collective.

    Args:
        world: the ranks.
        layer: what to compute.
        text: one byte a token.
        machine: for the plan; None takes the world's.
        watch: told the workspace, and what to expect, before the fused call.
    """
    x = layer.chunk(text, world.rank, world.size, world.device)
    w = layer.weights(world.rank, world.device)
    workspace = TpSpWorkspace(
        world,
        layer.tokens,
        layer.hidden,
        machine=machine,
        timeout_s=TIMEOUT_S,
        trace_events=TRACE_EVENTS,
    )
    with workspace:
        times: dict[str, float] = {}
        if world.describe() == "group":
            times = _times(world, workspace, layer, x, w)
        if world.device.type == "cuda":
            # The first call compiles, which is nothing to look at.
            ag_gemm(x, w, workspace, options=OPTIONS)
            workspace.synchronize()
            workspace.trace_buffer.zero_()
        plan = describe_call(x, w, workspace, OPTIONS).plan
        watch(workspace, _expected(layer, world.size, plan))
        out = x.new_full((layer.tokens, layer.local_width), float("nan"))
        world.barrier()
        ag_gemm(x, w, workspace, out=out, options=OPTIONS)
        workspace.synchronize()
        wanted, gathered = reference.ag_gemm(x, w, world)
        spans = decode(workspace.trace_buffer, TRACE_EVENTS, world.rank)
        lost = _trace_rows(workspace)[:, 0] - TRACE_EVENTS
        return Outcome(
            rank=world.rank,
            plan=plan,
            wrong=checking.compare(out, wanted).wrong,
            rel_err=checking.fp64_error(out, gathered, w, "tn", samples=1024),
            rel_err_reference=checking.fp64_error(wanted, gathered, w, "tn", samples=1024),
            spans=tuple(spans),
            lost_spans=int(lost.clamp(min=0).sum()),
            unit_bytes=plan.tile_row_rows // plan.slices * layer.hidden * 2,
            times_ms=times,
        )


def _expected(layer: Layer, world_size: int, plan: AgGemmPlan) -> Expected:
    rows = layer.tokens // world_size
    tiles = world_size * -(-rows // plan.block_m) * -(-layer.local_width // plan.block_n)
    units = (world_size - 1) * -(-rows // plan.tile_row_rows) * plan.slices
    return Expected(units, tiles, -(-layer.hidden // plan.block_k))


def _times(
    world: World, workspace: TpSpWorkspace, layer: Layer, x: torch.Tensor, w: torch.Tensor
) -> dict[str, float]:
    """Median milliseconds of the fused call and of the collective and GEMM in sequence."""
    case = Case(layer.label, layer.tokens, layer.local_width, layer.hidden)
    outs = {
        "out": x.new_empty(layer.tokens, layer.local_width),
        "gathered": x.new_empty(layer.tokens, layer.hidden),
    }
    data = Data(case, world, {"x": x, "w": w}, outs, {})
    calls = {
        BASELINE: v.baseline(data).call,
        FUSED: v.fused_call(data, workspace, replace(OPTIONS, traced=False)),
    }
    timings = time_rounds(calls, EventTimer(world), rounds=3)
    return {name: timing.median_ms for name, timing in timings.items()}
