"""Routes triton's language and launches to the executor while one is active.

All replacements are computed once per process and applied and undone by assignment.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as interpreter
from triton.language import target_info
from triton.language.semantic import TritonSemantic
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITCallable, JITFunction

from . import fastblocks, fastpath, reduce, state
from .builder import ExecutorBuilder
from .numerics import Handle, np_dtype
from .twins import Function, TwinMaker

_MISSING = object()
_EXTRA = (
    "triton.language.extra.libdevice",
    "triton.language.extra.cuda.libdevice",
    "triton.language.extra.cuda.utils",
    "triton.language.extra.cuda",
    "triton.language.extra.hip.libdevice",
)


class Language:
    """The patched language (one per process, see `language`).

    Attributes:
        builder: the builder that runs operations.
        semantic: triton's front end on that builder.
        maker: makes twins of jitted functions.
    """

    def __init__(self) -> None:
        self.builder = ExecutorBuilder()
        options = self.builder.options
        self.builder.options = type(options)(
            **{**vars(options), "debug": True, "sanitize_overflow": False}
        )
        self.semantic = TritonSemantic(self.builder)
        self.maker = TwinMaker(self._assign, self._range)
        self._patches: list[tuple[Any, str, Any]] = []
        self._builtins: dict[Any, Any] = {}
        self._saved: list[tuple[Any, str, Any]] = []
        self._globals: list[tuple[dict[str, Any], str, Any]] = []
        self._collect()

    def _assign(self, value: Any) -> Any:
        if type(value) is tl.tensor:
            return value
        if isinstance(value, tl.constexpr):
            value = value.value
        if isinstance(value, (bool, int, float)):
            return self.semantic.to_tensor(value)
        return value

    def _range(self, start: Any, stop: Any = None, step: Any = 1, **_: Any) -> Iterator[Any]:
        """``range`` and ``tl.range``: loop variables are tensors, as in the compiler."""
        if stop is None:
            start, stop = 0, start
        bounds = [b.value if isinstance(b, tl.constexpr) else b for b in (start, stop, step)]
        ty = tl.int32
        for b in bounds:
            if isinstance(b, tl.tensor):
                if b.dtype.primitive_bitwidth == 64:
                    ty = tl.int64
            elif not -(2**31) <= b < 2**31:
                ty = tl.int64
        dtype = np_dtype(ty)
        for i in range(*bounds):
            yield tl.tensor(Handle(np.array([i], dtype), ty), ty)

    # ---- collecting the replacements
    def _collect(self) -> None:
        stock = interpreter.interpreter_builder, interpreter.interpreter_semantic
        interpreter.interpreter_builder = self.builder
        interpreter.interpreter_semantic = self.semantic
        try:
            scope_globals = {"tl": tl, "core": tl.core}
            scope = interpreter._patch_lang(types.SimpleNamespace(__globals__=scope_globals))
            changes = [(o, n, old, getattr(o, n)) for o, n, old in scope._changes]
            scope.restore()
        finally:
            interpreter.interpreter_builder, interpreter.interpreter_semantic = stock
        for obj, name, old, new in changes:
            if tl.core.is_builtin(old):
                new = self._bind(old)
                self._builtins[old] = new
            self._patches.append((obj, name, new))
        for module in _extra_modules():
            for name, member in inspect.getmembers(module, tl.core.is_builtin):
                self._builtins[member] = self._bind(member)
                self._patches.append((module, name, self._builtins[member]))
        self._collect_libdevice()
        self._collect_methods()
        operators = {name: new for obj, name, new in self._patches if obj is tl.tensor}
        slow = {(obj, name): new for obj, name, new in self._patches}
        self._patches += [
            (interpreter, "_get_np_dtype", np_dtype),
            (interpreter, "interpreter_builder", self.builder),
            (interpreter, "interpreter_semantic", self.semantic),
            (target_info, "current_target", lambda: None),
            (tl, "range", self._range),
            (tl.core, "range", self._range),
            (tl, "condition", _condition),
            (tl.core, "condition", _condition),
            (JITFunction, "run", _launch),
            (JITFunction, "__call__", _call),
            (interpreter.InterpretedFunction, "run", _launch),
            (interpreter.InterpretedFunction, "__call__", _call),
            (Autotuner, "run", _run_first_config),
            (TritonSemantic, "dot_scaled", _dot_scaled(TritonSemantic.dot_scaled)),
            *fastpath.patches(operators),
            *fastblocks.patches(slow, self.builder),
            *reduce.patches(self.semantic),
        ]

    def _bind(self, member: Any) -> Callable[..., Any]:
        """A builtin that needs no `_semantic` argument."""
        semantic = self.semantic
        raw = getattr(member, "__wrapped__", member)

        def builtin(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return raw(*args, **kwargs)

        return builtin

    def _collect_libdevice(self) -> None:
        """The generic libdevice is a table of empty stubs: use the CUDA one's names."""
        stub = sys.modules.get("triton.language.extra.libdevice")
        cuda = sys.modules.get("triton.language.extra.cuda.libdevice")
        if stub is None or cuda is None:
            return
        for name, member in inspect.getmembers(stub, inspect.isfunction):
            real = getattr(cuda, name, None)
            if real is not None and real in self._builtins:
                self._builtins[member] = self._builtins[real]
                self._patches.append((stub, name, self._builtins[real]))

    def _collect_methods(self) -> None:
        """``x.sum(...)``: a jitted function as an attribute of a class is not bound by Python."""
        for name, member in list(vars(tl.tensor).items()):
            if isinstance(member, JITCallable):
                self._patches.append((tl.tensor, name, _method(member)))
        self._patches.append((tl.tensor, "__index__", _tensor_index))
        for name in _CONSTEXPR_OPS:
            old = vars(tl.constexpr).get(name)
            if old is not None:
                self._patches.append((tl.constexpr, name, _constexpr_op(old)))

    # ---- applying them
    def apply(self) -> None:
        """Replace."""
        saved = self._saved
        for obj, name, new in self._patches:
            saved.append((obj, name, vars(obj).get(name, _MISSING)))
            setattr(obj, name, new)

    def restore(self) -> None:
        """Undo everything."""
        for names, name, old in reversed(self._globals):
            names[name] = old
        self._globals.clear()
        for obj, name, old in reversed(self._saved):
            if old is _MISSING:
                delattr(obj, name)
            else:
                setattr(obj, name, old)
        self._saved.clear()

    def adopt_globals(self, names: dict[str, Any]) -> None:
        """Replace builtins that a module has imported by name.

        That is, ``from triton.language import load``.
        """
        for name, value in list(names.items()):
            if isinstance(value, types.FunctionType):
                new = self._builtins.get(value)
                if new is not None:
                    self._globals.append((names, name, value))
                    names[name] = new


_language: Language | None = None


def language() -> Language:
    """The patched language of this process."""
    global _language
    if _language is None:
        _language = Language()
    return _language


def _condition(value: Any, disable_licm: bool = False) -> Any:
    """``tl.condition``: what it tells the compiler about a loop means nothing here."""
    return value


def _extra_modules() -> list[types.ModuleType]:
    out = []
    for name in _EXTRA:
        try:
            out.append(importlib.import_module(name))
        except ImportError:
            continue
    return out


# ---- launches and calls
def _launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
    if warmup:
        return None
    for hook in self.pre_run_hooks:
        hook(*args, **kwargs)
    return state.active().launch(self.fn, args, kwargs, grid)


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    ex = state.active()
    fn: Function = self.fn
    twin = ex.twins.get(fn)
    if twin is None:
        twin = ex.adopt(fn)
    if ex.tracer is not None and not fn.__module__.startswith("triton."):
        return ex.tracer.device_function(ex, fn.__name__, twin, args, kwargs)
    return twin(*args, **kwargs)


def _run_first_config(self: Any, *args: Any, **kwargs: Any) -> Any:
    """An autotuner measures nothing here: it takes its first configuration."""
    config = self.configs[0]
    if config.pre_hook is not None:
        named = dict(zip(self.arg_names, args, strict=False))
        config.pre_hook({**named, **kwargs, **config.all_kwargs()})
    return self.fn.run(*args, **kwargs, **config.all_kwargs())


def _dot_scaled(stock: Any) -> Any:
    if "lhs_format.value" not in inspect.getsource(stock):
        return stock

    # triton 3.6 wants constexprs, and the interpreter passes plain strings.
    def dot_scaled(
        self: Any, lhs: Any, ls: Any, lf: Any, rhs: Any, rs: Any, rf: Any, *args: Any, **kw: Any
    ) -> Any:
        lhs_format = lf if isinstance(lf, tl.constexpr) else tl.constexpr(lf)
        rhs_format = rf if isinstance(rf, tl.constexpr) else tl.constexpr(rf)
        return stock(self, lhs, ls, lhs_format, rhs, rs, rhs_format, *args, **kw)

    return dot_scaled


def _method(member: Any) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return member(self, *args, **kwargs)

    return method


def _tensor_index(self: Any) -> int:
    return int(self.handle.data.reshape(-1)[0])


_CONSTEXPR_OPS = [
    f"__{op}__"
    for op in (
        "add", "sub", "mul", "mod", "truediv", "floordiv", "and", "or", "xor", "lshift", "rshift",
        "gt", "ge", "lt", "le", "eq", "ne", "pow",
    )
]  # fmt: skip


def _constexpr_op(old: Any) -> Any:
    """``constexpr op tensor`` is a tensor: leave it to the tensor's reflected operator."""

    def op(self: Any, other: Any) -> Any:
        if isinstance(other, tl.tensor):
            return NotImplemented
        return old(self, other)

    return op
