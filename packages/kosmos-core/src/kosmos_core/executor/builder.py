"""The interpreter builder: triton's front end calls it instead of emitting IR."""

# ruff: noqa: D102 -- the methods are those of triton's interpreter builder.

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as interpreter
from triton._C.libtriton import ir

from . import state
from .access import Access, Array
from .asm import emulate
from .atomics import RMW, AtomicsMixin, array_of, ordering
from .extern import extern_elementwise
from .model import RELAXED_SYSTEM
from .numerics import U64, Handle, NumericsMixin, np_dtype
from .tasks import WorkGroup


class ExecutorBuilder(AtomicsMixin, NumericsMixin, interpreter.InterpreterBuilder):  # type: ignore[misc]
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
        m = array_of(mask)
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
        ex.model.store(ex.current, ptrs.data, array_of(mask), v, dtype)

    # ---- tensor descriptors: straight to a block, without pointer arrays
    def _block(self, desc: Any, offsets: Any) -> tuple[Access | None, tuple[int, ...], Any, bool]:
        size, base, shape, strides, block = _plan(desc)
        start = [o if type(o) is int else int(np.asarray(o.data).item()) for o in offsets]
        if (start[-1] * size) % 16:
            raise ValueError(
                f"tensor descriptor: last offset {start[-1]} is not a multiple of 16 bytes"
            )
        lo, hi, address, full = [], [], base, True
        for x, n, s, b in zip(start, shape, strides, block, strict=True):
            low, high = max(0, -x), min(b, n - x)
            if high <= low:
                return None, block, None, False
            full = full and high - low == b
            address += (x + low) * s
            lo.append(low)
            hi.append(high)
        extent = block if full else tuple([h - low for low, h in zip(lo, hi, strict=True)])
        access = state.active().memory.block(address, extent, strides, size)
        where = None if full else tuple([slice(a, b) for a, b in zip(lo, hi, strict=True)])
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
        op = RMW[getattr(ir.ATOMIC_OP, str(kind).rsplit(".", maxsplit=1)[-1].upper())]
        ex = state.active()
        ex.model.pause(ex.current)
        access, block, where, full = self._block(desc, offsets)
        if access is None:
            return
        v = value.data.reshape(block)
        v = v if full else v[where]
        order = ordering(ir.MEM_SEMANTIC.RELAXED, ir.MEM_SYNC_SCOPE.GPU)
        ex.model.sync_accesses(
            ex.current, [access], access.shape, None, dtype, order, lambda old, a: (old, op(old, v))
        )

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

    def note_dot(self, flops: int) -> None:
        ex = state.active()
        w = ex.current
        ex.num_dots += 1
        if ex.clock.cost is not None:
            ex.clock.charge(w, ex.clock.cost.dot_ns(flops))
        if w.seen:
            ex.polls.productive(w)

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


def _plan(desc: Any) -> tuple[int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Item size, address, shape, byte strides and block shape of a descriptor (kept on it)."""
    plan: Any = getattr(desc, "executor_plan", None)
    if plan is None:
        size = max(1, desc.base.dtype.element_ty.primitive_bitwidth // 8)
        base = int(desc.base.data.item())
        shape = tuple([int(s.data.item()) for s in desc.shape])
        strides = tuple([int(s.data.item()) * size for s in desc.strides])
        plan = (size, base, shape, strides, tuple([int(b) for b in desc.block_shape]))
        desc.executor_plan = plan
    return plan  # type: ignore[no-any-return]


def _current() -> WorkGroup:
    return state.active().current


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
