"""The numbers of the formats against torch's own."""

from __future__ import annotations

import pytest
import torch
from kosmos_core.errors import ArgumentError
from kosmos_mx.formats import E4M3, E5M2, FORMATS, format_of, num_groups, padded


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_a_format_is_torchs(form):
    info = torch.finfo(form.dtype)
    assert form.largest == info.max == 1.75 * 2.0**form.top
    assert form.smallest == info.smallest_normal * 2.0**-form.mantissa_bits
    assert format_of(form.dtype) is form


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_bf16_holds_exactly_what_is_said_and_nothing_beyond(form):
    bits = torch.arange(256, dtype=torch.uint8).view(form.dtype)
    values = bits.double()[bits.double().isfinite()]

    def is_exact(code):
        scaled = values * 2.0 ** (code - 127)
        return torch.equal(scaled.float().to(torch.bfloat16).double(), scaled)

    exact = [code for code in range(255) if is_exact(code)]
    assert exact == list(form.exact_bf16_codes)


def test_the_exact_ranges():
    assert (E4M3.exact_bf16_codes, E5M2.exact_bf16_codes) == (range(3, 247), range(10, 240))


@pytest.mark.parametrize(("length", "groups"), [(0, 0), (1, 1), (32, 1), (33, 2)])
def test_groups(length, groups):
    assert (num_groups(length), padded(length)) == (groups, 32 * groups)


def test_another_dtype_is_refused():
    with pytest.raises(ArgumentError, match=r"dtype: got torch.float16, wanted torch.float8_e4m3"):
        format_of(torch.float16)
