"""The arguments of `check`, validated before any world is made."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

import click
from kosmos_core.arguments import Rejected
from kosmos_core.errors import KosmosError
from kosmos_core.testing.worlds import world_size

from kosmos_moe.cli.calls import ROUTINGS, Call
from kosmos_moe.ops.options import MoeOptions
from kosmos_moe.router import RouterOptions

DEFAULT_SCHEDULES = 3
GRANULE = 8  # elements of a row of 16 bytes


@dataclass(frozen=True)
class Request:
    """What `check` is asked for; the fields are its options.

    Raises:
        click.UsageError: an argument is out of range; names it, what it got and what it wanted.
    """

    world: str
    tokens: str
    hidden: int
    inter: int
    experts: int
    topk: int
    score: str
    after_topk: bool
    normalize: bool
    scaling: float
    groups: int
    group_topk: int
    aux: float
    z: float
    bias: bool
    padding: bool
    shared: int
    routing: str
    capacity: float | None
    switching: str
    transport: str
    push_order: str
    cap: int | None
    calls: int
    delay: bool
    kill_rank: int | None
    seed: int
    schedules: int | None
    direction: str

    def __post_init__(self) -> None:
        for name, value, least in (
            ("hidden", self.hidden, 1),
            ("inter", self.inter, 1),
            ("calls", self.calls, 1),
            ("schedules", self.num_schedules, 1),
            ("seed", self.seed, 0),
            ("shared", self.shared, 0),
        ):
            if value < least:
                raise click.UsageError(f"{name}: got {value}, wanted at least {least}")
        if self.kill_rank is not None and not 0 <= self.kill_rank < self.size:
            raise click.UsageError(f"kill-rank: got {self.kill_rank}, wanted 0 to {self.size - 1}")
        if self.kill_rank is not None and self.size == 1:
            raise click.UsageError("kill-rank: a group of one has no peers; use two ranks or more")
        if re.match("zipf:", self.routing):
            try:
                float(self.routing.partition(":")[2])
            except ValueError:
                raise click.UsageError(
                    f"routing: got {self.routing}, wanted a number after zipf:"
                ) from None
        elif self.routing not in ROUTINGS and not os.path.exists(self.routing):
            raise click.UsageError(
                f"routing: got {self.routing}, wanted {', '.join(ROUTINGS)}, zipf:A or a file"
            )
        try:
            self.router.check_experts(self.experts, self.size)
            self.options.check()
        except (KosmosError, Rejected) as error:
            raise click.UsageError(str(error)) from error
        _ = self.all_tokens

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
    def all_tokens(self) -> tuple[int, ...]:
        """Tokens of each rank; one number stands for all.

        Raises:
            click.UsageError: they are no numbers, or not one for each rank.
        """
        parts = self.tokens.split(",")
        if not all(part.isdecimal() for part in parts) or len(parts) not in (1, self.size):
            raise click.UsageError(
                f"tokens: got {self.tokens}, wanted one number, or {self.size} with commas between"
            )
        return tuple(int(part) for part in parts) * (self.size if len(parts) == 1 else 1)

    @property
    def num_schedules(self) -> int:
        """Runs: schedules on the executor, repetitions elsewhere."""
        if self.schedules is not None:
            return self.schedules
        return DEFAULT_SCHEDULES if self.kind == "cpu" else 1

    @property
    def router(self) -> RouterOptions:
        """Options of the router."""
        return RouterOptions(
            self.topk, score=self.score, score_first=not self.after_topk, normalize=self.normalize,
            scaling=self.scaling, groups=self.groups, group_topk=self.group_topk,
            aux_coefficient=self.aux, z_coefficient=self.z,
            forced="uniform" if self.routing == "uniform" else None,
        )  # fmt: skip

    @property
    def options(self) -> MoeOptions:
        """Choices of every call."""
        return MoeOptions(
            cap=self.cap,
            policy=self.switching,
            transport=self.transport,
            order=self.push_order,
            save=self.direction != "fwd",
        )

    def sequence(self) -> list[Call]:
        """The layer on fresh data, between calls of a smaller and odd one, then again.

        Tokens move on by one rank from call to call.
        """
        shared = self.shared * self.inter
        calls: list[Call] = []
        for data in range(self.calls):
            wanted = Call(
                self._moved(data), self.hidden, self.inter, self.experts, self.router, shared,
                self.routing, self.bias, self.padding, data, self.options,
            )  # fmt: skip
            calls.append(wanted)
            if self.routing in ROUTINGS:
                odd: dict[str, Any] = {
                    "tokens": tuple(t * 2 // 3 for t in self._moved(data + 1)),
                    "hidden": _odd(self.hidden),
                    "inter": _odd(self.inter),
                    "shared_inter": _odd(shared) if shared else 0,
                }
                calls.append(Call(**{**wanted.__dict__, **odd}))
        return [*calls, *calls[:2][::-1]]

    def _moved(self, steps: int) -> tuple[int, ...]:
        if self.routing not in ROUTINGS:
            return self.all_tokens  # a file says how many each rank has
        steps %= self.size
        return self.all_tokens[steps:] + self.all_tokens[:steps]


def _odd(width: int) -> int:
    """An odd multiple of `GRANULE`, about two thirds of a width."""
    return max(1, (width * 2 // 3 // GRANULE - 1) | 1) * GRANULE
