"""An assembly listing as instructions, events and control flow, the same for PTX and AMDGCN."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePath

from kosmos_core.testing.compile_guard.ttir import Place, Source

WIDE_BYTES = 16  # what one thread reads with the widest load


@dataclass(frozen=True)
class Event:
    """What an instruction does to memory order.

    `kind`: store, barrier, drain, flush, release, acquire, load, volatile_load, tma_load,
    tma_store, bulk_wait, proxy_fence, mma or scaled_mma (beside an mma). `scope` of a release or
    acquire: sys, gpu or cta.
    `width`: bytes one thread reads, 0 if unknown. `waited`: whether a release waits for its own
    cache write-back (AMD).
    """

    kind: str
    scope: str = ""
    width: int = 0
    waited: bool = True


@dataclass
class Instruction:
    """One instruction; `targets` are the labels it may jump to."""

    text: str
    place: Place
    events: tuple[Event, ...] = ()
    targets: tuple[str, ...] = ()
    falls_through: bool = True


@dataclass
class Listing:
    """Instructions in order and the index each label stands before."""

    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    entries: list[int] = field(default_factory=list)

    def successors(self, index: int) -> Iterator[int]:
        """Indices of the instructions that may run after the one at `index`."""
        instruction = self.instructions[index]
        if instruction.falls_through and index + 1 < len(self.instructions):
            yield index + 1
        for label in instruction.targets:
            if label in self.labels and self.labels[label] < len(self.instructions):
                yield self.labels[label]

    def events(self) -> Iterator[tuple[Instruction, Event]]:
        """Every event with its instruction, in order."""
        for instruction in self.instructions:
            for event in instruction.events:
                yield instruction, event

    def counts(self) -> dict[str, int]:
        """Instructions per event kind; releases and acquires per scope ("release_sys")."""
        counts: dict[str, int] = {}
        for _, event in self.events():
            name = f"{event.kind}_{event.scope}" if event.scope else event.kind
            counts[name] = counts.get(name, 0) + 1
            if event.kind == "load" and event.width >= WIDE_BYTES:
                counts["wide_load"] = counts.get("wide_load", 0) + 1
        return counts


_FILE = re.compile(r'^\.file\s+(\d+)\s+"([^"]*)"(?:\s+"([^"]*)")?')
_LOC = re.compile(r"^\.loc\s+(\d+)\s+(\d+)\s+\d+")
_INLINED_PTX = re.compile(r"inlined_at\s+(\d+)\s+(\d+)")
_INLINED_AMD = re.compile(r"@\[\s*([^\s:]+):(\d+):\d+")


class LocationTracker:
    """Follows .loc directives.

    In triton 3.9 those inside inline assembly count lines of the assembly text, so that only the
    first of a block is believed.
    """

    def __init__(self, text: str) -> None:
        self._files: dict[int, str] = {}
        for line in text.splitlines():
            if match := _FILE.match(line.strip()):
                path = match.group(3) or match.group(2)
                self._files[int(match.group(1))] = PurePath(path).name
        self._inside_asm = False
        self._asm_located = False
        self.place = Place()

    def enter_asm(self) -> None:
        """Notes that a block of inline assembly begins."""
        self._inside_asm, self._asm_located = True, False

    def leave_asm(self) -> None:
        """Notes that it ends."""
        self._inside_asm = False

    def directive(self, line: str) -> None:
        """Takes a .loc line."""
        match = _LOC.match(line)
        if match is None or (self._inside_asm and self._asm_located):
            return
        self._asm_located = self._inside_asm
        source = self._source(int(match.group(1)), int(match.group(2)))
        caller = None
        if inlined := _INLINED_PTX.search(line):
            caller = self._source(int(inlined.group(1)), int(inlined.group(2)))
        elif inlined := _INLINED_AMD.search(line):
            caller = Source(PurePath(inlined.group(1)).name, int(inlined.group(2)))
        self.place = Place(source, caller)

    def _source(self, file: int, line: int) -> Source | None:
        name = self._files.get(file)
        return Source(name, line) if name and line else None
