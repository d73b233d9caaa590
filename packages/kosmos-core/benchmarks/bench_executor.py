"""Speed of the concurrent CPU executor on an AG+GEMM-like persistent kernel.

    python bench_executor.py [--ranks 8] [--wgs 8] [--repeats 3] [--json FILE]

Times the run of one collective call (256 x 256 x 256 in tiles of 32 x 64 x 64 unless given) in
seconds of one core, without checks and with all of them, and compares the result with torch. The
bound that the project holds itself to is 2 s with all checks.
"""

from __future__ import annotations

import json
import os
import platform
import time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import click
import torch
import triton
import triton.language as tl
from kosmos_core.executor import Executor, Random
from rich.console import Console
from rich.table import Table

BLOCK_M, BLOCK_N, BLOCK_K = 32, 64, 64
BOUND_S = 2.0
MODES: dict[str, dict[str, Any]] = {
    "no checks": {},
    "race": {"race": "raise"},
    "weak + stale": {"weak": "late", "stale": True},
    "all checks": {"weak": "late", "stale": True, "race": "raise", "strict": True},
}


@triton.jit
def signal(flag, scope: tl.constexpr):
    tl.debug_barrier()
    tl.atomic_add(flag, 1, sem="release", scope=scope)


@triton.jit
def wait(flag, target, scope: tl.constexpr):
    while tl.atomic_add(flag, 0, sem="acquire", scope=scope) < target:
        pass
    tl.debug_barrier()


@triton.jit
def copy_row(src, dst, row, K, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    m = row * BLOCK_M + tl.arange(0, BLOCK_M)
    for k0 in tl.range(0, K, BLOCK_K):
        offsets = m[:, None] * K + (k0 + tl.arange(0, BLOCK_K))[None, :]
        tl.store(dst + offsets, tl.load(src + offsets))


@triton.jit
def gemm_tile(
    a, b, c, tm, tn, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    m = tm * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tn * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k0 in tl.range(0, K, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        x = tl.load(a + m[:, None] * K + k[None, :])
        y = tl.load(b + k[:, None] * N + n[None, :])
        acc = tl.dot(x, y, acc)
    tl.store(c + m[:, None] * N + n[None, :], acc.to(tl.bfloat16))


@triton.jit
def ag_gemm_kernel(
    shard_table, ready_table, gathered, w, out, arrivals, ready, queue, rank, M_LOCAL, N, K,
    WORLD: tl.constexpr, MOVERS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Movers gather rows of all ranks, then everybody builds tiles claimed from a queue."""
    pid = tl.program_id(0)
    rows = M_LOCAL // BLOCK_M
    num_n = tl.cdiv(N, BLOCK_N)
    num_tiles = rows * WORLD * num_n
    if pid == 0:
        for r in tl.static_range(WORLD):
            peer = tl.load(ready_table + r).to(tl.pointer_type(tl.int32))
            signal(peer + rank, "sys")
    if pid < MOVERS:
        for step in range(WORLD):
            source = (rank + step) % WORLD
            shard = tl.load(shard_table + source).to(tl.pointer_type(tl.bfloat16))
            wait(ready + source, 1, "sys")
            for row in range(pid, rows, MOVERS):
                copy_row(shard, gathered + source * M_LOCAL * K, row, K, BLOCK_M, BLOCK_K)
                signal(arrivals + source * rows + row, "gpu")
    tile = tl.atomic_add(queue, 1, sem="relaxed", scope="gpu")
    while tile < num_tiles:
        tm = (tile // num_n + rank * rows) % (rows * WORLD)
        wait(arrivals + tm, 1, "gpu")
        gemm_tile(gathered, w, out, tm, tile % num_n, N, K, BLOCK_M, BLOCK_N, BLOCK_K)
        tile = tl.atomic_add(queue, 1, sem="relaxed", scope="gpu")


def run_once(
    ranks: int, wgs: int, size: int, seed: int, **modes: Any
) -> tuple[float, dict[str, int]]:
    """Core seconds of one call, and the executor's counts.

    Raises:
        AssertionError: the result differs from torch's by more than BF16 rounding.
    """
    generator = torch.Generator().manual_seed(seed)
    shards = [
        torch.randn(size // ranks, size, generator=generator).bfloat16() for _ in range(ranks)
    ]
    weights = [torch.randn(size, size, generator=generator).bfloat16() for _ in range(ranks)]
    with Executor(ranks, policy=Random(seed), seed=seed, **modes) as ex:
        x = [ex.tensor(r, shards[r], "shard") for r in range(ranks)]
        gathered = ex.symmetric((size, size), torch.bfloat16, "gathered")
        out = ex.symmetric((size, size), torch.bfloat16, "out")
        arrivals = ex.symmetric(size // BLOCK_M, torch.int32, "arrivals")
        ready = ex.symmetric(ranks, torch.int32, "ready")
        queue = ex.symmetric(1, torch.int32, "queue")
        for r in range(ranks):
            with ex.on(r):
                ag_gemm_kernel[(wgs,)](
                    ex.pointers(r, x), ex.pointers(r, ready), gathered[r],
                    ex.tensor(r, weights[r], "w"), out[r], arrivals[r], ready[r], queue[r], r,
                    size // ranks, size, size, ranks, min(2, wgs), BLOCK_M, BLOCK_N, BLOCK_K,
                )  # fmt: skip
        start = time.process_time()
        ex.run()
        seconds = time.process_time() - start
        full = torch.cat(shards).double()
        for r in range(ranks):
            want = full @ weights[r].double()
            error = float((out[r].double() - want).norm() / want.norm())
            if not error < 4e-3:
                raise AssertionError(f"rank {r}: relative error {error:.2e}")
        return seconds, ex.stats


@click.command()
@click.option("--ranks", default=8, show_default=True, help="Virtual ranks.")
@click.option("--wgs", default=8, show_default=True, help="Workgroups a rank.")
@click.option("--size", default=256, show_default=True, help="m = n = k.")
@click.option("--repeats", default=3, show_default=True, help="Runs a mode; the fastest counts.")
@click.option("--json", "json_path", type=click.Path(), help="Write the results here.")
def main(ranks: int, wgs: int, size: int, repeats: int, json_path: str | None) -> None:
    """Time the executor."""
    torch.set_num_threads(1)
    table = Table(title=f"{ranks} ranks x {wgs} workgroups, {size} x {size} x {size}")
    for name in ("mode", "core seconds", "switches", "loads", "dots"):
        table.add_column(name, justify="left" if name == "mode" else "right")
    results: dict[str, Any] = {}
    for mode, options in MODES.items():
        runs = [run_once(ranks, wgs, size, seed, **options) for seed in range(repeats)]
        seconds, stats = min(runs, key=lambda r: r[0])
        results[mode] = {"seconds": seconds, "all_seconds": [r[0] for r in runs], **stats}
        counts = (str(stats[k]) for k in ("switches", "loads", "dots"))
        table.add_row(mode, f"{seconds:.2f}", *counts)
    console = Console()
    console.print(table)
    worst = results["all checks"]["seconds"]
    console.print(f"all checks: {worst:.2f} s, bound {BOUND_S:.0f} s")
    if json_path is not None:
        versions = {
            "triton": triton.__version__, "torch": torch.__version__,
            "python": platform.python_version(), "machine": platform.processor(),
        }  # fmt: skip
        sizes = {"ranks": ranks, "wgs": wgs, "size": size}
        with open(json_path, "w", encoding="utf-8") as f:
            json.dump({"benchmark": "executor", **sizes, **versions, "modes": results}, f, indent=1)
    if (ranks, wgs, size) == (8, 8, 256) and worst > BOUND_S:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
