"""The H200's constants, from what was measured there.

``data/measured`` holds the inputs, each with machine, date and versions: a measurement of two GPUs
as ``python -m kosmos_core measure`` wrote it, times of GEMMs alone, and times of ``ag_gemm`` by
crew. From them come the constants of the crew rule, and the simulated machine, which reads no time
of a fused call. The same inputs give the same constants.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any, NamedTuple

from kosmos_heuristics.curves import machine_from_measurement
from kosmos_heuristics.errors import MachineError
from kosmos_heuristics.machine import Machine
from kosmos_heuristics.movers import CrewConstants, crew_ms
from kosmos_heuristics.packaged import packaged_machine
from kosmos_heuristics.problems import AgGemmProblem
from kosmos_heuristics.simulate.from_curves import simulated_from_curves
from kosmos_heuristics.simulate.model import from_data, sim_machine

CURVES, GEMMS, CREW_TIMES = "h200_x2.json", "gemm_h200_x2.json", "ag_gemm_crews_h200_x2.json"
# A crew saturates the transport where none on the measured shapes is faster by more than this.
SATURATED = 0.02
STEP = 0.05
_FIX = "measure again with this version: python -m kosmos_core measure --json FILE"


class Fitted(NamedTuple):
    """What the measurements give."""

    crews: CrewConstants
    simulated: dict[str, dict[str, Any]]


def packaged(name: str) -> dict[str, Any]:
    """A packaged input."""
    path = resources.files("kosmos_heuristics") / "data" / "measured" / name
    found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return found


def fit(
    curves: Mapping[str, Any], gemms: Mapping[str, Any], crew_times: Mapping[str, Any]
) -> Fitted:
    """All constants of a machine.

    Args:
        curves: A measurement of two GPUs.
        gemms: Times of GEMMs alone.
        crew_times: Times of ``ag_gemm`` calls by crew.

    Raises:
        MachineError: An input lacks something or holds garbage.
    """
    machine = packaged_machine("h200")
    machine_from_measurement(curves, machine)
    try:
        simulated = simulated_from_curves(curves, gemms, sim_machine("h200"))
        from_data(simulated, "bf16")
        return Fitted(crew_constants(crew_times, machine), simulated)
    except (KeyError, TypeError, ValueError, IndexError, ArithmeticError) as error:
        if isinstance(error, MachineError):
            raise
        wanted = f"whole inputs ({type(error).__name__}: {error})"
        raise MachineError("measured", str(curves.get("machine")), wanted, _FIX) from error


def crew_constants(data: Mapping[str, Any], machine: Machine) -> CrewConstants:
    """The constants with which the crew rule predicts measured calls best, over a grid.

    Args:
        data: Times of ``ag_gemm`` calls by crew (``data/measured/ag_gemm_crews_h200_x2.json``).
        machine: The packaged machine.
    """
    calls = []
    for row in data["rows"]:
        ranks, layout = int(data["world_size"]), row["layout"]
        problem = AgGemmProblem(row["m"], row["n"], row["k"], ranks, layout=layout)
        calls += [(problem, int(crew), float(ms)) for crew, ms in row["ms"].items()]

    def loss(constants: CrewConstants) -> float:
        return math.fsum(
            abs(math.log(crew_ms(problem, machine, "push", crew, None, constants) / ms))
            for problem, crew, ms in calls
        )

    most = _saturating_crew(data["fixed"])
    grid = (
        CrewConstants(most, round(1.0 + STEP * a, 2), round(1.0 + STEP * b, 2), round(0.1 * c, 1))
        for a in range(25)
        for b in range(13)
        for c in range(13)
    )
    return min(grid, key=loss)


def _saturating_crew(rows: Sequence[Mapping[str, Any]]) -> int:
    """The smallest crew that is close to the best on every shape that bytes decide."""

    def saturates(crew: str) -> bool:
        return all(row["ms"][crew] <= (1.0 + SATURATED) * min(row["ms"].values()) for row in rows)

    return min(int(crew) for crew in rows[0]["ms"] if saturates(crew))
