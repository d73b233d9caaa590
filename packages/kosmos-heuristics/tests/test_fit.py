"""The fit: the packaged inputs give the packaged constants, and other inputs others."""

from __future__ import annotations

import json
import statistics
from importlib import resources
from pathlib import Path

import pytest
from kosmos_heuristics.__main__ import main
from kosmos_heuristics.cli_fit import texts
from kosmos_heuristics.errors import MachineError
from kosmos_heuristics.fit import CREW_TIMES, CURVES, GEMMS, Fitted, fit, packaged
from kosmos_heuristics.movers import CREWS
from kosmos_heuristics.simulate.model import sim_machine
from kosmos_heuristics.simulate.simulate import simulate
from kosmos_heuristics.simulate.tpsp import Case

DATA = resources.files("kosmos_heuristics") / "data"
RESULTS = Path(__file__).parents[3] / "docs" / "results"
needs_results = pytest.mark.skipif(not RESULTS.exists(), reason="not in the repository")


def refit(**changes: dict) -> Fitted:
    """The fit of the packaged inputs, some of them replaced."""
    names = {"curves": CURVES, "gemms": GEMMS, "crews": CREW_TIMES}
    return fit(*(changes.get(key, packaged(name)) for key, name in names.items()))


def test_the_packaged_inputs_give_the_packaged_constants() -> None:
    found = refit()
    assert found.crews == CREWS
    for path, text in texts(found).items():
        assert (DATA / path).read_text("utf-8") == text
    for name in (CURVES, GEMMS, CREW_TIMES):
        assert all(packaged(name)[key] for key in ("machine", "date", "versions"))


@needs_results
def test_the_packaged_inputs_are_the_committed_results() -> None:
    result = (RESULTS / f"measure_{CURVES}").read_text("utf-8")
    assert (DATA / "measured" / CURVES).read_text("utf-8") == result
    bench = json.loads((RESULTS / "bench_ag_gemm_tn_h200_x2.json").read_text("utf-8"))
    assert packaged(GEMMS)["date"] == bench["date"]
    for row, measured in zip(packaged(GEMMS)["rows"], bench["rows"], strict=True):
        own = measured["variants"]["gemm_own"]["median_ms"]
        assert (row["m"], row["n"], row["k"]) == tuple(measured[key] for key in "mnk")
        assert row["own_ms"] == pytest.approx(own, abs=1e-4)


@needs_results
@pytest.mark.parametrize(("file", "kernel"), [("ag_gemm_tn", "ag_gemm_tn"), ("gemm_rs", "gemm_rs")])
def test_fused_times_that_the_fit_has_not_read(file: str, kernel: str) -> None:
    bench = json.loads((RESULTS / f"bench_{file}_h200_x2.json").read_text("utf-8"))
    errors = []
    for row in bench["rows"]:
        # Larger calls are as far off, and take longer to play.
        if row["m"] <= 16384:
            case = Case(
                kernel, row["m"], row["n"], row["k"], world_size=2, crew=row["plan"]["num_movers"]
            )
            time = simulate(case, sim_machine("h200")).time_ms
            errors.append(time / row["variants"]["fused"]["median_ms"] - 1.0)
    assert len(errors) == 12
    assert statistics.median(map(abs, errors)) < 0.10
    assert max(map(abs, errors)) < 0.20


def test_other_inputs_give_other_constants() -> None:
    before = refit()
    curves = packaged(CURVES)
    curves["push_gbps"] = {wgs: 0.5 * rate for wgs, rate in curves["push_gbps"].items()}
    slower = refit(curves=curves).simulated["common"]
    assert slower["link_gbps"] == pytest.approx(183.3, abs=0.1)
    assert slower["copy_gbps"] < 0.6 * before.simulated["common"]["copy_gbps"]
    gemms = packaged(GEMMS)
    for row in gemms["rows"]:
        row["own_ms"] *= 1.25
    assert refit(gemms=gemms).simulated["bf16"]["tflops"] < before.simulated["bf16"]["tflops"]
    crews = packaged(CREW_TIMES)
    for row in crews["fixed"]:
        row["ms"]["16"] = row["ms"]["24"]
    assert refit(crews=crews).crews.saturating_crew == 16


def test_the_command_writes_what_the_package_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", "--output", str(tmp_path)]) == 0
    assert sim_machine(str(tmp_path / "simulate" / "h200.json")) == sim_machine("h200")
    assert f"saturating_crew {CREWS.saturating_crew}" in capsys.readouterr().out


def test_garbage_is_refused_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gemms = packaged(GEMMS)
    del gemms["rows"][0]["own_ms"]
    with pytest.raises(MachineError, match="KeyError: 'own_ms'"):
        refit(gemms=gemms)
    curves = packaged(CURVES)
    curves["push_gbps"] = {"4": -1.0}
    with pytest.raises(MachineError, match="push_gbps"):
        refit(curves=curves)
    path = tmp_path / "bad.json"
    for text in ("", "[]", "{}"):
        path.write_text(text)
        assert main(["fit", "--curves", str(path)]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: measure")
        assert error.count("\n") == 1
