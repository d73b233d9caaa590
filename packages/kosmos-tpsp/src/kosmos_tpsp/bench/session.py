"""A benchmark run from rank to report: the group, the workspaces, every case, the host's cost."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from kosmos_core.testing.bench import EventTimer, environment, host_microseconds
from kosmos_core.worlds import World, group_world
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from kosmos_tpsp.bench.cases import Case
from kosmos_tpsp.bench.peak import transport_peaks
from kosmos_tpsp.bench.report import console, summary
from kosmos_tpsp.bench.results import Report, Row
from kosmos_tpsp.bench.runner import Settings, measure, measure_orders
from kosmos_tpsp.bench.variants import Rig
from kosmos_tpsp.ops import mx
from kosmos_tpsp.ops.catalog import driver_of
from kosmos_tpsp.ops.registry import call_handle
from kosmos_tpsp.workspaces import TRANSPORTS, TpSpWorkspace

# A stuck kernel should end a benchmark soon, not after the production bound.
TIMEOUT_S = 20.0
# (tokens, n, the third size), small enough that the host, not the GPU, sets the pace.
HOST_SHAPE = (512, 256, 1024)


@contextmanager
def process_group() -> Iterator[None]:
    """The default group of this process on a GPU of its own: torchrun's, else a group of one.

    Where there is no GPU the ranks of torchrun meet on the CPU.
    """
    # Collectives without NVLink multicast, as docs/benchmarking.md says, unless asked for.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    options: dict[str, Any] = {"backend": "gloo"}
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        device = torch.device("cuda", torch.cuda.current_device())
        options = {"backend": "nccl", "device_id": device}
    if "RANK" not in os.environ:
        store = dist.HashStore()  # type: ignore[attr-defined]
        options |= {"store": store, "rank": 0, "world_size": 1}
    dist.init_process_group(**options)
    yield
    # Not after an exception: this rank's peers may be anywhere, and nobody would end the wait.
    dist.destroy_process_group()


@contextmanager
def group_rig(cases: Sequence[Case], choices: Any) -> Iterator[Rig]:
    """A rig over the default process group, its workspaces large enough for all. Collective."""
    # The groups of one below never communicate: no SMs need to be kept free for them.
    world = group_world(reserve_sms=0)
    mine = [dist.new_group([rank]) for rank in range(world.size)][world.rank]
    solo_world = group_world(mine, reserve_sms=0)
    tokens = max(HOST_SHAPE[0], *(c.tokens for c in cases))
    features = max(HOST_SHAPE[2], *(c.width for c in cases))
    timer = EventTimer(world)
    # The staging region is large: only who asks for it gets it.
    pulls = choices.transport == "pull" and driver_of(choices).name == "gemm_rs"
    reduces = TRANSPORTS if pulls else None

    def workspace_of(ranks: World) -> TpSpWorkspace:
        return TpSpWorkspace(
            ranks, tokens, features, reduce_transports=reduces, timeout_s=TIMEOUT_S
        )

    workspace, solo = workspace_of(world), workspace_of(solo_world)
    peaks = transport_peaks(world, workspace.machine, timer)
    yield Rig(world, workspace, timer, choices, solo, peaks)
    # Not after an exception: destroy() is collective, and the peers may not come.
    workspace.destroy()
    solo.destroy()


def run(
    rig: Rig,
    cases: Sequence[Case],
    order_cases: Sequence[Case],
    settings: Settings,
    *,
    sweep: bool,
    described: dict[str, Any],
    so_far: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Measures all cases. Collective, and the report is the same on every rank.

    Args:
        rig: what to measure with.
        cases: shapes to measure against everything.
        order_cases: shapes of the queue-order ablation.
        settings: how long; every case gets a seed of its own.
        sweep: also two-way switching and fixed splits.
        described: what else the report should say about how it was measured.
        so_far: told on rank 0, after each case, what has been measured until then.
    """
    rows: list[Row] = []
    host_us: dict[str, float] = {}
    surroundings = environment(rig.world)

    def report() -> Report:
        return Report(
            tuple(rows[: len(cases)]),
            tuple(rows[len(cases) :]),
            host_us,
            rig.peak_gbps,
            {**described, **asdict(settings), "sweep": sweep},
            surroundings,
        )

    with _progress(rig.world) as bar:
        task = bar.add_task("", total=len(cases) + len(order_cases))

        def show(name: str, case: Case) -> None:
            bar.update(task, description=f"{case.name} {name}")

        for i, case in enumerate((*cases, *order_cases)):
            show("checks", case)
            varied, advance = replace(settings, seed=settings.seed + i), partial(show, case=case)
            if i < len(cases):
                row = measure(rig, case, varied, sweep=sweep, advance=advance)
            else:
                row = measure_orders(rig, case, varied, advance=advance)
            rows.append(row)
            if rig.world.rank == 0:
                bar.console.print(summary(row), markup=False)
                so_far(report())
            bar.advance(task)
        bar.update(task, description="host cost of a call")
        if settings.host_calls:
            dtype = next((case.dtype for case in (*cases, *order_cases)), "bf16")
            host_us.update(host_cost(rig, settings.host_calls, dtype))
    return report()


def host_cost(rig: Rig, calls: int, dtype: str = "bf16") -> dict[str, float]:
    """Host microseconds of a warm call under no_grad on the slowest rank, by entry point."""
    driver = driver_of(rig.choices)
    options = replace(rig.choices, force=True)
    shape = driver.shape_of(*HOST_SHAPE)
    axes = driver.quantised(options) if dtype == "mxfp8" else {}
    given: dict[str, Any] = {}
    for name, of in driver.operand_shapes(shape, rig.world.size, options).items():
        t = torch.randn(of, device=rig.world.device).bfloat16()
        # Local operands as values, as in a layer, where rows are dequantised on arrival.
        is_whole = not given or mx.takes_scales(rig.world.device)
        given[name] = t
        if name in axes:
            copy = mx.quantized(t, axes[name])
            given[name] = copy if is_whole else mx.as_operand(copy, scaled=False)
    operator, handle = driver.operator(options), call_handle(rig.workspace, options)
    entries: dict[str, Callable[[], object]] = {
        driver.name: lambda: driver.op(*given.values(), rig.workspace, options=options),
    }
    if dtype == "bf16":
        entries[f"kosmos::{driver.name}"] = lambda: operator(*given.values(), handle)
    costs = {}
    with torch.no_grad():
        for name, entry in entries.items():
            mine = host_microseconds(entry, rig.world, calls=calls)
            costs[name] = max(rig.world.all_gather_object(mine))
    return costs


def _progress(world: World) -> Progress:
    return Progress(
        TextColumn("{task.description:<40}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console(stderr=True),
        disable=world.rank != 0,
    )
