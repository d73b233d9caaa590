"""A workspace: memory that the calls of a group share, and the words by which its ranks meet.

Creation, `reset()` and `destroy()` are collective. Epochs live on the device, so that a replayed
graph advances them; nothing on the host depends on them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import triton.language as tl

from kosmos_core.device import layout
from kosmos_core.device.barrier import agree_kernel, fault_kernel
from kosmos_core.device.layout import Context
from kosmos_core.errors import PeerError, WorkspaceError
from kosmos_core.peer_errors import (
    EXCEPTION,
    LAUNCH,
    LEAVE_HASH,
    MASK32,
    Reader,
    as_int32,
    host_error,
    peer_error,
)
from kosmos_core.regions import (
    SPLIT_TICKETS,
    Region,
    control_sizes,
    trace_num_words,
    workspace_num_bytes,
)
from kosmos_core.uncopied import Uncopied
from kosmos_core.worlds.base import HOST, SymmetricBuffer, World

DEFAULT_TIMEOUT_S = 120.0
# Ranks may leave a workspace further apart than they make a call; the backends' own bound.
LEAVE_TIMEOUT_S = 600.0
_LOG = logging.getLogger(__name__)

W = TypeVar("W", bound="Workspace")

# Workspaces left by an exception or after an abort; peers may still reach their memory.
_ABANDONED: list[Workspace] = []


class Workspace(Uncopied):
    """Symmetric regions, control words and the peer table of one rank.

    Args:
        world: where the ranks live; every rank creates its workspace with the same arguments.
        regions: the op family's regions.
        max_tile_rows: tile rows a source may have.
        timeout_s: bound of every wait, in seconds of device time.
        trace_events: events a workgroup may record in all traced calls together, until
            `trace_buffer` is zeroed; 0 allocates none.
        first_epoch: epoch of the first call (tests start near the wrap).
        num_counters: words of a set of counters beyond the queue heads; see `control_sizes`.

    Raises:
        WorkspaceError: an argument is out of range.
        WorldError: memory cannot be shared here.
    """

    def __init__(
        self,
        world: World,
        regions: Sequence[Region],
        max_tile_rows: int,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        trace_events: int = 0,
        first_epoch: int = 1,
        num_counters: int | None = None,
    ) -> None:
        if not 0.001 <= timeout_s <= 2_000_000:
            raise WorkspaceError(f"timeout_s: got {timeout_s}, wanted 0.001 to 2000000 seconds")
        self.world = world
        self.rank = world.rank
        self.regions = tuple(regions)
        self.max_tile_rows = max_tile_rows
        self._num_counters = num_counters
        self.timeout_s = timeout_s
        self.trace_events = trace_events
        self.last_op = "none yet"
        self._last_hash = 0
        self._first_epoch = first_epoch
        self._destroyed = False
        self._leaving = False
        self._error: PeerError | None = None
        self._refused = False  # this rank gave up a call itself, and raised why
        self._last_stream: Any = None
        stride, self._set_words, self._arrival_words = control_sizes(max_tile_rows, num_counters)
        self._stride = stride
        self._trace_words = trace_num_words(world.num_wgs, trace_events) if world.fused else 0
        if world.fused:
            # Perhaps made by a first call under inference mode, it is used outside too.
            with torch.inference_mode(False):
                self._allocate()
                self.reset()

    # ------------------------------------------------------------------ memory

    def _allocate(self) -> None:
        w = self.world
        ranks, rows = int(layout.MAX_RANKS.value), int(layout.NUM_REGIONS.value)
        self._signal = w.symmetric("signal", int(layout.SIGNAL_WORDS.value), torch.int64)
        self._arrival = w.symmetric("arrival", 2 * self._arrival_words, torch.int32)
        self._buffers: dict[int, SymmetricBuffer] = {}
        for region in self.regions:
            for copy in range(region.depth):
                name = region.name if region.depth == 1 else f"{region.name}{copy}"
                buffer = w.symmetric(name, region.num_elements, region.dtype)
                self._buffers[region.row + copy] = buffer
                if region.poison is not None:
                    w.polled(buffer.local, region.poison)
        words = int(layout.HEADER_WORDS.value) + 2 * self._set_words
        self._control = w.local("control", words, torch.int32)
        self._status = w.host_visible(1)
        self._status_view = self._status.numpy()
        table = torch.zeros(rows, ranks, dtype=torch.int64, device=HOST)
        everything = {
            int(layout.SIGNAL.value): self._signal,
            int(layout.ARRIVAL.value): self._arrival,
            **self._buffers,
        }
        for row, buffer in everything.items():
            addresses = torch.tensor(buffer.addresses, dtype=torch.int64, device=HOST)
            table[row, : w.size] = addresses
        self._table = w.local("table", rows * ranks, torch.int64)
        self._table.copy_(table.flatten())
        if self.trace_events:
            self.trace_buffer = w.local("trace", self._trace_words, torch.int64)
            self.trace_buffer.zero_()
        self._contexts = {traced: self._context(traced) for traced in (False, True)}
        if w.size > 1:
            # Before any call: loading them while a kernel waits for this rank would wait for it.
            for kernel, name, values in (
                (agree_kernel, "agree", (0,)),
                (fault_kernel, "fault", (0, 0)),
            ):
                args = (self.context(), *values)
                w.load(kernel, args, (name, self.context_key), num_warps=8, num_stages=1)

    def _context(self, traced: bool) -> Context:
        traced = traced and self.trace_events > 0
        return Context(
            self._table,
            self._control,
            self._status,
            self.trace_buffer if traced else self._status,
            tl.constexpr(self.world.size),
            tl.constexpr(self._set_words),
            tl.constexpr(self._arrival_words),
            tl.constexpr(self._stride),
            tl.constexpr(self.world.target),
            tl.constexpr(self.trace_events if traced else 0),
        )

    def num_bytes(self) -> int:
        """Bytes that this workspace takes on each rank."""
        if not self.world.fused:
            return 0
        return workspace_num_bytes(
            self.regions, self.max_tile_rows, self._trace_words, self._num_counters
        )

    def buffer(self, row: int) -> torch.Tensor:
        """This rank's part of the region in a row of the peer table; no operand of a call."""
        return self._buffers[row].local

    @property
    def context_key(self) -> tuple[int, ...]:
        """The constants that code compiled for this workspace depends on."""
        return (
            self.world.size,
            self._set_words,
            self._arrival_words,
            self._stride,
            self.trace_events,
            self.world.target,
        )

    def context(self, traced: bool = False) -> Context:
        """What launches on this workspace pass as `ctx`."""
        return self._contexts[traced]

    # ------------------------------------------------------------------ life

    def reset(self) -> None:
        """Zeroes every word, fills start slots and polled regions, and revives the workspace.

        Collective.
        """
        self.ensure_usable()
        if not self.world.fused:
            self.world.barrier()
            self._error = None
            return
        self.world.synchronize()
        told = self._error is not None or self._refused
        if not told and self._abort_error() is not None:
            # Its peers have heard of it and reset; raising here would leave them waiting.
            _LOG.warning("reset() forgets a call that was given up: %s", self._error)
        self._error = None
        self._refused = False
        self.world.barrier()
        e0 = self._first_epoch
        self._control.zero_()
        self._control[int(layout.EPOCH.value)] = as_int32(e0)
        self._control[int(layout.RANK.value)] = self.world.rank
        self._set_bound(self.timeout_s)
        self._arrival.local.zero_()
        for region in self.regions:
            if region.poison is not None:
                for copy in range(region.depth):
                    self.buffer(region.row + copy).view(torch.int16).fill_(region.poison)
        words = int(layout.SIGNAL_WORDS.value)
        signal = torch.zeros(words, dtype=torch.int64, device=HOST)
        ranks = int(layout.MAX_RANKS.value)
        # Fresh slots hold the two epochs before the first: never a value that a call waits for.
        for back in (1, 2):
            first = int(layout.START.value) + ((e0 - back) & 1) * ranks
            signal[first : first + ranks] = (e0 - back) & MASK32
        self._signal.local.copy_(signal)
        self._status_view[0] = 0
        self.world.barrier()

    @property
    def _leave_timeout_s(self) -> float:
        return max(self.timeout_s, LEAVE_TIMEOUT_S)

    def _set_bound(self, seconds: float) -> None:
        self._control[int(layout.BOUND_MS.value)] = max(1, min(int(seconds * 1000), 2**31 - 1))

    def destroy(self) -> None:
        """Releases the memory once every rank has come to destroy its own.

        Collective and idempotent. After an abort it waits for nobody, and the memory stays as long
        as the process, since peers may still write to it; `reset()` it first to have it released.

        Synchronizes: the host. The ranks wait for one another for `timeout_s`, but at least for
        ten minutes.

        Raises:
            PeerError: a call was given up and this rank was not told so far, a peer left by an
                exception, does not come, or makes a call instead.
        """
        if self._destroyed:
            return
        self._leaving = True
        if not self.world.fused:
            self._destroyed = True
            return
        told = self._error is not None or self._refused
        self.world.synchronize()
        self._meet_to_leave()
        error = self._abort_error()
        self._destroyed = True
        if error is None:
            self.world.barrier()
            self._release()
            return
        _ABANDONED.append(self)
        if not told:
            raise error

    def _meet_to_leave(self) -> None:
        """A last call that moves nothing.

        A host barrier would wait for ever for a peer that has left by an exception, and a peer that
        has given up a call may say so only now.
        """
        if self.world.size == 1 or self._abort_error() is not None:
            return
        self._set_bound(self._leave_timeout_s)
        self._last_hash = LEAVE_HASH
        self._launch_agree(LEAVE_HASH)
        self.world.synchronize()

    def _release(self) -> None:
        for buffer in (self._signal, self._arrival, *self._buffers.values()):
            self.world.release(buffer.local)
        for tensor in (self._control, self._table, self._status):
            self.world.release(tensor)
        if self.trace_events:
            self.world.release(self.trace_buffer)
            del self.trace_buffer
        self._buffers.clear()
        self._contexts.clear()
        del self._signal, self._arrival, self._control, self._table, self._status
        del self._status_view

    @property
    def destroyed(self) -> bool:
        """Whether `destroy()` has been called."""
        return self._destroyed

    def __enter__(self: W) -> W:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self.destroy()
        elif not self._destroyed:
            # The peers may never come to a barrier, and may still write here: the memory stays.
            _ABANDONED.append(self)
            self._tell_of_exception(EXCEPTION)
            self._destroyed = True

    def _tell_of_exception(self, reason: int) -> None:
        """Peers that wait for this rank, now or later, hear that it does not come."""
        try:
            # Where ranks compare calls on the host it would have to wait for them.
            tells = self.world.fused and self.world.is_running()
            if tells and self._abort_error() is None:
                self.fault(reason, self.last_op)
        except Exception as error:
            # The exception that is on its way matters more: perhaps the device is lost.
            _LOG.warning("rank %d cannot tell its peers of an exception: %s", self.rank, error)

    def ensure_usable(self) -> None:
        """Raises WorkspaceError if the workspace is destroyed, or of another rank."""
        if self._destroyed:
            raise WorkspaceError("workspace: it is destroyed; create a new one on every rank")
        if self.world.rank != self.rank:
            raise WorkspaceError(
                f"workspace: it belongs to rank {self.rank}, got rank {self.world.rank}; "
                "every rank uses the one that it created"
            )

    # ------------------------------------------------------------------ calls

    def begin(self, op: str, call_hash: int, *, checks: bool = True) -> None:
        """Before a launch: raises what earlier calls left, orders calls on different streams.

        Not while a graph is captured: the captured calls have the order of the streams that they
        are captured on, and whoever replays them orders the replays against other calls.
        """
        self.ensure_usable()
        if checks:
            self.check()
        self.last_op = op
        self._last_hash = call_hash
        if self.world.is_capturing():
            # A capture must not wait for work outside it, nor later calls for a stream that only
            # captured.
            return
        stream = self.world.current_stream()
        if self._last_stream is not None and stream != self._last_stream:
            self.world.order_after(self._last_stream)
        self._last_stream = stream

    def check(self) -> None:
        """Raises if a call on this workspace was given up; costs one read of host memory.

        Raises:
            PeerTimeoutError: a peer did not come within the bound.
            PeerMismatchError: the ranks made different calls.
            PeerFaultError: a peer refused its call.
        """
        error = self._abort_error()
        if error is not None:
            raise error

    def _abort_error(self) -> PeerError | None:
        """What an abort that this rank's host can see makes of the workspace; None without one."""
        if self._error is None and not self._destroyed and self.world.fused:
            word = int(self._status_view[0])
            if word != 0:
                self._error = self._peer_error(word)
        return self._error

    def synchronize(self) -> None:
        """Waits for this rank's calls and raises what they left."""
        self.world.synchronize()
        self.check()

    def fault(self, reason: int, op: str) -> None:
        """Tells every peer that this rank will not make its call, so that nobody waits for it.

        The caller raises why.

        Nothing runs while a graph is captured, and nobody waits then: nothing is told.

        Args:
            reason: key of `peer_errors.FAULT_REASONS`.
            op: the call as error messages show it.
        """
        if self._destroyed or self.world.size == 1:
            return
        if self.world.rank != self.rank:
            return  # its words belong to another rank; nobody waits for this rank's call on it
        if self.world.is_capturing():
            return
        self.last_op = op
        if not self.world.fused:
            if self._error is None:
                self._error = self._compare_on_host(0, reason)
            return
        self._refused = True
        args = (self.context(), int(layout.FAULT.value), reason)
        key = ("fault", self.context_key)
        self.world.launch(fault_kernel, 1, args, key, num_warps=8, num_stages=1)

    def launch_failed(self, error: Exception) -> None:
        """Tells the peers, which wait for this rank's call, that an exception keeps it from coming.

        Args:
            error: what a launch raised, after `begin` or instead of it.
        """
        if not isinstance(error, PeerError):  # of that the peers know
            self._tell_of_exception(LAUNCH)

    def agree(self, op: str, call_hash: int) -> None:
        """Waits until every rank has made this same call.

        A declined call does this before it takes the reference path.

        Synchronizes: the host, except while a graph is captured.
        """
        self.begin(op, call_hash)
        if self.world.size == 1:
            return
        if not self.world.fused:
            self._error = self._compare_on_host(call_hash, 0)
            self.check()
            return
        self._launch_agree(call_hash)
        if not self.world.is_capturing():
            self.synchronize()

    def _compare_on_host(self, call_hash: int, reason: int) -> PeerError | None:
        """What the calls that all ranks now make mean, where no kernel runs that could compare."""
        calls = self.world.all_gather_object((call_hash, reason))
        return host_error(calls, self._reader())

    def _launch_agree(self, call_hash: int) -> None:
        args = (self.context(), call_hash)
        key = ("agree", self.context_key)
        self.world.launch(agree_kernel, 1, args, key, num_warps=8, num_stages=1)

    # ------------------------------------------------------------------ errors

    def _peer_error(self, word: int) -> PeerError:
        return peer_error(word, self._signal.local.cpu(), self._reader())

    def _reader(self) -> Reader:
        fused = self.world.fused
        return Reader(
            rank=self.world.rank,
            size=self.world.size,
            op=self.last_op,
            call_hash=self._last_hash,
            epoch=int(self._control[int(layout.EPOCH.value)].cpu()) if fused else 0,
            timeout_s=self.timeout_s,
            leave_timeout_s=self._leave_timeout_s,
            leaving=self._leaving,
        )


__all__ = [
    "DEFAULT_TIMEOUT_S",
    "LEAVE_TIMEOUT_S",
    "SPLIT_TICKETS",
    "Region",
    "Workspace",
    "control_sizes",
    "trace_num_words",
    "workspace_num_bytes",
]
