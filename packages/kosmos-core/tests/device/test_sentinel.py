"""Data that carries its own arrival, in the executor and in the compilers' output."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from kosmos_core.device.barrier import call_enter, call_leave, start_hold, start_publish
from kosmos_core.device.layout import GATHER, PHASE_REDUCE, Context
from kosmos_core.device.peers import peer_ptr
from kosmos_core.device.sentinel import SENTINEL, data_add, poison, result_bits
from kosmos_core.errors import PeerTimeoutError
from kosmos_core.executor import DataRace, Random
from kosmos_core.testing.compile_guard import CompileCase, Expectations, run_cases
from kosmos_core.workspace import Region, Workspace
from kosmos_core.worlds import cpu_world

ROWS, COLS = 8, 16
PATTERN = int(SENTINEL.value)


@triton.jit(do_not_specialize=["call_hash"])
def exchange_kernel(
    x_ptr,
    out_ptr,
    ctx,
    call_hash,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    SENDS: tl.constexpr,
    SOURCES: tl.constexpr,
):
    """One workgroup a rank: stores its tile at home, then adds up those of all ranks."""
    call, standing = call_enter(ctx, call_hash)
    start_publish(ctx, call)
    offsets = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    if SENDS & (standing.ok != 0):
        bits = result_bits(tl.load(x_ptr + offsets))
        tl.store(peer_ptr(ctx, GATHER, call.rank, tl.int16) + offsets, bits)
    total = tl.zeros([ROWS, COLS], tl.float32)
    ok = standing.ok
    for first in range(0, ctx.WORLD, SOURCES):
        for source in range(first, tl.minimum(first + SOURCES, ctx.WORLD)):
            standing = start_hold(ctx, call, standing, source, PHASE_REDUCE)
        total, here = data_add(
            ctx, call, GATHER, first, 0, offsets, offsets >= 0, total, 5, PHASE_REDUCE, SOURCES
        )
        ok = tl.minimum(ok, here)
    if ok != 0:
        tl.store(out_ptr + offsets, total.to(tl.bfloat16))
    call_leave(ctx, call, standing)


@triton.jit
def poison_kernel(ptr, num_elements, BLOCK: tl.constexpr):
    poison(ptr, num_elements, BLOCK)


def exchange(world, rank, x, *, sends=True, poisons=True, timeout_s=120.0, sources=2):
    region = Region("gather", int(GATHER.value), ROWS * COLS, torch.int16)
    workspace = Workspace(world, [region], 1, timeout_s=timeout_s)
    own = workspace.buffer(int(GATHER.value))
    world.executor.sentinel(own, PATTERN)
    if poisons:
        world.launch(poison_kernel, 1, (own, own.numel(), 32), None, num_warps=1, num_stages=1)
    else:
        # Fresh memory may be another test's, which has left poison in it.
        own.zero_()
    world.barrier()
    out = torch.zeros(ROWS, COLS, dtype=torch.bfloat16)
    workspace.begin("exchange", 7)
    args = (x, out, workspace.context(), 7, ROWS, COLS, sends, sources)
    world.launch(exchange_kernel, 1, args, None, num_warps=1, num_stages=1)
    workspace.synchronize()
    return out


def tile(rank: int) -> torch.Tensor:
    x = torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(rank))
    x[0, :4] = torch.tensor([float("nan"), float("inf"), float("inf"), 0.0])
    # The sentinel's own bits as a user's NaN: it must not look like missing data.
    x[1, 0] = torch.tensor([PATTERN << 16], dtype=torch.int32).view(torch.float32)[0]
    return x


def added(world_size: int) -> torch.Tensor:
    """In rank order in fp32, each tile rounded once, and the sum."""
    total = torch.zeros(ROWS, COLS)
    for rank in range(world_size):
        total += tile(rank).bfloat16().float()
    return total.bfloat16()


@pytest.mark.parametrize("vendor", ["nvidia", "amd"])
@pytest.mark.parametrize(("world_size", "sources"), [(2, 2), (3, 2), (4, 4), (3, 1)])
def test_polled_data_arrives_whole(world_size, sources, vendor):
    for seed in range(5):
        checks = {"weak": "random", "stale": True, "race": "raise", "strict": True, "seed": seed}
        with cpu_world(world_size, vendor=vendor, policy=Random(seed), **checks) as world:
            outs = world.spmd(lambda rank, w=world: exchange(w, rank, tile(rank), sources=sources))
        for out in outs:
            assert right(out, added(world_size))


def test_data_that_never_comes_ends_at_the_bound_with_a_name():
    def host(rank, world):
        with pytest.raises(PeerTimeoutError) as caught:
            exchange(world, rank, tile(rank), sends=rank != 1, timeout_s=0.5)
        return caught.value

    with cpu_world(3) as world:
        errors = world.spmd(host, world)
    for error in errors:
        assert (error.flag, error.phase, error.seen) == ("data", "reduce", ROWS * COLS)
        assert error.peer == 1


def right(out: torch.Tensor, wanted: torch.Tensor) -> bool:
    there = ~wanted.isnan()
    return torch.equal(out.isnan(), wanted.isnan()) and torch.equal(out[there], wanted[there])


def test_a_poll_without_poison_is_found_out():
    checks = {"race": "raise", "strict": True, "weak": "late", "stale": True}
    try:
        with cpu_world(2, **checks) as world:
            outs = world.spmd(lambda rank, w=world: exchange(w, rank, tile(rank), poisons=False))
    except DataRace:
        return
    assert not all(right(out, added(2)) for out in outs)


@pytest.mark.compile
@pytest.mark.parametrize("target", ["sm_90", "gfx950"])
def test_polls_stay_polls_in_the_assembly(target):
    vendor = 1 if target.startswith("gfx") else 0
    constants = (2, 2048, 1024, 32, vendor, 0)
    case = CompileCase(
        name="sentinel exchange",
        kernel=exchange_kernel,
        signature={
            "x_ptr": "*fp32",
            "out_ptr": "*bf16",
            "ctx": Context("*i64", "*i32", "*i64", "*i64", *map(tl.constexpr, constants)),
            "call_hash": "i32",
        },
        constexprs={"ROWS": 16, "COLS": 256, "SENDS": True, "SOURCES": 2},
        divisible_by_16=("x_ptr", "out_ptr", "ctx.table_ptr", "ctx.control_ptr"),
        target=target,
        options={"num_warps": 8, "num_stages": 1},
        expect=Expectations(volatile_load=2, release_sys=1, acquire_sys=1),
    )
    result = run_cases([case], jobs=1)
    assert result.passed, result.reports[0].reasons
