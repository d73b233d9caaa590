"""Against the torchao that is installed: the committed digests, and numbers beyond the corpus."""

from __future__ import annotations

import sys

import pytest
import torch
from kosmos_core.errors import ArgumentError
from kosmos_mx import reference
from kosmos_mx.cli import vectors
from kosmos_mx.formats import FORMATS, SCALINGS


@pytest.fixture
def torchao():
    pytest.importorskip("torchao")


@pytest.mark.usefixtures("torchao")
def test_the_committed_digests_are_what_torchao_gives():
    count = vectors.COUNTS[0]
    made = vectors.make((count,))["values"][str(count)]
    assert made == vectors.committed()["values"][str(count)]


@pytest.mark.usefixtures("torchao")
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_random_numbers(form, scaling):
    x = torch.randn(512, 256) * torch.exp2(torch.randint(-126, 118, (512, 1)).float())
    row, column = vectors.by_torchao(x.bfloat16(), form, scaling)
    data, scales = reference.quantize_rows(x.bfloat16(), form, scaling, (256,))
    turned, turned_scales = reference.quantize_rows(x.bfloat16().t(), form, scaling, (512,))
    assert vectors.digests(row, column) == vectors.digests(
        (data, scales), (turned.t(), turned_scales.t())
    )


@pytest.mark.usefixtures("torchao")
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_quotients_just_above_a_power_of_two(form):
    """torchao's logarithm in FP32 takes them for the power; the instruction it stands for does not.

    docs/numerics.md: the only numbers where our codes differ from its eager path.
    """
    exponents = torch.arange(form.top + 1, 255)[:, None]
    mantissas = 0x600000 + torch.arange(-2, 62)[None, :]
    amax = ((exponents << 23) + mantissas).to(torch.int32).view(torch.float32).flatten()
    x = torch.zeros(len(amax), 32)
    x[:, 0] = amax
    (_, theirs), _ = vectors.by_torchao(x, form, "rceil")
    _, ours = reference.quantize_rows(x, form, "rceil", (32,))
    theirs, ours = (s.view(torch.uint8).int().flatten() for s in (theirs, ours))
    differs = ours != theirs
    assert 0 < int(differs.sum()) < len(amax) // 2
    assert bool((ours - theirs)[differs].eq(1).all())
    quotient = amax.double() / form.largest
    above = quotient / torch.exp2((ours - 1 - 127).double()) - 1
    assert bool(((above > 0) & (above < 2.0**-17))[differs].all())


def test_without_torchao_the_digests_cannot_be_made(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.prototype.mx_formats.mx_tensor", None)
    with pytest.raises(ArgumentError, match="torchao: not installed here"):
        vectors.make((8192,))
