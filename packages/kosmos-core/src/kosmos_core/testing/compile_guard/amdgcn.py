"""AMDGCN: which instruction stores, drains, releases, acquires."""

from __future__ import annotations

import re
from dataclasses import replace

from kosmos_core.testing.compile_guard.cases import Finding
from kosmos_core.testing.compile_guard.listing import (
    Event,
    Instruction,
    Listing,
    LocationTracker,
)
from kosmos_core.testing.compile_guard.ttir import ScalarWrites

_LABEL = re.compile(r"^([\w.$]+):")
_WRITE = re.compile(r"^(?:global|flat|buffer)_(?:store|atomic)_")
_LOAD = re.compile(r"^(?:global|flat|buffer)_load_(\w+)")
_WIDTHS = {
    "ubyte": 1,
    "sbyte": 1,
    "ushort": 2,
    "sshort": 2,
    "short": 2,
    "dword": 4,
    "dwordx2": 8,
    "dwordx3": 12,
    "dwordx4": 16,
}


def parse_amdgcn(text: str, scalar_writes: ScalarWrites, num_warps: int) -> Listing:
    """Parses an AMDGCN module, whose workgroups have `num_warps` waves."""
    listing = Listing()
    tracker = LocationTracker(text)
    in_body = False
    for raw in text.splitlines():
        line = raw.strip()
        if line.startswith(";;#ASMSTART"):
            tracker.enter_asm()
        elif line.startswith(";;#ASMEND"):
            tracker.leave_asm()
        elif line.startswith(".loc"):
            tracker.directive(line)
        elif line.startswith(".Lfunc_begin"):
            in_body = True
            listing.entries.append(len(listing.instructions))
        elif line.startswith((".Lfunc_end", ".section")):
            in_body = False
        elif in_body and line.startswith("; wave barrier"):
            _append(listing, "; wave barrier", tracker, (Event("barrier"),))
        if not in_body:
            continue
        code = line.split(";")[0].strip()
        if match := _LABEL.match(code):
            listing.labels[match.group(1)] = len(listing.instructions)
            continue
        if code and not code.startswith("."):
            is_elected = scalar_writes.cover(tracker.place, "_atomic_" in code)
            _append(listing, code, tracker, _classify(code, is_elected, num_warps))
    for index, instruction in enumerate(listing.instructions):
        if instruction.text.startswith("buffer_wbl2"):
            _pair_release(listing, index)
    return listing


def _pair_release(listing: Listing, index: int) -> None:
    """Looks from a write-back at what follows: the wait for it, and the word it releases.

    That word's own write is no data store, wherever the compiler says it stands in the source.
    A write-back that no write follows (hand-written in inline assembly) releases nothing.
    """
    release = listing.instructions[index]
    kind, waited = "flush", False
    for following in listing.instructions[index + 1 :]:
        if not following.falls_through or following.targets:
            break
        if Event("drain") in following.events:
            waited = True
        elif _WRITE.match(following.text):
            following.events, kind = (), "release"
            break
        elif _LOAD.match(following.text) or following.events:
            break
    (event,) = release.events
    release.events = (replace(event, kind=kind, waited=waited),)


def _append(
    listing: Listing, code: str, tracker: LocationTracker, events: tuple[Event, ...]
) -> None:
    opcode = code.split()[0]
    jumps = opcode == "s_branch" or opcode.startswith("s_cbranch")
    targets = (code.split()[1],) if jumps else ()
    falls_through = opcode not in ("s_branch", "s_endpgm", "s_setpc_b64")
    listing.instructions.append(Instruction(code, tracker.place, events, targets, falls_through))


def _classify(code: str, is_elected: bool, num_warps: int) -> tuple[Event, ...]:
    opcode = code.split()[0]
    cache_bits = set(re.findall(r"\b(sc0|sc1|nt)\b", code))
    if opcode == "s_barrier":
        return (Event("barrier"),)
    if opcode == "s_waitcnt":
        if not re.search(r"vmcnt\(0\)", code):
            return ()
        # One wave needs no barrier: what it waited for is what it releases.
        return (Event("drain"), Event("barrier")) if num_warps == 1 else (Event("drain"),)
    if opcode == "buffer_wbl2":
        return (Event("release", _scope(cache_bits)),)
    if opcode == "buffer_inv":
        return (Event("acquire", _scope(cache_bits)),)
    if _WRITE.match(opcode):
        return () if is_elected else (Event("store"),)
    if match := _LOAD.match(opcode):
        if "lds" in code.split():
            return (Event("load"),)
        width = next((_WIDTHS[w] for w in match.group(1).split("_") if w in _WIDTHS), 0)
        bypasses_caches = {"sc0", "sc1"} <= cache_bits
        return (Event("volatile_load" if bypasses_caches else "load", width=width),)
    if re.match(r"^v_s?mfma", opcode):
        scales = "_scale_" in opcode
        return (Event("mma"), Event("scaled_mma")) if scales else (Event("mma"),)
    return ()


def _scope(cache_bits: set[str]) -> str:
    if {"sc0", "sc1"} <= cache_bits:
        return "sys"
    return "gpu" if "sc1" in cache_bits else "cta"


def check_subnormals(text: str) -> list[Finding]:
    """Whether the kernel runs with FP32 subnormals allowed, as inputs and as results."""
    found = re.search(r"\.amdhsa_float_denorm_mode_32\s+(\d+)", text)
    mode = found.group(1) if found else "missing"
    if mode == "3":
        return []
    return [Finding("subnormals", "", f"float_denorm_mode_32 is {mode}, wanted 3")]


def check_divergence(text: str) -> list[Finding]:
    """Irreducible control flow made by merging two copies of an elected lane's poll.

    LLVM's fix-up lets the other lanes of the wave run ahead of the elected one, through barriers
    and reads of what it has yet to load: wrong values or a hang. ``v = poll(); while v < want:
    v = poll()`` compiles to this in triton 3.6; ``while poll() < want: pass`` does not.
    """
    if "irr.guard" not in text:
        return []
    message = (
        "two copies of a poll were merged into an irreducible loop: other lanes pass the elected "
        "one; write the poll once, inside its loop"
    )
    return [Finding("divergence", "", message)]
