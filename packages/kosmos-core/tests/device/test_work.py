"""Queues, roles, peers and copies."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from kosmos_core.device import roles
from kosmos_core.device.layout import MAX_RANKS, NUM_REGIONS
from kosmos_core.device.mover import copy_run, fill_nan
from kosmos_core.device.peers import peer_at, peer_ptr
from kosmos_core.device.queue import queue_claim
from kosmos_core.device.roles import is_builder_last, is_mover_first
from kosmos_core.executor import Executor, MemoryFault

Checked = Callable[..., Executor]


@triton.jit
def claim_kernel(head_ptr, owner_ptr, total):
    place = queue_claim(head_ptr)
    while place < total:
        tl.store(owner_ptr + place, tl.program_id(0))
        place = queue_claim(head_ptr)


@pytest.mark.parametrize("total", [0, 1, 40])
def test_every_index_is_claimed_once(total: int, checked: Checked) -> None:
    for seed in range(5):
        with checked(1, seed, start="random") as ex:
            head = ex.symmetric(1, torch.int32, "head")[0]
            owner = ex.tensor(0, torch.full((total + 1,), -1, dtype=torch.int32), "owner")
            claim_kernel[(4,)](head, owner, total)
            ex.run()
            assert int(head) == total + 4
            assert owner[total] == -1
            assert all(0 <= wg < 4 for wg in owner[:total].tolist())


class Arrived(NamedTuple):
    """What the role functions read of a call."""

    ticket: tl.tensor


@triton.jit
def roles_kernel(head_ptr, out_ptr, num_movers, POLICY: tl.constexpr):
    call = Arrived(queue_claim(head_ptr))
    moves = is_mover_first(call, num_movers)
    builds = is_builder_last(call, num_movers, POLICY)
    both = moves.to(tl.int32) + 2 * builds.to(tl.int32)
    tl.store(out_ptr + call.ticket, both)


@pytest.mark.parametrize(
    ("policy", "wanted"),
    [
        (roles.FIXED, [1, 1, 2, 2, 2]),
        (roles.ONE_WAY, [3, 3, 2, 2, 2]),
        (roles.TWO_WAY, [3, 3, 2, 2, 2]),
    ],
)
def test_the_first_to_arrive_move_whatever_their_ids(
    policy: tl.constexpr, wanted: list[int], checked: Checked
) -> None:
    for seed, start in enumerate(("ascending", "descending", "random")):
        with checked(1, seed, start=start, slots=2) as ex:
            head = ex.symmetric(1, torch.int32, "head")[0]
            out = ex.empty(0, 5, torch.int32, "out")
            roles_kernel[(5,)](head, out, 2, policy)
            ex.run()
            assert out.tolist() == wanted


class Table(NamedTuple):
    """What `peer_ptr` reads of a context."""

    table_ptr: tl.tensor


@triton.jit
def write_to_peers_kernel(table_ptr, rank, region, WORLD: tl.constexpr):
    ctx = Table(table_ptr)
    for step in range(WORLD):
        peer = peer_at(rank, step, WORLD)
        tl.store(peer_ptr(ctx, region, peer, tl.float32) + rank, (10.0 * rank + peer))


@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize("region", [0, 5])
def test_a_region_of_a_peer_is_reached_by_the_table(size: int, region: int) -> None:
    with Executor(size) as ex:
        regions = ex.symmetric(8, torch.float32, "region")
        table = torch.zeros(int(NUM_REGIONS.value), int(MAX_RANKS.value), dtype=torch.int64)
        table[region, :size] = torch.tensor([t.data_ptr() for t in regions])
        for rank in range(size):
            with ex.on(rank):
                own = ex.tensor(rank, table, "table")
                write_to_peers_kernel[(1,)](own, rank, region, size)
        ex.run()
        for peer, t in enumerate(regions):
            assert t[:size].tolist() == [10.0 * rank + peer for rank in range(size)]


@triton.jit
def peers_kernel(out_ptr, rank, first, WORLD: tl.constexpr):
    for i in range(2 * WORLD):
        tl.store(out_ptr + i, peer_at(rank, first + i, WORLD))


@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_steps_to_peers_go_round_both_ways(size: int) -> None:
    for rank in range(size):
        with Executor() as ex:
            out = ex.empty(0, 2 * size, torch.int32, "out")
            peers_kernel[(1,)](out, rank, -size, size)
            ex.run()
            assert out.tolist() == [(rank - size + i) % size for i in range(2 * size)]


@triton.jit
def copy_kernel(src_ptr, dst_ptr, count, BLOCK: tl.constexpr, DEPTH: tl.constexpr):
    copy_run(src_ptr, dst_ptr, count, BLOCK, DEPTH)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 32, 47, 48, 49, 200])
def test_a_run_is_copied_and_nothing_beside_it(count: int, depth: int) -> None:
    data = torch.randn(count, generator=torch.Generator().manual_seed(count)).bfloat16()
    with Executor() as ex:
        # Exactly as long as the run: a step beyond either end is a memory fault.
        src = ex.tensor(0, data, "src") if count else ex.empty(0, 1, torch.bfloat16, "src")
        dst = ex.empty(0, max(count, 1), torch.bfloat16, "dst")
        dst.fill_(-7)
        copy_kernel[(1,)](src, dst, count, 16, depth)
        ex.run()
        assert torch.equal(dst[:count], data)
        assert count > 0 or float(dst[0]) == -7


def test_a_copy_that_is_too_long_is_found() -> None:
    with Executor() as ex:
        src, dst = (ex.empty(0, n, torch.bfloat16, name) for n, name in ((64, "a"), (63, "b")))
        copy_kernel[(1,)](src, dst, 64, 16, 1)
        with pytest.raises(MemoryFault, match="b"):
            ex.run()


@triton.jit
def fill_kernel(dst_ptr, count, BLOCK: tl.constexpr):
    fill_nan(dst_ptr, count, BLOCK)


def test_a_run_is_filled_with_nan_and_nothing_beside_it() -> None:
    rng = random.Random(0)
    for _ in range(10):
        count = rng.randrange(70)
        with Executor() as ex:
            dst = ex.tensor(0, torch.ones(80).bfloat16(), "dst")
            fill_kernel[(1,)](dst, count, 16)
            ex.run()
            assert dst[:count].isnan().all()
            assert dst[count:].eq(1).all()
