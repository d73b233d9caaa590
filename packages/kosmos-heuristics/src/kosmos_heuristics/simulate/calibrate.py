"""Fitting a machine's numbers to measured cells: a pattern search, in the open.

One set of numbers per machine, some of them per dtype, none per kernel or cell. The error of a cell
is the logarithm of simulated over measured time. The loss is the mean size of the errors, plus a
share of the worst, so that no cell is given up for the others, plus a share of each kernel's bias,
so that speed-ups averaged over a kernel's shapes come out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from kosmos_heuristics.simulate.model import SimMachine
from kosmos_heuristics.simulate.simulate import baseline_ms, simulate
from kosmos_heuristics.simulate.tables import Cell

WORST_SHARE = 0.12
BIAS_SHARE = 0.5
# Fields that are fitted to the fused times and to the vendor's, and how far each may go.
FUSED_COMMON: dict[str, tuple[float, float]] = {
    "unit_us": (0.05, 6.0),
    "flag_us": (0.2, 10.0),
    "launch_us": (3.0, 60.0),
    "copy_gbps": (12.8, 14.0),
    "reduce_gbps": (8.0, 8.6),
    "link_gbps": (59.5, 62.0),
    "saturating_wgs": (56, 112),
}
FUSED_DTYPE: dict[str, tuple[float, float]] = {
    "tflops": (600.0, 4000.0),
    "power_exponent": (0.4, 1.0),
    "boost": (0.01, 0.8),
    "boost_ms": (0.3, 12.0),
    "tile_us": (0.2, 30.0),
    "nt_share": (0.8, 1.2),
    "build_drag": (0.001, 0.4),
    "acquire_us": (0.01, 12.0),
    "move_drag": (0.001, 0.4),
    "sentinel": (0.001, 0.4),
}
# Of a machine whose transport was measured alone, what only fused runs show.
BESIDE = {
    **{name: bounds for name, bounds in FUSED_DTYPE.items() if name != "nt_share"},
    "unit_us": FUSED_COMMON["unit_us"],
    "move_drag": (0.001, 0.8),
}
VENDOR_COMMON: dict[str, tuple[float, float]] = {
    "collective_gbps": (300.0, 460.0),
    "reduction_gbps": (250.0, 460.0),
    "collective_us": (5.0, 150.0),
    "vendor_gemm_us": (1.0, 60.0),
}
VENDOR_BESIDE: dict[str, tuple[float, float]] = {
    "collective_gbps": (100.0, 500.0),
    "collective_us": (3.0, 150.0),
    "vendor_gemm_us": (0.5, 60.0),
    "vendor_tflops": (300.0, 4000.0),
    "vendor_tail": (0.01, 1.0),
}
VENDOR_DTYPE = {"vendor_tflops": (600.0, 4000.0), "vendor_tail": (0.01, 1.0)}
Machines = dict[str, SimMachine]
Bounds = dict[str, tuple[float, float]]


def loss(errors: Sequence[float], kernels: Sequence[str]) -> float:
    """Mean size of the errors, plus a share of the worst and of the kernels' biases."""
    sizes = [abs(error) for error in errors]
    groups: dict[str, list[float]] = {}
    for error, kernel in zip(errors, kernels, strict=True):
        groups.setdefault(kernel, []).append(error)
    bias = sum(abs(sum(group)) / len(group) for group in groups.values()) / len(groups)
    return sum(sizes) / len(sizes) + WORST_SHARE * max(sizes) + BIAS_SHARE * bias


def fused_errors(machines: Machines, cells: Sequence[Cell]) -> list[float]:
    """Logarithms of simulated over measured times of the fused kernels."""
    return [
        math.log(simulate(cell.case, machines[cell.case.dtype]).time_ms / cell.kosmos_ms)
        for cell in cells
    ]


def vendor_errors(machines: Machines, cells: Sequence[Cell]) -> list[float]:
    """The same of the unfused path."""
    return [
        math.log(baseline_ms(cell.case, machines[cell.case.dtype]) / cell.base_ms) for cell in cells
    ]


Errors = Callable[[Machines, Sequence[Cell]], list[float]]


def fit(
    machines: Machines,
    cells: Sequence[Cell],
    errors: Errors = fused_errors,
    rounds: int = 6,
    fields: tuple[Bounds, Bounds] | None = None,
    report: Callable[[str], None] = lambda text: None,
) -> Machines:
    """Pattern search: each number in turn is moved by a step, kept if the loss falls.

    Args:
        machines: Start, by dtype.
        cells: What to fit to.
        errors: ``fused_errors`` or ``vendor_errors``.
        rounds: Sweeps over all numbers; steps halve after a sweep without gain.
        fields: What may move, with bounds: numbers that all dtypes share, and those of each. None
            means those of the MI350X.
        report: Called with a line per sweep.

    Returns:
        The machines with the fitted numbers.
    """
    if fields is None:
        fused = errors is fused_errors
        fields = (FUSED_COMMON, FUSED_DTYPE) if fused else (VENDOR_COMMON, VENDOR_DTYPE)
    common, by_dtype = fields
    moves = [(name, tuple(machines), bounds) for name, bounds in common.items()]
    moves += [(n, (dtype,), bounds) for dtype in machines for n, bounds in by_dtype.items()]
    parts = {dtype: [c for c in cells if c.case.dtype == dtype] for dtype in machines}
    now = {dtype: errors(machines, parts[dtype]) for dtype in machines}
    best = _total(now, parts)
    steps = dict.fromkeys(range(len(moves)), 0.16)
    for sweep in range(rounds):
        for index, (name, dtypes, bounds) in enumerate(moves):
            gained = False
            for sign in (1.0, -1.0):
                trial = _moved(machines, name, dtypes, bounds, sign * steps[index])
                if trial == machines:
                    continue
                tried = {**now, **{d: errors(trial, parts[d]) for d in dtypes}}
                if _total(tried, parts) < best - 1e-6:
                    machines, now, best, gained = trial, tried, _total(tried, parts), True
                    break
            steps[index] *= 1.3 if gained else 0.5
        report(f"sweep {sweep + 1} of {rounds}: loss {best:.4f}")
    return machines


def _total(errors: dict[str, list[float]], parts: dict[str, list[Cell]]) -> float:
    return sum(
        loss(errors[dtype], [cell.case.kernel for cell in cells]) for dtype, cells in parts.items()
    )


def _moved(
    machines: Machines, name: str, dtypes: Sequence[str], bounds: tuple[float, float], step: float
) -> Machines:
    moved = dict(machines)
    for dtype in dtypes:
        old = getattr(machines[dtype], name)
        new = min(max(old * (1.0 + step), bounds[0]), bounds[1])
        value: Any = round(new) if isinstance(old, int) else float(f"{new:.5g}")
        moved[dtype] = replace(machines[dtype], **{name: value})
    return moved


def to_data(machines: Machines) -> dict[str, dict[str, object]]:
    """The contents of a machine file: what all dtypes share, then what each has of its own."""
    own = {*FUSED_DTYPE, *VENDOR_DTYPE}
    data: dict[str, dict[str, object]] = {}
    for dtype, machine in machines.items():
        fields = dict(vars(machine))
        data["common"] = {name: value for name, value in fields.items() if name not in own}
        data[dtype] = {name: value for name, value in fields.items() if name in own}
    return data
