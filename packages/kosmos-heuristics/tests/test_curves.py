"""Machines from measurements."""

import copy
import json

import pytest
from kosmos_heuristics import (
    AgGemmProblem,
    MachineError,
    load_machine,
    machine_from_measurement,
    plan_ag_gemm,
)

MEASUREMENT = {
    "schema": 1,
    "machine": "NVIDIA H200",
    "date": "2026-01-31",
    "versions": {"torch": "2.13.0", "triton": "3.6.0"},
    "num_wgs": 100,
    "pull_gbps": {"4": 110.0, "16": 300.0, "64": 310.0},
    "push_gbps": {"4": 140.0, "16": 330.0, "64": 340.0},
    "tflops": {"80": 500.0, "100": 600.0},
    "flag_latency_us": 1.5,
    "launch_us": 7.25,
}


def test_what_was_measured_replaces_the_packaged_figures():
    machine = machine_from_measurement(MEASUREMENT)
    base = load_machine("h200")
    assert machine.num_wgs == 100
    assert machine.gbps("pull", 16, 1) == 300
    assert machine.gbps("push", 64, 1) == 340
    assert machine.tflops.at(90) == 550
    assert (machine.flag_latency_us, machine.launch_us) == (1.5, 7.25)
    assert (machine.tiles, machine.baseline, machine.rule_set) == (
        base.tiles,
        base.baseline,
        base.rule_set,
    )
    assert machine.pull.copy_bytes == base.pull.copy_bytes
    for field in ("pull", "push", "tflops", "num_wgs", "launch_us", "flag_latency_us"):
        assert "2026-01-31" in machine.source(field)
        assert "triton 3.6.0" in machine.source(field)
    assert "2026-01-31" not in machine.source("baseline")


def test_plans_follow_the_measured_curves():
    problem = AgGemmProblem(65536, 2304, 4096, 2)
    slower = copy.deepcopy(MEASUREMENT)
    slower["push_gbps"] = {"4": 60.0, "16": 140.0, "64": 150.0}
    quick = plan_ag_gemm(problem, machine_from_measurement(MEASUREMENT))
    slow = plan_ag_gemm(problem, machine_from_measurement(slower))
    assert quick.num_movers < slow.num_movers
    assert "measured on NVIDIA H200" in slow.explain()


def test_of_a_copy_curve_only_the_peak_decides_a_crew():
    # How a crew's rate rises beside builders is the rule's own; an idle GPU's curve does not say.
    slow_start = copy.deepcopy(MEASUREMENT)
    slow_start["push_gbps"] = {"4": 30.0, "48": 340.0}
    measured = machine_from_measurement(MEASUREMENT)
    for n in (768, 2304, 7168):
        problem = AgGemmProblem(65536, n, 4096, 2)
        crew = plan_ag_gemm(problem, machine_from_measurement(slow_start)).num_movers
        assert crew == plan_ag_gemm(problem, measured).num_movers


def test_measurement_as_file_or_data(tmp_path):
    path = tmp_path / "m.json"
    path.write_text(json.dumps(MEASUREMENT))
    assert load_machine(path) == load_machine(MEASUREMENT) == machine_from_measurement(MEASUREMENT)


def test_further_measurements_in_the_file_are_not_read():
    with_more = {**MEASUREMENT, "power_w": {"8": 300}}
    assert machine_from_measurement(with_more) == machine_from_measurement(MEASUREMENT)


def test_unknown_gpu_needs_a_machine_to_start_from():
    other = {**MEASUREMENT, "machine": "NVIDIA B300"}
    with pytest.raises(MachineError, match=r"measurement\.machine: got 'NVIDIA B300'"):
        machine_from_measurement(other)
    machine = machine_from_measurement(other, base=load_machine("mi350x"))
    assert machine.rule_set == "mi350"
    assert "NVIDIA B300" in machine.source("tflops")


# Any text is a date and any object lists versions: those alone are not garbage there.
GARBAGE = [
    (key, value)
    for key in sorted(MEASUREMENT)
    for value in ("missing", None, "garbage", -1, [], {"x": 1}, {"8": float("nan")})
    if not (key == "date" and value == "garbage")
    if not (key == "versions" and isinstance(value, dict))
]


@pytest.mark.parametrize(("key", "value"), GARBAGE)
def test_garbage_never_yields_a_machine(key, value):
    data = copy.deepcopy(MEASUREMENT)
    if value == "missing":
        del data[key]
    else:
        data[key] = value
    with pytest.raises(MachineError) as caught:
        machine_from_measurement(data)
    assert f"measurement.{key}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_more_wgs_than_resident_and_collapsing_curves_are_refused():
    data = copy.deepcopy(MEASUREMENT)
    data["pull_gbps"] = {"4": 100.0, "101": 200.0}
    with pytest.raises(MachineError, match="at most num_wgs 100"):
        machine_from_measurement(data)
    data["pull_gbps"] = {"4": 300.0, "64": 20.0}
    with pytest.raises(MachineError, match="half the peak"):
        machine_from_measurement(data)
    with pytest.raises(MachineError, match="measurement: got"):
        machine_from_measurement([])
