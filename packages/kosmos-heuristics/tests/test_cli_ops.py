"""``python -m kosmos_heuristics plan`` for every operation."""

import json

import pytest
from kosmos_heuristics import (
    BulkAgProblem,
    BulkRsProblem,
    GemmRsProblem,
    MoeProblem,
    can_fuse,
    estimate,
    load_machine,
    plan_bulk_ag,
    plan_bulk_rs,
    plan_gemm_rs,
    plan_moe_backward,
    plan_moe_forward,
)
from kosmos_heuristics.__main__ import main

MACHINES = ("h200", "mi350x", "mi355x")
TP = ["--tp", "8", "--m", "8192", "--n", "4096", "--k", "1792"]
MOE = [
    *("--ep", "8", "--tokens", "8192", "--hidden", "5120", "--inter", "8192"),
    *("--experts", "16", "--topk", "1"),
]
TP_OPS = {
    "gemm_rs": (GemmRsProblem, plan_gemm_rs),
    "bulk_ag": (BulkAgProblem, plan_bulk_ag),
    "bulk_rs": (BulkRsProblem, plan_bulk_rs),
}
MOE_OPS = {"moe_forward": plan_moe_forward, "moe_backward": plan_moe_backward}
COMMON = {"op", "machine", "problem", "split_k", "xcd_bucketing", "cap", "rule"}
KEYS = {
    "ag_gemm": COMMON | {"movers_per_peer", "num_movers", "estimate", "decline"},
    "ag_gemm_pair": COMMON | {"movers_per_peer", "num_movers", "estimate", "decline"},
    "gemm_rs": COMMON | {"reducers_per_peer", "num_movers", "max_movers", "estimate", "decline"},
    "bulk_ag": COMMON | {"movers_per_peer", "num_movers", "estimate", "decline"},
    "bulk_rs": COMMON | {"reducers_per_peer", "num_movers", "estimate", "decline"},
    "moe_forward": COMMON | {"dispatch_crew", "combine_crew", "burst_depth", "column_input"},
    "moe_backward": COMMON | {"dispatch_crew", "combine_crew", "burst_depth", "column_input"},
}


def planned(op, *options, machine="h200"):
    sizes = MOE if op.startswith("moe") else TP
    return ["plan", op, "--machine", machine, *sizes, *options]


@pytest.mark.parametrize("dtype", ["bf16", "mxfp8"])
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("op", KEYS)
def test_json_holds_the_keys_of_the_operation(op, machine, dtype, capsys):
    if op == "ag_gemm_pair" and dtype == "bf16":
        assert main(planned(op, "--dtype", dtype, machine=machine)) == 2
        assert capsys.readouterr().err.startswith("error: dtype: got 'bf16', wanted one of mxfp8")
        return
    assert main(planned(op, "--dtype", dtype, "--json", "--explain", machine=machine)) == 0
    captured = capsys.readouterr()
    data = json.loads(captured.out)
    assert captured.err == ""
    assert KEYS[op] <= set(data)
    assert (data["op"], data["machine"], data["problem"]["dtype"]) == (op, machine, dtype)
    other = {"movers_per_peer", "reducers_per_peer", "dispatch_crew"} - KEYS[op]
    assert not other & set(data)
    assert all(entry["rule"] and entry["source"] for entry in data["explain"].values())


@pytest.mark.parametrize("op", TP_OPS)
def test_json_and_text_are_those_of_the_plan(op, capsys):
    kind, planner = TP_OPS[op]
    machine = load_machine("mi350x")
    problem = kind(8192, 4096, 1792, 8, dtype="mxfp8")
    plan = planner(problem, machine, cap=100, policy="serial", split_k=2)
    options = ["--cap", "100", "--policy", "serial", "--split-k", "2", "--dtype", "mxfp8"]
    assert main(planned(op, *options, "--json", machine="mi350x")) == 0
    data = json.loads(capsys.readouterr().out)
    assert {name: data[name] for name in plan.to_dict()} == plan.to_dict()
    assert data["estimate"]["time_ms"] == estimate(problem, machine, plan).time_ms
    declined = can_fuse(problem, machine, plan)
    assert data["decline"] == (declined.reason if declined else None)
    assert main(planned(op, *options, machine="mi350x")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == str(plan)
    assert "ms predicted" in lines[1]
    assert lines[2].split(":")[0] in ("fused", "declined")


@pytest.mark.parametrize("op", MOE_OPS)
def test_moe_json_and_text_are_those_of_the_plan(op, capsys):
    plan = MOE_OPS[op](
        MoeProblem(8192, 5120, 8192, 16, 1, 8, "mxfp8"), load_machine("mi350x"), cap=100
    )
    assert plan.burst_depth == 5
    options = ["--cap", "100", "--dtype", "mxfp8"]
    assert main(planned(op, *options, "--json", machine="mi350x")) == 0
    data = json.loads(capsys.readouterr().out)
    assert {name: data[name] for name in plan.to_dict()} == plan.to_dict()
    assert main(planned(op, *options, machine="mi350x")) == 0
    assert capsys.readouterr().out == f"{plan}\n"


def test_options_reach_the_plan(capsys):
    for op, options, wanted in (
        ("gemm_rs", ["--transport", "pull", "--order", "row_major"], ("pull", "row_major")),
        ("moe_forward", ["--transport", "pull", "--order", "destination_major"], None),
    ):
        assert main(planned(op, *options, "--json")) == 0
        data = json.loads(capsys.readouterr().out)
        assert (data["transport"], data["order"]) == (wanted or ("pull", "destination_major"))
    assert main(planned("gemm_rs", "--reducers-per-peer", "3", "--json")) == 0
    assert json.loads(capsys.readouterr().out)["reducers_per_peer"] == 3
    assert main(planned("bulk_ag", "--movers-per-peer", "3", "--json")) == 0
    assert json.loads(capsys.readouterr().out)["movers_per_peer"] == 3
    assert main(planned("moe_backward", "--policy", "planned_split", "--json")) == 0
    assert json.loads(capsys.readouterr().out)["policy"] == "planned_split"


@pytest.mark.parametrize("op", KEYS)
def test_explain_names_every_source_once(op, capsys):
    assert main(planned(op, "--json", "--explain", machine="mi350x")) == 0
    explained = json.loads(capsys.readouterr().out)["explain"]
    assert main(planned(op, "--explain", machine="mi350x")) == 0
    flat = " ".join(capsys.readouterr().out.split())
    sources = {entry["source"] for entry in explained.values()}
    assert len(sources) < len(explained)
    for number, source in enumerate(dict.fromkeys(e["source"] for e in explained.values()), 1):
        assert flat.count(f"source {number}: {' '.join(source.split())}") == 1
    assert f"source {len(sources) + 1}:" not in flat
    assert all(field in flat for field in explained)


def test_a_machine_from_a_file_plans_everything(tmp_path, capsys):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**load_machine("h200").to_dict(), "name": "mine", "num_wgs": 60}))
    for op in KEYS:
        assert main(planned(op, "--json", machine=str(path))) == 0
        data = json.loads(capsys.readouterr().out)
        assert (data["machine"], data["cap"]) == ("mine", 60)


def test_help_names_all_operations(capsys):
    assert main(["plan", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(op in out for op in KEYS)
    assert main(["--help"]) == 0
    assert "validate" in capsys.readouterr().out
