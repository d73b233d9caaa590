"""The arguments of `check`, validated before any world is made."""

from __future__ import annotations

from dataclasses import dataclass

import click
from kosmos_core.testing.worlds import world_size

from kosmos_tpsp.ops.catalog import DRIVERS, Shape
from kosmos_tpsp.ops.mx import INSTALL, has_mx

DEFAULT_SCHEDULES = 3


@dataclass(frozen=True)
class Request:
    """What `check` is asked for; the fields are its options.

    Raises:
        click.UsageError: an argument is out of range; names it, what it got and what it wanted.
    """

    op: str
    world: str
    m: int
    n: int
    k: int
    dtype: str
    block_scaled: bool
    layout: str | None
    policy: str
    order: str | None
    transport: str | None
    cap: int | None
    seed: int
    schedules: int | None
    calls: int
    delay: bool
    kill_rank: int | None
    allow_decline: bool

    def __post_init__(self) -> None:
        size = self.size
        for name, value, least in (
            *((name, getattr(self, name), int(name != DRIVERS[self.op].tokens)) for name in "mnk"),
            ("calls", self.calls, 1),
            ("schedules", self.num_schedules, 1),
            ("seed", self.seed, 0),
        ):
            if value < least:
                raise click.UsageError(f"{name}: got {value}, wanted at least {least}")
        tokens = DRIVERS[self.op].num_tokens(self.shape)
        granule = DRIVERS[self.op].granule(self.dtype)
        if tokens % (size * granule):
            more = tokens + size * granule - tokens % (size * granule)
            groups = "" if granule == 1 else f" times {granule}, as its groups lie along the tokens"
            raise click.UsageError(
                f"{DRIVERS[self.op].tokens}: got {tokens}, wanted a multiple of the {size} ranks"
                f"{groups}; pad to {more} rows"
            )
        if self.cap is not None and self.cap < 2:
            raise click.UsageError(
                f"cap: got {self.cap}, wanted at least 2 (a mover beside a builder)"
            )
        self._check_op()
        if self.block_scaled and self.dtype != "mxfp8":
            raise click.UsageError("block-scaled: got it with bf16 operands; add --dtype mxfp8")
        if self.block_scaled and not hasattr(DRIVERS[self.op].options, "block_scaled"):
            raise click.UsageError(f"block-scaled: {self.op} has no such choice")
        if self.dtype == "mxfp8" and not has_mx():
            raise click.UsageError(f"dtype: got mxfp8, which needs kosmos-mx; {INSTALL}")
        self._check_kill(size)

    def _check_op(self) -> None:
        driver = DRIVERS[self.op]
        for name, value, allowed in (
            ("dtype", self.dtype, driver.dtypes),
            ("order", self.order, driver.orders),
            ("transport", self.transport, driver.transports),
            ("layout", self.layout, driver.layouts),
        ):
            if value is not None and value not in allowed:
                wanted = f"one of {', '.join(allowed)}" if allowed else "none: there is no choice"
                raise click.UsageError(f"{name}: got {value} for {self.op}, wanted {wanted}")

    def _check_kill(self, size: int) -> None:
        if self.kill_rank is None:
            return
        if size == 1:
            raise click.UsageError("kill-rank: a group of one has no peers; use two ranks or more")
        if not 0 <= self.kill_rank < size:
            raise click.UsageError(f"kill-rank: got {self.kill_rank}, wanted 0 to {size - 1}")
        driver = DRIVERS[self.op]
        if driver.num_tokens(self.shape) == 0:
            raise click.UsageError(
                f"kill-rank: {driver.tokens} is 0, so that no call waits; use a positive one"
            )

    @property
    def shape(self) -> Shape:
        """(m, n, k)."""
        return self.m, self.n, self.k

    @property
    def kind(self) -> str:
        """Kind of world: "cpu", "gpu" or "group"."""
        return self.world.partition(":")[0]

    @property
    def size(self) -> int:
        """Ranks of the world.

        Raises:
            click.UsageError: the world's name is none, or `group` without torchrun.
        """
        return world_size(self.world)

    @property
    def num_schedules(self) -> int:
        """Runs: schedules on the executor, repetitions elsewhere."""
        if self.schedules is not None:
            return self.schedules
        return DEFAULT_SCHEDULES if self.kind == "cpu" else 1
