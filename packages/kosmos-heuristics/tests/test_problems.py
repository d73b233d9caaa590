"""Problems: sizes derived from the arguments, and clear refusals."""

import pytest
from kosmos_heuristics import AgGemmProblem, ProblemError


def test_sizes():
    problem = AgGemmProblem(m=24, n=40, k=16, world_size=3)
    assert problem.chunk_rows == 8
    assert problem.num_peers == 2
    assert problem.chunk_bytes == 8 * 16 * 2
    assert problem.remote_bytes == 2 * 8 * 16 * 2
    assert problem.flops == 2 * 24 * 40 * 16


@pytest.mark.parametrize(
    ("layout", "keep", "kept"),
    [("tn", None, False), ("nn", None, True), ("tn", True, True), ("nn", False, False)],
)
def test_gathered_operand_is_kept_for_nn_unless_told(layout, keep, kept):
    assert AgGemmProblem(8, 8, 8, 2, layout, keep_gathered=keep).keeps_gathered is kept


def test_no_rows_are_allowed():
    assert AgGemmProblem(0, 8, 8, 8).remote_bytes == 0


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("m", -8),
        ("m", 9),
        ("m", 8.0),
        ("m", True),
        ("n", 0),
        ("k", 0),
        ("k", "8"),
        ("world_size", 0),
        ("world_size", 9),
        ("layout", "nt"),
        ("layout", None),
        ("dtype", "fp32"),
        ("keep_gathered", "yes"),
    ],
)
def test_bad_arguments_are_named(argument, value):
    good = {"m": 8, "n": 8, "k": 8, "world_size": 4}
    with pytest.raises(ProblemError) as caught:
        AgGemmProblem(**{**good, argument: value})
    message = str(caught.value)
    assert message.startswith(f"{argument}: got {value!r}, wanted ")
    assert "; " in message
    assert "\n" not in message


def test_error_is_a_value_error_and_proposes_a_padding():
    with pytest.raises(ValueError, match="pad to 12 rows"):
        AgGemmProblem(10, 8, 8, 4)
