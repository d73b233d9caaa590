"""What this machine can run: versions, GPUs, worlds, links. Nothing here raises; a probe that fails says why.

torch and triton are imported inside the probes, so that the report comes where one of them is broken.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

DISTRIBUTIONS = ("kosmos-core", "kosmos-heuristics", "kosmos-tpsp", "kosmos-moe", "kosmos-mx")
LINK_BYTES = 64 << 20
LINK_REPEATS = 5
# How long the workgroups of the residency probe wait for each other.
RESIDENT_BOUND_NS = 50_000_000
CHECK = "-m kosmos_tpsp check ag_gemm --m 384 --n 200 --k 128"


@dataclass(frozen=True)
class WorldReport:
    """Whether the ranks of a group can live in a world here.

    Attributes:
        name: as `kosmos_core.worlds.parse_world` takes it.
        possible: whether they can.
        detail: what was tried and found, or why not.
        command: a command to try; empty where the world is not possible.
    """

    name: str
    possible: bool
    detail: str
    command: str = ""


@dataclass
class Report:
    """All that `examine` found; `faults` maps each probe that failed to its reason."""

    versions: dict[str, str] = field(default_factory=dict)
    gpus: list[dict[str, Any]] = field(default_factory=list)
    peer_access: list[list[bool]] = field(default_factory=list)
    link_gbps: list[list[float | None]] = field(default_factory=list)
    symmetric_memory: dict[str, Any] = field(default_factory=dict)
    multicast: dict[str, str] = field(default_factory=dict)
    worlds: list[WorldReport] = field(default_factory=list)
    faults: dict[str, str] = field(default_factory=dict)

    @property
    def can_run(self) -> bool:
        """Whether at least one world is possible."""
        return any(world.possible for world in self.worlds)

    def as_dict(self) -> dict[str, Any]:
        """The report as plain JSON types."""
        return {**asdict(self), "can_run": self.can_run}


def examine() -> Report:
    """Runs every probe. Never raises: what fails is in `Report.faults`."""
    report = Report()
    steps: list[tuple[str, Callable[[], Any]]] = [
        ("versions", lambda: report.versions.update(probe_versions())),
        ("gpus", lambda: report.gpus.extend(probe_gpus(report.faults))),
        ("peer access", lambda: report.peer_access.extend(probe_peer_access(len(report.gpus)))),
        ("links", lambda: report.link_gbps.extend(probe_links(len(report.gpus)))),
        ("symmetric memory", lambda: report.symmetric_memory.update(probe_symmetric_memory())),
        ("multicast", lambda: report.multicast.update(probe_multicast())),
        ("worlds", lambda: report.worlds.extend(probe_worlds(report))),
    ]
    for name, step in steps:
        fault = _fault_of(step)
        if fault is not None:
            report.faults[name] = fault
    return report


def _fault_of(step: Callable[[], Any]) -> str | None:
    try:
        step()
    except Exception as error:
        return _describe(error)
    return None


def _describe(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def probe_versions() -> dict[str, str]:
    """Versions of Python, torch, triton, and which of our packages are there."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name in ("torch", "triton", *DISTRIBUTIONS):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            on_path = _on_path(name.replace("-", "_"))
            found[name] = "on the path, not installed" if on_path else "not installed"
    return found


def _on_path(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def gpu_driver() -> str:
    """Version of the GPU driver, or why it is not known."""
    for command in (
        ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        ("rocm-smi", "--showdriverversion", "--csv"),
    ):
        if shutil.which(command[0]) is None:
            continue
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            return f"unknown ({_describe(error)})"
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        return lines[-1].split(",")[-1] if lines else "unknown (no output)"
    return "unknown (neither nvidia-smi nor rocm-smi)"


def probe_gpus(faults: dict[str, str]) -> list[dict[str, Any]]:
    """Each visible GPU: name, SMs, memory, shared memory, driver, and how many WGs were seen resident at once.

    Args:
        faults: where a residency probe that fails leaves its reason.

    Raises:
        RuntimeError: torch cannot use the driver.
    """
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        raise RuntimeError("this build of torch is for CPUs; install one for CUDA or ROCm")
    if not torch.cuda.is_available():
        # Says what is_available() swallows: no driver, one that is too old, no permission.
        torch.cuda.init()
        raise RuntimeError("no GPU is visible")
    driver = gpu_driver()
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        gpu = {
            "index": index,
            "name": properties.name,
            "sms": properties.multi_processor_count,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "shared_memory_optin_kib": _shared_kib(properties),
            "driver": driver,
            "resident_wgs": None,
        }
        try:
            gpu["resident_wgs"] = probe_residency(index, properties.multi_processor_count)
        except Exception as error:
            faults[f"residency of GPU {index}"] = _describe(error)
        gpus.append(gpu)
    return gpus


def _shared_kib(properties: Any) -> float | None:
    for name in ("shared_memory_per_block_optin", "shared_memory_per_block"):
        value = getattr(properties, name, None)
        if value:
            return round(int(value) / 1024, 1)
    return None


def probe_residency(index: int, sms: int) -> int:
    """Launches one workgroup a multiprocessor that wait for each other; returns how many met.

    Source: design rule that a persistent grid is never larger than what is resident.
    """
    import torch

    from kosmos_core.device_info import vendor_target
    from kosmos_core.kernels.measure import presence_kernel
    from kosmos_core.launch import LAUNCHER

    with torch.cuda.device(index):
        word = torch.zeros(32, dtype=torch.int32, device="cuda")
        seen = torch.zeros(sms, dtype=torch.int32, device="cuda")
        stream = torch.cuda.current_stream().cuda_stream
        args = (word, seen, RESIDENT_BOUND_NS, vendor_target())
        LAUNCHER.launch(presence_kernel, sms, args, "presence", index, stream, 8, 1)
        torch.cuda.synchronize()
        return int(seen.min())


def probe_peer_access(num_gpus: int) -> list[list[bool]]:
    """Row i, column j: whether GPU i can read and write the memory of GPU j."""
    if num_gpus < 2:
        return []
    import torch

    return [
        [i == j or torch.cuda.can_device_access_peer(i, j) for j in range(num_gpus)]
        for i in range(num_gpus)
    ]


def probe_links(num_gpus: int) -> list[list[float | None]]:
    """GB/s of a copy of 64 MiB from GPU i (row) to GPU j (column); None on the diagonal."""
    if num_gpus < 2:
        return []
    import torch

    buffers = [
        [torch.empty(LINK_BYTES, dtype=torch.uint8, device=f"cuda:{i}") for _ in range(2)]
        for i in range(num_gpus)
    ]
    rates: list[list[float | None]] = []
    for i in range(num_gpus):
        row: list[float | None] = []
        for j in range(num_gpus):
            row.append(None if i == j else _link_gbps(buffers[i][0], buffers[j][1]))
        rates.append(row)
    return rates


def _link_gbps(src: Any, dst: Any) -> float:
    import torch

    # The copy runs on the current stream of the source's GPU, and so must the events.
    with torch.cuda.device(src.device):
        times = []
        for _ in range(LINK_REPEATS + 1):
            begin = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            begin.record()
            dst.copy_(src, non_blocking=True)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
    return round(LINK_BYTES / (min(times[1:]) * 1e6), 1)


def probe_symmetric_memory() -> dict[str, Any]:
    """Whether torch has symmetric memory, and the backend that it would use."""
    import torch.distributed as dist

    if not dist.is_available():
        return {"available": False, "why_not": "this build of torch has no torch.distributed"}
    import torch
    import torch.distributed._symmetric_memory as symm_mem

    missing = [n for n in ("empty", "rendezvous") if not hasattr(symm_mem, n)]
    if missing:
        return {"available": False, "why_not": f"it lacks {', '.join(missing)}; torch 2.9 has them"}
    if not torch.cuda.is_available():
        return {"available": False, "why_not": "no GPU is visible"}
    return {"available": True, "why_not": ""}


def probe_multicast() -> dict[str, str]:
    """The variables that keep NVLink multicast off, as they are set. KOSMOS uses none of it."""
    names = ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "NCCL_NVLS_ENABLE", "NVSHMEM_DISABLE_NVLS")
    return {name: os.environ.get(name, "not set") for name in names}


def probe_worlds(report: Report) -> list[WorldReport]:
    """The four worlds, each tried as far as this process can."""
    return [_group(report), _virtual_gpu(report), _virtual_cpu(), _reference()]


def _no_gpu(report: Report) -> str:
    return report.faults.get("gpus", "no GPU is visible")


def _group(report: Report) -> WorldReport:
    if not report.gpus:
        return WorldReport("group", False, _no_gpu(report))
    if not report.symmetric_memory.get("available"):
        why = report.symmetric_memory.get("why_not") or report.faults.get("symmetric memory", "")
        return WorldReport("group", False, f"torch's symmetric memory: {why}")
    cut = [
        f"{i} to {j}" for i, row in enumerate(report.peer_access) for j, ok in enumerate(row) if not ok
    ]
    if cut:
        return WorldReport("group", False, f"no peer access from GPU {', '.join(cut)}")
    fault = _fault_of(_import_nccl)
    if fault is not None:
        return WorldReport("group", False, fault)
    count = len(report.gpus)
    tail = f"{CHECK} --world group" if _has_check() else "-m kosmos_core measure --quick"
    detail = f"one process a GPU, up to {count} ranks"
    return WorldReport("group", True, detail, f"torchrun --nproc-per-node {count} {tail}")


def _import_nccl() -> None:
    import torch.distributed as dist

    if not dist.is_nccl_available():
        raise RuntimeError("this build of torch has neither NCCL nor RCCL")


def _virtual_gpu(report: Report) -> WorldReport:
    if not report.gpus:
        return WorldReport("gpu:N", False, _no_gpu(report))
    resident, sms = report.gpus[0]["resident_wgs"], report.gpus[0]["sms"]
    if resident is None:
        why = report.faults.get("residency of GPU 0", "the residency probe did not run")
        return WorldReport("gpu:N", False, f"kernels do not launch on GPU 0: {why}")
    if resident < sms:
        why = f"only {resident} of {sms} workgroups were resident at once on GPU 0: is it shared?"
        return WorldReport("gpu:N", False, why)
    detail = f"virtual ranks on one GPU; a kernel ran with {resident} workgroups at once"
    return WorldReport("gpu:N", True, detail, _command("gpu", 8))


def _virtual_cpu() -> WorldReport:
    fault = _fault_of(_run_on_cpu)
    if fault is not None:
        return WorldReport("cpu:N", False, fault)
    detail = "virtual ranks in the CPU executor; a kernel ran on 2 of them"
    return WorldReport("cpu:N", True, detail, _command("cpu", 4))


def _run_on_cpu() -> None:
    """Two virtual ranks send each other a flag.

    Raises:
        RuntimeError: it did not arrive.
    """
    import torch

    from kosmos_core.kernels.measure import ping_pong_kernel
    from kosmos_core.workspace import Workspace
    from kosmos_core.worlds import cpu_world

    with cpu_world(2) as world:

        def host(rank: int) -> int:
            with Workspace(world, (), 1) as workspace:
                elapsed = world.local("elapsed", 1, torch.int64)
                elapsed.zero_()
                args = (workspace.context(), elapsed, 1 - rank, 1, 1)
                world.launch(ping_pong_kernel, 1, args, "ping pong", num_warps=8, num_stages=1)
                workspace.synchronize()
                return int(elapsed)

        if not all(ns > 0 for ns in world.spmd(host)):
            raise RuntimeError("a flag between two virtual ranks did not arrive")


def _reference() -> WorldReport:
    fault = _fault_of(_make_reference)
    if fault is not None:
        return WorldReport("reference", False, fault)
    code = "from kosmos_core.worlds import reference_world; print(reference_world().describe())"
    detail = "the plain unfused path, on any group, gloo included"
    return WorldReport("reference", True, detail, f'{_python()} -c "{code}"')


def _make_reference() -> None:
    from kosmos_core.worlds import reference_world

    reference_world()


def _has_check() -> bool:
    return _on_path("kosmos_tpsp.__main__")


def _python() -> str:
    return Path(sys.executable).name or "python3"


def _command(kind: str, ranks: int) -> str:
    if _has_check():
        return f"{_python()} {CHECK} --world {kind}:{ranks}"
    code = f"from kosmos_core.worlds import {kind}_world; print({kind}_world({ranks}).spmd(lambda rank: rank))"
    return f'{_python()} -c "{code}"'


def print_report(report: Report, console: Any) -> None:
    """Prints a report as tables.

    Args:
        report: from `examine`.
        console: a `rich.console.Console`.
    """
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="versions", title_justify="left", show_header=False)
    for name, found in report.versions.items():
        table.add_row(name, escape(found))
    console.print(table)
    if report.gpus:
        console.print(_gpu_table(report.gpus))
    if report.link_gbps:
        console.print(_link_table(report))
    shared = report.symmetric_memory
    if shared:
        has = "there" if shared["available"] else f"missing: {escape(shared['why_not'])}"
        console.print(f"symmetric memory of torch.distributed: {has}", soft_wrap=True)
    if report.gpus:
        state = ", ".join(f"{name}={value}" for name, value in report.multicast.items())
        console.print(f"NVLink multicast: not used, nothing changed ({state})", soft_wrap=True)
    for world in report.worlds:
        mark = "[green]yes[/]" if world.possible else "[red]no [/]"
        console.print(f"{mark} [bold]{world.name:<10}[/] {escape(world.detail)}", soft_wrap=True)
        if world.command:
            console.print(f"    try: {escape(world.command)}", soft_wrap=True, highlight=False)
    for name, fault in report.faults.items():
        console.print(f"[yellow]{escape(name)}[/]: {escape(fault)}", soft_wrap=True)


def _gpu_table(gpus: Sequence[dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table(title="GPUs", title_justify="left")
    columns = ("", "name", "SMs", "resident WGs", "memory GiB", "shared KiB a WG", "capability", "driver")
    for name in columns:
        table.add_column(name, justify="left" if name in ("name", "driver") else "right")
    for gpu in gpus:
        keys = (
            "index", "name", "sms", "resident_wgs", "memory_gib", "shared_memory_optin_kib", "capability",
            "driver",
        )  # fmt: skip
        table.add_row(*("?" if gpu[key] is None else str(gpu[key]) for key in keys))
    return table


def _link_table(report: Report) -> Any:
    from rich.table import Table

    table = Table(title="GB/s of a copy from row to column (x: no peer access)", title_justify="left")
    table.add_column("")
    for j in range(len(report.link_gbps)):
        table.add_column(str(j), justify="right")
    for i, row in enumerate(report.link_gbps):
        cells = []
        for j, rate in enumerate(row):
            reached = not report.peer_access or report.peer_access[i][j]
            cells.append("" if rate is None else f"{rate:.0f}{'' if reached else ' x'}")
        table.add_row(str(i), *cells)
    return table
