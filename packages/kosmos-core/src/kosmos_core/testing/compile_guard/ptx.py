"""PTX: which instruction stores, releases, acquires, waits, fences."""

from __future__ import annotations

import re

from kosmos_core.testing.compile_guard.cases import Finding
from kosmos_core.testing.compile_guard.listing import (
    Event,
    Instruction,
    Listing,
    LocationTracker,
)
from kosmos_core.testing.compile_guard.ttir import ScalarWrites

_LABEL = re.compile(r"^([$%\w.]+):\s*(.*)$")
_PREDICATE = re.compile(r"^@!?%?\w+\s+")
_SCOPES = {"sys": "sys", "gpu": "gpu", "cta": "cta", "cluster": "cta"}
_NOT_GLOBAL = ("shared", "local", "param", "const")


def parse_ptx(text: str, scalar_writes: ScalarWrites, num_warps: int) -> Listing:
    """Parses a PTX module, whose thread blocks have `num_warps` warps."""
    listing = Listing()
    tracker = LocationTracker(text)
    in_body = False
    for raw in text.splitlines():
        line = raw.strip()
        if line.startswith("// begin inline asm"):
            tracker.enter_asm()
        elif line.startswith("// end inline asm"):
            tracker.leave_asm()
        elif line.startswith(".loc"):
            tracker.directive(line)
        elif re.match(r"^(\.visible\s+|\.weak\s+)?\.(entry|func)\b", line):
            in_body = False
        elif line == "{" and not in_body:
            in_body = True
            listing.entries.append(len(listing.instructions))
        elif line.startswith(".section"):
            break
        if not in_body or line.startswith((".", "//")):
            continue
        for statement in line.split("//")[0].split(";"):
            _add(listing, statement.strip(), tracker, scalar_writes, num_warps)
    return listing


def _add(
    listing: Listing,
    statement: str,
    tracker: LocationTracker,
    scalar_writes: ScalarWrites,
    num_warps: int,
) -> None:
    statement = statement.lstrip("{} \t")
    if match := _LABEL.match(statement):
        listing.labels[match.group(1)] = len(listing.instructions)
        statement = match.group(2).lstrip("{} \t")
    predicated = _PREDICATE.match(statement)
    body = statement[predicated.end() :] if predicated else statement
    opcode, _, operands = body.partition(" ") if " " in body else body.partition("\t")
    opcode = opcode.split("\t")[0]
    if not opcode or opcode.startswith("."):
        return
    targets: tuple[str, ...] = ()
    if opcode.split(".")[0] in ("bra", "brx"):
        targets = tuple(re.findall(r"[$\w.]+", operands))
    ends = opcode.split(".")[0] in ("bra", "brx", "ret", "exit", "trap")
    place = tracker.place
    is_atomic = opcode.startswith(("atom", "red"))
    is_elected = scalar_writes.cover(place, is_atomic)
    events = _classify(opcode, body, is_elected, num_warps)
    falls_through = not ends or predicated is not None
    listing.instructions.append(Instruction(statement, place, events, targets, falls_through))


def _classify(opcode: str, body: str, is_elected: bool, num_warps: int) -> tuple[Event, ...]:
    words = opcode.split(".")
    base = words[0]
    scope = next((_SCOPES[w] for w in words if w in _SCOPES), "")
    is_global = not any(word.split("::")[0] in _NOT_GLOBAL for word in words[1:])
    if base in ("bar", "barrier"):
        within_warp = "warp" in words
        return (Event("barrier"),) if not within_warp or num_warps == 1 else ()
    if base == "fence" or base == "membar":
        return _fence(opcode, words, scope)
    if base == "cp" and "bulk" in words:
        return _bulk(opcode, body)
    if base == "cp" and words[-1] == "global":
        # Of the generic proxy: ordered as a load is, and complete before what it brought is used.
        return (Event("load", width=_copied(body)),)
    if base in ("atom", "red", "multimem") and is_global:
        events = _ordered(words, scope)
        return events if is_elected or events else (Event("store"),)
    if base == "ld" and is_global:
        events = _ordered(words, scope)
        kind = "volatile_load" if {"volatile", "relaxed", "mmio"} & set(words) else "load"
        return events or (Event(kind, width=_width(words)),)
    if base == "st" and is_global:
        events = _ordered(words, scope)
        return events if is_elected or events else (Event("store"),)
    if base in ("wgmma", "mma", "tcgen05") and ("mma" in words or "mma_async" in words):
        scales = "block_scale" in words
        return (Event("mma"), Event("scaled_mma")) if scales else (Event("mma"),)
    return ()


def check_subnormals(text: str) -> list[Finding]:
    """Whether no FP32 instruction flushes subnormals."""
    flushing = sorted(set(re.findall(r"\b[\w.]+\.ftz\b[\w.]*", text)))
    return [Finding("subnormals", "", f"{opcode} flushes subnormals") for opcode in flushing]


def _ordered(words: list[str], scope: str) -> tuple[Event, ...]:
    events = []
    if {"release", "acq_rel"} & set(words):
        events.append(Event("release", scope or "gpu"))
    if {"acquire", "acq_rel"} & set(words):
        events.append(Event("acquire", scope or "gpu"))
    return tuple(events)


def _fence(opcode: str, words: list[str], scope: str) -> tuple[Event, ...]:
    if opcode.startswith("fence.proxy"):
        # Triton's own fence.proxy.async.shared::cta orders shared memory alone.
        orders_global = opcode in ("fence.proxy.async", "fence.proxy.async.global")
        return (Event("proxy_fence"),) if orders_global else ()
    if words[0] == "membar":
        scope = {"sys": "sys", "gl": "gpu"}.get(words[1], "cta")
        return (Event("release", scope), Event("acquire", scope))
    if "mbarrier_init" in opcode:
        return ()
    ordered = ["acq_rel" if word == "sc" else word for word in words]
    return _ordered(ordered, scope)


def _bulk(opcode: str, body: str) -> tuple[Event, ...]:
    if "wait_group" in opcode:
        in_full = "read" not in opcode and re.search(r"\s0\s*$", body.rstrip("; "))
        return (Event("bulk_wait"),) if in_full else ()
    if re.search(r"\.shared::\w+\.global\b", opcode):
        return (Event("tma_load"),)
    if re.search(r"\.global\.shared::\w+", opcode):
        return (Event("tma_store"),)
    return ()


def _copied(body: str) -> int:
    """Bytes a thread of `cp.async [shared], [global], bytes`."""
    operands = body.rstrip("; ").split("],")[-1].split(",")
    return int(operands[0], 0)


def _width(words: list[str]) -> int:
    count = next((int(w[1:]) for w in words if re.fullmatch(r"v\d", w)), 1)
    bits = next((int(w[1:]) for w in reversed(words) if re.fullmatch(r"[bsuf]\d+", w)), 0)
    return count * bits // 8
