"""Which of the four worlds are possible here, and a command to try in each."""

from __future__ import annotations

import sys
from pathlib import Path

from kosmos_core.doctor.probes import fault_of, on_path
from kosmos_core.doctor.report import Report, WorldReport

CHECK = "-m kosmos_tpsp check ag_gemm --m 384 --n 200 --k 128"
MAX_RANKS = 8


def probe_worlds(report: Report) -> list[WorldReport]:
    """The four worlds, each tried as far as this process can."""
    worlds: list[WorldReport] = []
    for name, probe in (
        ("group", lambda: _group(report)),
        ("gpu:N", lambda: _virtual_gpu(report)),
        ("cpu:N", _virtual_cpu),
        ("reference", _reference),
    ):
        fault = fault_of(lambda probe=probe: worlds.append(probe()))  # type: ignore[misc]
        if fault is not None:
            worlds.append(WorldReport(name, False, fault))
    return worlds


def _no_gpu(report: Report) -> str:
    if "gpus" in report.faults:
        return report.faults["gpus"]
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return "this build of torch is for CPUs; install one for CUDA or ROCm"
    return "no GPU is visible"


def _group(report: Report) -> WorldReport:
    if not report.gpus:
        return WorldReport("group", False, _no_gpu(report))
    access = report.peer_access
    cut = [f"{i} to {j}" for i, row in enumerate(access) for j, ok in enumerate(row) if not ok]
    if cut:
        return WorldReport("group", False, f"no peer access from GPU {', '.join(cut)}")
    import torch.distributed as dist

    if not dist.is_available():
        return WorldReport("group", False, "this build of torch has no torch.distributed")
    if not dist.is_nccl_available():
        return WorldReport("group", False, "this build of torch has neither NCCL nor RCCL")
    count = min(len(report.gpus), MAX_RANKS)
    check = CHECK.replace("kosmos_tpsp ", "kosmos_tpsp -- ")
    tail = f"{check} --world group" if _has_check() else "-m kosmos_core -- measure --quick"
    detail = f"one process a GPU, up to {count} ranks"
    if not report.symmetric_memory.get("available"):
        why = report.symmetric_memory.get("why_not") or report.faults.get("symmetric memory", "")
        detail += f"; memory is shared by IPC, not as torch's symmetric memory: {why}"
    return WorldReport("group", True, detail, f"torchrun --nproc-per-node {count} {tail}")


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
    _run_on_cpu()
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
    from kosmos_core.worlds import reference_world

    reference_world()
    code = "from kosmos_core.worlds import reference_world; print(reference_world().describe())"
    detail = "the plain unfused path, on any group, gloo included"
    return WorldReport("reference", True, detail, f'{_python()} -c "{code}"')


def _has_check() -> bool:
    return on_path("kosmos_tpsp.__main__")


def _python() -> str:
    return Path(sys.executable).name or "python3"


def _command(kind: str, ranks: int) -> str:
    if _has_check():
        return f"{_python()} {CHECK} --world {kind}:{ranks}"
    world = f"{kind}_world({ranks})"
    code = f"from kosmos_core.worlds import {kind}_world; print({world}.spmd(lambda rank: rank))"
    return f'{_python()} -c "{code}"'
