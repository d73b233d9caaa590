"""Atomics of triton's builder interface."""

# ruff: noqa: D102 -- the methods are those of triton's interpreter builder.

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton._C.libtriton import ir

from . import state
from .access import UINT, Access, Array
from .numerics import Handle, np_dtype
from .tasks import Ordering

_SEM, _SCOPE, _OP = ir.MEM_SEMANTIC, ir.MEM_SYNC_SCOPE, ir.ATOMIC_OP

RMW: dict[Any, Any] = {
    _OP.ADD: np.add,
    _OP.FADD: np.add,
    _OP.MIN: np.minimum,
    _OP.UMIN: np.minimum,
    _OP.MAX: np.maximum,
    _OP.UMAX: np.maximum,
    _OP.AND: np.bitwise_and,
    _OP.OR: np.bitwise_or,
    _OP.XOR: np.bitwise_xor,
    _OP.XCHG: lambda old, value: value,
}
_UNSIGNED = (_OP.UMIN, _OP.UMAX)


def ordering(sem: Any, scope: Any) -> Ordering:
    """Order of an atomic; one of scope ``cta`` orders nothing between workgroups."""
    if scope == _SCOPE.CTA:
        return _ORDERS[_SEM.RELAXED, _SCOPE.GPU]
    return _ORDERS[sem, scope]


_ORDERS = {
    (sem, scope): Ordering(
        sem in (_SEM.ACQUIRE, _SEM.ACQUIRE_RELEASE),
        sem in (_SEM.RELEASE, _SEM.ACQUIRE_RELEASE),
        scope == _SCOPE.SYSTEM,
    )
    for sem in (_SEM.ACQUIRE, _SEM.RELEASE, _SEM.ACQUIRE_RELEASE, _SEM.RELAXED)
    for scope in (_SCOPE.GPU, _SCOPE.SYSTEM)
}


def array_of(mask: Any) -> Array | None:
    """The array of an optional mask."""
    if mask is None:
        return None
    return mask.data if isinstance(mask, Handle) else np.asarray(mask)


class AtomicsMixin:
    """Builder methods; mixed in before triton's interpreter builder."""

    def _sync(
        self, ptr: Any, mask: Any, dtype: np.dtype[Any], sem: Any, scope: Any, update: Any
    ) -> Array:
        ex = state.active()
        order = ordering(sem, scope)
        return ex.model.sync(ex.current, ptr.data, array_of(mask), None, dtype, order, update)

    def create_atomic_cas(self, ptr: Any, cmp: Any, val: Any, sem: Any, scope: Any) -> Any:
        dtype = np_dtype(cmp.dtype.scalar)
        bits = UINT[dtype.itemsize]
        shape = ptr.data.shape
        expected = np.ascontiguousarray(np.broadcast_to(cmp.data, shape), dtype).view(bits)
        new = np.ascontiguousarray(np.broadcast_to(val.data, shape), dtype).view(bits)

        def update(old: Array, a: Access) -> tuple[Array, Array]:
            now = np.ascontiguousarray(old).view(bits)
            return old, np.where(now == a.pick(expected), a.pick(new), now).view(dtype)

        return Handle(self._sync(ptr, None, dtype, sem, scope, update), cmp.dtype.scalar)

    def create_atomic_rmw(
        self, rmw_op: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any
    ) -> Any:
        dtype = np_dtype(val.dtype.scalar)
        bits = UINT[dtype.itemsize]
        op = RMW[rmw_op]
        value = val.data if val.data.dtype == dtype else val.data.astype(dtype)
        if value.shape != ptr.data.shape:
            value = np.broadcast_to(value, ptr.data.shape)
        unsigned = rmw_op in _UNSIGNED

        def apply(old: Array, v: Array) -> Array:
            if unsigned:
                raw: Array = op(old.view(bits), np.ascontiguousarray(v).view(bits))
                return raw.view(dtype)
            return np.asarray(op(old, v), dtype)

        def update(old: Array, a: Access) -> tuple[Array, Array]:
            v = a.pick(value)
            if a.index is None or len(np.unique(a.index)) == len(a.index):
                return old, apply(old, v)
            # Several lanes on one address: one after the other.
            old, new = old.copy(), old.copy()
            latest: dict[int, Array] = {}
            for j, offset in enumerate(a.index.tolist()):
                old[j] = latest.get(offset, old[j])
                latest[offset] = apply(old[j : j + 1], v[j : j + 1])[0]
            new[:] = [latest[offset] for offset in a.index.tolist()]
            return old, new

        return Handle(self._sync(ptr, mask, dtype, sem, scope, update), val.dtype.scalar)

    # triton >= 3.9
    def create_atomic_load(self, ptr: Any, mask: Any, sem: Any, scope: Any) -> Any:
        ty = ptr.get_element_ty()
        return Handle(self._sync(ptr, mask, np_dtype(ty), sem, scope, None), ty)

    def create_atomic_store(self, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> None:
        self.create_atomic_rmw(_OP.XCHG, ptr, val, mask, sem, scope)

    def create_atomic_poll(
        self, ptr: Any, expected: Any, timeout_ns: Any, sem: Any, scope: Any
    ) -> Any:
        ty = ptr.get_element_ty()
        ex = state.active()
        w = ex.current
        bound = None if timeout_ns is None else int(timeout_ns.data.reshape(-1)[0])
        start = ex.model.read_clock(w) if bound is not None else 0
        wanted = expected.data
        while True:
            value = self._sync(ptr, None, np_dtype(ty), sem, scope, None)
            matched = value == np.broadcast_to(wanted, value.shape)
            if matched.all():
                break
            if bound is not None and ex.model.read_clock(w) - start >= bound:
                break
        return Handle(matched, tl.int1)
