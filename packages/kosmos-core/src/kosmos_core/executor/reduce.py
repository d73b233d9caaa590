"""Reductions and scans on whole slices (the stock interpreter goes element by element)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl

from .access import Array
from .numerics import Handle, np_dtype

Combine = Callable[..., Any]


def _wrap(data: Array, dtype: Any) -> Any:
    if data.ndim == 0:
        return tl.tensor(Handle(np.array([data], np_dtype(dtype)), dtype), dtype)
    data = np.ascontiguousarray(data, np_dtype(dtype))
    return tl.tensor(Handle(data, dtype), tl.block_type(dtype, list(data.shape)))


def _fold_fast(name: str, data: Array, axis: int) -> Array | None:
    if name == "_sum_combine":
        return np.asarray(np.sum(data, axis=axis, dtype=data.dtype))
    if name == "_elementwise_max":
        return np.asarray(np.fmax.reduce(data, axis=axis))
    if name == "_elementwise_min":
        return np.asarray(np.fmin.reduce(data, axis=axis))
    return None


def _combine(fn: Any, left: list[Any], right: list[Any]) -> list[Any]:
    out = fn(*left, *right)
    return list(out) if isinstance(out, (tuple, tl.tuple)) else [out]


def _place_combine(name: str) -> Callable[[list[Array], list[Array]], list[Array]] | None:
    """Triton's argmax and argmin; they join conditions by `and`, which means nothing on blocks."""
    kind, _, tie = name.partition("_combine_tie_break_")
    if kind not in ("_argmax", "_argmin") or tie not in ("left", "fast"):
        return None
    better = np.greater if name.startswith("_argmax") else np.less

    def combine(left: list[Array], right: list[Array]) -> list[Array]:
        first = better(left[0], right[0])
        if name.endswith("left"):
            first |= (left[0] == right[0]) & (left[1] < right[1])
        return [np.where(first, a, b) for a, b in zip(left, right, strict=True)]

    return combine


def _name(combine_fn: Any) -> str:
    fn = getattr(combine_fn, "fn", combine_fn)
    return fn.__name__ if fn.__module__ == "triton.language.standard" else ""


def _reduce(
    inputs: tuple[Any, ...], axis: int | None, combine_fn: Any, keep_dims: bool
) -> list[Any]:
    arrays = [x.handle.data for x in inputs]
    dtypes = [x.dtype for x in inputs]
    ndim = arrays[0].ndim
    if axis is None:
        arrays, at = [a.reshape(-1) for a in arrays], 0
    else:
        at = axis % ndim
    fast = _fold_fast(_name(combine_fn), arrays[0], at) if len(arrays) == 1 else None
    place = _place_combine(_name(combine_fn))
    if fast is not None:
        out = [fast]
    elif place is not None:
        while arrays[0].shape[at] > 1:
            arrays = place(
                [_every_other(a, at, 0) for a in arrays], [_every_other(a, at, 1) for a in arrays]
            )
        out = [np.squeeze(a, axis=at) for a in arrays]
    else:
        # Adjacent halves pairwise, as the hardware does: log2(n) calls on whole blocks.
        while arrays[0].shape[at] > 1:
            left = [_wrap(_every_other(a, at, 0), d) for a, d in zip(arrays, dtypes, strict=True)]
            right = [_wrap(_every_other(a, at, 1), d) for a, d in zip(arrays, dtypes, strict=True)]
            arrays = [x.handle.data for x in _combine(combine_fn, left, right)]
        out = [np.squeeze(a, axis=at) for a in arrays]
    if keep_dims:
        out = [a.reshape((1,) * ndim) if axis is None else np.expand_dims(a, at) for a in out]
    return [_wrap(a, d) for a, d in zip(out, dtypes, strict=True)]


def _every_other(a: Array, axis: int, start: int) -> Array:
    part: Array = a[(slice(None),) * axis + (slice(start, None, 2),)]
    return part


def _scan(inputs: tuple[Any, ...], axis: int, combine_fn: Any, reverse: bool) -> list[Any]:
    arrays = [x.handle.data for x in inputs]
    dtypes = [x.dtype for x in inputs]
    at = axis % arrays[0].ndim
    if reverse:
        arrays = [np.flip(a, at) for a in arrays]
    name = _name(combine_fn)
    if len(arrays) == 1 and name in ("_sum_combine", "_prod_combine"):
        fold = np.cumsum if name == "_sum_combine" else np.cumprod
        out = [np.asarray(fold(arrays[0], axis=at, dtype=arrays[0].dtype))]
    else:
        out = [np.empty_like(a) for a in arrays]
        lead = (slice(None),) * at
        acc: list[Any] = []
        for i in range(arrays[0].shape[at]):
            at_i = (*lead, i)
            now = [_wrap(a[at_i], d) for a, d in zip(arrays, dtypes, strict=True)]
            acc = now if i == 0 else _combine(combine_fn, acc, now)
            for o, x in zip(out, acc, strict=True):
                o[at_i] = x.handle.data.reshape(o[at_i].shape)
    if reverse:
        out = [np.flip(a, at) for a in out]
    return [_wrap(a, d) for a, d in zip(out, dtypes, strict=True)]


def _value(x: Any) -> Any:
    return x.value if isinstance(x, tl.constexpr) else x


def _call(fold: Callable[..., list[Any]], x: Any, *args: Any) -> Any:
    if isinstance(x, (tuple, tl.tuple)):
        return tuple(fold(tuple(x), *args))
    return fold((x,), *args)[0]


def patches(semantic: Any) -> list[tuple[Any, str, Any]]:
    """(object, attribute, value) to set."""

    def reduce(x: Any, axis: Any, combine_fn: Any, keep_dims: Any = False, **_: Any) -> Any:
        return _call(_reduce, x, _value(axis), combine_fn, _value(keep_dims))

    def scan(x: Any, axis: Any, combine_fn: Any, reverse: Any = False, **_: Any) -> Any:
        return _call(_scan, x, _value(axis), combine_fn, _value(reverse))

    return [
        (module, name, fn)
        for module in (tl, tl.core)
        for name, fn in (("reduce", reduce), ("associative_scan", scan))
    ] + [(tl.tensor, "reduce", reduce), (tl.tensor, "associative_scan", scan)]
