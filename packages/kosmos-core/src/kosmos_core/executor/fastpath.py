"""Cheaper front end: constructors, and operators on operands of one type.

Triton's front end spends far more time on type checks than NumPy on the arithmetic. The operators
here handle the common cases (same type, or a constant that takes the tensor's type) and leave
everything else to triton's. All is undone when the executor closes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as interpreter

from .access import Array
from .numerics import U64, Handle, np_dtype

_core = tl.core
_tensor = _core.tensor
_scalar = (_core.tuple([]), _core.constexpr(1))
_shapes: dict[tuple[int, ...], tuple[Any, int, tuple[Any, Any]]] = {}
_blocks: dict[tuple[int, tuple[int, ...]], Any] = {}

_RANGE = {
    id(ty): (ty.get_int_min_value(), ty.get_int_max_value())
    for ty in (tl.int8, tl.int16, tl.int32, tl.int64, tl.uint8, tl.uint16, tl.uint32, tl.uint64)
}
_FLOATS = {id(ty) for ty in (tl.float16, tl.bfloat16, tl.float32, tl.float64)}
_OFFSETS = {id(tl.int32), id(tl.int64)}


def _tensor_init(self: Any, handle: Any, type: Any) -> None:
    self.handle = handle
    self.type = type
    if isinstance(type, _core.block_type):
        self.shape, self.numel = type._shape_and_numel
    else:
        self.shape, self.numel = _scalar
    self.dtype = type.scalar


def _block_type_init(self: Any, element_ty: Any, shape: Any) -> None:
    key = tuple([n if type(n) is int else int(_core._unwrap_if_constexpr(n)) for n in shape])
    if not key:
        raise TypeError("0d block_type is forbidden")
    known = _shapes.get(key)
    if known is None:
        numel = _core.validate_block_shape(key)
        constexprs = _core.tuple([_core.constexpr(n) for n in key])
        known = (_core.tuple(key), numel, (constexprs, _core.constexpr(numel)))
        _shapes[key] = known
    self.element_ty = element_ty
    # The shape stays a tl.tuple, which the front end expects.
    self.shape, self.numel, self._shape_and_numel = known


def _block_type_name(self: Any) -> str:
    return f"<{self.shape}, {self.element_ty}>"


def _handle_post_init(self: Any) -> None:
    """The stock one checks sizes of every array made."""


def _block(dtype: Any, shape: tuple[int, ...]) -> Any:
    """Block type of a scalar type that lives for ever, or of a pointer type."""
    key = (id(dtype), shape)
    ty = _blocks.get(key)
    if ty is None or ty.element_ty is not dtype:
        ty = _blocks[key] = _core.block_type(dtype, shape)
    return ty


def _constant(value: Any, dtype: Any, data: Array) -> Any:
    """`value` as a NumPy scalar of the tensor's type if the result has that type, else None."""
    if type(value) is _core.constexpr:
        value = value.value
    kind = type(value)
    if kind is int:
        limits = _RANGE.get(id(dtype))
        if limits is not None:
            return data.dtype.type(value) if limits[0] <= value <= limits[1] else None
    elif kind is not float:
        return None
    return data.dtype.type(value) if id(dtype) in _FLOATS else None


def _operator(op: Callable[[Any, Any], Any], slow: Any, swapped: bool, compares: bool) -> Any:
    simple = _FLOATS | set(_RANGE)

    def fast(self: Any, other: Any) -> Any:
        dtype = self.dtype
        if id(dtype) not in simple:
            return slow(self, other)
        x = self.handle.data
        mine = self.type
        if type(other) is _tensor:
            if other.dtype is not dtype:
                return slow(self, other)
            y = other.handle.data
            theirs = other.type
        else:
            y = _constant(other, dtype, x)
            if y is None:
                return slow(self, other)
            theirs = dtype
        data = op(y, x) if swapped else op(x, y)
        element = tl.int1 if compares else dtype
        if mine is dtype and theirs is dtype:
            return _tensor(Handle(data, element), element)
        return _tensor(Handle(data, element), _block(element, data.shape))

    return fast


def _add(slow: Any) -> Any:
    values = _operator(operator.add, slow, False, False)

    def add(self: Any, other: Any) -> Any:
        dtype = self.dtype
        if not isinstance(dtype, _core.pointer_type):
            return values(self, other)
        if type(other) is not _tensor or id(other.dtype) not in _OFFSETS:
            return slow(self, other)
        size = max(1, dtype.element_ty.primitive_bitwidth // 8)
        offset = other.handle.data
        if offset.dtype != np.int64:
            offset = offset.astype(np.int64)
        if size > 1:
            offset = offset * size
        # Wraps modulo 2**64, so that negative offsets work on unsigned addresses.
        data = self.handle.data + offset.view(U64)
        if self.type is dtype and other.type is other.dtype:
            return _tensor(Handle(data, dtype), dtype)
        return _tensor(Handle(data, dtype), _core.block_type(dtype, data.shape))

    return add


def _quotient(slow: Any, remainder: bool) -> Any:
    """Division of signed integer scalars: truncates, as the hardware does."""

    def fast(self: Any, other: Any) -> Any:
        dtype = self.dtype
        limits = _RANGE.get(id(dtype))
        if limits is None or self.type is not dtype or limits[0] == 0:
            return slow(self, other)
        if type(other) is _tensor:
            if other.type is not dtype:
                return slow(self, other)
            y = int(other.handle.data[0])
        else:
            y = other.value if type(other) is _core.constexpr else other
            if type(y) is not int or not limits[0] <= y <= limits[1]:
                return slow(self, other)
        x = int(self.handle.data[0])
        if y == 0 or x == limits[0]:
            return slow(self, other)
        q = abs(x) // abs(y)
        q = -q if (x < 0) != (y < 0) else q
        data = np.array([x - q * y if remainder else q], np_dtype(dtype))
        return _tensor(Handle(data, dtype), dtype)

    return fast


_ALL = slice(None)


def _getitem(slow: Any) -> Any:
    def getitem(self: Any, slices: Any) -> Any:
        if type(slices) is not tuple or self.type is self.dtype:
            return slow(self, slices)
        for s in slices:
            if s is not None and not (type(s) is slice and s == _ALL):
                return slow(self, slices)
        data = self.handle.data[slices]
        dtype = self.dtype
        return _tensor(Handle(data, dtype), _core.block_type(dtype, data.shape))

    return getitem


def patches(slow: dict[str, Any]) -> list[tuple[Any, str, Any]]:
    """(object, attribute, value) to set.

    Args:
        slow: triton's own operators of `tl.tensor`, by name.
    """
    operators: dict[str, Any] = {
        "__add__": _add(slow["__add__"]),
        "__radd__": _operator(operator.add, slow["__radd__"], True, False),
        "__floordiv__": _quotient(slow["__floordiv__"], False),
        "__mod__": _quotient(slow["__mod__"], True),
        "__getitem__": _getitem(slow["__getitem__"]),
    }
    for name in ("sub", "mul"):
        op = getattr(operator, name)
        operators[f"__{name}__"] = _operator(op, slow[f"__{name}__"], False, False)
        operators[f"__r{name}__"] = _operator(op, slow[f"__r{name}__"], True, False)
    for name in ("lt", "le", "gt", "ge", "eq", "ne"):
        op = getattr(operator, name)
        operators[f"__{name}__"] = _operator(op, slow[f"__{name}__"], False, True)
    return [
        (_core.tensor, "__init__", _tensor_init),
        (_core.block_type, "__init__", _block_type_init),
        (_core.block_type, "name", property(_block_type_name)),
        (interpreter.TensorHandle, "__post_init__", _handle_post_init),
        *((_tensor, name, fn) for name, fn in operators.items()),
    ]
