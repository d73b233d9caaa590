"""From MXFP8 back: exact in FP32, and rounded to BF16 where BF16 cannot hold the value."""

import triton
import triton.language as tl

from kosmos_mx.device.encode import E4M3, NAN_CODE, NAN_ELEMENT


@triton.jit
def element_value(element, FORMAT: tl.constexpr):
    """fp32 of the elements with the bits `element` (uint8), by integers and one exact subtraction.

    The infinities of E5M2 come out as such, every NaN as 0x7FC00000.
    """
    BIAS: tl.constexpr = 7 if FORMAT == E4M3 else 15
    MANTISSA: tl.constexpr = 3 if FORMAT == E4M3 else 2
    SHIFT: tl.constexpr = 23 - MANTISSA
    bits = element.to(tl.int32)
    size = (bits & 0x7F) << SHIFT
    # 1.m - 1 is m units, and normal; the power of two that a subnormal lacks is put in afterwards.
    fraction = (size | 0x3F800000).to(tl.float32, bitcast=True) - 1.0
    lowest = tl.full([], (128 - BIAS) << 23, tl.int32).to(tl.float32, bitcast=True)
    small = (fraction * lowest).to(tl.int32, bitcast=True)
    value = tl.where((bits & 0x7F) < (1 << MANTISSA), small, size + ((127 - BIAS) << 23))
    value = value | ((bits & 0x80) << 24)
    if FORMAT == E4M3:
        value = tl.where((bits & 0x7F) == NAN_ELEMENT, 0x7FC00000, value)
    else:
        infinity = ((bits & 0x80) << 24) | 0x7F800000
        value = tl.where((bits & 0x7F) == 0x7C, infinity, value)
        value = tl.where((bits & 0x7F) > 0x7C, 0x7FC00000, value)
    return value.to(tl.float32, bitcast=True)


@triton.jit
def scale_factors(code):
    """Two fp32 powers of two whose product is the scale of `code` (int32); each is normal."""
    first = (code - 127) >> 1
    second = code - 127 - first
    return (
        ((first + 127) << 23).to(tl.float32, bitcast=True),
        ((second + 127) << 23).to(tl.float32, bitcast=True),
    )


@triton.jit
def to_bf16(x):
    """fp32 to bf16, nearest even, on the bits: subnormals are kept, NaN becomes 0x7FC0."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    half = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)
    return half.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def dequantize_groups(groups, code, FORMAT: tl.constexpr):
    """fp32 of elements (uint8) whose groups' scales are `code` (int32, broadcastable).

    Exact, or infinity past the range of fp32; NaN for code 255.
    """
    first, second = scale_factors(code)
    value = element_value(groups, FORMAT) * first * second
    return tl.where(code == NAN_CODE, float("nan"), value)
