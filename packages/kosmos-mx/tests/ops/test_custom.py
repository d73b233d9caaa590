"""The operators of the dispatcher: real and fake results agree, and they compile."""

from __future__ import annotations

import pytest
import torch
from kosmos_mx import mx_gemm, quantize
from kosmos_mx.ops import custom


def operands():
    x = torch.randn(70, 100).bfloat16()
    return x, custom.mx_quantize_op(x, "both", "rceil", "e4m3", [40, 30], False)


@pytest.mark.parametrize("axis", ["row", "col", "both"])
@pytest.mark.parametrize("transposed", [False, True])
def test_quantize(axis, transposed):
    x, _ = operands()
    arguments = (x, axis, "floor", "e5m2", [40, 0, 30], transposed)
    torch.library.opcheck(custom.mx_quantize_op, arguments, test_utils=("test_schema", *UTILS))
    made = torch.ops.kosmos.mx_quantize(*arguments)
    assert len(made) == (4 if axis == "both" else 2)
    assert all(part.is_contiguous() for part in made)


# Torch's check of the schema compares inputs in a way that it has not for fp8.
UTILS = ("test_autograd_registration", "test_faketensor")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dequantize(dtype):
    _, (data, scales, column, column_scales) = operands()
    for arguments in ((data, scales, "row", dtype), (column, column_scales, "col", dtype)):
        torch.library.opcheck(custom.mx_dequantize_op, arguments, test_utils=UTILS)
    row = torch.ops.kosmos.mx_dequantize(data, scales, "row", dtype)
    assert row.shape == (70, 128)


def test_gemm():
    x, (data, scales, column, column_scales) = operands()
    w = quantize(torch.randn(24, 100).bfloat16())
    arguments = (data, scales, "row", w.data, w.scales, "row", torch.float32)
    torch.library.opcheck(custom.mx_gemm_op, arguments, test_utils=UTILS)
    out = torch.ops.kosmos.mx_gemm(*arguments)
    assert torch.equal(out, mx_gemm(quantize(x), w, out_dtype=torch.float32))
    both = (column, column_scales, "col", column, column_scales, "col", torch.bfloat16)
    torch.library.opcheck(custom.mx_gemm_op, both, test_utils=UTILS)
    assert torch.ops.kosmos.mx_gemm(*both).shape == (100, 100)


def test_they_compile_into_one_graph():
    w = quantize(torch.randn(24, 100).bfloat16())

    def forward(x, w_data, w_scales):
        data, scales = torch.ops.kosmos.mx_quantize(x, "row", "rceil", "e4m3", [70], False)
        return torch.ops.kosmos.mx_gemm(
            data, scales, "row", w_data, w_scales, "row", torch.float32
        ).relu()

    x, _ = operands()
    compiled = torch.compile(forward, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, w.data, w.scales), forward(x, w.data, w.scales))
