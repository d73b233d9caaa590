"""What an abort left in the signal words, as the exception that the host raises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kosmos_core.device import layout
from kosmos_core.errors import (
    PeerError,
    PeerFaultError,
    PeerMismatchError,
    PeerTimeoutError,
)

MASK32 = 0xFFFFFFFF
# By which ranks that destroy a workspace know one another from those that make a call.
LEAVE_HASH = 0x6C656176
# What became of the outputs: kernels leave early, the reference path does not begin.
OUTPUTS_NAN = "Outputs of this and later calls are NaN"
NOTHING_COMPUTED = "Nothing was computed and no output written"

# Reasons of a local fault, as they travel to the peers.
FAULT_REASONS = {
    1: "dtype",
    2: "device",
    3: "shape",
    4: "size",
    5: "workspace",
    6: "cap",
    7: "argument",
    8: "exception",
    9: "launch",
}
EXCEPTION = 8
LAUNCH = 9


@dataclass(frozen=True)
class Reader:
    """The rank that reads the record, and what it was doing; `leaving` is destroying."""

    rank: int
    size: int
    op: str
    call_hash: int
    epoch: int
    timeout_s: float
    leave_timeout_s: float
    leaving: bool = False


def peer_error(word: int, signal: torch.Tensor, reader: Reader) -> PeerError:
    """The exception that an abort makes at one rank.

    Args:
        word: its abort word.
        signal: its signal words, int64, on the CPU.
        reader: the rank.
    """
    code, raiser, peer = word & 0xFF, (word >> 8) & 0xFF, (word >> 16) & 0xFF
    words = int(layout.RECORD_WORDS.value)
    first = int(layout.RECORD.value) + raiser * words
    record = [int(v) for v in signal[first : first + words]]
    phase = layout.PHASE_NAMES.get(record[2], "?")
    flag = layout.FLAG_NAMES.get(record[3], "?")
    index, seen, wanted = record[4], record[5], record[6]
    leaving = record[3] == int(layout.FLAG_START.value) and wanted >> 32 == LEAVE_HASH
    bound = reader.leave_timeout_s if leaving else reader.timeout_s
    kinds: dict[int, tuple[type[PeerError], str]] = {
        int(layout.TIMEOUT.value): (
            PeerTimeoutError,
            f"rank {raiser} waited {bound:g} s for rank {peer}: {flag} {index} was "
            f"{_shown(flag, seen)}, wanted {_shown(flag, wanted)} (phase {phase})",
        ),
        int(layout.MISMATCH.value): (
            PeerMismatchError,
            f"rank {peer} made another call than rank {raiser} "
            f"(operation, shape, dtype or plan differ): {flag} {index} was "
            f"{_shown(flag, seen)}, wanted {_shown(flag, wanted)} (phase {phase})",
        ),
        int(layout.FAULT.value): (PeerFaultError, _refusal(raiser, seen)),
    }
    kind, text = kinds[code]
    if code == int(layout.MISMATCH.value):
        text += _odd_one_out(signal, reader)
    return _error(kind, text, reader, raiser, peer, phase, flag, index, seen, wanted)


def host_error(calls: Sequence[tuple[int, int]], reader: Reader) -> PeerError | None:
    """The exception where ranks compare their calls on the host; None if all make the same one.

    They do so before they compute anything, so that no output is touched.

    Args:
        calls: (hash, 0) of each rank's call, or (anything, key of `FAULT_REASONS`) where it refused
            its call.
        reader: the rank.
    """
    start = layout.FLAG_NAMES[int(layout.FLAG_START.value)]
    phase = layout.PHASE_NAMES[int(layout.PHASE_START.value)]
    for rank, (_, reason) in enumerate(calls):
        if reason:
            return _error(
                PeerFaultError, _refusal(rank, reason), reader, rank, rank, phase, start, rank,
                reason, 0, NOTHING_COMPUTED,
            )  # fmt: skip
    mine = calls[reader.rank][0]
    others = [rank for rank, (theirs, _) in enumerate(calls) if theirs != mine]
    if not others:
        return None
    text = (
        f"ranks {others} made another call than rank {reader.rank} "
        "(operation, shape, dtype or plan differ)"
    )
    seen = calls[others[0]][0]
    return _error(
        PeerMismatchError, text, reader, reader.rank, others[0], phase, start, others[0], seen,
        mine, NOTHING_COMPUTED,
    )  # fmt: skip


def _refusal(rank: int, reason: int) -> str:
    if reason == EXCEPTION:
        return f"rank {rank} left the workspace by an exception"
    if reason == LAUNCH:
        return f"rank {rank} could not launch its call"
    return (
        f"rank {rank} refused its call before launch: bad {FAULT_REASONS.get(reason, 'argument')}"
    )


def _error(
    kind: type[PeerError],
    text: str,
    reader: Reader,
    raiser: int,
    peer: int,
    phase: str,
    flag: str,
    index: int,
    seen: int,
    wanted: int,
    outputs: str = OUTPUTS_NAN,
) -> PeerError:
    end = (
        "The workspace is destroyed; outputs of its last calls may be NaN"
        if reader.leaving
        else f"{outputs}; call reset() on every rank to go on"
    )
    message = f"rank {reader.rank} of {reader.size}, last call {reader.op}: {text}. {end}"
    return kind(
        message, rank=reader.rank, raised_by=raiser, peer=peer, op=reader.op, phase=phase,
        flag=flag, index=index, seen=seen, wanted=wanted,
    )  # fmt: skip


def _odd_one_out(signal: torch.Tensor, reader: Reader) -> str:
    """Names the minority where three or more ranks are seen to have made calls of one epoch."""
    ranks = int(layout.MAX_RANKS.value)
    epoch = reader.epoch & MASK32
    for e in (epoch, (epoch - 1) & MASK32):
        first = int(layout.START.value) + (e & 1) * ranks
        words = {p: int(signal[first + p]) for p in range(reader.size) if p != reader.rank}
        hashes = {p: v >> 32 for p, v in words.items() if v & MASK32 == e}
        if not hashes:
            continue
        hashes[reader.rank] = reader.call_hash
        groups: dict[int, list[int]] = {}
        for p, h in hashes.items():
            groups.setdefault(h, []).append(p)
        if len(groups) == 2:
            small, large = sorted(groups.values(), key=len)
            if len(small) < len(large):
                return f"; ranks {small} differ from ranks {large}"
    return ""


def _shown(flag: str, value: int) -> str:
    """A word's value as a reader understands it: start words are hash << 32 | epoch."""
    if flag != layout.FLAG_NAMES[int(layout.FLAG_START.value)]:
        return str(value)
    return f"call {value >> 32:08x} of epoch {as_int32(value & MASK32)}"


def as_int32(value: int) -> int:
    """The same 32 bits as a signed number."""
    return ((value + 2**31) & MASK32) - 2**31
