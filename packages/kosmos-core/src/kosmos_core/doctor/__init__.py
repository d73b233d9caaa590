"""What this machine can run: versions, GPUs, worlds, links.

    python -m kosmos_core doctor

`examine` never raises: a probe that fails says why in the report.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kosmos_core.doctor import probes
from kosmos_core.doctor.report import Report, WorldReport
from kosmos_core.doctor.show import print_report
from kosmos_core.doctor.worlds import probe_worlds

__all__ = ["Report", "WorldReport", "examine", "print_report"]


def examine() -> Report:
    """Runs every probe. Never raises: what fails is in `Report.faults`."""
    report = Report()
    steps: list[tuple[str, Callable[[], Any]]] = [
        ("versions", lambda: report.versions.update(probes.probe_versions())),
        ("gpus", lambda: report.gpus.extend(probes.probe_gpus(report.faults))),
        (
            "peer access",
            lambda: report.peer_access.extend(probes.probe_peer_access(len(report.gpus))),
        ),
        ("links", lambda: report.link_gbps.extend(probes.probe_links(len(report.gpus)))),
        (
            "symmetric memory",
            lambda: report.symmetric_memory.update(probes.probe_symmetric_memory()),
        ),
        ("multicast", lambda: report.multicast.update(probes.probe_multicast())),
        ("worlds", lambda: report.worlds.extend(probe_worlds(report))),
    ]
    for name, step in steps:
        fault = probes.fault_of(step)
        if fault is not None:
            report.faults[name] = fault
    return report
