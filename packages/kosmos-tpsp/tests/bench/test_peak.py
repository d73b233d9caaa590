"""The measured peak of a transport."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kosmos_core.worlds import World, cpu_world
from kosmos_tpsp.bench import peak
from kosmos_tpsp.workspaces import TpSpWorkspace


class MadeUp:
    """A timer that runs the call once and says 2.5 ms."""

    def time(self, name: str, fn: Callable[[], object], warmup: int, calls: int) -> list[float]:
        fn()
        return [2.5] * calls


def test_the_peak_of_a_transport_counts_what_it_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    chunk, ranks = 2048, 3
    best = peak._best
    landed: dict[tuple[str, int], list[float]] = {}

    def watched(world: World, machine: Any, timer: Any, way: str, *rest: Any) -> float:
        rank = world.rank
        own, shared = memory[rank]
        own.fill_(10 + rank)
        shared.fill_(20 + rank)
        world.barrier()
        gbps = best(world, machine, timer, way, *rest)
        world.barrier()
        target = own if way == "pull" else shared
        landed[way, rank] = [float(part.float().mean()) for part in target.split(chunk)]
        world.barrier()
        return gbps

    def on_rank(rank: int, world: World) -> dict[str, float]:
        with TpSpWorkspace(world, 64, 64) as workspace:
            return peak.transport_peaks(
                world, workspace.machine, MadeUp(), chunk_elements=chunk, warmup=0, calls=1
            )

    monkeypatch.setattr(peak, "CREWS", (2,))
    monkeypatch.setattr(peak, "_best", watched)
    with cpu_world(ranks) as world:
        memory = note_memory(world, "peak own", "peak", monkeypatch)
        results = world.spmd(on_rank, world)
    gbps = pytest.approx(2 * chunk * 2 / (2.5 * 1e6))
    assert results == [{"pull": gbps, "push": gbps}] * ranks
    for rank in range(ranks):
        others = [p for p in range(ranks) if p != rank]
        # A slot for every peer; the own one stays as it was.
        pulled, pushed = landed["pull", rank], landed["push", rank]
        assert [pulled[p] for p in others] == [20 + p for p in others]
        assert [pushed[p] for p in others] == [10 + p for p in others]
        assert (pulled[rank], pushed[rank]) == (10 + rank, 20 + rank)


def note_memory(
    world: World, local: str, shared: str, monkeypatch: pytest.MonkeyPatch
) -> list[list[torch.Tensor]]:
    """By rank, the memory that it is about to allocate under two names."""
    noted: list[list[torch.Tensor]] = [[torch.empty(0)] * 2 for _ in range(world.size)]
    make_local, make_shared = world.local, world.symmetric

    def note_local(name: str, *rest: Any) -> torch.Tensor:
        made = make_local(name, *rest)
        if name == local:
            noted[world.rank][0] = made
        return made

    def note_shared(name: str, *rest: Any) -> Any:
        made = make_shared(name, *rest)
        if name == shared:
            noted[world.rank][1] = made.local
        return made

    monkeypatch.setattr(world, "local", note_local)
    monkeypatch.setattr(world, "symmetric", note_shared)
    return noted


def test_one_rank_has_no_transport() -> None:
    def on_rank(rank: int, world: World) -> dict[str, float]:
        with TpSpWorkspace(world, 64, 64) as workspace:
            return peak.transport_peaks(world, workspace.machine, MadeUp())

    with cpu_world(1) as world:
        assert world.spmd(on_rank, world) == [{}]
