"""Operations on MXFP8: they check, allocate and launch."""

from kosmos_mx.ops.dequantize import dequantize
from kosmos_mx.ops.gemm import mx_gemm
from kosmos_mx.ops.quantize import quantize, swiglu_quantize

__all__ = ["dequantize", "mx_gemm", "quantize", "swiglu_quantize"]
