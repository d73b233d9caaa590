"""The device functions inside another kernel, as a GEMM's epilogue or a mover would call them."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from kosmos_mx import reference
from kosmos_mx.device.decode import to_bf16
from kosmos_mx.device.tiles import (
    dequantize_columns,
    dequantize_rows,
    quantize_rows,
    quantize_transposed,
    swiglu_quantize,
)
from kosmos_mx.formats import E4M3, FORMATS, SCALE_DTYPE

BLOCK = 64


@triton.jit
def epilogue_kernel(
    a, b, row, row_code, col, col_code, FORMAT: tl.constexpr, TARGET: tl.constexpr, B: tl.constexpr
):
    """The product of two tiles, quantised from the accumulator: row-wise, and turned."""
    i = tl.arange(0, B)
    g = tl.arange(0, B // 32)
    at = i[:, None] * B + i[None, :]
    acc = tl.dot(tl.load(a + at), tl.load(b + at), tl.zeros((B, B), tl.float32))
    elements, codes = quantize_rows(acc, FORMAT, 0, TARGET)
    tl.store(row + at, elements)
    tl.store(row_code + i[:, None] * (B // 32) + g[None, :], codes)
    elements, codes = quantize_transposed(acc, FORMAT, 0, TARGET)
    tl.store(col + at, elements)
    tl.store(col_code + i[:, None] * (B // 32) + g[None, :], codes)


@pytest.mark.parametrize("target", [0, 1])
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_in_an_epilogue(checked, form, target):
    a, b = torch.randn(BLOCK, BLOCK).bfloat16(), torch.randn(BLOCK, BLOCK).bfloat16()
    row, col = (torch.zeros(BLOCK, BLOCK, dtype=torch.uint8) for _ in range(2))
    row_code, col_code = (torch.zeros(BLOCK, BLOCK // 32, dtype=torch.uint8) for _ in range(2))

    def work():
        arguments = (a, b, row, row_code, col, col_code, form.constant, target, BLOCK)
        epilogue_kernel[(1,)](*arguments)

    checked(work)
    exact = a.float() @ b.float()
    for source, elements, codes in ((exact, row, row_code), (exact.t(), col, col_code)):
        data, scales = reference.quantize_rows(source, form, "rceil", (BLOCK,))
        # The sums of the executor and of torch may differ in the last bit.
        assert int((codes.int() - scales.view(torch.uint8).int()).abs().max()) == 0
        assert float((elements == data.view(torch.uint8)).float().mean()) > 0.995


@triton.jit
def mover_kernel(data, code, out, COLUMNS: tl.constexpr, TARGET: tl.constexpr, B: tl.constexpr):
    """Dequantises a tile on its way."""
    i = tl.arange(0, B)
    g = tl.arange(0, B // 32)
    at = i[:, None] * B + i[None, :]
    elements = tl.load(data + at)
    if COLUMNS:
        value = dequantize_columns(elements, tl.load(code + g[:, None] * B + i[None, :]), 0, TARGET)
    else:
        codes = tl.load(code + i[:, None] * (B // 32) + g[None, :])
        value = dequantize_rows(elements, codes, 0, TARGET)
    tl.store(out + at, to_bf16(value, TARGET))


@pytest.mark.parametrize("target", [0, 1])
@pytest.mark.parametrize("columns", [0, 1])
def test_in_a_mover(checked, columns, target):
    x = torch.randn(BLOCK, BLOCK)
    data, scales = reference.quantize_rows(x, E4M3, "rceil", (BLOCK,))
    wanted = reference.dequantize_rows(data, scales).bfloat16()
    if columns:
        data, scales, wanted = (t.t().contiguous() for t in (data, scales, wanted))
    out = torch.zeros(BLOCK, BLOCK, dtype=torch.bfloat16)
    parts = (data.view(torch.uint8), scales.view(torch.uint8))
    checked(lambda: mover_kernel[(1,)](*parts, out, columns, target, BLOCK))
    assert torch.equal(out, wanted)


@triton.jit
def swiglu_kernel(gate, up, row, row_code, col, col_code, TARGET: tl.constexpr, B: tl.constexpr):
    i = tl.arange(0, B)
    g = tl.arange(0, B // 32)
    at = i[:, None] * B + i[None, :]
    r, rc, c, cc = swiglu_quantize(tl.load(gate + at), tl.load(up + at), 0, 0, TARGET)
    tl.store(row + at, r)
    tl.store(row_code + i[:, None] * (B // 32) + g[None, :], rc)
    tl.store(col + at, c)
    tl.store(col_code + g[:, None] * B + i[None, :], cc)


@pytest.mark.parametrize("target", [0, 1])
def test_behind_swiglu_both_copies_come_from_fp32(checked, target):
    gate, up = torch.randn(BLOCK, BLOCK), torch.randn(BLOCK, BLOCK)
    row, col = (torch.zeros(BLOCK, BLOCK, dtype=torch.uint8) for _ in range(2))
    row_code = torch.zeros(BLOCK, BLOCK // 32, dtype=torch.uint8)
    col_code = torch.zeros(BLOCK // 32, BLOCK, dtype=torch.uint8)
    arguments = (gate, up, row, row_code, col, col_code, target, BLOCK)
    checked(lambda: swiglu_kernel[(1,)](*arguments))
    exact = torch.nn.functional.silu(gate.double()) * up.double()
    bound = reference.error_bound(exact.float(), E4M3, "rceil") + 1e-6
    values = reference.dequantize_rows(row.view(E4M3.dtype), row_code.view(SCALE_DTYPE))
    assert bool(((values - exact).abs() <= bound).all())
    bound = reference.error_bound(exact.float().t(), E4M3, "rceil") + 1e-6
    columns = (t.t().contiguous() for t in (col.view(E4M3.dtype), col_code.view(SCALE_DTYPE)))
    values = reference.dequantize_rows(*columns)
    assert bool(((values - exact.t()).abs() <= bound).all())
