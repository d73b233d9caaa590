"""Fitting crews to the cap: every mover runs beside at least one builder."""

from __future__ import annotations

from kosmos_heuristics.checks import check_int
from kosmos_heuristics.errors import PlanError

MIN_CAP = 2


def resolve_cap(cap: int | None, num_wgs: int) -> int:
    """WGs in the grid: the caller's cap, never more than what is resident.

    Raises:
        PlanError: The cap is below 2, so that no mover would have a builder beside it.
    """
    if cap is None:
        return num_wgs
    check_int(PlanError, "cap", cap, MIN_CAP, "leave at least one mover and one builder")
    return min(cap, num_wgs)


def fit_movers(movers_per_peer: int, num_peers: int, cap: int) -> tuple[int, int]:
    """Fit a crew to a cap: the per-peer count is lowered until all movers fit in half the cap.

    When not even one mover per peer fits, the movers share the peers: they claim units of all peers
    from one queue, so any number of at least one serves any number of peers.

    Args:
        movers_per_peer: What the rule asks for, at least 1.
        num_peers: Remote ranks.
        cap: WGs in the grid, at least 2.

    Returns:
        ``(movers_per_peer, num_movers)``; ``(0, 0)`` without peers.

    Source: paper Table B.3, caption.
    """
    if num_peers == 0:
        return 0, 0
    most = cap // 2
    fitted = max(1, min(movers_per_peer, most // num_peers))
    return fitted, min(fitted * num_peers, most)
