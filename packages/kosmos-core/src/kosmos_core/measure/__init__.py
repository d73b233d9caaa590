"""Measures a machine: movers and builders by their number, flags, launches, start order, power.

    python -m kosmos_core measure --json FILE --png FILE
    torchrun --nproc-per-node 2 -m kosmos_core measure --json FILE --png FILE

The JSON is what `kosmos_heuristics.machine_from_measurement` reads, with further keys.
"""

from kosmos_core.measure.budget import FULL, QUICK, Budget
from kosmos_core.measure.run import measure, measure_here, to_json
from kosmos_core.measure.timing import EventTimer, MeasurementError, Timer

__all__ = [
    "FULL",
    "QUICK",
    "Budget",
    "EventTimer",
    "MeasurementError",
    "Timer",
    "measure",
    "measure_here",
    "to_json",
]
