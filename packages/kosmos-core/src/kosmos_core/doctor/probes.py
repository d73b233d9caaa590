"""Probes of what is installed and plugged in. They raise what they meet; `fault_of` says it.

torch and triton are imported inside them, so that a report comes where one of the two is broken.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

DISTRIBUTIONS = ("kosmos-core", "kosmos-heuristics", "kosmos-tpsp", "kosmos-moe", "kosmos-mx")
LINK_BYTES = 64 << 20
LINK_REPEATS = 5
# How long the workgroups of the residency probe wait for each other.
RESIDENT_BOUND_NS = 50_000_000


def fault_of(step: Callable[[], Any]) -> str | None:
    """What went wrong in a probe, as one line; None if nothing did."""
    try:
        step()
    except Exception as error:
        return describe(error)
    return None


def describe(error: Exception) -> str:
    """An exception in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def probe_versions() -> dict[str, str]:
    """Versions of Python, torch, triton, and which of our packages are there."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name in ("torch", "triton", *DISTRIBUTIONS):
        try:
            found[name] = torch_version() if name == "torch" else version(name)
        except PackageNotFoundError:
            there = on_path(name.replace("-", "_"))
            found[name] = "on the path, not installed" if there else "not installed"
    return found


def torch_version() -> str:
    """Version of torch with the label of its build (+cpu, +cu130), which its metadata may lack."""
    try:
        import torch
    except Exception:
        return version("torch")
    return str(torch.__version__)


def on_path(module: str) -> bool:
    """Whether a module can be found; a package whose own import fails has none."""
    try:
        return importlib.util.find_spec(module) is not None
    except Exception:
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
            return f"unknown ({describe(error)})"
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        return lines[-1].split(",")[-1] if lines else "unknown (no output)"
    return "unknown (neither nvidia-smi nor rocm-smi)"


def probe_gpus(faults: dict[str, str]) -> list[dict[str, Any]]:
    """Each visible GPU: name, SMs, memory, driver, and how many WGs were seen resident at once.

    Args:
        faults: where a residency probe that fails leaves its reason.

    Raises:
        RuntimeError: torch cannot use the driver.
    """
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return []
    if not torch.cuda.is_available():
        # Says what is_available() swallows: a driver that is too old, no permission.
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            # A machine without a driver is in order.
            if not str(error).startswith("Found no NVIDIA driver"):
                raise
        return []
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
            faults[f"residency of GPU {index}"] = describe(error)
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

    A persistent grid must be resident as a whole: others wait in vain for a WG that never starts.
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
        times: list[float] = []
        for _ in range(LINK_REPEATS + 1):
            begin, end = (
                torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                for _ in range(2)
            )
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
