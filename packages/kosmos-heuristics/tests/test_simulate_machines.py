"""The simulated machines: what they were fitted to, what was held out, how a fit behaves."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from kosmos_heuristics.__main__ import main
from kosmos_heuristics.errors import MachineError
from kosmos_heuristics.simulate import calibrate
from kosmos_heuristics.simulate.model import DTYPES, SimMachine, from_data, sim_machine
from kosmos_heuristics.simulate.simulate import simulate
from kosmos_heuristics.simulate.tables import measured_cells
from kosmos_heuristics.simulate.tpsp import Case

MEASURED = Path(__file__).parent / "data" / "h200_ag_gemm.json"
TABLE_A4 = {
    "ag": {7: 96.1, 14: 185.8, 28: 343.6, 56: 423.8, 112: 412.4},
    "rs": {7: 59.1, 14: 117.6, 28: 231.0, 56: 410.6, 112: 404.1},
}


@pytest.mark.parametrize("kind", ["ag", "rs"])
@pytest.mark.parametrize("name", ["mi350x", "mi355x"])
def test_the_transport_is_that_of_table_a4(kind: str, name: str) -> None:
    machine = sim_machine(name)
    for wgs, gbps in TABLE_A4[kind].items():
        if kind == "ag":
            rate = machine.share_table(machine.copy_gbps, machine.link_gbps)[wgs // 7]
        else:
            limit, sharpness = 7 * machine.link_gbps, machine.reduce_sharpness
            rate = machine.share_table(machine.reduce_gbps, limit, sharpness)[wgs]
        assert rate * wgs * 1e-3 == pytest.approx(gbps, rel=0.06)


def test_a_gemm_under_a_cap_keeps_what_figure_2_says() -> None:
    rates = sim_machine("mi350x").build_rates()
    for wgs, kept in ((224, 0.93), (192, 0.88)):
        assert rates[wgs] * wgs / 256 == pytest.approx(kept, abs=0.04)


@pytest.mark.parametrize("run", [True, False])
def test_h200_against_fused_times_that_it_was_not_fitted_to(run: bool) -> None:
    errors = calibrate.fused_errors(
        {"bf16": sim_machine("h200")}, measured_cells(str(MEASURED), run)
    )
    assert statistics.median(map(abs, errors)) < 0.06
    assert max(map(abs, errors)) < 0.15


def test_mi355x_is_the_mi350x_with_more_power() -> None:
    for dtype in DTYPES:
        old, new = sim_machine("mi350x", dtype), sim_machine("mi355x", dtype)
        gain = min(1.4 ** (1.0 - old.power_exponent), 2.52 / 2.31)
        assert new.tflops == pytest.approx(old.tflops * gain, rel=1e-4)
        differ = {n for n, value in vars(old).items() if value != getattr(new, n)}
        assert differ == {"name", "tflops", "vendor_tflops"}


def test_a_fit_finds_numbers_that_were_taken_away() -> None:
    machine = sim_machine("h200")
    cells = []
    for n, k in ((7168, 8192), (1280, 8192), (3584, 4096)):
        case = Case("ag_gemm_tn", 8192, n, k, world_size=2)
        time = simulate(case, machine).time_ms
        cells.append(measured_cells(str(MEASURED), True)[0])
        cells[-1] = replace(cells[-1], case=case, kosmos_ms=time)
    start = {"bf16": replace(machine, tflops=machine.tflops * 0.8)}
    bounds = {"tflops": (100.0, 2000.0)}
    found = calibrate.fit(start, cells, rounds=12, fields=({}, bounds))["bf16"]
    assert found.tflops == pytest.approx(machine.tflops, rel=0.01)


def test_calibrate_writes_a_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "fitted.json"
    call = ["calibrate", "--machine", "h200", "--measured", str(MEASURED), "--rounds", "1"]
    assert main([*call, "--output", str(path)]) == 0
    assert "sweep 1 of 1" in capsys.readouterr().out
    assert isinstance(from_data(json.loads(path.read_text()), "bf16"), SimMachine)
    assert sim_machine(str(path)).name == "h200"


def test_garbage_measurements_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    for text in ("", "[]", '{"runs": [{"fitted": true, "rows": [{"m": "x"}]}]}', '{"runs": []}'):
        path.write_text(text)
        with pytest.raises(MachineError, match="measured: got"):
            measured_cells(str(path), True)
