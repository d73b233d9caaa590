"""Whole tiles: quantised along rows, along columns, transposed, and behind SwiGLU.

A tile is [R, C] fp32 with R and C multiples of 32 wherever groups lie along them. What a tile's
owner does not have (past the end of a shard or an expert) it sets to 0 beforehand: zeros change no
scale, and their own bits are 0.
"""

import triton
import triton.language as tl

from kosmos_mx.device.decode import dequantize_groups
from kosmos_mx.device.encode import (
    GROUP,
    group_scale,
    magnitude_bits,
    round_elements,
)


@triton.jit
def quantize_rows(x, FORMAT: tl.constexpr, SCALING: tl.constexpr, TARGET: tl.constexpr):
    """Groups along each row: elements [R, C] and codes [R, C / 32], uint8."""
    R: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    groups = x.reshape(R, C // GROUP, GROUP)
    code, factor = group_scale(tl.max(magnitude_bits(groups), 2), FORMAT, SCALING)
    scaled = groups * factor[:, :, None]
    elements = round_elements(scaled.reshape(R, C), FORMAT, TARGET)
    return elements, code.to(tl.uint8)


@triton.jit
def quantize_columns(x, FORMAT: tl.constexpr, SCALING: tl.constexpr, TARGET: tl.constexpr):
    """Groups along each column: elements [R, C] and codes [R / 32, C], uint8."""
    R: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    groups = x.reshape(R // GROUP, GROUP, C)
    code, factor = group_scale(tl.max(magnitude_bits(groups), 1), FORMAT, SCALING)
    scaled = groups * factor[:, None, :]
    elements = round_elements(scaled.reshape(R, C), FORMAT, TARGET)
    return elements, code.to(tl.uint8)


@triton.jit
def quantize_transposed(x, FORMAT: tl.constexpr, SCALING: tl.constexpr, TARGET: tl.constexpr):
    """`quantize_columns`, turned: elements [C, R] and codes [C, R / 32], uint8.

    The contraction of a weight gradient then lies along rows, as block-scaled instructions read it.
    """
    elements, code = quantize_columns(x, FORMAT, SCALING, TARGET)
    return elements.T, code.T


@triton.jit
def swiglu(gate, up):
    """silu(gate) * up of fp32 tiles; not rounded in between."""
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def swiglu_quantize(gate, up, FORMAT: tl.constexpr, SCALING: tl.constexpr, TARGET: tl.constexpr):
    """Both copies of silu(gate) * up: (row elements, row codes, column elements, column codes).

    Each comes from the fp32 value; neither comes from the other.
    """
    x = swiglu(gate, up)
    row, row_code = quantize_rows(x, FORMAT, SCALING, TARGET)
    column, column_code = quantize_columns(x, FORMAT, SCALING, TARGET)
    return row, row_code, column, column_code


@triton.jit
def dequantize_rows(elements, codes, FORMAT: tl.constexpr, TARGET: tl.constexpr):
    """fp32 [R, C] of elements [R, C] and codes [R, C / 32], uint8."""
    R: tl.constexpr = elements.shape[0]
    C: tl.constexpr = elements.shape[1]
    groups = elements.reshape(R, C // GROUP, GROUP)
    code = codes.to(tl.int32)[:, :, None]
    return dequantize_groups(groups, code, FORMAT, TARGET).reshape(R, C)


@triton.jit
def dequantize_columns(elements, codes, FORMAT: tl.constexpr, TARGET: tl.constexpr):
    """fp32 [R, C] of elements [R, C] and codes [R / 32, C], uint8."""
    R: tl.constexpr = elements.shape[0]
    C: tl.constexpr = elements.shape[1]
    groups = elements.reshape(R // GROUP, GROUP, C)
    code = codes.to(tl.int32)[:, None, :]
    return dequantize_groups(groups, code, FORMAT, TARGET).reshape(R, C)
