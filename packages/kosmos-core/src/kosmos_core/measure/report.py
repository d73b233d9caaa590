"""A measurement as tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table


def copy_label(curve: Mapping[str, Any]) -> str:
    """How a copy curve is called in tables and figures."""
    step = f"{curve['copy_bytes'] // 1024} KiB x {curve['depth'] + 1}, {curve['num_warps']} warps"
    if curve["direction"] == "local":
        return f"local {step}"
    peers = "" if curve["peers"] == 1 else f" from {curve['peers']}"
    if curve["direction"] == "push":
        peers = peers.replace("from", "to")
    return f"{curve['direction']}{peers} {step}"


def print_report(data: Mapping[str, Any], console: Console) -> None:
    """Prints the curves and the single figures."""
    console.print(
        f"[bold]{data['machine']}[/] x {data['world_size']}, "
        f"{data['num_wgs']} workgroups, {data['date']}"
    )
    _print_copies(data, console)
    _print_gemm(data, console)
    _print_beside(data, console)
    console.print(_singles(data))


def _print_copies(data: Mapping[str, Any], console: Console) -> None:
    curves = data["copies"]["curves"]
    table = Table(title="GB/s by movers (KiB a step x steps in flight)", title_justify="left")
    table.add_column("")
    for wgs in curves[0]["gbps"]:
        table.add_column(wgs, justify="right")
    for curve in curves:
        table.add_row(copy_label(curve), *(f"{v:.0f}" for v in curve["gbps"].values()))
    console.print(table)


def _print_gemm(data: Mapping[str, Any], console: Console) -> None:
    curve, fixed = data["tflops"], data["gemm"]["fixed_shape_tflops"]
    full = curve[str(data["num_wgs"])]
    shape = "x".join(str(v) for v in data["gemm"]["shape"])
    table = Table(title="TFLOPS by builders", title_justify="left")
    table.add_column("")
    for wgs in curve:
        table.add_column(wgs, justify="right")
    table.add_row("whole rounds of tiles", *(f"{v:.0f}" for v in curve.values()))
    table.add_row("kept", *(f"{100 * v / full:.0f} %" for v in curve.values()))
    table.add_row(shape, *(f"{v:.0f}" for v in fixed.values()))
    console.print(table)
    for key, what in (("contraction", "contraction"), ("call", "tiles a WG in one call")):
        table = Table(title=f"TFLOPS by {what}", title_justify="left")
        ours = data["gemm"][f"{key}_tflops"]
        table.add_column("")
        for size in ours:
            table.add_column(size, justify="right")
        table.add_row("ours", *(f"{v:.0f}" for v in ours.values()))
        vendors = data["gemm"][f"vendor_{key}_tflops"].values()
        table.add_row("vendor's", *(f"{v:.0f}" for v in vendors))
        console.print(table)


def sum_label(curve: Mapping[str, Any]) -> str:
    """How a curve of sums is called in tables and figures."""
    step = f"{curve['copy_bytes'] / 1024:g} KiB of {curve['sources']}"
    return f"{curve['direction']} {step}, {curve['num_warps']} warps"


def _print_beside(data: Mapping[str, Any], console: Console) -> None:
    table = Table(title="Sums by movers, GB/s (KiB a step of each)", title_justify="left")
    table.add_column("")
    for wgs in data["sums"][0]["gbps"]:
        table.add_column(wgs, justify="right")
    for curve in data["sums"]:
        table.add_row(sum_label(curve), *(f"{v:.0f}" for v in curve["gbps"].values()))
    console.print(table)
    beside = data["beside"]
    table = Table(title="Movers beside builders, by movers", title_justify="left")
    table.add_column("")
    for movers in beside["alone_tflops"]:
        table.add_column(movers, justify="right")
    for curve in beside["curves"]:
        for key, unit in (("gbps", "GB/s"), ("tflops", "TFLOPS beside")):
            table.add_row(
                f"{curve['direction']}, {unit}", *(f"{v:.0f}" for v in curve[key].values())
            )
    table.add_row("TFLOPS alone", *(f"{v:.0f}" for v in beside["alone_tflops"].values()))
    console.print(table)


def singles(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The figures that are no curves: name, and value with its unit."""
    latency, copies = data["latency"], data["copies"]
    rows = []
    if data["flag_latency_us"] is not None:
        rows.append(("flag between ranks", f"{data['flag_latency_us']:.2f} us"))
    rows += [
        ("flag between workgroups", f"{latency['local_flag_us']:.2f} us"),
        ("empty fused call", f"{data['launch_us']:.1f} us"),
        ("empty kernel", f"{latency['empty_kernel_us']:.1f} us"),
        ("host time of a launch", f"{latency['host_launch_us']:.1f} us"),
        ("vendor's GEMM", f"{data['gemm']['vendor_tflops']:.0f} TFLOPS"),
    ]
    if copies["engine_gbps"] is not None:
        where = "local" if data["world_size"] == 1 else "peer"
        rows.append((f"{where} copy by the driver", f"{copies['engine_gbps']:.0f} GB/s"))
    for key, name in (("collective", "all-gather"), ("reduction", "reduce-scatter")):
        if f"{key}_gbps" in copies:
            rows.append((f"vendor's {name}", f"{copies[f'{key}_gbps']:.0f} GB/s"))
            rows.append(("the same, 16 KiB", f"{copies[f'{key}_us']:.0f} us"))
    return rows


def _singles(data: Mapping[str, Any]) -> Table:
    table = Table(show_header=False)
    table.add_column("")
    table.add_column("", justify="right")
    for name, value in singles(data):
        table.add_row(name, value)
    power = data["power"]
    if "note" in power:
        table.add_row("power and clock", power["note"])
    for key, unit in (("watts", "W"), ("mhz", "MHz")):
        if key in power:
            table.add_row(
                f"{unit} by active workgroups",
                "  ".join(f"{wgs}: {v:.0f}" for wgs, v in power[key].items()),
            )
    return table
