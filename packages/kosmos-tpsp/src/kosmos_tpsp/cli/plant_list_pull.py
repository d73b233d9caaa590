"""Planted defects of pulled `gemm_rs`: partial sums that are polled in their data."""

from __future__ import annotations

from typing import Any

from kosmos_core.device import sentinel

from kosmos_tpsp.cli.plants import Plant
from kosmos_tpsp.device import staging
from kosmos_tpsp.kernels.gemm_rs import gemm_rs_kernel

RULE = "arrival in the data"
# The third call uses the half of the first one.
AGAIN = ((40, 40, 16),) * 4
# A half that a large call has filled is used again after a small one.
SHRINKING = ((8, 8, 16), (40, 40, 16), (8, 8, 16), (40, 40, 16))
HOLD = "standing = start_hold(ctx, call, standing, source, PHASE_REDUCE)"


def _plant(name: str, what: str, *edits: tuple[Any, str, str], **more: Any) -> Plant:
    shapes = more.pop("shapes", AGAIN)
    choices = {"transport": "pull", **more.pop("choices", {})}
    return Plant(
        f"rs_{name}", RULE, what, edits, shapes=shapes, choices=choices, op="gemm_rs", **more
    )


PULL_PLANTS = [
    _plant(
        "never_poisoned",
        "what a call has left in its half is not poisoned",
        (gemm_rs_kernel, "standing = poison_stale(ctx, call, standing, stage, CONFIG)", "pass"),
    ),
    _plant(
        "poisoned_before_starts",
        "a half is poisoned while peers may still poll it",
        (
            staging.poison_stale,
            "standing = start_hold_all(ctx, call, standing, PHASE_REDUCE)",
            "pass",
        ),
        ranks=3,
    ),
    _plant(
        "own_half_poisoned",
        "the half that this call fills is poisoned",
        (staging.poison_stale, "STAGING + 1 - stage.half", "STAGING + stage.half"),
    ),
    _plant(
        "other_half_polled",
        "movers poll the half that the call before has filled",
        (staging.pull_unit, "STAGING + stage.half", "STAGING + 1 - stage.half"),
    ),
    _plant(
        "half_by_epoch",
        "the half goes by the epoch, which other launches advance too",
        (staging.stage_enter, "half = turn & 1", "half = tl.load(ctx.control_ptr) & 1"),
        choices={"policy": "serial"},
    ),
    _plant(
        "extent_of_an_earlier_call",
        "as much is poisoned as the call before the last one has filled",
        (staging.stage_enter, "STAGE_EXTENT + 1 - half", "STAGE_EXTENT + half"),
        shapes=SHRINKING,
    ),
    _plant(
        "own_rows_poisoned",
        "only as much is poisoned as one owner's rows take",
        (staging.stage_leave, "m.to(tl.int64)", "(m // ctx.WORLD).to(tl.int64)"),
    ),
    _plant(
        "one_half",
        "all calls use the same half",
        (staging.stage_leave, "stage.turn + 1", "stage.turn"),
    ),
    _plant(
        "turn_passed_on_early",
        "the first workgroup passes the turn on, and the last ones take it for theirs",
        (gemm_rs_kernel, "if last:", "if call.ticket == 0:"),
    ),
    _plant(
        "polled_before_start",
        "movers poll peers that may not have poisoned the half yet",
        (staging.pull_unit, HOLD, "pass"),
        ranks=3,
    ),
    _plant(
        "looked_at_before_start",
        "two-way: a mover looks at a peer whose start it does not hold",
        (staging.num_late, HOLD, "pass"),
        choices={"policy": "two_way"},
        ranks=3,
        seeds=tuple(range(1, 9)),
    ),
    _plant(
        "first_start_of_a_group",
        "of the ranks that are polled together only the first one's start is held",
        (staging.pull_unit, "range(0, CONFIG.SOURCE_UNROLL)", "range(0, 1)"),
        ranks=3,
    ),
    _plant(
        "polled_plainly",
        "data is polled by ordinary loads",
        (sentinel.data_poll, "other=0, volatile=True)", "other=0)"),
    ),
    _plant(
        "staged_after_abort",
        "tiles are stored although the call is aborted, over what peers may still read",
        (
            staging.stage_tile,
            "tl.where(standing.ok != 0, tile.row_block * CONFIG.BLOCK_M, job.grid.chunk_rows)",
            "tile.row_block * CONFIG.BLOCK_M",
        ),
        trouble="expiry",
        ranks=3,
    ),
    _plant(
        "poisoned_after_abort",
        "a half is poisoned although the call is aborted and peers may still poll it",
        (staging.poison_stale, "if standing.ok != 0:", "if standing.ok >= 0:"),
        trouble="expiry",
        ranks=3,
    ),
]
