"""`mx_gemm` on the executor, with and without block-scaled MMA, in every layout."""

from __future__ import annotations

import pytest
import torch
from kosmos_core.errors import ArgumentError
from kosmos_core.executor import MemoryFault, Mutation
from kosmos_mx import MXTensor, mx_gemm, quantize
from kosmos_mx.cli.checking import exact_gemm, gemm
from kosmos_mx.device import gemm as device_gemm
from kosmos_mx.formats import E4M3, E5M2, SCALE_DTYPE
from kosmos_mx.ops.gemm import LAYOUTS

CPU = torch.device("cpu")


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_products(checked, layout, transposed):
    for case in checked(lambda: [f(layout, transposed, CPU, 1) for f in (gemm, exact_gemm)]):
        assert case.passed, str(case)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 1), (128, 128, 128), (129, 5, 320), (7, 130, 33)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sizes(on_executor, layout, shape, scaled):
    m, n, k = shape
    kind = LAYOUTS[layout]
    x, w = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()
    a = quantize(x if kind.a_axis == "row" else x.t().contiguous(), kind.a_axis)
    b = quantize(w if kind.b_axis == "row" else w.t().contiguous(), kind.b_axis)
    out = on_executor(lambda: mx_gemm(a, b, layout, block_scaled=scaled))
    assert out.dtype is torch.bfloat16
    plain = mx_gemm(a, b, layout)
    error = (out.double() - plain.double()).norm()
    assert float(error) <= 4e-3 * float(plain.double().norm())
    exact = x.double() @ w.double().t()
    assert float((out.double() - exact).norm()) <= 0.14 * float(
        x.double().norm() * w.double().norm()
    )


@pytest.mark.parametrize("scaled", [False, True])
def test_mixed_formats(on_executor, scaled):
    x, w = torch.randn(64, 96), torch.randn(32, 96)
    a, b = quantize(x, dtype=E5M2.dtype), quantize(w, dtype=E4M3.dtype)
    out = on_executor(lambda: mx_gemm(a, b, out_dtype=torch.float32, block_scaled=scaled))
    wanted = a.dequantize(torch.float64) @ b.dequantize(torch.float64).t()
    assert float((out - wanted).norm() / wanted.norm()) < 1e-6


def test_block_scales_meet_before_they_overflow(on_executor):
    """Scales of 2^127 and 2^-127: what either alone makes of the elements is out of range."""
    element = torch.full((32, 32), 256.0).to(E4M3.dtype)

    def matrix(code):
        scales = torch.full((32, 1), code, dtype=torch.uint8).view(SCALE_DTYPE)
        return MXTensor(element, scales, "row", (32, 32), (32,))

    a, b = matrix(254), matrix(0)
    out = on_executor(lambda: mx_gemm(a, b, out_dtype=torch.float32, block_scaled=True))
    assert bool((out == 32 * 256 * 256).all())


DEFECTS = {
    "scales of the neighbours": (device_gemm.load_scales, "k // GROUP,", "k // GROUP + 1,"),
    "past the contraction": (
        device_gemm.load_operand,
        "(ks < depth - k)[None, :]",
        "(ks >= 0)[None, :]",
    ),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_planted_defect_is_seen(on_executor, defect):
    mutations = [Mutation(*DEFECTS[defect])]
    try:
        passed = on_executor(lambda: gemm("tn", False, CPU, 1), mutations=mutations).passed
    except MemoryFault:
        passed = False
    assert not passed


@pytest.mark.parametrize(
    ("a", "b", "options", "told"),
    [
        ((4, 64), (6, 64), {"layout": "tt"}, "layout: got 'tt', wanted one of tn, nn, nt"),
        ((4, 64), (6, 64), {"out_dtype": torch.float16}, "out_dtype: got torch.float16"),
        ((4, 64), (6, 32), {}, r"a, b: got \(4, 64\) row-wise in \(64,\) and \(6, 32\)"),
        ((4, 64), (64, 6), {"layout": "nn"}, r"wanted a \[m, k\] and b \[k, n\], row-wise and col"),
    ],
)
def test_bad_arguments_are_named(a, b, options, told):
    with pytest.raises(ArgumentError, match=told):
        mx_gemm(quantize(torch.zeros(a)), quantize(torch.zeros(b)), **options)


def test_segments_must_agree():
    x = torch.zeros(64, 8)
    with pytest.raises(ArgumentError, match=r"contracted over equal segments"):
        mx_gemm(quantize(x, "col", segments=32), quantize(x, "col"), "nt")
