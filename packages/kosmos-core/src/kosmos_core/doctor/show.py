"""A report as tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kosmos_core.doctor.report import Report


def print_report(report: Report, console: Console) -> None:
    """Prints a report as tables.

    Args:
        report: from `examine`.
        console: a `rich.console.Console`.
    """
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


def _gpu_table(gpus: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="GPUs", title_justify="left")
    columns = (
        "",
        "name",
        "SMs",
        "resident WGs",
        "memory GiB",
        "shared KiB a WG",
        "capability",
        "driver",
    )
    for name in columns:
        table.add_column(name, justify="left" if name in ("name", "driver") else "right")
    for gpu in gpus:
        keys = (
            "index", "name", "sms", "resident_wgs", "memory_gib", "shared_memory_optin_kib",
            "capability", "driver",
        )  # fmt: skip
        table.add_row(*("?" if gpu[key] is None else str(gpu[key]) for key in keys))
    return table


def _link_table(report: Report) -> Table:
    table = Table(
        title="GB/s of a copy from row to column (x: no peer access)", title_justify="left"
    )
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
