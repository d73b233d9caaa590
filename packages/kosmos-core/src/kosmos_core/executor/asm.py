"""Emulation of inline assembly, by patterns that users can extend."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import triton.language as tl
from triton._C.libtriton import ir

from .errors import UnsupportedAsm
from .numerics import U64, Handle, np_dtype
from .tasks import WorkGroup

if TYPE_CHECKING:
    from .executor import Executor

# handler(executor, workgroup, asm text, operand arrays, result types) -> value(s) or None
AsmHandler = Callable[..., Any]


def emulate(ex: Executor, asm: str, values: list[Any], types: list[Any]) -> list[Any]:
    """Results of an assembly block.

    Raises:
        UnsupportedAsm: no handler matches.
    """
    for pattern, handler in (*ex.asm_handlers, *_HANDLERS):
        if pattern.search(asm):
            out = handler(ex, ex.current, asm, [v.data for v in values], types)
            many = out if isinstance(out, (list, tuple)) else [out] * len(types)
            return [_fit(x, t) for x, t in zip(many, types, strict=True)]
    raise UnsupportedAsm(
        f"no emulation of inline assembly {asm.strip()!r}; "
        "add one with Executor.register_asm(pattern, handler)"
    )


def _fit(value: Any, ty: Any) -> Any:
    dtype = np_dtype(ty.scalar)
    shape = tuple(int(n) for n in ty.shape) if ty.is_block() else (1,)
    data = np.asarray(0 if value is None else value)
    return Handle(np.array(np.broadcast_to(data.astype(dtype), shape)), ty.scalar)


def _is_system(asm: str) -> bool:
    return ".gpu" not in asm and ".cta" not in asm


def _proxy_fence(ex: Executor, w: WorkGroup, asm: str, args: Any, types: Any) -> None:
    w.proxy_dirty = False


def _fence(ex: Executor, w: WorkGroup, asm: str, args: Any, types: Any) -> None:
    ex.model.fence(w, _is_system(asm) and "membar.gl" not in asm)


def _clock(ex: Executor, w: WorkGroup, asm: str, args: Any, types: Any) -> int:
    ns = ex.model.read_clock(w)
    # s_memrealtime counts at 100 MHz.
    ticks = ns // 10 if "s_memrealtime" in asm else ns
    bits = np_dtype(types[0].scalar).itemsize * 8
    return ticks & ((1 << (bits - 1)) - 1)


def _agreed(ex: Executor, w: WorkGroup, asm: str, args: Any, types: Any) -> Any:
    # A workgroup is one thread here: it agrees with itself. Not counted as a barrier, for which no
    # code may take it.
    return (np.asarray(args[0]) != 0).astype(np.int32)


def _multiprocessor(ex: Executor, w: WorkGroup, asm: str, args: Any, types: Any) -> int:
    gx, gy, gz = w.launch.grid
    return gx * gy * gz if "%nsmid" in asm else w.wg


def _nothing(ex: Executor, w: WorkGroup, asm: str, args: Any, types: Any) -> None:
    return None


def _sleep(ex: Executor, w: WorkGroup, asm: str, args: Any, types: Any) -> None:
    ex.clock.tick()


def _barrier(ex: Executor, w: WorkGroup, asm: str, args: Any, types: Any) -> None:
    ex.model.barrier(w)


def _pointer(address: Any, ty: Any) -> Any:
    """A pointer handle to elements of the NumPy type of `ty`."""
    return Handle(np.asarray(address).astype(U64), tl.pointer_type(ty))


def _semantics(asm: str) -> Any:
    for word, sem in (
        (".acq_rel", ir.MEM_SEMANTIC.ACQUIRE_RELEASE),
        (".acquire", ir.MEM_SEMANTIC.ACQUIRE),
        (".release", ir.MEM_SEMANTIC.RELEASE),
    ):
        if word in asm:
            return sem
    return ir.MEM_SEMANTIC.RELAXED


def _scope(asm: str) -> Any:
    return ir.MEM_SYNC_SCOPE.SYSTEM if _is_system(asm) else ir.MEM_SYNC_SCOPE.GPU


def _ordered_load(ex: Executor, w: WorkGroup, asm: str, args: Any, types: Any) -> Any:
    pointer = _pointer(args[0], types[0].scalar)
    return ex.builder.create_atomic_load(pointer, None, _semantics(asm), _scope(asm)).data


_STORE_TYPES = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


def _ordered_store(ex: Executor, w: WorkGroup, asm: str, args: Any, types: Any) -> None:
    value = np.asarray(args[1])
    ty = _STORE_TYPES[value.itemsize]
    op = ir.ATOMIC_OP.ADD if re.search(r"\bred\.", asm) else ir.ATOMIC_OP.XCHG
    handle = Handle(value.view(np_dtype(ty)), ty)
    pointer = _pointer(args[0], ty)
    ex.builder.create_atomic_rmw(op, pointer, handle, None, _semantics(asm), _scope(asm))


_HANDLERS: list[tuple[re.Pattern[str], AsmHandler]] = [
    (re.compile(p), h)
    for p, h in (
        (r"fence\.proxy", _proxy_fence),
        (r"fence\.(acq_rel|sc)|membar", _fence),
        (r"\bld\.(global\.)?(acquire|relaxed|volatile|mmio)", _ordered_load),
        (r"\b(st|red)\.(global\.)?(async\.)?(release|relaxed|volatile|mmio)", _ordered_store),
        (r"bar\.red\.(or|and)", _agreed),
        (r"%globaltimer|%clock|s_memrealtime|s_memtime|s_getreg_b32.*SHADER_CYCLES", _clock),
        (r"%n?smid|HW_ID|XCC_ID", _multiprocessor),
        (r"nanosleep|s_sleep", _sleep),
        (r"\bbar\.sync|\bbarrier\.|s_barrier", _barrier),
        (r"s_waitcnt|buffer_(wbl2|inv)|s_nop|cp\.async\.bulk\.(wait|commit)", _nothing),
        (r"griddepcontrol|discard\.|prefetch", _nothing),
    )
]
