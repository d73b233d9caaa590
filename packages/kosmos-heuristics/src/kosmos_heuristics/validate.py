"""Measured times of benchmarks against ``estimate`` and ``can_fuse``."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kosmos_heuristics.ag_gemm import plan_ag_gemm, plan_ag_gemm_pair
from kosmos_heuristics.bulk_plans import plan_bulk_ag, plan_bulk_rs
from kosmos_heuristics.checks import check_number
from kosmos_heuristics.errors import HeuristicsError, ValidationError
from kosmos_heuristics.estimate import can_fuse, estimate
from kosmos_heuristics.gemm_rs import plan_gemm_rs
from kosmos_heuristics.load import load_machine
from kosmos_heuristics.machine import Machine
from kosmos_heuristics.plans import AgGemmPairPlan, AgGemmPlan
from kosmos_heuristics.problems import (
    AgGemmPairProblem,
    AgGemmProblem,
    BulkAgProblem,
    BulkRsProblem,
    GemmRsProblem,
    TpProblem,
)
from kosmos_heuristics.tp_plans import BulkAgPlan, BulkRsPlan, GemmRsPlan, TpPlan

# An accepted shape may lose so much, a declined one may leave so much unused.
MAX_LOSS = 0.01
MAX_MISSED_GAIN = 0.05
SCHEMA = 1
FUSED = "fused"
UNFUSED = "nccl_cublas"
_FIX = "pass the JSON of a benchmark of this version"
_OPS: dict[str, tuple[type[TpProblem], type[TpPlan], Callable[..., TpPlan]]] = {
    "ag_gemm": (AgGemmProblem, AgGemmPlan, plan_ag_gemm),
    "ag_gemm_pair": (AgGemmPairProblem, AgGemmPairPlan, plan_ag_gemm_pair),
    "gemm_rs": (GemmRsProblem, GemmRsPlan, plan_gemm_rs),
    "bulk_ag": (BulkAgProblem, BulkAgPlan, plan_bulk_ag),
    "bulk_rs": (BulkRsProblem, BulkRsPlan, plan_bulk_rs),
}


@dataclass(frozen=True)
class Comparison:
    """One measured shape beside what was predicted of it.

    Args:
        op: Operation.
        shape: Name of the shape.
        machine: Name of the machine.
        ranks: Ranks of the group.
        predicted_ms: The fused call as predicted.
        measured_ms: The fused call as measured.
        unfused_predicted_ms: Collective, then GEMM, as predicted.
        unfused_measured_ms: The same as measured.
        declined: Reason for which the call would be declined, or None.
    """

    op: str
    shape: str
    machine: str
    ranks: int
    predicted_ms: float
    measured_ms: float
    unfused_predicted_ms: float
    unfused_measured_ms: float
    declined: str | None

    @property
    def gain(self) -> float:
        """Measured speed-up of fusing, minus 1."""
        return self.unfused_measured_ms / self.measured_ms - 1.0

    @property
    def loss(self) -> float:
        """How much longer the fused call took than the unfused one, as a share of the latter."""
        return self.measured_ms / self.unfused_measured_ms - 1.0

    @property
    def error(self) -> float:
        """Signed relative error of the fused time."""
        return self.predicted_ms / self.measured_ms - 1.0

    @property
    def unfused_error(self) -> float:
        """Signed relative error of the unfused time."""
        return self.unfused_predicted_ms / self.unfused_measured_ms - 1.0

    @property
    def fault(self) -> str | None:
        """What is wrong with the decision, or None."""
        if self.declined is None and self.loss > MAX_LOSS:
            return f"accepted, and lost {100 * self.loss:.1f} %"
        if self.declined is not None and self.gain > MAX_MISSED_GAIN:
            return f"declined, and would have gained {100 * self.gain:.1f} %"
        return None


@dataclass(frozen=True)
class Errors:
    """Statistics of relative errors, as shares.

    Args:
        median: Median of the magnitudes.
        mean: Mean, signed.
        worst: Largest magnitude.
    """

    median: float
    mean: float
    worst: float

    @classmethod
    def of(cls, errors: Iterable[float]) -> Errors:
        """Statistics of one error or more."""
        found = list(errors)
        sizes = [abs(error) for error in found]
        return cls(statistics.median(sizes), statistics.mean(found), max(sizes))


def compare_files(
    paths: Sequence[Path], machine: str | None = None
) -> tuple[list[Comparison], list[str]]:
    """Compare all measured shapes of some files.

    Args:
        paths: JSON files; those that are no benchmark of an operation are left out.
        machine: Machine to predict for; None means the one that each file names.

    Returns:
        The comparisons, and a line for everything that was left out.

    Raises:
        ValidationError: A file is not readable, a benchmark is malformed, or nothing was measured.
        MachineError: The machine is unknown.
    """
    compared: list[Comparison] = []
    left_out: list[str] = []
    for path in paths:
        data = _read(path)
        benchmark = data.get("benchmark") if isinstance(data, Mapping) else None
        if not isinstance(benchmark, str) or benchmark not in _OPS or not isinstance(data, Mapping):
            left_out.append(f"{path.name}: not a benchmark of {', '.join(_OPS)}")
            continue
        settings = data.get("settings")
        transport = settings.get("transport") if isinstance(settings, Mapping) else None
        if transport is not None:
            left_out.append(f"{path.name}: transport {transport} was asked for, not chosen")
            continue
        rows, skipped = compare_benchmark(data, path.name, machine)
        compared += rows
        left_out += skipped
    if not compared:
        raise ValidationError(
            "measured",
            ", ".join(path.name for path in paths),
            "at least one measured shape",
            _FIX,
        )
    return compared, left_out


def compare_benchmark(
    data: Mapping[str, Any], name: str, machine: str | None = None
) -> tuple[list[Comparison], list[str]]:
    """Compare the rows of one benchmark.

    Predictions are of the plan that ran, where the file holds it in this version's fields; else of
    the plan that would be made now. The verdict is what ``can_fuse`` says now.

    Args:
        data: The benchmark's JSON data.
        name: Name of the file, for messages.
        machine: Machine to predict for; None means the one that the benchmark names.

    Returns:
        The comparisons, and a line for each row that was left out.

    Raises:
        ValidationError: The data are malformed.
        MachineError: The machine is unknown.
    """
    if data.get("schema") != SCHEMA:
        raise ValidationError(f"{name}: schema", data.get("schema"), str(SCHEMA), _FIX)
    described, rows = data.get("machine"), data.get("rows")
    if not isinstance(described, Mapping):
        raise ValidationError(f"{name}: machine", described, "an object", _FIX)
    if not isinstance(rows, list):
        raise ValidationError(f"{name}: rows", rows, "a list of shapes", _FIX)
    model = described.get("model") if machine is None else machine
    if not isinstance(model, str):
        raise ValidationError(f"{name}: machine.model", model, "a name", "pass --machine")
    known = load_machine(model)
    found: list[Comparison] = []
    left_out: list[str] = [] if rows else [f"{name}: no shapes"]
    for index, row in enumerate(rows):
        at = f"{name}: rows[{index}]"
        if not isinstance(row, Mapping):
            raise ValidationError(at, row, "an object", _FIX)
        if row.get("wrong"):
            left_out.append(f"{at}: wrong results, not a measurement")
            continue
        variants = row.get("variants")
        if not isinstance(variants, Mapping):
            raise ValidationError(f"{at}.variants", variants, "an object", _FIX)
        missing = [variant for variant in (FUSED, UNFUSED) if variant not in variants]
        if missing:
            left_out.append(f"{at}: {' and '.join(missing)} not measured")
            continue
        fused, unfused = (_median(variants, variant, at) for variant in (FUSED, UNFUSED))
        ranks = described.get("ranks")
        found.append(_compare(str(data["benchmark"]), row, at, ranks, known, fused, unfused))
    return found, left_out


def _compare(
    op: str,
    row: Mapping[str, Any],
    at: str,
    ranks: object,
    machine: Machine,
    fused_ms: float,
    unfused_ms: float,
) -> Comparison:
    kind, plan_kind, planner = _OPS[op]
    optional = {"layout", "dtype", "keep_gathered"} & {item.name for item in fields(kind)}
    given = {key: row[key] for key in optional if key in row}
    sizes = {key: row.get(key) for key in ("m", "n", "k")}
    try:
        problem = kind(**sizes, world_size=ranks, **given)  # type: ignore[arg-type]
        plan = _plan_that_ran(row.get("plan"), plan_kind) or planner(problem, machine)
        predicted = estimate(problem, machine, plan)
        declined = can_fuse(problem, machine, plan)
    except HeuristicsError as error:
        raise ValidationError(
            f"{at}.{error.argument}", error.got, error.wanted, error.remedy
        ) from None
    return Comparison(
        op=op,
        shape=str(row.get("shape") or f"{problem.m}x{problem.n}x{problem.k}"),
        machine=machine.name,
        ranks=problem.world_size,
        predicted_ms=predicted.time_ms,
        measured_ms=fused_ms,
        unfused_predicted_ms=predicted.baseline_ms,
        unfused_measured_ms=unfused_ms,
        declined=declined.reason if declined else None,
    )


def _plan_that_ran(data: object, kind: type[TpPlan]) -> TpPlan | None:
    """The plan of a row, if it has exactly the fields of this version's plans."""
    names = {item.name for item in fields(kind)} - {"reasons"}
    if not isinstance(data, Mapping) or set(data) != names:
        return None
    return kind(**data)


def _median(variants: Mapping[str, Any], variant: str, at: str) -> float:
    timing = variants[variant]
    value = timing.get("median_ms") if isinstance(timing, Mapping) else None
    where = f"{at}.variants.{variant}.median_ms"
    return check_number(ValidationError, where, value, _FIX)


def _read(path: Path) -> object:
    try:
        data: object = json.loads(path.read_text("utf-8"))
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise ValidationError("measured", str(path), "a readable JSON file", why) from None
    except (ValueError, RecursionError) as error:
        remedy = f"repair the file ({error})"
        raise ValidationError("measured", str(path), "a readable JSON file", remedy) from None
    return data
