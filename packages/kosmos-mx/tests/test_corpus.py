"""The corpus goes through everything that it is said to go through."""

from __future__ import annotations

import math

import pytest
import torch
from kosmos_mx import reference
from kosmos_mx.cli.corpus import corpus
from kosmos_mx.formats import FORMATS, SCALINGS


def test_ten_million_numbers_hold_all_of_bf16():
    x = corpus(10 << 20, torch.bfloat16)
    assert x.numel() >= 10_000_000
    assert x.view(torch.int16).unique().numel() == 1 << 16


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_code_and_every_element_come_up(form, scaling, dtype):
    x = corpus(1 << 20, dtype)
    for source in (x, x.t()):
        data, scales = reference.quantize_rows(source, form, scaling, (source.shape[1],))
        ends = torch.tensor([3.38e38, math.inf, math.nan], dtype=torch.float64)
        largest, *others = reference.scale_codes(ends, form, scaling).tolist()
        wanted = {*range(largest + 1), *others}
        assert set(scales.view(torch.uint8).unique().tolist()) == wanted
        bits = torch.arange(256, dtype=torch.uint8).view(form.dtype).float()
        numbers = set(bits[bits.isfinite()].tolist())
        assert numbers <= set(data.float().unique().tolist())
        assert bool(data.float().isnan().any())


def test_it_is_the_same_everywhere():
    x = corpus(1 << 16, torch.float32)
    assert int(x.view(torch.int32).long().sum()) == -41220563015680
    assert torch.equal(corpus(1 << 15, torch.float32).view(torch.int32), x[:128].view(torch.int32))
