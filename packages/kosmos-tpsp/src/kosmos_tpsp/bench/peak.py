"""The best rate of each transport, measured in the same run as what is judged by it."""

from __future__ import annotations

import itertools
import statistics

import torch
from kosmos_core.device.layout import MAX_RANKS
from kosmos_core.kernels.measure import Routes, copy_kernel
from kosmos_core.testing.bench import Timer
from kosmos_core.worlds import World
from kosmos_heuristics import Machine
from kosmos_heuristics.tiles import choose_copy_depth

# 256 MiB from each peer: long enough that a launch does not show.
CHUNK_ELEMENTS = 1 << 27
# Movers past which no measured machine gets faster; the curve falls a little beyond its peak.
CREWS = (16, 32, 48, 64, 96, 128)
# What a mover claims at once.
UNIT_ELEMENTS = 1 << 17
_HEADS = 256


def transport_peaks(
    world: World,
    machine: Machine,
    timer: Timer,
    *,
    chunk_elements: int = CHUNK_ELEMENTS,
    warmup: int = 3,
    calls: int = 8,
) -> dict[str, float]:
    """GB/s into a rank, pulling from all peers at once and pushing to them, with the best crew.

    Args:
        world: the ranks; a group of one has no transport and gets no figures.
        machine: how its movers copy.
        timer: measures.
        chunk_elements: bfloat16 elements from each peer.
        warmup: calls before the clock starts.
        calls: timed calls a crew.

    Communication: every rank reads and writes every peer's memory. Collective.
    """
    if world.size == 1:
        return {}
    shared = world.symmetric("peak", world.size * chunk_elements, torch.bfloat16)
    shared.local.zero_()
    own = world.local("peak own", world.size * chunk_elements, torch.bfloat16)
    own.fill_(1)
    world.barrier()
    offset = world.rank * chunk_elements * 2
    peers = [(world.rank + step) % world.size for step in range(1, world.size)]
    there = [shared.addresses[peer] + offset for peer in peers]
    here = [own.data_ptr() + peer * chunk_elements * 2 for peer in peers]
    peaks = {
        "pull": _best(world, machine, timer, "pull", there, here, chunk_elements, warmup, calls),
        "push": _best(world, machine, timer, "push", here, there, chunk_elements, warmup, calls),
    }
    # Peers may still be writing into this rank's memory.
    world.barrier()
    return peaks


def _best(
    world: World,
    machine: Machine,
    timer: Timer,
    transport: str,
    sources: list[int],
    targets: list[int],
    chunk_elements: int,
    warmup: int,
    calls: int,
) -> float:
    table = torch.zeros(2, int(MAX_RANKS.value), dtype=torch.int64)
    table[0, : len(sources)] = torch.tensor(sources)
    table[1, : len(targets)] = torch.tensor(targets)
    on_device = world.local("peak table", table.numel(), torch.int64)
    on_device.copy_(table.flatten())
    block = machine.transport_named(transport).copy_bytes // 2
    unit = min(UNIT_ELEMENTS, chunk_elements)
    units = chunk_elements // unit * len(sources)
    depth, _ = choose_copy_depth(machine, transport, "bf16")
    # A queue head for every call, zeroed ahead: zeroing one is no part of the transport.
    heads = world.local("peak heads", 4 * _HEADS, torch.int32)
    crews = [crew for crew in CREWS if crew < world.num_wgs] + [world.num_wgs]
    best = 0.0
    for crew in crews:
        heads.zero_()
        places = itertools.cycle(range(_HEADS))

        def call(crew: int = crew, places: itertools.cycle[int] = places) -> None:
            head = heads[4 * next(places) :]
            args = (Routes(on_device), head, len(sources), units, unit, block, depth)
            key = ("transport peak", unit, block, depth)
            world.launch(copy_kernel, crew, args, key, num_warps=8, num_stages=1)

        ms = statistics.median(timer.time(f"{transport} by {crew}", call, warmup, calls))
        best = max(best, units * unit * 2 / (ms * 1e6))
    return best
