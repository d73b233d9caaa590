"""The packaged Llama 3 shapes."""

import pytest
from kosmos_heuristics import ProblemError
from kosmos_heuristics.shapes import llama3


@pytest.mark.parametrize(("layout", "layers"), [("tn", {"FC1", "QKV"}), ("nn", {"Down", "OProj"})])
def test_24_shapes_of_each_layout(layout, layers):
    shapes = llama3("ag_gemm", layout)
    assert len({shape.name for shape in shapes}) == 24
    assert {shape.layer for shape in shapes} == layers
    assert {shape.mbs for shape in shapes} == {1, 2, 4, 8}
    for shape in shapes:
        assert shape.m == 8192 * shape.mbs
        assert shape.k == {"8B": 4096, "70B": 8192, "405B": 16384}[shape.model]
        assert shape.speedup == pytest.approx(shape.base_ms / shape.kosmos_ms, abs=3e-3)


def test_24_shapes_of_the_row_parallel_forward():
    shapes = llama3("gemm_rs")
    assert len({shape.name for shape in shapes}) == 24
    assert {shape.layer for shape in shapes} == {"Down", "OProj"}
    for shape in shapes:
        assert shape.m == 8192 * shape.mbs
        assert shape.n == {"8B": 4096, "70B": 8192, "405B": 16384}[shape.model]
        # Printed to a microsecond, of a tenth of a millisecond.
        assert shape.speedup == pytest.approx(shape.base_ms / shape.kosmos_ms, rel=1e-2)


@pytest.mark.parametrize(("op", "layout"), [("bulk_ag", "nn"), ("bulk_rs", "nt")])
def test_24_shapes_of_the_column_parallel_backward(op, layout):
    shapes = llama3(op, layout)
    assert len({shape.name for shape in shapes}) == 24
    assert {shape.layer for shape in shapes} == {"FC1", "QKV"}
    forward = {shape.name: shape for shape in llama3("ag_gemm")}
    for shape in shapes:
        tokens, width = (shape.k, shape.m) if op == "bulk_rs" else (shape.m, shape.k)
        # What the forward multiplied: tokens, local width, hidden size.
        of = forward[shape.name]
        assert (tokens, width, shape.n) == (of.m, of.n, of.k)
        assert shape.speedup == pytest.approx(shape.base_ms / shape.kosmos_ms, rel=1e-2)


def test_a_cell_as_printed():
    shape = next(shape for shape in llama3("ag_gemm") if shape.name == "70B-FC1-MBS8")
    assert (shape.m, shape.n, shape.k) == (65536, 7168, 8192)
    assert (shape.base_ms, shape.kosmos_ms, shape.speedup) == (10.035, 7.678, 1.307)


def test_unknown_tables_are_refused():
    with pytest.raises(ProblemError, match="op: got 'bulk'"):
        llama3("bulk")
    with pytest.raises(ProblemError, match="layout: got 'nn'"):
        llama3("gemm_rs", "nn")
    with pytest.raises(ProblemError, match="layout: got 'tt'"):
        llama3("ag_gemm", "tt")
