"""Latency of flags and launches, and the order in which workgroups start."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from kosmos_core.device.barrier import agree_kernel
from kosmos_core.kernels.measure import (
    empty_kernel,
    local_ping_pong_kernel,
    ping_pong_kernel,
    start_order_kernel,
)
from kosmos_core.measure.budget import Budget
from kosmos_core.measure.timing import Timer, figures, slowest
from kosmos_core.workspace import Workspace
from kosmos_core.worlds.base import World

WAIT_BOUND_S = 10.0
NUM_WARPS = 8
CALL_HASH = 1
# Workgroups of the oversubscribed grid: 512 threads, so that no more than 4 share an SM.
OVERSUBSCRIBED_WARPS = 16
HOLD_NS = 20_000
# Uneven work: a workgroup stays for 1 to 8 times HOLD_NS.
UNEVEN = 8
LAUNCHES = 200
NUM_POINTS = 6


def measure_latency(
    world: World, timer: Timer, budget: Budget, tick: Callable[[str], None]
) -> dict[str, Any]:
    """Flags between ranks and between workgroups, empty launches, start order. Collective.

    Returns:
        The keys flag_latency_us (None in a group of one), launch_us (an empty call with the
        protocol of fused kernels: arrival, start words, last to leave), "latency", "start_order".

    Raises:
        PeerTimeoutError: a flag did not come within WAIT_BOUND_S.
    """
    with Workspace(world, (), 1, timeout_s=WAIT_BOUND_S) as workspace:
        tick("flags between workgroups")
        local_us = _local_flags_us(workspace, budget)
        flag_us = None
        if world.size > 1:
            tick("flags between ranks")
            flag_us = _flags_us(workspace, budget)
        tick("empty call")
        call_us = _call_us(workspace, timer, budget)
        workspace.synchronize()
    tick("empty launches")
    word = world.local("word", 32, torch.int32)
    kernel_us = 1e3 * timer.median(
        lambda: _launch_empty(world, word), warmup=budget.warmup, repeats=3 * budget.repeats
    )
    host_us, round_trip_us = _host_us(world, word)
    tick("start order")
    order = {
        "persistent": start_order(world, world.num_wgs, NUM_WARPS, 1),
        "oversubscribed": start_order(
            world, budget.oversubscribed_wgs, OVERSUBSCRIBED_WARPS, UNEVEN
        ),
    }
    return {
        "flag_latency_us": None if flag_us is None else figures(flag_us),
        "launch_us": figures(call_us),
        "latency": {
            "local_flag_us": figures(local_us),
            "empty_kernel_us": figures(kernel_us),
            "host_launch_us": figures(host_us),
            "launch_and_wait_us": figures(round_trip_us),
        },
        "start_order": order,
    }


def partner_of(rank: int, size: int) -> int:
    """Ranks play in pairs (0, 1), (2, 3), ...; a last rank without a partner is its own."""
    partner = rank ^ 1
    return partner if partner < size else rank


def _flags_us(workspace: Workspace, budget: Budget) -> float:
    """Half a round trip of a flag between two ranks, microseconds, of the slowest pair."""
    world = workspace.world
    elapsed = world.local("elapsed", 1, torch.int64)
    partner = partner_of(world.rank, world.size)
    rounds = budget.flag_rounds
    times = []
    for _ in range(budget.warmup + budget.repeats):
        elapsed.zero_()
        workspace.begin("ping pong", CALL_HASH)
        args = (workspace.context(), elapsed, partner, rounds, CALL_HASH)
        key = ("ping pong", workspace.context_key)
        world.launch(ping_pong_kernel, 1, args, key, num_warps=NUM_WARPS, num_stages=1)
        workspace.synchronize()
        times.append(int(elapsed.cpu()) / 2e3 / rounds)
    return statistics.median(slowest(world, times[budget.warmup :]))


def _local_flags_us(workspace: Workspace, budget: Budget) -> float:
    """Half a round trip of a flag between two workgroups of this rank, microseconds."""
    world = workspace.world
    elapsed = world.local("elapsed", 1, torch.int64)
    times = []
    for _ in range(budget.warmup + budget.repeats):
        workspace.begin("local ping pong", CALL_HASH)
        args = (workspace.context(), elapsed, budget.flag_rounds, CALL_HASH)
        key = ("local ping pong", workspace.context_key)
        world.launch(local_ping_pong_kernel, 2, args, key, num_warps=NUM_WARPS, num_stages=1)
        workspace.synchronize()
        times.append(int(elapsed.cpu()) / 2e3 / budget.flag_rounds)
    return statistics.median(slowest(world, times[budget.warmup :]))


def _call_us(workspace: Workspace, timer: Timer, budget: Budget) -> float:
    """An empty call of all workgroups: arrival tickets, start words of all ranks, last to leave."""
    world = workspace.world
    args = (workspace.context(), CALL_HASH)
    key = ("agree", workspace.context_key)

    def call() -> None:
        workspace.begin("empty call", CALL_HASH)
        world.launch(agree_kernel, world.num_wgs, args, key, num_warps=NUM_WARPS, num_stages=1)

    return 1e3 * timer.median(call, warmup=budget.warmup, repeats=3 * budget.repeats)


def _launch_empty(world: World, word: torch.Tensor) -> None:
    world.launch(empty_kernel, world.num_wgs, (word,), "empty", num_warps=NUM_WARPS, num_stages=1)


def _host_us(world: World, word: torch.Tensor) -> tuple[float, float]:
    """Host time of a launch that is not waited for, and of one that is; microseconds."""
    world.synchronize()
    begin = time.perf_counter()
    for _ in range(LAUNCHES):
        _launch_empty(world, word)
    queued = time.perf_counter() - begin
    world.synchronize()
    waits = []
    for _ in range(LAUNCHES // 4):
        begin = time.perf_counter()
        _launch_empty(world, word)
        world.synchronize()
        waits.append(time.perf_counter() - begin)
    return queued / LAUNCHES * 1e6, statistics.median(waits) * 1e6


def start_order(world: World, wgs: int, num_warps: int, spread: int) -> dict[str, Any]:
    """How the workgroups of one launch of this rank started.

    Returns:
        "tickets" and "start_ns" by program id: place in the order of arrival, and device time since
        the first.
    """
    head = world.local("tickets drawn", 32, torch.int32)
    tickets = world.local("tickets", wgs, torch.int32)
    times = world.local("start times", wgs, torch.int64)
    args = (head, tickets, times, HOLD_NS, spread, world.target)
    for _ in range(2):  # the first one loads the module
        head.zero_()
        world.launch(
            start_order_kernel,
            wgs,
            args,
            ("start order", spread, num_warps),
            num_warps=num_warps,
            num_stages=1,
        )
        world.synchronize()
    begun = times.cpu()
    return {
        "wgs": wgs,
        "num_warps": num_warps,
        "uneven_work": spread > 1,
        "tickets": tickets.cpu().tolist(),
        "start_ns": (begun - begun.min()).tolist(),
    }
