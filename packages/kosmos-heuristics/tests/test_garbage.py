"""Garbage in never gives a plan: one line that names the field, and exit status 2."""

import copy
import json
import random

import pytest
from kosmos_heuristics import (
    AgGemmPairProblem,
    AgGemmProblem,
    BulkAgProblem,
    BulkRsProblem,
    GemmRsProblem,
    HeuristicsError,
    MachineError,
    MoeProblem,
    PlanError,
    ProblemError,
    load_machine,
    machine_from_measurement,
    plan_ag_gemm,
    plan_ag_gemm_pair,
    plan_bulk_ag,
    plan_bulk_rs,
    plan_gemm_rs,
    plan_moe_backward,
    plan_moe_forward,
)
from kosmos_heuristics.__main__ import main

NAMES = ("h200", "mi350x", "executor")
TP = {"--tp": "2", "--m": "8192", "--n": "768", "--k": "4096"}
MOE = {
    "--ep": "8",
    "--tokens": "8192",
    "--hidden": "5120",
    "--inter": "8192",
    "--experts": "16",
    "--topk": "1",
}
COMMANDS = {
    **dict.fromkeys(("ag_gemm", "ag_gemm_pair", "gemm_rs", "bulk_ag", "bulk_rs"), TP),
    **dict.fromkeys(("moe_forward", "moe_backward"), MOE),
}
TOKENS = {"ag_gemm": "m", "ag_gemm_pair": "m", "gemm_rs": "m", "bulk_ag": "m", "bulk_rs": "k"}
# Nothing of this is a size, a rate, a count or a name of anything.
NEVER = (None, "", "x", [], [1], {}, {"a": 1}, -1, -0.5, float("nan"), float("inf"), 1e300)
NEVER_A_TEXT = (None, 3, [], {}, -1, float("nan"))
MEASUREMENT = {
    "schema": 1,
    "machine": "NVIDIA H200",
    "date": "2026-01-01",
    "versions": {"torch": "2.11"},
    "num_wgs": 132,
    "pull_gbps": {"4": 159.0, "16": 328.0},
    "push_gbps": {"4": 170.0, "16": 340.0},
    "tflops": {"112": 670.0, "132": 700.0},
    "flag_latency_us": 1.5,
    "launch_us": 9.0,
}


def command(op, **changes):
    options = {"--machine": "h200", **COMMANDS[op]}
    options.update({f"--{name.replace('_', '-')}": value for name, value in changes.items()})
    return ["plan", op, *(text for pair in options.items() if pair[1] is not None for text in pair)]


def refused(argv, capsys, named=None):
    """Run a command line that has to be refused; returns its one line."""
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    if named is not None:
        assert named in captured.err
    return captured.err


def leaves(tree, path=()):
    """Paths of everything in JSON data that is no container."""
    if isinstance(tree, dict):
        return [leaf for key, value in tree.items() for leaf in leaves(value, (*path, key))]
    if isinstance(tree, list):
        return [leaf for i, value in enumerate(tree) for leaf in leaves(value, (*path, i))]
    return [path]


def planted(tree, path, value):
    changed = copy.deepcopy(tree)
    at = changed
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return changed


@pytest.mark.parametrize("name", NAMES)
def test_garbage_in_any_field_of_a_machine_is_refused_by_name(name):
    data = json.loads(json.dumps(load_machine(name).to_dict()))
    paths = leaves(data)
    assert len(paths) > 30
    for path in paths:
        text = path[0] in ("name", "sources", "rule_set", "topology", "transport")
        for value in NEVER_A_TEXT if text else NEVER:
            with pytest.raises(MachineError) as caught:
                load_machine(planted(data, path, value))
            assert "\n" not in str(caught.value)
            field = path[-2] if path[-1] in (0, 1) or str(path[-1]).isdigit() else path[-1]
            wanted = "sources" if path[0] == "sources" else str(field)
            assert wanted in str(caught.value)


def test_garbage_in_any_field_of_a_measurement_is_refused_by_name():
    assert load_machine(MEASUREMENT).num_wgs == 132
    for path in leaves(MEASUREMENT):
        if path[0] == "versions":
            continue
        for value in NEVER_A_TEXT if path[0] in ("machine", "date") else NEVER:
            with pytest.raises(MachineError, match=rf"measurement\.{path[0]}"):
                load_machine(planted(MEASUREMENT, path, value))


@pytest.mark.parametrize("curve", ["pull_gbps", "push_gbps", "tflops"])
def test_garbage_curves_are_refused_by_name(curve):
    rng = random.Random()
    keys = ("", "-4", "0", "4.0", "x", "1e3", "٤", " 4", "9" * 5000, None, True, 4.0, -1, 10**50)
    for key in keys:
        with pytest.raises(MachineError, match=curve):
            load_machine({**MEASUREMENT, curve: {"16": 300.0, key: 100.0}})
    for _ in range(100):
        points = {str(rng.randint(1, 132)): rng.uniform(1, 700) for _ in range(5)}
        points[rng.choice(list(points))] = rng.choice(NEVER)
        with pytest.raises(MachineError, match=curve):
            load_machine({**MEASUREMENT, curve: points})
    # More WGs than there are, and a curve that collapses.
    for points in ({"4": 100.0, "133": 200.0}, {"4": 300.0, "64": 140.0}):
        with pytest.raises(MachineError, match=curve):
            load_machine({**MEASUREMENT, curve: points})


def random_json(rng, depth=3):
    kinds = ["null", "number", "text", "list", "object"] if depth else ["null", "number", "text"]
    kind = rng.choice(kinds)
    if kind == "null":
        return rng.choice([None, True, False])
    if kind == "number":
        return rng.choice([0, 1, -1, 1.5, 10**30, rng.randint(-1000, 1000), rng.random()])
    words = ["num_wgs", "tflops", "pull", "pull_gbps", "push", "tiles", "schema", "4", "h200", ""]
    if kind == "text":
        return rng.choice(words)
    if kind == "list":
        return [random_json(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    return {rng.choice(words): random_json(rng, depth - 1) for _ in range(rng.randint(0, 5))}


def test_random_json_is_no_machine(tmp_path):
    rng = random.Random()
    path = tmp_path / "machine.json"
    for _ in range(500):
        data = random_json(rng)
        path.write_text(json.dumps(data))
        for read in (lambda: load_machine(path), lambda data=data: machine_from_measurement(data)):
            with pytest.raises(MachineError) as caught:
                read()
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize("op", COMMANDS)
def test_a_damaged_file_gives_no_plan(op, tmp_path, capsys):
    rng = random.Random()
    whole = json.dumps(rng.choice([load_machine("mi350x").to_dict(), MEASUREMENT]))
    path = tmp_path / "machine.json"
    argv = command(op, machine=str(path))
    path.write_text(whole)
    assert main(argv) == 0
    capsys.readouterr()
    for _ in range(20):
        path.write_text(whole[: rng.randint(0, len(whole) - 1)])
        refused(argv, capsys, "machine")
    for damage in (b"\xff\xfe{}", b"\x00" * 20, b"[" * 100000, b"{}", b"null", b"NaN", b'"h200"'):
        path.write_bytes(damage)
        refused(argv, capsys, "machine")


@pytest.mark.parametrize("op", COMMANDS)
def test_garbage_arguments_are_refused_by_name(op, capsys):
    assert main(command(op)) == 0
    capsys.readouterr()
    for option in COMMANDS[op]:
        name = option.lstrip("-")
        # Whose error it is: the command line's, or that of the argument which the option is.
        argument = "world_size" if name in ("tp", "ep") else name
        # No tokens are a size like any other.
        tokens = name == "tokens" or (op in TOKENS and name == TOKENS[op])
        for value in ("-1" if tokens else "0", "-3", "1.5", "x", "", "1e3"):
            line = refused(command(op, **{name: value}), capsys)
            assert f"{argument}:" in line or f"'--{name}'" in line
        refused(command(op, **{name: None}), capsys, f"--{name}: missing")
        refused(command(op, **{name: str(10**30)}), capsys, argument)
    refused(command(op, machine="mi999"), capsys, "machine: got 'mi999'")
    refused(command(op, machine="\0"), capsys, "machine: got")
    refused(command(op, machine=None), capsys, "--machine")
    for cap in ("1", "0", "-5", "x", "2.5"):
        refused(command(op, cap=cap), capsys, "cap")
    for choice in ("dtype", "policy"):
        refused(command(op, **{choice: "best"}), capsys, choice)


def test_options_of_other_operations_are_refused(capsys):
    for op, option in (
        ("gemm_rs", "--movers-per-peer"),
        ("ag_gemm", "--reducers-per-peer"),
        ("bulk_rs", "--order"),
        ("bulk_ag", "--order"),
        ("moe_forward", "--split-k"),
        ("moe_forward", "--m"),
        ("ag_gemm", "--tokens"),
        ("gemm_rs", "--layout"),
    ):
        refused([*command(op), option, "8"], capsys, f"{option}: {op} has no such option")
    refused([*command("bulk_ag"), "--keep-gathered"], capsys, "--keep-gathered: bulk_ag has no")


def test_impossible_splits_are_refused_by_name(capsys):
    refused(command("gemm_rs", m="8193"), capsys, "m: got 8193")
    refused(command("bulk_rs", k="8193"), capsys, "k: got 8193")
    refused(command("ag_gemm", k="4100", dtype="mxfp8"), capsys, "k: got 4100")
    refused(command("moe_forward", experts="17"), capsys, "experts: got 17")
    refused(command("moe_forward", topk="17"), capsys, "topk: got 17")
    refused(command("moe_forward", experts="16", topk="0"), capsys, "topk: got 0")
    refused(command("moe_backward", hidden="100", dtype="mxfp8"), capsys, "hidden: got 100")
    for op in ("ag_gemm", "gemm_rs", "bulk_ag", "bulk_rs"):
        for split in ("0", "3", "16", "-2"):
            refused(command(op, split_k=split), capsys, f"split_k: got {split}")
        refused(command(op, tp="9"), capsys, "world_size: got 9")


KINDS = {
    AgGemmProblem: (plan_ag_gemm,),
    AgGemmPairProblem: (plan_ag_gemm_pair,),
    GemmRsProblem: (plan_gemm_rs,),
    BulkAgProblem: (plan_bulk_ag,),
    BulkRsProblem: (plan_bulk_rs,),
    MoeProblem: (plan_moe_forward, plan_moe_backward),
}


@pytest.mark.parametrize("kind", KINDS)
def test_garbage_sizes_are_refused_by_name(kind):
    if kind is MoeProblem:
        names = ("tokens", "hidden", "inter", "experts", "topk", "world_size")
    else:
        names = ("m", "n", "k", "world_size")
    good = {**dict.fromkeys(names, 256), "world_size": 8}
    if kind is MoeProblem:
        good["topk"] = 2
    kind(**good)
    for name in (*names, "dtype"):
        for value in (*NEVER, True, 2.0, "256", 1 << 40, 10**5000):
            with pytest.raises(ProblemError) as caught:
                kind(**{**good, name: value})
            assert str(caught.value).startswith(f"{name}: got ")
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_garbage_for_a_planner_is_refused_by_name(kind):
    sizes = {"m": 256, "n": 64, "k": 64}
    if kind is MoeProblem:
        sizes = {"tokens": 64, "hidden": 64, "inter": 64, "experts": 64, "topk": 2}
    problem = kind(**sizes, world_size=8)
    for planner in KINDS[kind]:
        for name in NAMES:
            machine = load_machine(name)
            for field in ("cap", "policy", "block_m", "num_warps"):
                for value in NEVER:
                    if field == "cap" and value is None:
                        continue
                    with pytest.raises(PlanError) as caught:
                        planner(problem, machine, **{field: value})
                    assert str(caught.value).startswith(f"{field}: got ")


@pytest.mark.parametrize("source", [None, 3, 4.5, [], ["h200"], b"h200", object])
def test_what_describes_no_machine_is_refused(source):
    with pytest.raises(MachineError, match="machine"):
        load_machine(source)


def test_errors_show_what_has_no_representation():
    nested = []
    for _ in range(100_000):
        nested = [nested]
    for value in (10**5000, nested):
        with pytest.raises(HeuristicsError, match="got a value of type"):
            AgGemmProblem(value, 8, 8, 1)
