"""Power and clock while a number of workgroups build tiles. Clocks are read, never set."""

from __future__ import annotations

import importlib
import statistics
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from kosmos_core.measure.budget import Budget
from kosmos_core.measure.gemm import GemmBench
from kosmos_core.measure.timing import figures, new_event, slowest
from kosmos_core.worlds.base import World

SAMPLE_S = 0.02
# The driver averages power: what it says in the first part of a load still holds the time before.
SETTLED = 0.5

Reading = tuple[float, float]  # watts, MHz


def open_meter(device: torch.device) -> tuple[Callable[[], Reading] | None, str]:
    """A function that reads (watts, SM clock in MHz) and its name; or None and why not."""
    faults = []
    for name, opener in (("nvml", _nvml), ("torch", _torch), ("nvidia-smi", _smi)):
        try:
            read = opener(device)
            read()
        except Exception as error:
            faults.append(f"{name}: {type(error).__name__}: {error}")
        else:
            return read, name
    return None, "; ".join(faults)


def _uuid(device: torch.device) -> str:
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def _nvml(device: torch.device) -> Callable[[], Reading]:
    """Power of this instant; the plain query is an average over a second on recent GPUs."""
    nvml = importlib.import_module("pynvml")
    nvml.nvmlInit()
    gpu = nvml.nvmlDeviceGetHandleByUUID(_uuid(device))
    instant = nvml.NVML_FI_DEV_POWER_INSTANT

    def read() -> Reading:
        (field,) = nvml.nvmlDeviceGetFieldValues(gpu, [instant])
        if field.nvmlReturn != nvml.NVML_SUCCESS:
            raise RuntimeError(f"no instantaneous power (NVML status {field.nvmlReturn})")
        return field.value.uiVal / 1e3, float(nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM))

    return read


def _torch(device: torch.device) -> Callable[[], Reading]:
    return lambda: (torch.cuda.power_draw(device) / 1e3, float(torch.cuda.clock_rate(device)))


def _smi(device: torch.device) -> Callable[[], Reading]:
    command = (
        "nvidia-smi", "-i", _uuid(device), "--query-gpu=power.draw,clocks.sm",
        "--format=csv,noheader,nounits",
    )  # fmt: skip

    def read() -> Reading:
        text = subprocess.run(
            command, capture_output=True, text=True, timeout=10, check=True
        ).stdout
        watts, mhz = text.split(",")
        return float(watts), float(mhz)

    return read


class Sampler:
    """Reads a meter in a thread while its block runs.

    Args:
        read: from `open_meter`.

    Attributes:
        readings: (seconds since the start, watts, MHz).
    """

    def __init__(self, read: Callable[[], Reading]) -> None:
        self._read = read
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.readings: list[tuple[float, float, float]] = []
        self.fault: str | None = None

    def _run(self) -> None:
        begin = time.perf_counter()
        try:
            while not self._stop.is_set():
                watts, mhz = self._read()
                self.readings.append((time.perf_counter() - begin, watts, mhz))
                self._stop.wait(SAMPLE_S)
        except Exception as error:
            self.fault = f"{type(error).__name__}: {error}"

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def settled(self) -> tuple[float, float]:
        """Median watts and MHz of the later part.

        Raises:
            RuntimeError: nothing could be read.
        """
        if not self.readings:
            raise RuntimeError(self.fault or "the meter gave no reading in time")
        end = self.readings[-1][0]
        late = [r for r in self.readings if r[0] >= SETTLED * end]
        return statistics.median(r[1] for r in late), statistics.median(r[2] for r in late)


def num_points(budget: Budget, num_wgs: int) -> int:
    """Loads under which power is read, idle included."""
    return 1 + len(budget.counts(budget.power_wgs, num_wgs))


def measure_power(world: World, budget: Budget, tick: Callable[[str], None]) -> dict[str, Any]:
    """Watts, MHz and TFLOPS of this rank by active workgroups, all ranks loaded alike. Collective.

    Returns:
        The key "power"; its "note" says why the curves are missing where no meter can be read.
    """
    read, source = open_meter(world.device)
    missing = [r for r in world.all_gather_object(None if read else source) if r]
    if missing or read is None:
        for _ in range(num_points(budget, world.num_wgs)):
            tick("power: no meter")
        return {"power": {"note": f"not measured: {missing[0] if missing else source}"}}
    bench = GemmBench(world, budget)
    curves: dict[str, dict[str, float]] = {"watts": {}, "mhz": {}, "tflops": {}}
    tick("power: idle")
    with Sampler(read) as idle:
        time.sleep(budget.power_seconds / 2)
    curves["watts"]["0"], curves["mhz"]["0"] = idle.settled()
    for wgs in budget.counts(budget.power_wgs, world.num_wgs):
        tick(f"power: {wgs} WGs")
        world.barrier()
        with Sampler(read) as load:
            batches, seconds = _load(bench, wgs, budget.power_seconds)
        watts, mhz = load.settled()
        (longest,) = slowest(world, [seconds / batches])
        key = str(wgs)
        curves["watts"][key], curves["mhz"][key] = figures(watts), figures(mhz)
        rate = bench.tflops(longest * 1e3, bench.whole_rounds_m(wgs))
        curves["tflops"][key] = figures(rate)
    return {"power": {"source": source, "seconds_each": budget.power_seconds, **curves}}


def _load(bench: GemmBench, wgs: int, seconds: float) -> tuple[int, float]:
    """Multiplies for so many seconds. Returns batches and the seconds they took."""
    m = bench.whole_rounds_m(wgs)
    batches = 0
    before: torch.cuda.Event | None = None
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        bench.reset()
        bench.batch(wgs, m)
        batches += 1
        # Two batches are queued at most, and the GPU never waits for the host.
        event = new_event()
        event.record()
        if before is not None:
            before.synchronize()
        before = event
    bench.world.synchronize()
    return batches, time.perf_counter() - begin
