"""``python -m kosmos_heuristics plan``."""

import json
import subprocess
import sys

import pytest
from kosmos_heuristics import AgGemmProblem, load_machine, plan_ag_gemm
from kosmos_heuristics.__main__ import main

GOOD = {"--machine": "h200", "--tp": "2", "--m": "8192", "--n": "768", "--k": "4096"}


def arguments(**changes):
    options = {**GOOD, **{f"--{name.replace('_', '-')}": value for name, value in changes.items()}}
    flat = [text for pair in options.items() if pair[1] is not None for text in pair]
    return ["plan", "ag_gemm", *flat]


def test_json_holds_the_plan(capsys):
    assert main([*arguments(layout="nn", cap="64"), "--json", "--explain"]) == 0
    captured = capsys.readouterr()
    data = json.loads(captured.out)
    plan = plan_ag_gemm(AgGemmProblem(8192, 768, 4096, 2, "nn"), load_machine("h200"), cap=64)
    assert captured.err == ""
    assert {name: data[name] for name in plan.to_dict()} == plan.to_dict()
    assert data["cap"] == 64
    assert data["problem"]["keep_gathered"] is True
    assert data["estimate"]["time_ms"] > 0
    assert set(data["explain"]) == set(plan.to_dict()) - {"rule"}
    for key in ("movers_per_peer", "split_k", "xcd_bucketing", "cap", "rule", "transport"):
        assert key in data


def test_text_is_the_plan_in_one_line(capsys):
    assert main(arguments()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == str(plan_ag_gemm(AgGemmProblem(8192, 768, 4096, 2), load_machine("h200")))
    assert "ms predicted" in lines[1]
    assert lines[2].split(":")[0] in ("fused", "declined")
    assert len(lines) == 3


def test_explain_prints_rules_and_sources(capsys):
    assert main([*arguments(machine="mi350x", tp="8"), "--explain"]) == 0
    text = capsys.readouterr().out
    assert "B.3 row 1" in text
    assert "Table B.3" in text


def test_decline_is_printed(capsys):
    assert main(arguments(machine="executor")) == 0
    assert capsys.readouterr().out.endswith("\nfused\n")
    assert main([*arguments(machine="executor"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["decline"] is None
    assert main(arguments(k="4100")) == 0
    assert "declined: rows of k = 4100" in capsys.readouterr().out
    assert main([*arguments(k="4100"), "--json"]) == 0
    assert "4100" in json.loads(capsys.readouterr().out)["decline"]


def test_options_reach_the_plan(capsys):
    options = arguments(
        policy="fixed", order="naive", transport="pull", movers_per_peer="5", split_k="2"
    )
    assert main([*options, "--keep-gathered", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["policy"] == "fixed"
    assert data["order"] == "naive"
    assert data["transport"] == "pull"
    assert (data["movers_per_peer"], data["split_k"]) == (5, 2)
    assert data["problem"]["keep_gathered"] is True


def test_machine_from_a_file(tmp_path, capsys):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**load_machine("h200").to_dict(), "name": "mine", "num_wgs": 60}))
    assert main([*arguments(machine=str(path)), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["machine"], data["cap"]) == ("mine", 60)


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["plan"],
        ["plan", "ag_gemm"],
        ["plan", "reduce_everything"],
        ["simulate"],
        arguments(machine="mi999"),
        arguments(machine="/"),
        arguments(tp="0"),
        arguments(tp="9"),
        arguments(tp="x"),
        arguments(tp=None),
        arguments(m="8193"),
        arguments(m="-2"),
        arguments(n="0"),
        arguments(k="0"),
        arguments(cap="1"),
        arguments(layout="nt"),
        arguments(dtype="fp64"),
        arguments(policy="best"),
        arguments(movers_per_peer="0"),
        arguments(split_k="0"),
        [*arguments(), "--frobnicate"],
    ],
)
def test_bad_arguments_exit_2_with_one_line(argv, capsys):
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1


def test_help_exits_0(capsys):
    assert main(["plan", "--help"]) == 0
    assert "--explain" in capsys.readouterr().out


def test_runs_as_a_module_without_torch_or_triton():
    code = (
        "import runpy, sys\n"
        "for name in ('torch', 'triton', 'numpy'):\n"
        "    sys.modules[name] = None\n"
        f"sys.argv = ['kosmos_heuristics', *{arguments()!r}]\n"
        "runpy.run_module('kosmos_heuristics', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ag_gemm cap=132")
