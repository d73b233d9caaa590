"""Reads Triton's own IR: what the source asks for, before any backend has touched it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import NamedTuple

from kosmos_core.testing.compile_guard.cases import Finding


class Source(NamedTuple):
    """A line of kernel source; `file` is a base name, all that both assemblies agree on."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Place:
    """Where an operation stands and, if its function was inlined, where that was called.

    `callers` are all places of calls, the nearest first.
    """

    source: Source | None = None
    caller: Source | None = None
    callers: tuple[Source, ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        if self.source is None:
            return ""
        return f"{self.source} (from {self.caller})" if self.caller else str(self.source)


@dataclass
class Region:
    """An operation with a body, such as scf.for; `text` gains the attributes at its end."""

    name: str
    text: str


@dataclass
class Op:
    """One operation of the IR with the regions around it, outermost first."""

    text: str
    place: Place
    regions: list[Region]

    @property
    def order(self) -> str:
        """Memory order of an atomic, "" for anything else."""
        match = re.search(r"tt\.atomic_\w+ .*?\b(acquire|release|acq_rel|relaxed)\b", self.text)
        return match.group(1) if match else ""

    @property
    def scope(self) -> str:
        """Scope of an atomic: cta, gpu or sys; "" for anything else."""
        match = re.search(r"\b(?:acquire|release|acq_rel|relaxed), (cta|gpu|sys)\b", self.text)
        return match.group(1) if match else ""

    @property
    def is_acquire(self) -> bool:
        """Whether it acquires, as an atomic or in inline assembly."""
        if "tt.elementwise_inline_asm" in self.text:
            asm = self.text.split("{constraints")[0]
            return bool(re.search(r"\.acquire\.|buffer_inv|fence\.acq", asm))
        return self.order in ("acquire", "acq_rel")

    @property
    def is_dot(self) -> bool:
        """Whether it is a matrix product."""
        return bool(re.search(r"= tt\.dot(_scaled)?\b", self.text))

    @property
    def is_write(self) -> bool:
        """Whether it writes global memory."""
        return bool(re.search(r"\btt\.(store|atomic_\w+|descriptor_store)\b", self.text))

    @property
    def is_poll(self) -> bool:
        """A load meant to see another agent's store: volatile, or with modifier .cv."""
        is_load = re.search(r"= tt\.load\b", self.text)
        # cacheModifier in triton 3.6, cache_modifier in 3.9.
        asks = re.search(r"isVolatile = true|cache_?[mM]odifier = cv\b", self.text)
        return bool(is_load and asks)

    @property
    def is_tensor(self) -> bool:
        """Whether it works on a tile and not on a scalar."""
        return "tensor<" in self.text


@dataclass(frozen=True)
class ScalarWrites:
    """Tells writes of a scalar from writes of a tile.

    Triton lets one elected thread write a scalar, the one that also does every scalar release:
    no barrier is needed between the two.
    """

    lines: frozenset[Source]
    all_atomics: bool

    def cover(self, place: Place, is_atomic: bool) -> bool:
        """Whether a write in the assembly at `place` is a scalar's."""
        return (is_atomic and self.all_atomics) or place.source in self.lines


@dataclass
class Module:
    """The operations of one IR dump that the checks need."""

    ops: list[Op] = field(default_factory=list)

    def scalar_writes(self) -> ScalarWrites:
        """Which writes in the assembly are those of scalars."""
        writes = [op for op in self.ops if op.is_write]
        scalar = {op.place.source for op in writes if not op.is_tensor}
        tensor = {op.place.source for op in writes if op.is_tensor}
        lines = frozenset(source for source in scalar - tensor if source is not None)
        tile_atomics = any(op.is_tensor and "tt.atomic" in op.text for op in writes)
        return ScalarWrites(lines, not tile_atomics)


_LOCATION = re.compile(r"^#(loc\d*) = loc\((.*)\)\s*$")
_USES_LOCATION = re.compile(r"loc\(#(loc\d*)\)\s*$")


def parse(text: str) -> Module:
    """Parses the TTIR or TTGIR `text` that triton keeps in ``kernel.asm``."""
    definitions = {m.group(1): m.group(2) for line in text.splitlines() if (m := _match(line))}
    module = Module()
    stack: list[Region] = []
    for raw in text.splitlines():
        line = raw.strip()
        if line.startswith("#") or not line:
            continue
        if line.startswith("}") and stack:
            stack[-1].text += line
            closed = stack.pop()
            if line.endswith("{"):
                stack.append(Region(closed.name, closed.text))
                continue
        elif line.endswith("{"):
            name = re.search(r"\b(scf\.\w+|tt\.func|ttg\.\w+|module)\b", line)
            stack.append(Region(name.group(1) if name else "", line))
            continue
        location = _USES_LOCATION.search(line)
        place = _place(location.group(1), definitions) if location else Place()
        module.ops.append(Op(line, place, list(stack)))
    return module


def _match(line: str) -> re.Match[str] | None:
    return _LOCATION.match(line)


def _place(name: str, definitions: dict[str, str]) -> Place:
    text = definitions.get(name, "")
    if match := re.match(r'^"([^"]*)":(\d+):\d+', text):
        return Place(Source(PurePath(match.group(1)).name, int(match.group(2))))
    if match := re.match(r"^callsite\((.*) at (.*)\)$", text):
        callee = _inner(match.group(1), definitions)
        caller = _inner(match.group(2), definitions)
        callers = () if caller.source is None else (caller.source,)
        return Place(callee.source, caller.source, callee.callers + callers + caller.callers)
    if match := re.match(r'^"[^"]*"\((.*)\)$', text):
        return _inner(match.group(1), definitions)
    return Place()


def _inner(text: str, definitions: dict[str, str]) -> Place:
    return _place(text.lstrip("#"), definitions)


def check_loops(module: Module, num_stages: int) -> list[Finding]:
    """An acquire in a loop that the pipeliner reorders: its loads may pass the wait."""
    dots = [op for op in module.ops if op.is_dot]
    findings = []
    for op in module.ops:
        if not op.is_acquire:
            continue
        for region in op.regions:
            if _is_pipelined(region, dots, num_stages):
                findings.append(
                    Finding(
                        "k-loop",
                        str(op.place),
                        "acquire inside the pipelined K loop: the loop's loads are prefetched "
                        "above it; wait before the loop",
                    )
                )
                break
            if _is_flattened(region, dots):
                findings.append(
                    Finding(
                        "k-loop",
                        str(op.place),
                        "acquire inside a flattened tile loop: the next tile's wait can run before "
                        "this tile's epilogue; drop flatten=True",
                    )
                )
                break
    return findings


def _is_pipelined(region: Region, dots: list[Op], num_stages: int) -> bool:
    if region.name != "scf.for":
        return False
    own = re.search(r"tt\.num_stages = (\d+)", region.text)
    if (int(own.group(1)) if own else num_stages) < 2:
        return False
    return any(_innermost_loop(dot) is region for dot in dots)


def _is_flattened(region: Region, dots: list[Op]) -> bool:
    if region.name != "scf.for" or "tt.flatten" not in region.text:
        return False
    return any(any(around is region for around in dot.regions) for dot in dots)


def _innermost_loop(op: Op) -> Region | None:
    loops = [region for region in op.regions if region.name in ("scf.for", "scf.while")]
    return loops[-1] if loops else None


def check_warp_specialize(ttir: Module, ttgir_text: str, is_amd: bool) -> list[Finding]:
    """Warp specialization that copied an atomic into several partitions."""
    if is_amd or not any("warp_specialize" in r.text for op in ttir.ops for r in op.regions):
        return []
    if "ttg.warp_specialize" not in ttgir_text:
        return [Finding("warp-specialize", "", "asked for, and silently not done by triton")]
    pattern = r"\btt\.atomic_(?:rmw|cas|poll|load|store)\b"
    before = sum(bool(re.search(pattern, op.text)) for op in ttir.ops)
    after = len(re.findall(pattern, ttgir_text))
    if after <= before:
        return []
    message = f"{before} atomics in the source became {after}: each partition claims for itself"
    return [Finding("warp-specialize", "", message)]
