"""One measurement from start to files: the group, the stages, the progress bar, JSON and PNG."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import kosmos_core
from kosmos_core.doctor.probes import gpu_driver
from kosmos_core.errors import WorldError
from kosmos_core.measure import beside, copies, gemm, latency, power
from kosmos_core.measure.budget import Budget
from kosmos_core.measure.timing import EventTimer, Timer
from kosmos_core.worlds import World, group_world

SCHEMA = 1
# A rank that is gone ends the others within this time.
GROUP_TIMEOUT = timedelta(minutes=3)
# NVLink multicast stays off, in torch's symmetric memory and in NCCL: a fault in it can take the
# GPUs of a whole node out of service.
MULTICAST_OFF = {
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
}

Tick = Callable[[str], None]


@dataclass(frozen=True)
class Stage:
    """A part of the measurement: its name, how often it ticks, and what it does with `tick`."""

    name: str
    points: int
    run: Callable[[Tick], dict[str, Any]]


@contextmanager
def measuring_world() -> Iterator[World]:
    """The ranks of torchrun, or this process alone with one GPU.

    Raises:
        WorldError: there is no GPU, or fewer than ranks.
    """
    if not torch.cuda.is_available():
        raise WorldError("measure: no GPU is visible; it measures GPUs and runs nowhere else")
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if local_rank >= torch.cuda.device_count():
        raise WorldError(
            f"measure: rank {local_rank} of this node has no GPU of its own "
            f"({torch.cuda.device_count()} are visible); start fewer processes"
        )
    os.environ.update(MULTICAST_OFF)
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    if "WORLD_SIZE" in os.environ and "MASTER_ADDR" in os.environ:
        dist.init_process_group("nccl", device_id=device, timeout=GROUP_TIMEOUT)
    else:
        alone: Any = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("nccl", store=alone, rank=0, world_size=1, device_id=device)
    with group_world(reserve_sms=0) as world:
        yield world
    # Only after success: with a rank gone it would wait for that rank.
    dist.destroy_process_group()


def versions() -> dict[str, str]:
    """Versions that figures depend on."""
    found = {
        "kosmos-core": kosmos_core.__version__,
        "torch": str(torch.__version__),
        "triton": triton.__version__,
        "python": platform.python_version(),
    }
    if torch.cuda.is_available():
        found["driver"] = gpu_driver()
        parts = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        found["nccl"] = ".".join(str(part) for part in parts)
    return found


def stages(world: World, timer: Timer, budget: Budget) -> list[Stage]:
    """What is measured, in order: power last, since it warms the GPU up."""
    wgs = world.num_wgs
    return [
        Stage(
            "latency",
            latency.NUM_POINTS,
            lambda tick: latency.measure_latency(world, timer, budget, tick),
        ),
        Stage(
            "copies",
            copies.num_points(budget, world.size, wgs),
            lambda tick: copies.measure_copies(world, timer, budget, tick),
        ),
        Stage(
            "gemm",
            gemm.num_points(budget, wgs),
            lambda tick: gemm.measure_gemm(world, timer, budget, tick),
        ),
        Stage(
            "beside",
            beside.num_points(budget, world.size, wgs),
            lambda tick: beside.measure_beside(world, timer, budget, tick),
        ),
        Stage(
            "power",
            power.num_points(budget, wgs),
            lambda tick: power.measure_power(world, budget, tick),
        ),
    ]


def measure(
    world: World, timer: Timer, budget: Budget, machine: str, console: Console | None = None
) -> dict[str, Any]:
    """Measures the machine. Collective.

    Args:
        world: ranks.
        timer: how calls are timed.
        budget: how much is measured.
        machine: name to record; a plan's rules are chosen by what it contains ("h200").
        console: where the progress bar goes; None for no bar.

    Returns:
        The measurement as plain JSON data: schema 1 of kosmos_heuristics.curves and further keys.

    Raises:
        MeasurementError: a copy or a product was wrong.
        PeerTimeoutError: a rank did not answer.
    """
    begin = time.perf_counter()
    data: dict[str, Any] = {
        "schema": SCHEMA,
        "machine": machine,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": versions(),
        "world_size": world.size,
        "num_wgs": world.num_wgs,
        "multicast": "off",
    }
    todo = stages(world, timer, budget)
    seconds: dict[str, float] = {}
    columns = (TextColumn("{task.description:<46}"), BarColumn(), MofNCompleteColumn())
    bar = Progress(
        *columns, TimeElapsedColumn(), console=console, disable=console is None, transient=True
    )
    with bar:
        task = bar.add_task("", total=sum(stage.points for stage in todo))
        for stage in todo:
            done = bar.tasks[0].completed
            stage_begin = time.perf_counter()
            data.update(stage.run(lambda label: bar.update(task, advance=1, description=label)))
            bar.update(task, completed=done + stage.points)
            seconds[stage.name] = round(time.perf_counter() - stage_begin, 1)
    data["seconds"] = {**seconds, "total": round(time.perf_counter() - begin, 1)}
    data["baseline"] = _baseline(data)
    return data


def _baseline(data: Mapping[str, Any]) -> dict[str, Any]:
    """The unfused path in the words of kosmos_heuristics.Baseline, as far as it was measured."""
    found = {"tflops": data["gemm"]["vendor_tflops"]}
    for key in ("collective_gbps", "collective_us", "reduction_gbps", "reduction_us"):
        if key in data["copies"]:
            found[key] = data["copies"][key]
    return found


def measure_here(
    budget: Budget, machine: str | None, json_path: Path | None, png_path: Path | None
) -> dict[str, Any]:
    """Measures on the ranks at hand; rank 0 prints the report and writes the files.

    Raises:
        WorldError: there is no GPU to measure.
    """
    from kosmos_core.measure.figure import draw
    from kosmos_core.measure.report import print_report

    begin = time.perf_counter()
    with measuring_world() as world:
        leads = world.rank == 0
        console = Console(stderr=True)
        name = machine or torch.cuda.get_device_name(world.device)
        data = measure(world, EventTimer(world), budget, name, console if leads else None)
        if leads:
            out = Console()
            if not out.is_terminal:
                out = Console(width=140)
            print_report(data, out)
            if json_path is not None:
                json_path.write_text(to_json(data))
            if png_path is not None:
                draw(data, png_path)
            written = " and ".join(str(p) for p in (json_path, png_path) if p is not None)
            took = time.perf_counter() - begin
            out.print(
                f"{took:.0f} s with set-up" + (f"; written: {written}" if written else ""),
                soft_wrap=True,
            )
    return data


def to_json(data: Mapping[str, Any]) -> str:
    """JSON with a line a key, and lists of numbers on one line, so that files compare by eye."""
    lines = [f"  {json.dumps(key)}: {_value(value, 2)}" for key, value in data.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _value(value: Any, indent: int) -> str:
    flat = json.dumps(value)
    inside = value.values() if isinstance(value, dict) else value
    if not isinstance(value, (dict, list)) or not any(isinstance(v, (dict, list)) for v in inside):
        return flat
    pad = " " * (indent + 2)
    if isinstance(value, dict):
        inner = [f"{pad}{json.dumps(k)}: {_value(v, indent + 2)}" for k, v in value.items()]
        return "{\n" + ",\n".join(inner) + "\n" + " " * indent + "}"
    inner = [f"{pad}{_value(v, indent + 2)}" for v in value]
    return "[\n" + ",\n".join(inner) + "\n" + " " * indent + "]"
