"""Predictions for eight GPUs: committed, and what the packaged machine says now."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kosmos_heuristics.simulate import predict
from kosmos_heuristics.simulate.model import sim_machine

COMMITTED = Path(__file__).parents[3] / "docs" / "results" / "predictions_h200_x8.json"


@pytest.mark.skipif(not COMMITTED.exists(), reason="not in the repository")
def test_the_committed_predictions_are_those_of_the_packaged_machine() -> None:
    data = json.loads(COMMITTED.read_text("utf-8"))
    assert data["prediction"].startswith("simulated, not measured")
    rows = {(row["kernel"], row.get("shape") or row["model"], row.get("routing")): row
            for row in data["rows"]}  # fmt: skip
    assert len(rows) == len(data["rows"]) == 24 * 5 + 9 * 4
    cases = [case for case in predict.tp_cases(8, "h200") if "8B" in case[0] and "MBS1" in case[0]]
    for row in predict.predict_tp(cases, sim_machine("h200")):
        assert rows[row["kernel"], row["shape"], None] == row


def test_a_prediction_is_above_its_bound_and_names_its_plan_s_crew() -> None:
    cases = [case for case in predict.tp_cases(4, "h200") if case[0] == "8B-QKV-MBS1"]
    assert {case.kernel for _, case in cases} == {"ag_gemm_tn", "bulk_ag", "bulk_rs"}
    for row in predict.predict_tp(cases, sim_machine("h200")):
        assert row["fused_ms"] > row["bound_ms"]
        assert row["world_size"] == 4
        assert row["movers"] % 3 == 0
    names = {(model, routing) for model, routing, _ in predict.ep_cases(2)}
    assert len(names) == 18
