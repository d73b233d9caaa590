"""`quantize` and `swiglu_quantize` on the executor: torchao's bits, odd sizes, bad arguments."""

from __future__ import annotations

import importlib
import math

import pytest
import torch
from kosmos_core.device.target import AMD, NVIDIA
from kosmos_core.errors import ArgumentError
from kosmos_core.executor import Mutation
from kosmos_mx import quantize, reference, swiglu_quantize
from kosmos_mx.cli import vectors
from kosmos_mx.cli.checking import against_torchao
from kosmos_mx.cli.corpus import corpus
from kosmos_mx.device import encode, tiles
from kosmos_mx.formats import E4M3, FORMATS, SCALINGS
from kosmos_mx.kernels import quantize as kernels

TARGETS = {"conversion": int(NVIDIA.value), "integer": int(AMD.value)}
FEW, MANY = vectors.COUNTS
CASES = {name: (dtype, form, scaling) for name, dtype, form, scaling in vectors.cases()}


def compare(name, target, count=FEW):
    dtype, form, scaling = CASES[name]
    known = vectors.committed()["values"][str(count)][name]
    return against_torchao(
        name, lambda: corpus(count, dtype), form, scaling, TARGETS[target], known
    )


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", CASES)
def test_bits_are_torchaos(on_executor, name, target):
    case = on_executor(lambda: compare(name, target))
    assert case.passed, str(case)


@pytest.mark.parametrize("name", ["bf16 e4m3 rceil", "bf16 e4m3 floor"])
def test_bits_of_ten_million_numbers_are_torchaos(on_executor, name):
    case = on_executor(lambda: compare(name, "conversion", MANY))
    assert case.values == 2 * MANY >= 20_000_000
    assert case.passed, str(case)


DEFECTS = {
    "scale too small": (encode.group_scale, "+ 0x1FFFFF", "+ 0x1EFFFF"),
    "scale too large": (encode.group_scale, "+ 0x1FFFFF", "+ 0x20FFFF"),
    "infinity as the largest number": (encode.group_scale, "amax >= 0x7F800000", "amax < 0"),
    "NaN lost": (encode.group_scale, "amax > 0x7F800000", "amax < 0"),
    "elements of the lowest scale scaled": (encode.group_scale, "(is_low, 0x3F", "(amax < 0, 0x3F"),
    "lowest scale off": (encode.group_scale, "(is_low, 0,", "(amax < 0, 0,"),
    "infinity's factor flushed": (encode.group_scale, "0x7FC00000, 0x00400000", "0x7FC00000, 0"),
    "ties away": (encode.round_elements, "+ ((size >> SHIFT) & 1)", "+ 1"),
    "ties down": (encode.round_elements, "+ ((size >> SHIFT) & 1)", ""),
    "subnormal elements flushed": (
        encode.round_elements,
        "shifted.to(tl.int32, bitcast=True) - MAGIC",
        "size * 0",
    ),
    "no saturation": (encode.round_elements, "0x43E00000 if", "0x44000000 if"),
    "sign lost": (encode.round_elements, "sign | tl.where", "tl.where"),
    "neighbours' scale": (tiles.quantize_rows, "[:, :, None]", "[:, :, None] * 0.5"),
    "column-wise from half": (tiles.quantize_columns, "[:, None, :]", "[:, None, :] * 0.5"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_planted_defect_changes_the_digest(on_executor, defect):
    name = "bf16 e4m3 floor" if defect == "no saturation" else "bf16 e4m3 rceil"
    mutations = [Mutation(*DEFECTS[defect])]
    case = on_executor(lambda: compare(name, "integer"), mutations=mutations)
    assert not case.passed
    assert "differs in" in case.detail
    assert "got 0x" in case.detail


def test_the_quotient_that_fp32_rounds_to_a_power_of_two(on_executor):
    amax = torch.tensor([0x04600000, 0x04600001, 0x04600002], dtype=torch.int32)
    x = torch.zeros(3, 32)
    x[:, 5] = amax.view(torch.float32)
    for target in TARGETS.values():
        made = on_executor(lambda target=target: quantize(x, target=target))
        assert made.scales.view(torch.uint8).flatten().tolist() == [0, 0, 1]
    broken = [Mutation(encode.group_scale, "(TOP << 23) + 0x600001", "(TOP << 23) + 0x600000")]
    made = on_executor(lambda: quantize(x), mutations=broken)
    assert made.scales.view(torch.uint8).flatten().tolist() == [0, 1, 1]


SPECIAL = {
    "zeros": torch.zeros(32, 32),
    "negative zeros": -torch.zeros(32, 32),
    "subnormal": torch.full((32, 32), 2.0**-149),
    "smallest scaled": torch.full((32, 32), 449 * 2.0**-127),
    "largest": torch.full((32, 32), 3.4028234663852886e38),
    "one infinity": torch.ones(32, 32),
    "one NaN": torch.ones(32, 32),
}
SPECIAL["one infinity"][3, 4] = -math.inf
SPECIAL["one NaN"][3, 4] = math.nan
CODES = {
    "zeros": (0, 0),
    "negative zeros": (0, 0),
    "subnormal": (0, 0),
    "smallest scaled": (1, 0),
    "largest": (247, 246),
    "one infinity": (254, 247),
    "one NaN": (255, 255),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("name", SPECIAL)
def test_special_groups(on_executor, name, scaling, target):
    x = SPECIAL[name]
    row, column = on_executor(lambda: quantize(x, "both", scaling, target=TARGETS[target]))
    code = CODES[name][list(SCALINGS).index(scaling)]
    place = 3 if "one" in name else 0
    assert int(row.scales.view(torch.uint8)[place, 0]) == code
    assert int(column.scales.view(torch.uint8)[0, 4]) == code
    data, scales = reference.quantize_rows(x, E4M3, scaling, (32,))
    assert torch.equal(row.data.view(torch.uint8), data.view(torch.uint8))
    assert torch.equal(row.scales.view(torch.uint8), scales.view(torch.uint8))


SHAPES = [(1, 1), (32, 32), (31, 33), (70, 40), (33, 300), (64, 513)]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("segments", [None, 1, 20, 32, "table"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_odd_sizes_and_segments(checked, shape, segments, target):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    if segments == "table":
        segments = (0, shape[0] // 3, 0, shape[0] - shape[0] // 3)

    def work():
        return [
            quantize(x, "both", segments=segments, transposed=t, target=TARGETS[target])
            for t in (False, True)
        ]

    for row, column in checked(work):
        data, scales = reference.quantize_rows(x, E4M3, "rceil", (shape[1],))
        assert torch.equal(row.data.view(torch.uint8), data.view(torch.uint8))
        assert torch.equal(row.scales.view(torch.uint8), scales.view(torch.uint8))
        data, scales = reference.quantize_rows(x.t(), E4M3, "rceil", column.segments)
        assert torch.equal(column.data.view(torch.uint8), data.t().view(torch.uint8))
        assert torch.equal(column.scales.view(torch.uint8), scales.t().view(torch.uint8))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("values", ["row", "col", "both"])
@pytest.mark.parametrize(("shape", "segments"), [((64, 64), None), ((70, 40), 20), ((33, 300), 33)])
def test_values_are_those_of_the_copies(checked, shape, segments, values, target):
    x = torch.randn(shape).bfloat16()
    row, column = quantize(x, "both", segments=segments)
    wanted = {"row": row.dequantize(), "col": column.dequantize()}
    settings = {"segments": segments, "values": values, "target": TARGETS[target]}
    for run in (checked, lambda work: work()):
        made = run(lambda: quantize(x, "both", **settings))
        for copy, found in zip((row, column), made, strict=True):
            if values in (copy.axis, "both"):
                assert torch.equal(found, wanted[copy.axis])
            else:
                assert found.equal(copy)
        if values != "both":
            found = run(lambda: quantize(x, values, **settings))
            assert torch.equal(found, wanted[values])


def test_values_of_special_groups(on_executor):
    for x in SPECIAL.values():
        made = on_executor(lambda x=x: quantize(x, "both", values="both"))
        for found, copy in zip(made, quantize(x, "both"), strict=True):
            torch.testing.assert_close(found, copy.dequantize(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("choices", "told"),
    [
        ({"axis": "row", "values": "col"}, "values: got 'col', wanted copies that axis asks for"),
        ({"axis": "both", "values": "all"}, "values: got 'all', wanted row, col, both or None"),
        ({"axis": "col", "values": "col", "transposed": True}, "values: got transposed ones"),
    ],
)
def test_values_that_are_not_made_are_refused(choices, told):
    with pytest.raises(ArgumentError, match=told):
        quantize(torch.zeros(32, 32), **choices)


def test_groups_that_straddle_segments_would_show(on_executor):
    x = torch.cat([torch.ones(40, 32), torch.full((24, 32), 1000.0)])
    whole = [
        Mutation(kernels.group_rows, "tl.minimum(begin + source.segment_rows, ", "(0 * first + ")
    ]
    good = on_executor(lambda: quantize(x, "col", segments=40))
    bad = on_executor(lambda: quantize(x, "col", segments=40), mutations=whole)
    assert good.scales.view(torch.uint8)[:, 0].tolist() == [119, 119, 129]
    assert not good.equal(bad)


def test_a_view_with_a_stride_is_taken_as_it_is(on_executor):
    wide = torch.randn(40, 200)
    row, column = on_executor(lambda: quantize(wide[:, 50:130], "both"))
    again = on_executor(lambda: quantize(wide[:, 50:130].contiguous(), "both"))
    assert row.equal(again[0])
    assert column.equal(again[1])


@pytest.mark.parametrize(
    "tile", [(32, 1, 1, 8), (64, 4, 1, 16), (512, 8, 1, 8), (64, 1, 4, 8), (128, 2, 8, 16)]
)
def test_the_tile_changes_no_bit(on_executor, tile):
    x = torch.randn(70, 600)
    made = on_executor(lambda: quantize(x, "both", tile=tile))
    for copy, plain in zip(made, quantize(x, "both"), strict=True):
        assert copy.equal(plain)


def test_swiglu_in_steps_changes_no_bit(on_executor, monkeypatch):
    gate_up = torch.randn(40, 2 * 600)
    wanted = on_executor(lambda: swiglu_quantize(gate_up))
    # Its name in the package is the function's.
    module = importlib.import_module("kosmos_mx.ops.quantize")
    monkeypatch.setattr(module, "EXECUTOR_TILE", (256, 4, 4, 8))
    monkeypatch.setattr(module, "MANY_WGS", 1)
    for copy, plain in zip(on_executor(lambda: swiglu_quantize(gate_up)), wanted, strict=True):
        assert copy.equal(plain)


def test_shards_one_after_another_are_the_whole_in_segments(on_executor):
    """What a gather of column-wise copies gives, whatever the ranks' number of rows."""
    x = torch.randn(120, 64)
    whole = on_executor(lambda: quantize(x, "col", segments=40))
    shards = [on_executor(lambda part=part: quantize(part, "col")) for part in x.split(40)]
    for name in ("data", "scales"):
        gathered = torch.cat([getattr(shard, name).view(torch.uint8) for shard in shards])
        assert torch.equal(gathered, getattr(whole, name).view(torch.uint8))
    assert whole.data.shape == (3 * 64, 64)
    assert whole.dequantize().shape == (120, 64)


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 0)])
@pytest.mark.parametrize("transposed", [False, True])
def test_nothing_is_quantised_to_nothing(on_executor, shape, transposed):
    for run in (on_executor, lambda work: work()):
        row, column = run(lambda: quantize(torch.zeros(shape), "both", transposed=transposed))
        assert row.shape == column.shape == shape
        assert row.dequantize().shape == column.dequantize().shape == shape


@pytest.mark.parametrize("axis", ["row", "col", "both"])
def test_the_plain_path_gives_the_kernels_bits(on_executor, axis):
    x = torch.randn(70, 100).bfloat16()
    for form in FORMATS.values():
        for transposed in (False, True):

            def work(form=form, transposed=transposed):
                made = quantize(
                    x, axis, "floor", dtype=form.dtype, segments=33, transposed=transposed
                )
                return made if isinstance(made, tuple) else (made,)

            for fused, plain in zip(on_executor(work), work(), strict=True):
                assert fused.equal(plain)
                assert fused.is_transposed == plain.is_transposed


@pytest.mark.parametrize("target", TARGETS)
def test_swiglu_is_quantised_from_fp32(checked, target):
    gate_up = torch.randn(70, 2 * 96)
    row, column = checked(lambda: swiglu_quantize(gate_up, segments=40, target=TARGETS[target]))
    exact = torch.nn.functional.silu(gate_up[:, :96].double()) * gate_up[:, 96:].double()
    plain_row, plain_column = swiglu_quantize(gate_up, segments=40)
    for made, plain in ((row, plain_row), (column, plain_column)):
        # exp differs in the last bits: an element may fall on the other side of a threshold.
        codes = [m.scales.view(torch.uint8).int() for m in (made, plain)]
        assert int((codes[0] - codes[1]).abs().max()) == 0
        same = made.data.view(torch.uint8) == plain.data.view(torch.uint8)
        assert float(same.float().mean()) > 0.999
    bound = reference.error_bound(exact.float(), E4M3, "rceil")
    error = (row.dequantize(torch.float64) - exact).abs()
    assert bool((error <= bound + 1e-5).all())


def test_swiglu_is_not_rounded_to_bf16_in_between(on_executor):
    gate_up = torch.randn(64, 128)
    row, _ = on_executor(lambda: swiglu_quantize(gate_up))
    product = torch.nn.functional.silu(gate_up[:, :64]) * gate_up[:, 64:]
    assert not row.equal(quantize(product.bfloat16()))
    same = row.data.view(torch.uint8) == quantize(product).data.view(torch.uint8)
    assert float(same.float().mean()) > 0.999


@pytest.mark.parametrize(
    ("arguments", "options", "told"),
    [
        ((torch.zeros(2, 2, 2),), {}, r"x: got shape \(2, 2, 2\), wanted \[rows, cols\]"),
        ((torch.zeros(2, 2).half(),), {}, "x: got torch.float16, wanted torch.bfloat16 or"),
        ((torch.zeros(8, 4).t(),), {}, r"x: got strides \(1, 4\), wanted contiguous rows"),
        ((torch.zeros(2, 2), "k"), {}, "axis: got 'k', wanted row, col or both"),
        ((torch.zeros(2, 2), "row", "up"), {}, "scale_rounding: got 'up', wanted one of rceil"),
        ((torch.zeros(2, 2),), {"dtype": torch.int8}, "dtype: got torch.int8"),
        ((torch.zeros(2, 2),), {"segments": 0}, "segments: got 0"),
        ((torch.zeros(2, 2),), {"segments": (1, 2)}, r"segments: got \(1, 2\), wanted lengths"),
        (
            (torch.zeros(2, 2),),
            {"tile": (48, 4, 1, 8)},
            r"tile: got \(48, 4, 1, 8\), wanted",
        ),
        ((torch.zeros(2, 2),), {"tile": (64, 4, 3, 8)}, r"tile: got \(64, 4, 3, 8\)"),
        ((torch.zeros(2, 2),), {"tile": (16, 4, 1, 8)}, "tile: got 16 columns, wanted 32"),
        ((torch.zeros(2, 2),), {"segments": (3, -1)}, r"segments: got \(3, -1\)"),
    ],
)
def test_bad_arguments_are_named(arguments, options, told):
    with pytest.raises(ArgumentError, match=told):
        quantize(*arguments, **options)


def test_gates_without_as_many_values_are_refused():
    with pytest.raises(ArgumentError, match=r"gate_up: got shape \(2, 3\)"):
        swiglu_quantize(torch.zeros(2, 3))
