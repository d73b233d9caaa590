"""The plan of an operation: frozen numbers that a launch is made from."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from kosmos_heuristics.cap import MIN_CAP
from kosmos_heuristics.checks import check_choice, check_int, check_power_of_two
from kosmos_heuristics.errors import PlanError
from kosmos_heuristics.explain import Reason, format_reasons
from kosmos_heuristics.machine import TRANSPORTS

POLICIES = ("one_way", "two_way", "fixed", "serial")
ORDERS = ("local_first", "chunk_major", "naive")
# A mover's copy loop is written for at most so many steps in flight beyond the one it stores.
MAX_COPY_DEPTH = 2
# Partials are combined pair by pair, on at most three levels.
MAX_SPLIT_K = 8
_FIX = "change the override or leave the field to the rules"
_POWERS_OF_TWO = {
    "block_m": 16,
    "block_n": 16,
    "block_k": 16,
    "num_warps": 1,
    "tile_row_rows": 1,
    "slices": 1,
    "split_k": 1,
    "copy_elements": 1,
}
_CHOICES = {"transport": TRANSPORTS, "policy": POLICIES, "order": ORDERS}
_COUNTS = {
    "movers_per_peer": 0,
    "num_movers": 0,
    "num_stages": 1,
    "group_m": 1,
    "group_rows": 1,
    "split_tiles": 0,
    "claim_run": 1,
    "num_xcds": 1,
    "copy_depth": 1,
}
_MOST = {"copy_depth": MAX_COPY_DEPTH, "split_k": MAX_SPLIT_K}


def check_field(name: str, value: object) -> None:
    """Check a field of a plan by itself, without its relation to others.

    Raises:
        PlanError: The value is outside what the kernels accept.
    """
    if name in _CHOICES:
        check_choice(PlanError, name, value, _CHOICES[name], _FIX)
    elif name in _POWERS_OF_TWO:
        check_power_of_two(PlanError, name, value, _POWERS_OF_TWO[name], _FIX)
    elif name in _COUNTS:
        check_int(PlanError, name, value, _COUNTS[name], _FIX)
    elif name == "xcd_bucketing" and not isinstance(value, bool):
        raise PlanError(name, value, "a bool", _FIX)
    if name in _MOST and isinstance(value, int) and value > _MOST[name]:
        raise PlanError(name, value, f"at most {_MOST[name]}", _FIX)


@dataclass(frozen=True)
class AgGemmPlan:
    """Plan of one ``ag_gemm`` call. Equal plans are equal on every rank: ``str`` is canonical.

    Args:
        cap: WGs in the grid.
        movers_per_peer: Movers for each remote peer, 0 without peers.
        num_movers: WGs that start as movers, all peers together, at most half the cap. Below
            ``movers_per_peer`` times the peers only when not even one a peer fits.
        block_m: Rows of an output tile.
        block_n: Columns of an output tile.
        block_k: Contraction step.
        num_warps: Warps (NVIDIA) or waves (AMD) of a WG.
        num_stages: Depth of the software pipeline.
        tile_row_rows: Rows of a tile row, the unit at which gathered data is declared ready.
        slices: Mover units of a tile row; each is ``tile_row_rows / slices`` rows.
        group_m: Row blocks swept together per column in the local part of the tile queue.
        group_rows: Tile rows swept together per column in the remote part.
        split_k: Contraction splits of each of the last ``split_tiles`` tiles, a power of two up to
            8, combined pair by pair in fixed order.
        split_tiles: Tiles at the end of the queue that are split; 0 when ``split_k`` is 1.
        claim_run: Tiles claimed at once while the queue is deep.
        xcd_bucketing: Whether the tile queue is bucketed by XCD.
        num_xcds: XCDs to bucket by, 1 when ``xcd_bucketing`` is off.
        transport: ``pull`` or ``push``.
        policy: ``one_way``, ``two_way``, ``fixed`` or ``serial``.
        order: ``local_first``, ``chunk_major`` or ``naive``.
        copy_elements: Elements that a mover moves per step.
        copy_depth: Further steps whose loads a mover keeps in flight, 1 or 2.
        rule: The rule that set the crew.
        reasons: Rule and source of every field; not part of equality.

    Raises:
        PlanError: A field is outside what the kernels accept.
    """

    cap: int
    movers_per_peer: int
    num_movers: int
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    tile_row_rows: int
    slices: int
    group_m: int
    group_rows: int
    split_k: int
    split_tiles: int
    claim_run: int
    xcd_bucketing: bool
    num_xcds: int
    transport: str
    policy: str
    order: str
    copy_elements: int
    copy_depth: int
    rule: str
    reasons: tuple[Reason, ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        check_int(PlanError, "cap", self.cap, MIN_CAP, "leave at least one mover and one builder")
        for item in fields(self):
            check_field(item.name, getattr(self, item.name))
        self._check_relations()

    def _check_relations(self) -> None:
        if self.xcd_bucketing != (self.num_xcds > 1):
            wanted = "more than 1 with xcd_bucketing, 1 without"
            raise PlanError("num_xcds", self.num_xcds, wanted, "set both fields together")
        if (self.split_k == 1) != (self.split_tiles == 0):
            wanted = f"0 exactly when split_k ({self.split_k}) is 1"
            raise PlanError("split_tiles", self.split_tiles, wanted, "set both fields together")
        if self.num_movers > self.cap // 2:
            wanted = f"at most {self.cap // 2}, half the cap {self.cap}"
            raise PlanError("num_movers", self.num_movers, wanted, "lower it or raise the cap")
        if (self.num_movers == 0) != (self.movers_per_peer == 0):
            wanted = f"0 exactly when movers_per_peer ({self.movers_per_peer}) is 0"
            raise PlanError("num_movers", self.num_movers, wanted, _FIX)
        if self.tile_row_rows % self.block_m:
            wanted = f"a multiple of block_m {self.block_m}"
            raise PlanError("tile_row_rows", self.tile_row_rows, wanted, _FIX)
        if self.tile_row_rows % self.slices:
            wanted = f"a divisor of tile_row_rows {self.tile_row_rows}"
            raise PlanError("slices", self.slices, wanted, _FIX)

    @property
    def row_blocks_per_tile_row(self) -> int:
        """Row blocks of a tile row, ``tile_row_rows / block_m``."""
        return self.tile_row_rows // self.block_m

    def to_dict(self) -> dict[str, int | bool | str]:
        """All fields but the reasons, in order."""
        return {item.name: getattr(self, item.name) for item in fields(self) if item.compare}

    def __str__(self) -> str:
        """One line with every field."""
        return "ag_gemm " + " ".join(f"{name}={value}" for name, value in self.to_dict().items())

    def explain(self) -> str:
        """One line a field: its value, the rule that fired, and the rule's source."""
        values = [pair for pair in self.to_dict().items() if pair[0] != "rule"]
        return format_reasons(values, self.reasons)
