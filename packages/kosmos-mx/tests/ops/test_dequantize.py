"""`dequantize` on the executor: every element with every scale, and planted defects."""

from __future__ import annotations

import pytest
import torch
from kosmos_core.errors import ArgumentError
from kosmos_core.executor import Mutation
from kosmos_mx import dequantize, quantize
from kosmos_mx.cli.checking import PATHS, all_codes
from kosmos_mx.device import decode
from kosmos_mx.formats import FORMATS

CPU = torch.device("cpu")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_every_element_with_every_scale(checked, form, path):
    case = checked(lambda: all_codes(form, path, CPU))
    assert case.passed, str(case)
    assert case.values == 4 * 256 * 256


DEFECTS = {
    "scale of one power": (decode.scale_factors, "(code - 127) >> 1", "code - 127"),
    "NaN scale": (decode.scale_factors, "code == NAN_CODE", "code < 0"),
    "NaN element": (decode.element_value, "== NAN_ELEMENT", "== 0x80"),
    "infinity of E5M2": (decode.element_value, ">= 0x7C", "> 0x7C"),
    "subnormal elements": (decode.element_value, "(128 - BIAS) << 23", "(127 - BIAS) << 23"),
    "sign": (decode.element_value, "value | sign", "value"),
    "ties of bf16": (decode.to_bf16, "+ 0x7FFF + ((bits >> 16) & 1)", "+ 0x8000"),
    "truncated bf16": (decode.to_bf16, "+ 0x7FFF + ((bits >> 16) & 1)", ""),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_planted_defect_is_seen(on_executor, defect):
    form = FORMATS["e5m2" if "E5M2" in defect else "e4m3"]
    case = on_executor(
        lambda: all_codes(form, "integer", CPU), mutations=[Mutation(*DEFECTS[defect])]
    )
    assert not case.passed


def test_the_kernel_and_the_plain_path_agree(on_executor):
    x = torch.randn(70, 100)
    for axis in ("row", "col"):
        for transposed in (False, True):
            made = quantize(x, axis, segments=33, transposed=transposed)
            for padding in (False, True):

                def work(made=made, padding=padding):
                    return made.dequantize(torch.float32, padding=padding)

                assert torch.equal(on_executor(work), work())


def test_memory_that_is_there_is_written(on_executor):
    made = quantize(torch.randn(70, 100), "col")
    wanted = made.dequantize(padding=True)
    out = torch.full(made.data.shape, torch.nan, dtype=torch.bfloat16)
    for work in (on_executor, lambda work: work()):
        assert work(lambda: dequantize(made, padding=True, out=out.fill_(torch.nan))) is out
        assert torch.equal(out, wanted)
    for bad in (out.float(), out[:-1], out.t()):
        with pytest.raises(ArgumentError, match="out: got"):
            dequantize(made, out=bad)


def test_another_dtype_is_refused():
    with pytest.raises(ArgumentError, match=r"dtype: got torch.float16, wanted one of"):
        quantize(torch.zeros(2, 2)).dequantize(torch.float16)
