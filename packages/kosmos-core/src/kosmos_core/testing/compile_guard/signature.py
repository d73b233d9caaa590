"""From a case to what ``triton.compile`` takes: nested signatures, constexprs, attributes."""

from __future__ import annotations

from typing import Any

import triton.language as tl
from triton.compiler import ASTSource
from triton.runtime import JITFunction

from kosmos_core.testing.compile_guard.cases import CompileCase
from kosmos_core.testing.compile_guard.targets import TARGETS

Path = tuple[int, ...]


def build_source(case: CompileCase) -> ASTSource:
    """Builds the triton source object of `case`.

    Raises:
        TypeError: the kernel is not a compiled-mode ``@triton.jit`` function.
        ValueError: an argument without type, an unknown name or path, or a constexpr without value.
    """
    if not isinstance(case.kernel, JITFunction):
        raise TypeError(
            f"{case.label}: kernel is {type(case.kernel).__name__}, wanted a @triton.jit function; "
            "under TRITON_INTERPRET=1 kernels cannot be compiled, unset it"
        )
    names = list(case.kernel.arg_names)
    unknown = sorted(set(case.signature) - set(names))
    if unknown:
        raise ValueError(f"{case.label}: signature names {unknown}, the kernel has {names}")
    values: dict[Path, Any] = {}
    signature: dict[str, Any] = {}
    for index, name in enumerate(names):
        spec = case.signature.get(name, "constexpr" if name in case.constexprs else None)
        if spec is None:
            raise ValueError(f"{case.label}: argument {name!r} has neither a type nor a constexpr")
        signature[name] = _types(spec, (index,), values)
    resolver = _Resolver(case, names, signature)
    for key, value in case.constexprs.items():
        path = resolver.path(key, "constexprs")
        values[path] = value
        if resolver.leaf(path) != "constexpr":
            raise ValueError(
                f"{case.label}: constexprs gives {key!r} a value, its type is "
                f"{resolver.leaf(path)!r}; wanted 'constexpr'"
            )
    for path in _constexpr_paths(signature.values()):
        if path not in values:
            raise ValueError(
                f"{case.label}: {resolver.text(path)!r} is 'constexpr' without a value; "
                "add it to constexprs"
            )
    attrs: dict[Path, list[list[Any]]] = {}
    for key in case.divisible_by_16:
        attrs.setdefault(resolver.path(key, "divisible_by_16"), []).append(["tt.divisibility", 16])
    if TARGETS[case.target].is_amd:
        for key in case.pointer_range_32:
            path = resolver.path(key, "pointer_range_32")
            attrs.setdefault(path, []).append(["tt.pointer_range", 32])
    return ASTSource(fn=case.kernel, signature=signature, constexprs=values, attrs=attrs)


def _types(spec: Any, path: Path, values: dict[Path, Any]) -> Any:
    """`spec` with each tl.constexpr(value) replaced by "constexpr" and noted in `values`."""
    if isinstance(spec, tl.constexpr):
        values[path] = spec.value
        return "constexpr"
    if isinstance(spec, tuple):
        parts = [_types(part, (*path, i), values) for i, part in enumerate(spec)]
        # triton reads the field names off the NamedTuple class.
        return type(spec)(*parts) if hasattr(spec, "_fields") else tuple(parts)
    if isinstance(spec, str):
        return spec
    raise ValueError(f"type {spec!r} is not a string, a tl.constexpr or a (named) tuple of them")


def _constexpr_paths(specs: Any, path: Path = ()) -> list[Path]:
    found: list[Path] = []
    for index, spec in enumerate(specs):
        if isinstance(spec, tuple):
            found += _constexpr_paths(spec, (*path, index))
        elif spec == "constexpr":
            found.append((*path, index))
    return found


class _Resolver:
    """Turns "queue.SCOPE" or "queue.2" into the index path that triton wants."""

    def __init__(self, case: CompileCase, names: list[str], signature: dict[str, Any]) -> None:
        self._label = case.label
        self._names = names
        self._specs = list(signature.values())

    def path(self, key: str, argument: str) -> Path:
        name, *parts = key.split(".")
        if name not in self._names:
            raise ValueError(f"{self._label}: {argument} names {key!r}, the kernel has no {name!r}")
        path: Path = (self._names.index(name),)
        spec = self._specs[path[0]]
        for part in parts:
            fields = list(getattr(spec, "_fields", ()))
            size = len(spec) if isinstance(spec, tuple) else 0
            if part in fields:
                index = fields.index(part)
            elif part.isdigit() and int(part) < size:
                index = int(part)
            else:
                wanted = fields or list(range(size)) or "no parts"
                raise ValueError(f"{self._label}: {argument} names {key!r}; it has {wanted}")
            path = (*path, index)
            spec = spec[index]
        if isinstance(spec, tuple):
            raise ValueError(f"{self._label}: {argument} names {key!r}, a struct: name its fields")
        return path

    def leaf(self, path: Path) -> Any:
        spec: Any = self._specs
        for index in path:
            spec = spec[index]
        return spec

    def text(self, path: Path) -> str:
        words = [self._names[path[0]]]
        spec = self._specs[path[0]]
        for index in path[1:]:
            words.append(str(getattr(spec, "_fields", range(len(spec)))[index]))
            spec = spec[index]
        return ".".join(words)
