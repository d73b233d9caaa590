"""From MXFP8 back: exact in FP32, and rounded to BF16 where BF16 cannot hold the value."""

import triton
import triton.language as tl
from kosmos_core.device.target import NVIDIA

from kosmos_mx.device.encode import E4M3, NAN_CODE, NAN_ELEMENT


@triton.jit
def element_value(element, FORMAT: tl.constexpr, TARGET: tl.constexpr):
    """fp32 of the elements with the bits `element` (uint8), exact; infinities and NaN stay so.

    NVIDIA converts; elsewhere it is done by integers and one exact subtraction.
    """
    if TARGET == NVIDIA:
        if FORMAT == E4M3:
            return element.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        else:
            return element.to(tl.float8e5, bitcast=True).to(tl.float32)
    else:
        BIAS: tl.constexpr = 7 if FORMAT == E4M3 else 15
        MANTISSA: tl.constexpr = 3 if FORMAT == E4M3 else 2
        SHIFT: tl.constexpr = 23 - MANTISSA
        bits = element.to(tl.int32)
        sign = (bits & 0x80) << 24
        size = (bits & 0x7F) << SHIFT
        # 1.m - 1 is m units, and normal; a subnormal's power of two is put in afterwards.
        fraction = (size | 0x3F800000).to(tl.float32, bitcast=True) - 1.0
        lowest = tl.full([], (128 - BIAS) << 23, tl.int32).to(tl.float32, bitcast=True)
        small = (fraction * lowest).to(tl.int32, bitcast=True)
        value = tl.where((bits & 0x7F) < (1 << MANTISSA), small, size + ((127 - BIAS) << 23))
        if FORMAT == E4M3:
            value = tl.where((bits & 0x7F) == NAN_ELEMENT, 0x7FC00000, value)
        else:
            # Infinity and NaN have the exponent that comes after the largest.
            value = tl.where((bits & 0x7F) >= 0x7C, size | 0x7F800000, value)
        return (value | sign).to(tl.float32, bitcast=True)


@triton.jit
def scale_factors(code):
    """Two fp32 powers of two whose product is the scale of `code` (int32); each is normal.

    NaN for code 255.
    """
    first = (code - 127) >> 1
    second = (code - first) << 23  # 127 for the bias, 127 off
    second = tl.where(code == NAN_CODE, 0x7FC00000, second)
    return (
        ((first + 127) << 23).to(tl.float32, bitcast=True),
        second.to(tl.float32, bitcast=True),
    )


@triton.jit
def to_bf16(x, TARGET: tl.constexpr):
    """fp32 to bf16, nearest even; subnormals are kept, NaN stays NaN."""
    if TARGET == NVIDIA:
        return x.to(tl.bfloat16)
    else:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        half = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)
        return half.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def dequantize_groups(groups, code, FORMAT: tl.constexpr, TARGET: tl.constexpr):
    """fp32 of elements (uint8) whose groups' scales are `code` (int32, broadcastable).

    Exact, or infinity past the range of fp32; NaN for code 255.
    """
    first, second = scale_factors(code)
    return element_value(groups, FORMAT, TARGET) * first * second
