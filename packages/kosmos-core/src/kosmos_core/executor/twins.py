"""Twins: plain Python functions that behave like `@triton.jit` functions.

A twin has the code of the original with assignments converted (``x = 3`` makes a tensor, as in
the compiler) and shares its globals and closure. Nothing is added to the user's namespaces.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
import weakref
from collections.abc import Callable
from typing import Any

import triton.language as tl

_ASSIGN = "__executor_assign__"
_IS = "__executor_is__"
_IS_NOT = "__executor_is_not__"
_RANGE = "__executor_range__"

Function = Callable[..., Any]
_cache: weakref.WeakKeyDictionary[Function, Function] = weakref.WeakKeyDictionary()


class _Rewriter(ast.NodeTransformer):
    """Gives statements the meaning that they have in the compiler.

    Assigned numbers become tensors, so do the variables of ``for i in range(...)``, and
    ``x is None`` sees through `tl.constexpr`.
    """

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        if len(node.targets) > 1:
            raise ValueError(f"line {node.lineno}: triton does not support a = b = value")
        self.generic_visit(node)
        node.value = ast.Call(ast.Name(_ASSIGN, ast.Load()), [node.value], [])
        return node

    def visit_For(self, node: ast.For) -> ast.AST:
        self.generic_visit(node)
        call = node.iter
        function = call.func if isinstance(call, ast.Call) else None
        if isinstance(function, ast.Name) and function.id == "range":
            function.id = _RANGE
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if len(node.ops) == 1 and isinstance(node.ops[0], (ast.Is, ast.IsNot)):
            name = _IS if isinstance(node.ops[0], ast.Is) else _IS_NOT
            args = [node.left, node.comparators[0]]
            return ast.Call(ast.Name(name, ast.Load()), args, [])
        return node


def _plain(x: Any) -> Any:
    return x.value if isinstance(x, tl.constexpr) else x


def _same(a: Any, b: Any) -> bool:
    return _plain(a) is _plain(b)


def _differs(a: Any, b: Any) -> bool:
    return _plain(a) is not _plain(b)


class TwinMaker:
    """Makes twins whose assignments use a given conversion.

    Args:
        assign: called on every assigned value.
        loop_range: stands for ``range`` in a ``for`` statement.
    """

    def __init__(self, assign: Function, loop_range: Function) -> None:
        self._helpers = {
            _ASSIGN: assign, _IS: _same, _IS_NOT: _differs, _RANGE: loop_range,
        }  # fmt: skip

    def twin(self, fn: Function) -> Function:
        """The twin of the Python function of a `@triton.jit` function (cached)."""
        out = _cache.get(fn)
        if out is None:
            source, first = read_source(fn)
            out = _cache[fn] = self.build(fn, source, first, None)
        return out

    def build(
        self, fn: Function, source: str, first: int, renumber: Callable[[int], int] | None
    ) -> Function:
        """Compile `source` (decorators included) as the twin of `fn`.

        Args:
            fn: the original, whose globals and closure are used.
            source: its source text.
            first: line number of the first line of `source`.
            renumber: maps a line number of `source` (from 1) to one of the original text.

        Raises:
            ValueError: the source is not a function definition.
        """
        tree = ast.parse(textwrap.dedent(source))
        definition = tree.body[0]
        if not isinstance(definition, ast.FunctionDef):
            raise ValueError(f"{fn.__qualname__}: expected a function definition")
        definition.decorator_list = []
        definition.returns = None
        arguments = definition.args
        arguments.defaults = []
        arguments.kw_defaults = [None for _ in arguments.kwonlyargs]
        for arg in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            arg.annotation = None
        free = fn.__code__.co_freevars
        names = [*free, *self._helpers]
        rewritten = _Rewriter().visit(definition)
        parameters = ast.arguments([], [ast.arg(n) for n in names], None, [], [], None, [])
        factory = ast.parse("def __factory__(): pass").body[0]
        assert isinstance(factory, ast.FunctionDef)
        factory.args = parameters
        factory.body = [rewritten]
        module = ast.Module([factory], [])
        ast.fix_missing_locations(module)
        for node in ast.walk(module):
            for attribute in ("lineno", "end_lineno"):
                line = getattr(node, attribute, None)
                if line is not None:
                    line = renumber(line) if renumber is not None else line
                    setattr(node, attribute, line + first - 1)
        code = compile(module, fn.__code__.co_filename, "exec")
        inner = _inner_code(_inner_code(code, "__factory__"), definition.name)
        cells = dict(zip(free, fn.__closure__ or (), strict=True))
        for name, helper in self._helpers.items():
            cells[name] = types.CellType(helper)
        closure = tuple(cells[name] for name in inner.co_freevars)
        twin = types.FunctionType(inner, fn.__globals__, fn.__name__, fn.__defaults__, closure)
        twin.__kwdefaults__ = fn.__kwdefaults__
        twin.__qualname__ = fn.__qualname__
        return twin


def _inner_code(code: types.CodeType, name: str) -> types.CodeType:
    for const in code.co_consts:
        if isinstance(const, types.CodeType) and const.co_name == name:
            return const
    raise ValueError(f"no function {name} in the compiled source")


def read_source(fn: Function) -> tuple[str, int]:
    """Source text of a function (decorators included) and the number of its first line.

    Raises:
        ValueError: the source is not available.
    """
    try:
        lines, first = inspect.getsourcelines(fn)
    except OSError as e:
        raise ValueError(
            f"{fn.__qualname__}: its source is not available; define kernels in a file"
        ) from e
    return "".join(lines), first
