"""The FP64 reference against the formats' own definition, number by number."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from kosmos_mx import reference
from kosmos_mx.cli import vectors
from kosmos_mx.cli.corpus import corpus
from kosmos_mx.formats import FORMATS, SCALINGS


def finite(form):
    bits = torch.arange(128, dtype=torch.uint8).view(form.dtype).double()
    return bits[bits.isfinite()]


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_elements_are_the_nearest_ones_ties_to_even(form):
    numbers = finite(form)
    between = (numbers[1:] + numbers[:-1]) / 2
    random = torch.rand(2000, dtype=torch.float64) * form.largest * 1.2
    small = torch.rand(2000, dtype=torch.float64) * form.smallest * 20
    y = torch.cat([numbers, between, between * (1 + 2.0**-40), between * (1 - 2.0**-40)])
    y = torch.cat([y, random, small, torch.tensor([math.inf])]).to(torch.float64)
    got = reference.round_elements(y, form).view(torch.uint8)
    # The bits of positive numbers are in their order: an even mantissa is an even byte.
    for value, bits in zip(y.tolist(), got.tolist(), strict=True):
        distance = (numbers - value).abs()
        nearest = (distance == distance.min()).nonzero().flatten().tolist()
        wanted = nearest[0] if len(nearest) == 1 else next(i for i in nearest if i % 2 == 0)
        assert bits == (wanted if value < form.largest else len(numbers) - 1), value
    negative = reference.round_elements(-y, form).view(torch.uint8)
    assert torch.equal(negative, got | 0x80)


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_rceil_is_the_least_scale_that_saturates_nothing(form):
    amax = torch.cat([corpus(1 << 16, torch.float32).abs().flatten()[:3000], torch.tensor([448.0])])
    amax = amax[amax.isfinite() & (amax > 2.0**-100)].double()
    codes = reference.scale_codes(amax, form, "rceil")
    for value, code in zip(amax.tolist(), codes.tolist(), strict=True):
        largest = Fraction(form.largest) * Fraction(2) ** (code - 127)
        assert Fraction(value) <= largest
        assert Fraction(value) > largest / 2


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_floor_is_the_power_of_two_below(form):
    amax = corpus(1 << 16, torch.float32).abs().flatten()[:3000]
    amax = amax[amax.isfinite() & (amax > 2.0**-100)].double()
    codes = reference.scale_codes(amax, form, "floor")
    for value, code in zip(amax.tolist(), codes.tolist(), strict=True):
        power = Fraction(2) ** (code - 127 + form.top)
        assert power <= Fraction(value) < 2 * power


@pytest.mark.parametrize(
    ("form", "scaling", "amax", "code"),
    [
        ("e4m3", "rceil", 0.0, 0),
        ("e4m3", "rceil", 448.0, 127),
        ("e4m3", "rceil", 448.0 * (1 + 2.0**-23), 128),
        ("e4m3", "rceil", 2.0**-149, 0),
        ("e4m3", "rceil", 3.4028234663852886e38, 247),
        ("e4m3", "rceil", math.inf, 254),
        ("e4m3", "rceil", math.nan, 255),
        ("e4m3", "floor", 256.0, 127),
        ("e4m3", "floor", 511.0, 127),
        ("e4m3", "floor", 2.0**-130, 0),
        ("e4m3", "floor", math.inf, 247),
        ("e4m3", "floor", math.nan, 255),
        ("e5m2", "rceil", 57344.0, 127),
        ("e5m2", "rceil", 57345.0, 128),
        ("e5m2", "floor", 65535.0, 127),
        ("e5m2", "floor", math.inf, 240),
    ],
)
def test_scale_codes(form, scaling, amax, code):
    found = reference.scale_codes(torch.tensor(amax, dtype=torch.float64), FORMATS[form], scaling)
    assert int(found) == code


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_the_error_stays_within_the_bound_for_every_exponent(form, scaling):
    x = corpus(1 << 20, torch.float32)
    x = x[x.isfinite().all(1)]
    assert len(x) > 1500
    data, scales = reference.quantize_rows(x, form, scaling, (256,))
    error = (reference.dequantize_rows(data, scales) - x.double()).abs()
    bound = reference.error_bound(x, form, scaling)
    assert bool((error <= bound).all())
    # And no smaller bound would hold.
    assert float((error / bound.clamp(min=1e-300)).max()) == 1.0


@pytest.mark.parametrize("case", list(vectors.cases()), ids=lambda case: case[0])
def test_its_bits_are_torchaos(case):
    name, dtype, form, scaling = case
    count = vectors.COUNTS[0]
    x = corpus(count, dtype)
    row = reference.quantize_rows(x, form, scaling, (256,))
    data, scales = reference.quantize_rows(x.t(), form, scaling, (x.shape[0],))
    known = vectors.committed()["values"][str(count)][name]
    assert vectors.digests(row, (data.t(), scales.t())) == known


def test_segments_are_padded_by_themselves():
    x = torch.arange(1.0, 71.0)[None, :]
    data, scales = reference.quantize_rows(x, FORMATS["e4m3"], "rceil", (3, 0, 67))
    assert data.shape == (1, 32 + 96)
    assert scales.shape == (1, 4)
    assert bool((data.float()[0, 3:32] == 0).all())
    values = reference.crop_segments(reference.dequantize_rows(data, scales), (3, 0, 67))
    assert values.shape == x.shape
    assert bool(((values - x).abs() <= x / 16).all())
