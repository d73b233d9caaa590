"""The interpreter builder: triton's front end calls it instead of emitting IR."""

# ruff: noqa: D102 -- the methods are those of triton's interpreter builder.

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as interpreter
from triton._C.libtriton import ir

from . import state
from .access import UINT, Access, Array
from .asm import emulate
from .extern import extern_elementwise
from .model import RELAXED_SYSTEM
from .numerics import U64, Handle, NumericsMixin, np_dtype
from .tasks import Ordering, WorkGroup

_SEM, _SCOPE, _OP = ir.MEM_SEMANTIC, ir.MEM_SYNC_SCOPE, ir.ATOMIC_OP
_I32 = np.dtype(np.int32)

_RMW: dict[Any, Any] = {
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


class ExecutorBuilder(NumericsMixin, interpreter.InterpreterBuilder):  # type: ignore[misc]
    """Runs each operation at once, for the workgroup that is current in the active executor."""

    def create_get_program_id(self, axis: int) -> Any:
        return Handle(np.array([_current().pid[axis]], np.int32), tl.int32)

    def create_get_num_programs(self, axis: int) -> Any:
        return Handle(np.array([_current().launch.grid[axis]], np.int32), tl.int32)

    # ---- plain loads and stores. The tails of the signatures differ between triton 3.6 (cache
    # modifier, eviction policy) and 3.9 (cache policy); only `is_volatile`, the last, matters.
    def create_load(self, ptr: Any, *tail: Any) -> Any:
        return self._load(ptr, None, None, tail[-1])

    def create_masked_load(self, ptrs: Any, mask: Any, other: Any, *tail: Any, **kw: Any) -> Any:
        volatile = kw.get("is_volatile", tail[-1] if tail else False)
        return self._load(ptrs, mask, other, volatile)

    def create_store(self, ptr: Any, value: Any, *tail: Any) -> None:
        self._store(ptr, value, None)

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, *tail: Any, **kw: Any) -> None:
        self._store(ptrs, value, mask)

    def _load(self, ptrs: Any, mask: Any, other: Any, volatile: bool) -> Any:
        ty = ptrs.get_element_ty()
        dtype = np_dtype(ty)
        ex = state.active()
        m = _array(mask)
        o = None if other is None else other.data
        if volatile:
            out = ex.model.sync(ex.current, ptrs.data, m, o, dtype, RELAXED_SYSTEM)
        else:
            out = ex.model.load(ex.current, ptrs.data, m, o, dtype)
        return Handle(out, ty)

    def _store(self, ptrs: Any, value: Any, mask: Any) -> None:
        dtype = np_dtype(ptrs.get_element_ty())
        v = value.data
        if v.dtype != dtype:
            # int1 stores and signedness differ in type only; anything else was cast before.
            v = v.view(dtype) if v.dtype.itemsize == dtype.itemsize else v.astype(dtype)
        ex = state.active()
        ex.model.store(ex.current, ptrs.data, _array(mask), v, dtype)

    # ---- tensor descriptors: straight to a block, without pointer arrays
    def _block(self, desc: Any, offsets: Any) -> tuple[Access | None, list[int], Any, bool]:
        size = max(1, desc.base.dtype.element_ty.primitive_bitwidth // 8)
        start = [int(np.asarray(o.data).reshape(-1)[0]) for o in offsets]
        shape = [int(s.data.reshape(-1)[0]) for s in desc.shape]
        strides = [int(s.data.reshape(-1)[0]) * size for s in desc.strides]
        if (start[-1] * size) % 16:
            raise ValueError(
                f"tensor descriptor: last offset {start[-1]} is not a multiple of 16 bytes"
            )
        block = [int(b) for b in desc.block_shape]
        lo = [max(0, -x) for x in start]
        hi = [min(b, s - x) for b, s, x in zip(block, shape, start, strict=True)]
        if any(h <= low for low, h in zip(lo, hi, strict=True)):
            return None, block, None, False
        address = int(desc.base.data.reshape(-1)[0])
        address += sum((x + low) * s for x, low, s in zip(start, lo, strides, strict=True))
        extent = tuple([h - low for low, h in zip(lo, hi, strict=True)])
        access = state.active().memory.block(address, extent, tuple(strides), size)
        full = extent == tuple(block)
        where = tuple([slice(low, h) for low, h in zip(lo, hi, strict=True)])
        return access, block, where, full

    def create_descriptor_load(self, desc: Any, offsets: Any, *tail: Any, **kw: Any) -> Any:
        ty = desc.base.dtype.element_ty
        dtype = np_dtype(ty)
        ex = state.active()
        w = ex.current
        if ex.model.switch_memory:
            ex.model.pause(w)
        access, block, where, full = self._block(desc, offsets)
        if w.proxy_dirty:
            site = ex.sites.describe(ex.sites.here())
            ex.model.lint(f"tensor descriptor load after an acquire without a proxy fence: {site}")
        if w.seen:
            ex.polls.productive(w)
        if full and access is not None:
            return Handle(_tf32(desc, ex.model.read(w, access, dtype)), ty)
        nan = desc.padding == ir.PADDING_OPTION.PAD_NAN
        out = np.full(block, float("nan") if nan else 0, dtype)
        if access is not None:
            out[where] = ex.model.read(w, access, dtype)
        return Handle(_tf32(desc, out), ty)

    def create_descriptor_store(self, desc: Any, value: Any, offsets: Any) -> None:
        dtype = np_dtype(desc.base.dtype.element_ty)
        ex = state.active()
        w = ex.current
        if ex.model.switch_memory:
            ex.model.pause(w)
        access, block, where, full = self._block(desc, offsets)
        if access is not None:
            v = value.data.reshape(block)
            ex.model.write(w, access, dtype, v if full else v[where])
        ex.polls.productive(w)

    def create_descriptor_reduce(self, kind: Any, desc: Any, value: Any, offsets: Any) -> None:
        dtype = np_dtype(desc.base.dtype.element_ty)
        op = _RMW[getattr(_OP, str(kind).rsplit(".", maxsplit=1)[-1].upper())]
        ex = state.active()
        ex.model.pause(ex.current)
        access, block, where, full = self._block(desc, offsets)
        if access is None:
            return
        v = value.data.reshape(block)
        v = v if full else v[where]
        order = _ORDERS[_SEM.RELAXED, _SCOPE.GPU]
        ex.model.sync_accesses(
            ex.current, [access], access.shape, None, dtype, order, lambda old, a: (old, op(old, v))
        )

    # ---- atomics
    def _sync(
        self, ptr: Any, mask: Any, dtype: np.dtype[Any], sem: Any, scope: Any, update: Any
    ) -> Array:
        ex = state.active()
        order = ordering(sem, scope)
        return ex.model.sync(ex.current, ptr.data, _array(mask), None, dtype, order, update)

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
        op = _RMW[rmw_op]
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

    # ---- everything else
    def create_barrier(self, *args: Any) -> None:
        ex = state.active()
        ex.model.barrier(ex.current)

    def create_assert(self, condition: Any, message: str, *args: Any) -> None:
        if not np.all(condition.data):
            raise AssertionError(f"device_assert: {message}")

    def create_assume(self, condition: Any) -> None:
        if not np.all(condition.data):
            raise AssertionError("tl.assume: the condition does not hold")

    def create_print(self, prefix: str, hex: bool, values: Any, is_signed: Any) -> None:
        for v in values:
            text = np.vectorize(lambda x: f"{int(x):#x}")(v.data) if hex else v.data
            print(f"[{_current()}]{prefix} {text}")

    def note_dot(self) -> None:
        ex = state.active()
        ex.num_dots += 1
        if ex.current.seen:
            ex.polls.productive(ex.current)

    def create_inline_asm(
        self, asm: str, constraints: str, values: Any, types: Any, is_pure: bool, pack: int
    ) -> Any:
        ex = state.active()
        return AsmResult(emulate(ex, asm, list(values), list(types)))

    def create_extern_elementwise(
        self, lib_name: str, lib_path: str, symbol: str, args: Any, ret: Any, is_pure: bool
    ) -> Any:
        out = extern_elementwise(symbol, [a.data for a in args])
        return Handle(out.astype(np_dtype(ret.scalar)), ret.scalar)

    def create_splat(self, ret_ty: Any, arg: Any) -> Any:
        d = arg.data
        value = d.reshape(()) if d.size == 1 else d
        return Handle(np.broadcast_to(value, tuple(ret_ty.shape)), arg.dtype.scalar)

    def create_addptr(self, ptr: Any, offset: Any) -> Any:
        size = max(1, ptr.get_element_ty().primitive_bitwidth // 8)
        # Wraps modulo 2**64, so that negative offsets work on unsigned addresses.
        step = offset.data.astype(np.int64).view(U64)
        if size > 1:
            step = step * np.uint64(size)
        return Handle(ptr.data + step, ptr.dtype)


class AsmResult:
    """Results of one inline assembly block."""

    def __init__(self, results: list[Any]) -> None:
        self._results = results

    def get_result(self, i: int) -> Any:
        """Result number `i`."""
        return self._results[i]


def _current() -> WorkGroup:
    return state.active().current


def _array(mask: Any) -> Array | None:
    if mask is None:
        return None
    return mask.data if isinstance(mask, Handle) else np.asarray(mask)


def _tf32(desc: Any, data: Array) -> Array:
    """Round fp32 to tf32 where the descriptor asks for it (triton >= 3.9)."""
    if not getattr(desc, "round_f32_to_tf32", False) or data.dtype != np.float32:
        return data
    bits = data.view(np.uint32)
    special = (bits & np.uint32(0x7F800000)) == np.uint32(0x7F800000)
    bias = ((bits >> np.uint32(13)) & np.uint32(1)) + np.uint32(0xFFF)
    rounded = (bits + bias) & np.uint32(0xFFFFE000)
    out: Array = np.where(special, bits, rounded).view(np.float32)
    return out
