"""What a doctor's visit found, as data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class WorldReport:
    """Whether the ranks of a group can live in a world here.

    Attributes:
        name: as `kosmos_core.worlds.parse_world` takes it.
        possible: whether they can.
        detail: what was tried and found, or why not.
        command: a command to try; empty where the world is not possible.
    """

    name: str
    possible: bool
    detail: str
    command: str = ""


@dataclass
class Report:
    """All that `examine` found; `faults` maps each probe that failed to its reason."""

    versions: dict[str, str] = field(default_factory=dict)
    gpus: list[dict[str, Any]] = field(default_factory=list)
    peer_access: list[list[bool]] = field(default_factory=list)
    link_gbps: list[list[float | None]] = field(default_factory=list)
    symmetric_memory: dict[str, Any] = field(default_factory=dict)
    multicast: dict[str, str] = field(default_factory=dict)
    worlds: list[WorldReport] = field(default_factory=list)
    faults: dict[str, str] = field(default_factory=dict)

    @property
    def can_run(self) -> bool:
        """Whether at least one world is possible."""
        return any(world.possible for world in self.worlds)

    def as_dict(self) -> dict[str, Any]:
        """The report as plain JSON types."""
        return {**asdict(self), "can_run": self.can_run}
