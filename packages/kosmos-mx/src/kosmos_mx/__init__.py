"""MXFP8: formats, quantised matrices, their GEMMs, and device functions for other kernels."""

from importlib.metadata import PackageNotFoundError, version

from kosmos_mx.ops.dequantize import dequantize
from kosmos_mx.ops.gemm import mx_gemm
from kosmos_mx.ops.quantize import quantize, swiglu_quantize
from kosmos_mx.tensor import MXTensor

__all__ = ["MXTensor", "__version__", "dequantize", "mx_gemm", "quantize", "swiglu_quantize"]

try:
    __version__ = version("kosmos-mx")
except PackageNotFoundError:  # run from a source tree that is on the path but not installed
    __version__ = "0+source"
