"""From the curves that ``python -m kosmos_core measure`` wrote to a machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kosmos_heuristics.checks import check_int, check_number
from kosmos_heuristics.errors import MachineError
from kosmos_heuristics.machine import Machine
from kosmos_heuristics.packaged import MACHINE_NAMES, packaged_machine
from kosmos_heuristics.parts import Curve

MEASUREMENT_SCHEMA = 1
_KEYS = (
    "schema",
    "machine",
    "date",
    "versions",
    "num_wgs",
    "pull_gbps",
    "push_gbps",
    "tflops",
    "flag_latency_us",
    "launch_us",
)
_FIX = "measure again or correct the file"


def is_measurement(data: object) -> bool:
    """Whether JSON data looks like a measurement rather than a machine."""
    return isinstance(data, Mapping) and ("pull_gbps" in data or "push_gbps" in data)


def machine_from_measurement(data: object, base: Machine | None = None) -> Machine:
    """The machine that a measurement describes.

    What was measured replaces the figures of ``base``; the rest (tile shapes, topology, the unfused
    baseline) is kept from it. Keys beyond those listed are other measurements and are not read.

    Args:
        data: ``{"schema": 1, "machine": str, "date": str, "versions": {name: version},
            "num_wgs": int, "pull_gbps": {wgs: GB/s}, "push_gbps": {wgs: GB/s},
            "tflops": {wgs: TFLOPS}, "flag_latency_us": float, "launch_us": float}``.
        base: Machine to start from; None means the packaged machine whose name occurs in
            ``machine`` ("NVIDIA H200" is ``h200``).

    Raises:
        MachineError: A key is missing or holds garbage, a curve falls below half its peak by its
            last point, or no packaged machine fits the name.
    """
    if not isinstance(data, Mapping):
        raise MachineError("measurement", data, "an object", _FIX)
    for key in _KEYS:
        if key not in data:
            raise MachineError(f"measurement.{key}", None, "a value", _FIX)
    if data["schema"] != MEASUREMENT_SCHEMA:
        raise MachineError("measurement.schema", data["schema"], str(MEASUREMENT_SCHEMA), _FIX)
    name, date, versions = data["machine"], data["date"], data["versions"]
    for key, text in (("machine", name), ("date", date)):
        if not isinstance(text, str) or not text:
            raise MachineError(f"measurement.{key}", text, "a text", _FIX)
    if not isinstance(versions, Mapping):
        raise MachineError("measurement.versions", versions, "an object", _FIX)
    if base is None:
        base = _base_for(name)
    num_wgs = check_int(MachineError, "measurement.num_wgs", data["num_wgs"], 2, _FIX)
    curves = {key: _curve(key, data[key], num_wgs) for key in ("pull_gbps", "push_gbps", "tflops")}
    flag_us = check_number(
        MachineError, "measurement.flag_latency_us", data["flag_latency_us"], _FIX, positive=False
    )
    launch_us = check_number(
        MachineError, "measurement.launch_us", data["launch_us"], _FIX, positive=False
    )
    with_versions = ", ".join(f"{key} {version}" for key, version in versions.items())
    measured = f"measured on {name}, {date}" + (f" ({with_versions})" if with_versions else "")
    replaced = ("num_wgs", "pull", "push", "tflops", "flag_latency_us", "launch_us")
    return replace(
        base,
        num_wgs=num_wgs,
        pull=replace(base.pull, gbps=curves["pull_gbps"]),
        push=replace(base.push, gbps=curves["push_gbps"]),
        tflops=curves["tflops"],
        flag_latency_us=flag_us,
        launch_us=launch_us,
        sources=tuple({**dict(base.sources), **dict.fromkeys(replaced, measured)}.items()),
    )


def _base_for(name: str) -> Machine:
    words = name.lower().replace("-", " ").replace("_", " ").split()
    for known in MACHINE_NAMES:
        if known in words:
            return packaged_machine(known)
    wanted = "a name that holds one of " + ", ".join(MACHINE_NAMES)
    raise MachineError("measurement.machine", name, wanted, "pass a machine to start from")


def _curve(key: str, data: object, num_wgs: int) -> Curve:
    curve = Curve.from_mapping(f"measurement.{key}", data)
    most, last = curve.points[-1]
    if most > num_wgs:
        raise MachineError(f"measurement.{key}", most, f"at most num_wgs {num_wgs} WGs", _FIX)
    # Past saturation a few percent are lost; a curve that collapses is a broken measurement, and
    # every larger crew would be planned from its last point.
    if last < 0.5 * curve.peak:
        raise MachineError(
            f"measurement.{key}", last, f"at least half the peak {curve.peak:g} at {most} WGs", _FIX
        )
    return curve
