"""Arithmetic that the stock interpreter gets wrong, repaired with ml_dtypes.

The stock interpreter keeps bf16 in uint16 and fp8 in uint8 arrays, so that arithmetic on them is
integer arithmetic on bit patterns; it truncates fp32 -> bf16 and loses carries in fp32 -> fp8.
Here the arrays have ml_dtypes types, and NumPy's operations are right by themselves.
"""

# ruff: noqa: D102 -- the methods of the mixin are those of triton's builder.

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import triton.language as tl
import triton.runtime.interpreter as interpreter
from triton._C.libtriton import ir

from .access import Array

Handle = interpreter.TensorHandle
BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E5M2 = np.dtype(ml_dtypes.float8_e5m2)
E4M3_FNUZ = np.dtype(ml_dtypes.float8_e4m3fnuz)
E5M2_FNUZ = np.dtype(ml_dtypes.float8_e5m2fnuz)
F32 = np.dtype(np.float32)
U64 = np.dtype(np.uint64)

_SMALL = {
    tl.bfloat16: BF16,
    tl.float8e4nv: E4M3,
    tl.float8e5: E5M2,
    tl.float8e4b8: E4M3_FNUZ,
    tl.float8e5b16: E5M2_FNUZ,
}
_FP8_MAX = {E4M3: 448.0, E5M2: 57344.0, E4M3_FNUZ: 240.0, E5M2_FNUZ: 57344.0}
_stock_np_dtype = interpreter._get_np_dtype
_cache: dict[str, np.dtype[Any]] = {}


def np_dtype(ty: Any) -> np.dtype[Any]:
    """NumPy type of the elements of a triton type; pointers are uint64."""
    while isinstance(ty, tl.block_type):
        ty = ty.element_ty
    if isinstance(ty, tl.pointer_type):
        return U64
    out = _cache.get(ty.name)
    if out is None:
        found = _SMALL.get(ty)
        out = _cache[ty.name] = found if found is not None else _stock_np_dtype(ty)
    return out


def cast(x: Array, dst: np.dtype[Any], toward_zero: bool = False) -> Array:
    """Convert, rounding to nearest even.

    To fp8 as NVIDIA's ``satfinite``: with saturation, infinities included, and NaN to 0x7F.
    """
    src = x.dtype
    if src == dst:
        return x
    if dst in _FP8_MAX:
        y = x.astype(np.float32)
        limit = np.float32(_FP8_MAX[dst])
        out: Array = np.clip(y, -limit, limit).astype(dst)
        if dst in (E4M3, E5M2):
            out.view(np.uint8)[np.isnan(y)] = 0x7F
        return out
    if toward_zero and dst == BF16 and src == F32:
        return (x.view(np.uint32) >> 16).astype(np.uint16).view(BF16)
    if src in _FP8_MAX or src == BF16 or (dst == BF16 and src != np.float64):
        x = x.astype(np.float32)
    return x.astype(dst)


def f32(x: Array) -> Array:
    """As fp32."""
    return x if x.dtype == F32 else x.astype(np.float32)


_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def _unpack_e2m1(packed: Array, axis: int) -> Array:
    v = np.moveaxis(packed.view(np.uint8), axis, -1)
    out = np.empty((*v.shape[:-1], v.shape[-1] * 2), np.float32)
    out[..., 0::2] = _E2M1[v & 15]
    out[..., 1::2] = _E2M1[v >> 4]
    return np.moveaxis(out, -1, axis)


def scaled_operand(h: Any, scale: Any, fmt: Any, k_pack: bool, is_rhs: bool) -> Array:
    """An operand of ``dot_scaled`` in float64: elements times block scales, exactly.

    The matrix units add the exponents of both scales; in fp32 a large one would overflow before
    the other operand's small one is applied.
    """
    formats = ir.ScaleDotElemTypeTY
    if fmt == formats.E2M1:
        axis = (-2 if k_pack else -1) if is_rhs else (-1 if k_pack else -2)
        v = _unpack_e2m1(h.data, axis)
    else:
        data = h.data
        if data.dtype == np.uint8:
            data = data.view(E4M3 if fmt == formats.E4M3 else E5M2)
        v = f32(data)
    v = v.astype(np.float64)
    if scale is None:
        return v
    if scale.data.dtype == E4M3:
        factors = f32(scale.data).astype(np.float64)
    else:
        e = scale.data.view(np.uint8).astype(np.int32)
        factors = np.where(e == 255, np.nan, np.ldexp(1.0, e - 127))
    k = v.shape[-2] if is_rhs else v.shape[-1]
    factors = np.repeat(factors, k // factors.shape[-1], axis=-1)
    out: Array = v * (np.swapaxes(factors, -1, -2) if is_rhs else factors)
    return out


class NumericsMixin:
    """Builder methods; mixed in before triton's interpreter builder."""

    def cast_impl(self, src: Any, dst_type: Any) -> Any:
        return Handle(cast(src.data, np_dtype(dst_type)), dst_type.scalar)

    create_si_to_fp = create_ui_to_fp = create_fp_to_si = create_fp_to_ui = cast_impl
    create_fp_ext = create_fp_trunc = cast_impl

    def create_int_cast(self, src: Any, dst_type: Any, is_signed: bool) -> Any:
        return Handle(src.data.astype(np_dtype(dst_type)), dst_type.scalar)

    def create_fp_to_fp(self, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        toward_zero = rounding_mode == ir.ROUNDING_MODE.RTZ
        return Handle(cast(src.data, np_dtype(dst_type), toward_zero), dst_type.scalar)

    def binary_op(self, lhs: Any, rhs: Any, op: Any) -> Any:
        x, y = lhs.data, rhs.data
        ty = lhs.dtype.scalar
        if x.dtype == np.bool_ and y.dtype == np.bool_:
            # Triton's int1 wraps like any other integer; NumPy's bool saturates.
            return Handle((op(x.astype(np.int8), y.astype(np.int8)) & 1).astype(np.bool_), ty)
        out = op(x, y)
        if out.dtype.itemsize > x.dtype.itemsize:
            out = out.astype(x.dtype)
        return Handle(out, ty)

    def create_ashr(self, lhs: Any, rhs: Any) -> Any:
        x = lhs.data.astype(_signed(lhs.data.dtype))
        out = np.right_shift(x, rhs.data.astype(_signed(rhs.data.dtype)))
        return Handle(out.astype(lhs.data.dtype), lhs.dtype.scalar)

    def create_umulhi(self, lhs: Any, rhs: Any) -> Any:
        dtype = lhs.data.dtype
        bits = dtype.itemsize * 8
        unsigned = np.dtype(f"uint{bits}")
        x, y = lhs.data.view(unsigned), rhs.data.view(unsigned)
        if bits == 64:
            mask = np.uint64(0xFFFFFFFF)
            s = np.uint64(32)
            x0, x1, y0, y1 = x & mask, x >> s, y & mask, y >> s
            middle = x1 * y0 + (x0 * y0 >> s)
            out = x1 * y1 + (middle >> s) + ((x0 * y1 + (middle & mask)) >> s)
        else:
            wide = np.dtype(f"uint{2 * bits}")
            out = (x.astype(wide) * y.astype(wide) >> bits).astype(unsigned)
        return Handle(out.view(dtype), lhs.dtype.scalar)

    def create_dot(self, a: Any, b: Any, d: Any, input_precision: Any, max_num: Any) -> Any:
        x, y = a.data, b.data
        if x.dtype.kind in "iu":
            product = np.matmul(x.astype(np.float64), y.astype(np.float64))
        elif x.dtype == np.float64:
            product = np.matmul(x, y)
        else:
            product = np.matmul(f32(x), f32(y))
        if product.dtype != d.data.dtype:
            product = product.astype(d.data.dtype)
        product += d.data
        self.note_dot(2 * product.size * x.shape[-1])
        return Handle(product, d.dtype.scalar)

    def create_dot_scaled(
        self, lhs: Any, lhs_scale: Any, lhs_format: Any, rhs: Any, rhs_scale: Any,
        rhs_format: Any, fast_math: bool, lhs_k_pack: bool, rhs_k_pack: bool, acc: Any,
    ) -> Any:  # fmt: skip
        x = scaled_operand(lhs, lhs_scale, lhs_format, lhs_k_pack, False)
        y = scaled_operand(rhs, rhs_scale, rhs_format, rhs_k_pack, True)
        # The products of one instruction are rounded once, to the accumulator's fp32.
        out = np.matmul(x, y).astype(acc.data.dtype) + acc.data
        self.note_dot(2 * out.size * x.shape[-1])
        return Handle(out, acc.dtype.scalar)

    def note_dot(self, flops: int) -> None:
        """A matrix product has been computed."""

    def create_minnumf(self, lhs: Any, rhs: Any) -> Any:
        return self.binary_op(lhs, rhs, np.fmin)

    def create_maxnumf(self, lhs: Any, rhs: Any) -> Any:
        return self.binary_op(lhs, rhs, np.fmax)

    def create_fabs(self, arg: Any) -> Any:
        return Handle(np.abs(arg.data), arg.dtype.scalar)

    def create_erf(self, arg: Any) -> Any:
        x = arg.data.astype(np.float64)
        out = np.asarray(interpreter.np_erf_fp64(x)).astype(arg.data.dtype)
        return Handle(out, arg.dtype.scalar)

    def create_fma(self, x: Any, y: Any, z: Any) -> Any:
        dtype = z.data.dtype
        wide = np.float64 if dtype.itemsize <= 4 else dtype
        out = np.multiply(x.data.astype(wide), y.data.astype(wide)) + z.data.astype(wide)
        return Handle(out.astype(dtype), z.dtype.scalar)

    def create_histogram(self, data: Any, bins: int, mask: Any) -> Any:
        d = data.data
        ok = (d >= 0) & (d < bins)
        if mask is not None:
            ok &= mask.data
        counts = np.bincount(d[ok].astype(np.int64), minlength=bins)
        return Handle(counts.astype(np.int32), tl.int32)

    def get_bf16(self, value: float) -> Any:
        return Handle(np.array([value], np.float32).astype(BF16), tl.bfloat16)


def _signed(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(f"int{dtype.itemsize * 8}") if dtype.kind == "u" else dtype
