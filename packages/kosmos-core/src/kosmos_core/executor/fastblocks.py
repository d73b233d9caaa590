"""Cheaper matrix products, descriptor accesses and type checks in the common cases.

Like `fastpath`: the usual case is done at once, everything else is triton's.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl

from .numerics import Handle

_core = tl.core
_tensor = _core.tensor
_constexpr = _core.constexpr
_PLAIN = (_tensor, int, float, bool, str, type(None))
_DOT_TYPES = {id(t) for t in (tl.float16, tl.bfloat16, tl.float32, tl.float8e4nv, tl.float8e5)}


def _unwrap(slow: Any) -> Any:
    plain = frozenset(_PLAIN)

    def unwrap(o: Any) -> Any:
        kind = type(o)
        if kind in plain:
            return o
        return o.value if kind is _constexpr else slow(o)

    return unwrap


def _dtype_eq(slow: Any) -> Any:
    def eq(self: Any, other: Any) -> bool:
        return self is other or bool(slow(self, other))

    return eq


def _dot(slow: Any, builder: Any) -> Any:
    """``tl.dot(x, y, acc)`` of 2-D blocks of one float type, into fp32."""

    def dot(input: Any, other: Any, acc: Any = None, *args: Any, **kwargs: Any) -> Any:
        if (
            acc is None
            or args
            or any(k != "input_precision" and k != "_semantic" for k in kwargs)
            or not (type(input) is type(other) is type(acc) is _tensor)
            or input.dtype is not other.dtype
            or id(input.dtype) not in _DOT_TYPES
            or acc.dtype is not tl.float32
        ):
            return slow(input, other, acc, *args, **kwargs)
        x, y, z = input.handle, other.handle, acc.handle
        shape = z.data.shape
        if x.data.ndim != 2 or y.data.ndim != 2 or len(shape) != 2:
            return slow(input, other, acc, *args, **kwargs)
        if x.data.shape[1] != y.data.shape[0] or shape != (x.data.shape[0], y.data.shape[1]):
            return slow(input, other, acc, *args, **kwargs)
        return _tensor(builder.create_dot(x, y, z, None, 0), acc.type)

    return dot


def _ints(offsets: Any) -> list[Any] | None:
    """Scalar handles of descriptor offsets; None if they are anything unusual."""
    out = []
    for o in offsets:
        if type(o) is _tensor and o.dtype is tl.int32 and o.type is o.dtype:
            out.append(o.handle)
        else:
            value = o.value if type(o) is _constexpr else o
            if type(value) is not int or not -(2**31) <= value < 2**31:
                return None
            out.append(value)
    return out


def _descriptor_load(slow: Any, builder: Any) -> Any:
    def load(self: Any, offsets: Any, **kwargs: Any) -> Any:
        handles = _ints(offsets) if len(offsets) == len(self.block_shape) else None
        if handles is None:
            return slow(self, offsets, **kwargs)
        handle: Handle = builder.create_descriptor_load(self.handle, handles)
        return _tensor(handle, self.block_type)

    return load


def patches(slow: dict[tuple[Any, str], Any], builder: Any) -> list[tuple[Any, str, Any]]:
    """(object, attribute, value) to set.

    Args:
        slow: what would be set otherwise, by object and attribute.
        builder: the executor's builder.
    """
    descriptor = _core.tensor_descriptor_base
    dot = _dot(slow[_core, "dot"], builder)
    return [
        (_core, "_unwrap_if_constexpr", _unwrap(_core._unwrap_if_constexpr)),
        (_core.dtype, "__eq__", _dtype_eq(_core.dtype.__eq__)),
        (_core, "dot", dot),
        (tl, "dot", dot),
        (descriptor, "load", _descriptor_load(slow[descriptor, "load"], builder)),
    ]
