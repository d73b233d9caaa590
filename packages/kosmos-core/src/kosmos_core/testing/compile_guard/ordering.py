"""Release and acquire order, followed along every path of the assembly.

A forward data-flow analysis over six facts, each remembered with the instruction that caused
it, so that a finding can name both ends:

* `undrained`: a data store that AMD's ``s_waitcnt vmcnt(0)`` has not covered yet;
* `unbarriered`: a data store, or the kernel's entry, not followed by a workgroup barrier;
* `unflushed_gpu`, `unflushed_sys`: a data store not followed by a cache write-back, as far as
  that scope, that was waited for (AMD);
* `bulk`: a TMA store not waited for in full;
* `unfenced`: an acquire not followed by ``fence.proxy.async``.

Facts of paths that meet are united: what may have happened on one path counts. Stores that one
elected thread does (scalars) need no barrier, since that thread also releases.
"""

from __future__ import annotations

from typing import NamedTuple

from kosmos_core.testing.compile_guard.cases import Finding
from kosmos_core.testing.compile_guard.listing import Event, Listing
from kosmos_core.testing.compile_guard.ttir import Module, Place

_ENTRY = 1 << 60


class _State(NamedTuple):
    """Index of the instruction behind each fact, None where the fact does not hold."""

    undrained: int | None = None
    unbarriered: int | None = _ENTRY
    unflushed_gpu: int | None = None
    unflushed_sys: int | None = None
    bulk: int | None = None
    unfenced: int | None = None

    def join(self, other: _State) -> _State:
        return _State(*(_earlier(a, b) for a, b in zip(self, other, strict=True)))


def _earlier(a: int | None, b: int | None) -> int | None:
    if a is None or b is None:
        return b if a is None else a
    return min(a, b)


def _step(state: _State, event: Event, index: int, is_amd: bool) -> _State:
    if event.kind == "store":
        if is_amd:
            return state._replace(undrained=index, unflushed_gpu=index, unflushed_sys=index)
        return state._replace(unbarriered=index)
    if event.kind in ("release", "flush") and event.waited:
        unflushed_sys = None if event.scope == "sys" else state.unflushed_sys
        return state._replace(unflushed_gpu=None, unflushed_sys=unflushed_sys)
    if event.kind == "drain" and state.undrained is not None:
        return state._replace(undrained=None, unbarriered=state.undrained)
    if event.kind == "barrier":
        return state._replace(unbarriered=None)
    if event.kind == "tma_store":
        return state._replace(bulk=index)
    if event.kind == "bulk_wait" and state.bulk is not None:
        # The thread that waited must still tell the one that releases.
        return state._replace(bulk=None, unbarriered=state.bulk)
    if event.kind == "acquire" and event.scope != "cta":
        return state._replace(unfenced=index)
    if event.kind == "proxy_fence":
        return state._replace(unfenced=None)
    return state


def check_order(listing: Listing, is_amd: bool) -> list[Finding]:
    """Checks every release and every TMA load of the listing."""
    states: dict[int, _State] = {entry: _State() for entry in listing.entries}
    work = list(listing.entries)
    while work:
        index = work.pop()
        if index >= len(listing.instructions):
            continue
        state = states[index]
        for event in listing.instructions[index].events:
            state = _step(state, event, index, is_amd)
        for successor in listing.successors(index):
            old = states.get(successor)
            new = state if old is None else old.join(state)
            if new != old:
                states[successor] = new
                work.append(successor)
    findings: list[Finding] = []
    for index in sorted(states):
        if index >= len(listing.instructions):
            continue
        state = states[index]
        for event in listing.instructions[index].events:
            findings += _judge(listing, index, event, state)
            state = _step(state, event, index, is_amd)
    return list(dict.fromkeys(findings))


def _judge(listing: Listing, index: int, event: Event, state: _State) -> list[Finding]:
    where = str(listing.instructions[index].place)
    found: list[Finding] = []
    if event.kind == "release" and event.scope != "cta":
        if state.bulk is not None:
            message = (
                f"{event.scope} release after the TMA store at {_where(listing, state.bulk)} "
                "without a full cp.async.bulk.wait_group 0 (.read is not enough)"
            )
            found.append(Finding("bulk-wait", where, message))
        unflushed = state.unflushed_sys if event.scope == "sys" else state.unflushed_gpu
        if not event.waited and unflushed is not None:
            message = (
                f"{event.scope} release does not wait for its write-back of the store at "
                f"{_where(listing, unflushed)}: the compiler dropped that wait; "
                "write back and wait (buffer_wbl2 sc0 sc1, s_waitcnt vmcnt(0)) by hand before it"
            )
            found.append(Finding("write-back", where, message))
        if state.undrained is not None:
            message = (
                f"{event.scope} release after the store at {_where(listing, state.undrained)} "
                "without s_waitcnt vmcnt(0) in every wave before the barrier"
            )
            found.append(Finding("drain", where, message))
        if state.unbarriered == _ENTRY:
            message = f"{event.scope} release reached without any workgroup barrier"
            found.append(Finding("barrier", where, message))
        elif state.unbarriered is not None:
            message = (
                f"{event.scope} release after the store at {_where(listing, state.unbarriered)} "
                "without a workgroup barrier between: other threads' stores are not ordered"
            )
            found.append(Finding("barrier", where, message))
    if event.kind == "tma_load" and state.unfenced is not None:
        message = (
            f"TMA load after the acquire at {_where(listing, state.unfenced)} without "
            "fence.proxy.async between: it may read what was there before"
        )
        found.append(Finding("proxy-fence", where, message))
    return found


def _where(listing: Listing, index: int) -> str:
    instruction = listing.instructions[index]
    return str(instruction.place) or f"'{instruction.text}'"


def check_atomics(ttir: Module, listing: Listing, is_amd: bool) -> list[Finding]:
    """Each ordered atomic of the source must keep order and scope in the assembly.

    Matched by source line and call site. Where the compiler dropped the place of an instruction,
    or (AMD, which deletes no ordered atomic) merged equal ones, the scope anywhere counts. Merged
    ones may also stand where one of their callers does.
    """
    findings: list[Finding] = []
    for op in ttir.ops:
        kinds = {
            "acquire": ["acquire"],
            "release": ["release"],
            "acq_rel": ["release", "acquire"],
        }.get(op.order, [])
        if op.scope == "cta":
            continue
        for kind in kinds:
            here, elsewhere = _scopes(listing, kind, op.place, is_amd)
            if op.scope in here or (not here and op.scope in elsewhere):
                continue
            if is_amd and op.scope in _merged_scopes(listing, kind, op.place):
                continue
            if here:
                message = f"{kind} asked for scope {op.scope}, the assembly has {sorted(here)}"
                findings.append(Finding("scope", str(op.place), message))
            else:
                message = f"{op.scope} {kind} is not in the assembly"
                if kind == "acquire":
                    message += "; an acquire whose result is unused is deleted, use the result"
                findings.append(Finding("lost", str(op.place), message))
    return list(dict.fromkeys(findings))


def _scopes(listing: Listing, kind: str, place: Place, is_amd: bool) -> tuple[set[str], set[str]]:
    """Scopes of `kind` at `place`, and of those that may have been there too."""
    here: set[str] = set()
    elsewhere: set[str] = set()
    for instruction, event in listing.events():
        if event.kind != kind:
            continue
        if instruction.place.source is not None and _same(instruction.place, place):
            here.add(event.scope)
        elif is_amd or instruction.place.source is None or place.source is None:
            elsewhere.add(event.scope)
    return here, elsewhere


def _merged_scopes(listing: Listing, kind: str, place: Place) -> set[str]:
    """Scopes of `kind` in the functions that `place` was called from, in the same calls of them."""
    return {
        event.scope
        for instruction, event in listing.events()
        if event.kind == kind
        and (
            instruction.place.source in place.callers
            or instruction.place.caller in place.callers[1:]
        )
    }


def _same(a: Place, b: Place) -> bool:
    callers = (a.caller, b.caller)
    return a.source == b.source and (None in callers or a.caller == b.caller)


def check_polls(ttir: Module, listing: Listing) -> list[Finding]:
    """Each polled load of the source must reach memory anew and in at least 4 bytes."""
    findings: list[Finding] = []
    unplaced = any(
        event.kind == "volatile_load" and instruction.place.source is None
        for instruction, event in listing.events()
    )
    for op in ttir.ops:
        if not op.is_poll:
            continue
        where = str(op.place)
        loads = [
            event
            for instruction, event in listing.events()
            if event.kind in ("load", "volatile_load") and _same(instruction.place, op.place)
        ]
        plain = sum(event.kind == "load" for event in loads)
        if not loads and not unplaced:
            findings.append(Finding("lost", where, "polled load is not in the assembly"))
        elif plain:
            message = (
                f"{plain} of {len(loads)} loads are plain: the poll may never see a new value; "
                'give volatile=True and cache_modifier=".cv"'
            )
            findings.append(Finding("volatile", where, message))
        narrow = [event.width for event in loads if 0 < event.width < 4]
        if narrow:
            message = f"polled in pieces of {min(narrow)} bytes; make the pointer's alignment known"
            findings.append(Finding("narrow-poll", where, message))
    return list(dict.fromkeys(findings))
