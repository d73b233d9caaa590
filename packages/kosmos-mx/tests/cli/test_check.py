"""`python -m kosmos_mx check`: what it prints, what it returns, and that it can fail."""

from __future__ import annotations

import json

import pytest
from kosmos_mx.__main__ import main
from kosmos_mx.cli import check as command
from kosmos_mx.cli import checking, vectors


@pytest.fixture
def quick(monkeypatch):
    """Leaves the comparisons of whole corpora to other tests, but for one."""
    wanted = "bf16 e4m3 rceil"
    monkeypatch.setattr(vectors, "cases", lambda: (c for c in CASES if c[0] == wanted))


CASES = list(vectors.cases())


@pytest.mark.usefixtures("quick")
def test_everything_passes(capsys):
    assert main(["check", "--values", str(vectors.COUNTS[0]), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["passed"]
    assert told["world"] == "cpu"
    assert told["torchao"] == "0.18.0"
    names = [case["name"] for case in told["cases"]]
    assert len(names) == len(set(names)) == 25
    assert "quantize bf16 e4m3 rceil (conversion)" in names
    assert "gemm nt transposed, integers" in names
    assert all(case["passed"] and case["values"] for case in told["cases"])


@pytest.mark.usefixtures("quick")
def test_a_difference_fails(monkeypatch, capsys):
    def differs(*_):
        return checking.Case("broken", 3, "nothing", False, "differs")

    monkeypatch.setattr(command, "works", lambda *_: [differs])
    assert main(["check", "--values", str(vectors.COUNTS[0])]) == 1
    assert capsys.readouterr().out == (
        "broken: 3 values, nothing: differs: FAILED\n0 passed, 1 failed\n"
    )


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["check", "--values", "7"], "error: values: got 7, wanted one of 1048576, 10485760\n"),
        (["check", "--world", "moon"], "error: Invalid value for '--world'"),
        (["bench", "--rows", "0"], "error: rows: got 0, wanted 1 or more\n"),
        (["bench", "--json", "nowhere/x.json"], "its folder does not exist"),
        ([], "error: Missing command. see --help\n"),
    ],
)
def test_bad_arguments_are_one_line(arguments, told, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


def test_without_a_gpu_that_is_said(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["check", "--world", "gpu"]) == 2
    assert main(["bench"]) == 2
    assert capsys.readouterr().err == (
        "error: world: no GPU is visible; use cpu, which runs anywhere\n"
        "error: bench: no GPU is visible; it measures GPUs (check runs anywhere)\n"
    )


@pytest.mark.gpu
def test_everything_passes_on_a_gpu(capsys):
    assert main(["check", "--world", "gpu"]) == 0
    assert "0 failed" in capsys.readouterr().out
