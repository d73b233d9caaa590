"""The workspace of the TP+SP operations: sized for a maximum, shared by every layer of a group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, fields
from typing import Any

import torch
from kosmos_core.device import layout, sentinel
from kosmos_core.errors import WorkspaceError
from kosmos_core.workspace import (
    DEFAULT_TIMEOUT_S,
    SPLIT_TICKETS,
    Region,
    Workspace,
    workspace_num_bytes,
)
from kosmos_core.worlds import World
from kosmos_heuristics import Machine, load_machine

TRANSPORTS = ("pull", "push")
NO_PARTIALS = 4  # fp32 elements that stand for the partials where nothing is split


def _tile_rows(max_tokens: int, world_size: int, machine: Machine) -> int:
    chunk = -(-max_tokens // world_size)
    return max(1, -(-chunk // machine.tile_row_rows))


def _unpacked_elements(world_size: int, max_tokens: int, max_features: int) -> int:
    return -(-max_tokens // world_size) * world_size * max_features


def _reduce_transports(
    chosen: tuple[str, ...] | None, transports: tuple[str, ...], machine: Machine
) -> tuple[str, ...]:
    """The transports of reductions: those chosen, or what the machine's rules use."""
    if chosen is not None:
        return tuple(chosen)
    return ("pull", "push") if machine.transport == "pull" and "pull" in transports else ("push",)


def _regions(
    world_size: int,
    max_tokens: int,
    max_features: int,
    transports: tuple[str, ...],
    reduce_transports: tuple[str, ...],
    handover: bool,
) -> list[Region]:
    chunk = -(-max_tokens // world_size) * max_features if world_size > 1 else 8
    regions = [Region("gather", int(layout.GATHER.value), chunk * world_size, torch.bfloat16)]
    if handover and world_size > 1:
        # One copy: its owner overwrites it with its peers' starts held.
        row = int(layout.HANDOVER.value)
        regions.append(Region("handover", row, chunk * world_size, torch.bfloat16))
    if "pull" in transports:
        # Two-deep: the owner refills its shard before it holds its peers' starts.
        regions.insert(0, Region("shard", int(layout.SHARD.value), chunk, torch.bfloat16, depth=2))
    if "pull" in reduce_transports and world_size > 1:
        # Two-deep: poison must be older than the start word of the call that polls.
        staging = Region(
            "staging", int(layout.STAGING.value), chunk * world_size, torch.bfloat16, depth=2,
            poison=int(sentinel.SENTINEL.value),
        )  # fmt: skip
        regions.append(staging)
    return regions


@dataclass(frozen=True)
class _Settings:
    """What must be equal on all ranks: it decides where their words and rows lie."""

    kind: str
    max_tokens: int
    max_features: int
    transports: tuple[str, ...]
    reduce_transports: tuple[str, ...] | None
    handover: bool
    timeout_s: float
    first_epoch: int


def _check_sizes(
    world: World,
    max_tokens: int,
    max_features: int,
    transports: tuple[str, ...],
    reduce_transports: tuple[str, ...] | None,
    timeout_s: float,
    trace_events: int,
    first_epoch: int,
) -> None:
    for name, value, least in (
        ("max_tokens", max_tokens, 1),
        ("max_features", max_features, 1),
        ("trace_events", trace_events, 0),
        ("first_epoch", first_epoch, None),
    ):
        if not isinstance(value, int) or isinstance(value, bool):
            raise WorkspaceError(f"{name}: got {value!r}, wanted an integer")
        if least is not None and value < least:
            wanted = "a positive number" if least else "0 or more"
            raise WorkspaceError(f"{name}: got {value}, wanted {wanted}")
    for name, some in (("transports", transports), ("reduce_transports", reduce_transports)):
        if some is None and name == "reduce_transports":
            continue
        if not isinstance(some, (tuple, list)) or not some or set(some) - set(TRANSPORTS):
            raise WorkspaceError(f"{name}: got {some!r}, wanted some of {TRANSPORTS}")
    if not isinstance(timeout_s, (int, float)) or isinstance(timeout_s, bool):
        raise WorkspaceError(f"timeout_s: got {timeout_s!r}, wanted a number of seconds")
    if world.fused and world.num_wgs < 2:
        raise WorkspaceError(
            f"world: got {world.num_wgs} workgroups, wanted at least 2 (a mover beside a builder); "
            "reserve fewer SMs"
        )


def _agree(world: World, mine: _Settings, machine: dict[str, Any]) -> dict[str, Any]:
    """Rank 0's machine, once all ranks are seen to create the same workspace.

    Before any memory is shared: a rank with other sizes would write outside its peers' regions.

    Raises:
        WorkspaceError: a rank refused to create its workspace, or creates another one.
    """
    everybody = world.all_gather_object((mine, machine))
    for rank, theirs in enumerate(everybody):
        if isinstance(theirs, str):
            raise WorkspaceError(f"workspace: rank {rank} refused to create it: {theirs}")
    for field in fields(_Settings):
        ranks: dict[Any, list[int]] = {}
        for rank, (settings, _) in enumerate(everybody):
            ranks.setdefault(getattr(settings, field.name), []).append(rank)
        if len(ranks) > 1:
            found = ", ".join(f"{value!r} on ranks {where}" for value, where in ranks.items())
            raise WorkspaceError(f"{field.name}: got {found}, wanted the same on every rank")
    first: dict[str, Any] = everybody[0][1]
    return first


class TpSpWorkspace(Workspace):
    """Symmetric memory and words for the TP+SP operations of one group.

    Collective: every rank of the world creates, resets and destroys it together, with equal
    arguments.

    Args:
        world: where the ranks live.
        max_tokens: largest number of gathered rows m of any call.
        max_features: largest width k of a gathered row.
        transports: which transports gathers may use; "pull" needs a two-deep shard region.
        reduce_transports: which transports reductions (`gemm_rs`) may use; "pull" needs a two-deep
            staging region, 4 * max_tokens * max_features bytes. None takes "pull" only where the
            machine's rules do and `transports` has it, else "push", which costs nothing more.
        handover: keep a region for what `bulk_ag` hands to `bulk_rs` without a copy.
        machine: machine model that plans are made for; rank 0's is used by all. None takes the
            world's own.
        timeout_s: bound of every wait.
        trace_events: events a workgroup may record in all traced calls together, until
            `trace_buffer` is zeroed; with 0 they are refused.
        first_epoch: epoch of the first call.

    Raises:
        WorkspaceError: a size is not positive, a transport is unknown, or the ranks differ in
            anything but `machine` and `trace_events`; on every rank, before memory is shared.

    Attributes:
        launches: fused launches so far, by operation.
    """

    def __init__(
        self,
        world: World,
        max_tokens: int,
        max_features: int,
        *,
        transports: tuple[str, ...] = TRANSPORTS,
        reduce_transports: tuple[str, ...] | None = None,
        handover: bool = True,
        machine: Machine | str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        trace_events: int = 0,
        first_epoch: int = 1,
    ) -> None:
        try:
            _check_sizes(
                world, max_tokens, max_features, transports, reduce_transports, timeout_s,
                trace_events, first_epoch,
            )  # fmt: skip
            chosen = load_machine(machine if machine is not None else (world.machine or "executor"))
            mine = _Settings(
                kind=type(self).__name__,
                max_tokens=max_tokens,
                max_features=max_features,
                transports=tuple(sorted(set(transports))),
                reduce_transports=(
                    None if reduce_transports is None else tuple(sorted(set(reduce_transports)))
                ),
                handover=bool(handover),
                timeout_s=float(timeout_s),
                first_epoch=first_epoch,
            )
        except Exception as error:
            # Told before it is raised: the peers stand in this same collective.
            world.all_gather_object(str(error))
            raise
        # All ranks must decide alike, so all of them plan with rank 0's model.
        self.machine = Machine.from_dict(_agree(world, mine, chosen.to_dict()))
        self.max_tokens = max_tokens
        self.max_features = max_features
        self.transports = tuple(transports)
        self.reduce_transports = _reduce_transports(
            reduce_transports, self.transports, self.machine
        )
        self.prepared: dict[Hashable, Any] = {}
        self.launches: Counter[str] = Counter()
        self.partials: torch.Tensor | None = None
        self._outgrown: list[torch.Tensor] = []
        self._unpacked: list[torch.Tensor] = []
        self._calls_without_rows = 0
        super().__init__(
            world,
            _regions(
                world.size,
                max_tokens,
                max_features,
                self.transports,
                self.reduce_transports,
                handover,
            ),
            _tile_rows(max_tokens, world.size, self.machine),
            timeout_s=timeout_s,
            trace_events=trace_events,
            first_epoch=first_epoch,
        )
        row = int(layout.HANDOVER.value)
        has_one = world.fused and any(region.row == row for region in self.regions)
        self._handover = self.buffer(row) if has_one else None
        self._handed: torch.Tensor | None = None
        # Calls that split nothing pass it too, the first of them perhaps in a graph capture, where
        # nothing may be allocated.
        self.reserve_partials(1, 1, 0, 0)

    @staticmethod
    def required_bytes(
        world_size: int,
        max_tokens: int,
        max_features: int,
        machine: Machine | str,
        transports: tuple[str, ...] = TRANSPORTS,
        reduce_transports: tuple[str, ...] | None = None,
        handover: bool = True,
        mxfp8: int = 0,
    ) -> int:
        """Bytes a rank that a workspace of this size will take when it is created.

        mxfp8: with the room for so many copies of dequantised rows, which MXFP8 calls take: 1 for
        an `ag_gemm` that pushes or has no peers, 2 for `ag_gemm_pair`.

        Not in it: the trace buffer, and split-K partials, which come with the first call that
        splits and stay within the machine's `max_split_k_bytes` a call; `num_bytes()` counts both.
        """
        model = load_machine(machine)
        reduces = _reduce_transports(reduce_transports, transports, model)
        regions = _regions(world_size, max_tokens, max_features, transports, reduces, handover)
        return (
            workspace_num_bytes(regions, _tile_rows(max_tokens, world_size, model))
            + NO_PARTIALS * 4
            + 2 * mxfp8 * _unpacked_elements(world_size, max_tokens, max_features)
        )

    def reserve_partials(self, tiles: int, split_k: int, block_m: int, block_n: int) -> None:
        """Makes room for the FP32 partial tiles of split-K.

        Raises:
            WorkspaceError: more parts than there are tickets, or growth during graph capture.
        """
        if split_k > 1 and tiles * split_k > SPLIT_TICKETS:
            raise WorkspaceError(
                f"split_k: {tiles} tiles in {split_k} parts, wanted at most {SPLIT_TICKETS} parts; "
                "use split_k=1"
            )
        needed = tiles * split_k * block_m * block_n if split_k > 1 else NO_PARTIALS
        if split_k > 1 and 4 * needed > self.machine.max_split_k_bytes:
            raise WorkspaceError(
                f"split_k: {tiles} tiles in {split_k} parts take {4 * needed} bytes, wanted at "
                f"most {self.machine.max_split_k_bytes}; use a smaller split_k"
            )
        if self.partials is None or self.partials.numel() < needed:
            if self.world.is_capturing():
                raise WorkspaceError(
                    "split_k: the partials would be allocated during graph capture; prepare "
                    "the call first"
                )
            if self.partials is not None:
                # A captured graph may still replay on the smaller one.
                self._outgrown.append(self.partials)
            self.partials = self.world.local("partials", needed, torch.float32)

    def reserve_unpacked(self, copies: int = 1) -> None:
        """Makes room for gathered inputs that are dequantised beside where they land.

        Raises:
            WorkspaceError: it would be made during graph capture.
        """
        while len(self._unpacked) < copies:
            if self.world.is_capturing():
                raise WorkspaceError(
                    "workspace: room for dequantised rows would be allocated during graph capture; "
                    "prepare the call first"
                )
            elements = _unpacked_elements(self.world.size, self.max_tokens, self.max_features)
            name = f"unpacked{len(self._unpacked)}"
            self._unpacked.append(self.world.local(name, elements, torch.bfloat16))

    def unpacked(self, copy: int = 0) -> torch.Tensor:
        """Room for the dequantised rows of all ranks, bfloat16, that was reserved."""
        return self._unpacked[copy]

    def num_bytes(self) -> int:
        """Bytes that this workspace takes on each rank now, with what calls have made it take."""
        if not self.world.fused:
            return 0
        held = [t for t in (self.partials, *self._unpacked, *self._outgrown) if t is not None]
        return super().num_bytes() + sum(t.numel() * t.element_size() for t in held)

    @property
    def hands_over(self) -> bool:
        """Whether it has a handover region: not alone, not unfused, not if made without one."""
        return self._handover is not None

    def handover(self, rows: int, columns: int) -> torch.Tensor:
        """[rows, columns] bfloat16 that one call leaves here for the next to reduce over ranks.

        A view of symmetric memory, from its beginning, the same memory each time: `bulk_ag` writes
        it with every peer's start held, peers read it in place in a later call, under this rank's
        start of that call. The views before it then hold something else than they did, and
        `bulk_rs` takes them no more. Alone, or in the reference world, it is a new tensor.

        Raises:
            WorkspaceError: there is none, or it is too small.
        """
        if self.world.size == 1 or not self.world.fused:
            return torch.empty((rows, columns), dtype=torch.bfloat16, device=self.world.device)
        if self._handover is None or rows * columns > self._handover.numel():
            held = "none" if self._handover is None else f"{self._handover.numel()} elements"
            raise WorkspaceError(
                f"handover: got {held}, wanted room for [{rows}, {columns}]; create the workspace "
                "with handover=True and larger sizes on every rank"
            )
        self._handed = self._handover[: rows * columns].view(rows, columns)
        return self._handed

    def is_handover(self, t: torch.Tensor) -> bool:
        """Whether a tensor is the view that `handover` gave last."""
        return self._handed is not None and t is self._handed

    def in_handover(self, t: torch.Tensor) -> bool:
        """Whether a tensor begins in the memory that `handover` gives."""
        if self._handover is None or t.numel() == 0:
            return False
        begin = self._handover.data_ptr()
        return begin <= t.data_ptr() < begin + self._handover.nbytes

    def holds(self, t: torch.Tensor) -> bool:
        """Whether a tensor lies in the workspace's memory, where later calls may overwrite it."""
        if not self.world.fused:
            return False
        storage = t.untyped_storage().data_ptr()
        return any(
            self.buffer(region.row + copy).untyped_storage().data_ptr() == storage
            for region in self.regions
            for copy in range(region.depth)
        )

    def pass_over(self) -> None:
        """Stands for the launch of a call without rows, which has none.

        Raises:
            PeerError: an earlier call on the workspace was given up.
        """
        self.check()
        self._calls_without_rows += 1
        if not self.world.fused:
            # Where every call meets on the host anyway, a rank that alone has no rows is found now.
            self.agree("a call without rows", 0)

    def start_hash(self, call_hash: int) -> int:
        """What the ranks compare at the start of a launch, 31 bits.

        A call without rows takes no epoch. Were it without rows on one rank alone, every later
        call there would meet the one before it on its peers; the count makes the hashes differ.
        """
        # Odd, hence another value for every count; the golden ratio spreads the bits.
        return call_hash ^ (self._calls_without_rows * 0x9E3779B1 & 0x7FFFFFFF)

    def begin(self, op: str, call_hash: int, *, checks: bool = True) -> None:
        """Before a launch: raises what earlier calls left, orders calls on different streams."""
        if self._calls_without_rows:
            op = f"{op} (calls without rows before it: {self._calls_without_rows})"
        super().begin(op, call_hash, checks=checks)

    def reset(self) -> None:
        """Zeroes every word, poisons the staging region, and revives the workspace after an abort.

        Collective.
        """
        self._calls_without_rows = 0
        super().reset()

    def _release(self) -> None:
        super()._release()
        for tensor in (self.partials, *self._outgrown):
            if tensor is not None:
                self.world.release(tensor)

    def destroy(self) -> None:
        """Releases the memory, as `Workspace.destroy()` does, and what calls prepared.

        Collective and idempotent.
        """
        try:
            super().destroy()
        finally:
            # Only now: until the base class has synchronised, calls may still use the partials.
            self.prepared.clear()
            self.partials = None
            self._unpacked.clear()
            self._handover = self._handed = None
            self._outgrown.clear()
