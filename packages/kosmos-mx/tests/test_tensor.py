"""`MXTensor`: what it holds, turns, prints, saves, and refuses."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from kosmos_core.errors import ArgumentError
from kosmos_mx import MXTensor, quantize


@pytest.fixture
def x():
    return torch.randn(40, 72, generator=torch.Generator().manual_seed(0))


def both(x, **options):
    return quantize(x, "both", **options)


def test_shapes_and_types(x):
    row, column = both(x, segments=[8, 32])
    assert (row.shape, row.axis, row.segments) == ((40, 72), "row", (72,))
    assert (column.shape, column.axis, column.segments) == ((40, 72), "col", (8, 32))
    assert (row.data.shape, row.scales.shape) == ((40, 96), (40, 3))
    assert (column.data.shape, column.scales.shape) == ((64, 72), (2, 72))
    assert row.data.dtype is torch.float8_e4m3fn
    assert row.scales.dtype is torch.float8_e8m0fnu
    assert row.num_bytes == 40 * 99
    assert quantize(x, dtype=torch.float8_e5m2).format.name == "e5m2"


def test_the_transpose_shares_memory_and_turns_everything(x):
    for part in both(x, segments=[8, 32]):
        turned = part.t()
        assert turned.shape == (72, 40)
        assert turned.axis == {"row": "col", "col": "row"}[part.axis]
        assert turned.segments == part.segments
        assert turned.data.data_ptr() == part.data.data_ptr()
        assert turned.is_transposed
        assert turned.is_k_major == part.is_k_major
        assert torch.equal(turned.dequantize(torch.float64), part.dequantize(torch.float64).t())
        assert turned.T.equal(part)


def test_the_transposed_copy_holds_the_same(x):
    plain = quantize(x, "col", segments=16)
    turned = quantize(x, "col", segments=16, transposed=True)
    assert (plain.is_k_major, turned.is_k_major) == (False, True)
    assert turned.t().data.is_contiguous()
    assert turned.equal(plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_dequantised_it_is_close(x, dtype):
    for part in both(x, segments=24):
        values = part.dequantize(dtype)
        assert values.dtype is dtype
        assert values.shape == x.shape
        assert float((values.double() - x).norm() / x.norm()) < 0.03
    padded = quantize(x).dequantize(dtype, padding=True)
    assert padded.shape == (40, 96)
    assert bool((padded[:, 72:] == 0).all())


def test_it_prints_its_values_and_what_it_is(x):
    text = repr(quantize(torch.tensor([[1.0, -2.0], [0.5, 3.0]]), "col"))
    assert text == (
        "MXTensor([[ 1.0000, -2.0000],\n          [ 0.5000,  3.0000]], shape=(2, 2), axis='col', "
        "format=e4m3, device='cpu')"
    )
    column = quantize(x, "col", segments=[8, 32], transposed=True)
    assert repr(column) == (
        "MXTensor(..., shape=(40, 72), axis='col', format=e4m3, segments=(8, 32), transposed, "
        "device='cpu')"
    )


def test_it_can_be_copied_pickled_and_saved(x, tmp_path):
    for part in both(x, segments=[8, 32]):
        for kept in (part, part.t()):
            path = tmp_path / "x.pt"
            kept.save(path)
            plain = torch.load(path)
            for again in (
                copy.deepcopy(kept),
                pickle.loads(pickle.dumps(kept)),
                MXTensor.load(path),
                plain,
                kept.to("cpu"),
            ):
                assert again.equal(kept)
                assert again.is_transposed == kept.is_transposed


def test_it_goes_through_a_state_dict(x, tmp_path):
    torch.save({"w": quantize(x), "bias": torch.zeros(3)}, tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt")["w"].equal(quantize(x))


def test_something_else_is_not_loaded(tmp_path):
    torch.save(torch.zeros(3), tmp_path / "x.pt")
    with pytest.raises(ArgumentError, match="file: got a Tensor, wanted a saved MXTensor"):
        MXTensor.load(tmp_path / "x.pt")


def test_equality_is_bit_by_bit(x):
    row = quantize(x)
    other = x.clone()
    other[3, 4] = -other[3, 4]
    assert not quantize(other).equal(row)
    assert not quantize(x, scale_rounding="floor").equal(row)
    assert not quantize(x, dtype=torch.float8_e5m2).equal(row)
    broken = x.clone()
    broken[0, 0] = float("nan")
    assert quantize(broken).equal(quantize(broken))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"axis": "depth"}, "axis: got 'depth', wanted one of row, col"),
        ({"segments": (3, 4)}, r"segments: got \(3, 4\), wanted lengths that add up to 72"),
        ({"segments": (73, -1)}, "shape: got"),
        ({"shape": (40, 71), "segments": (71,), "axis": "row", "data": 90}, "data: got shape"),
        ({"scales": 2}, r"scales: got shape \[40, 2\], wanted \[40, 3\]"),
        ({"shape": (41, 72)}, r"data: got shape \[40, 96\], wanted \[41, 96\]"),
        ({"data": "wide"}, "dtype: got torch.float32"),
        ({"scales": "wide"}, "scales: got torch.uint8, wanted torch.float8_e8m0fnu"),
        ({"data": "strided"}, r"data: got strides \(192, 1\)"),
        ({"scales": "turned"}, "scales: got another memory order than data"),
    ],
)
def test_parts_that_do_not_fit_are_refused(x, changes, told):
    row = quantize(x)
    parts = {
        90: row.data[:, :90],
        2: row.scales[:, :2],
        "strided": torch.cat([row.data, row.data], 1)[:, :96],
    }
    if changes.get("data") == "wide":
        changes = {"data": row.data.float()}
    if changes.get("scales") == "wide":
        changes = {"scales": row.scales.view(torch.uint8)}
    if changes.get("scales") == "turned":
        changes = {"scales": row.scales.t().contiguous().t()}
    changes = {k: parts.get(v, v) if k in ("data", "scales") and not torch.is_tensor(v) else v
               for k, v in changes.items()}  # fmt: skip
    with pytest.raises(ArgumentError, match=told):
        replace(row, **changes)
