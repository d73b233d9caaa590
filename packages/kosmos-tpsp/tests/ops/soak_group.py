"""Program for torchrun: many calls on real ranks, every output compared in full and bit by bit.

`torchrun --nproc-per-node=2 soak_group.py CALLS OP [mxfp8]` prints one JSON object from rank 0.
Calls of other ops take turns with some of `ag_gemm`, whose rows land where their rows and sums do;
calls in MXFP8 with some in bf16.
"""

from __future__ import annotations

import json
import os
import random
import sys
from typing import Any

import torch
import torch.distributed as dist
from kosmos_core.worlds import group_world
from kosmos_tpsp.cli.calls import Call
from kosmos_tpsp.cli.rig import Rig, run_on_devices
from kosmos_tpsp.ops.catalog import DRIVERS, driver_of

# (tokens, n, the third of m, n, k) for two ranks: square tiles, ragged everywhere, one row a rank,
# few tiles.
SHAPES = ((4096, 1024, 2048), (2 * 1037, 904, 1032), (2, 8, 8), (512, 256, 4096))
# Sets of operands: each call repeats the one of so many turns before.
DATA = 4
MAX_SLEEP = 1 << 22
CHOICES: dict[str, tuple[dict[str, Any], ...]] = {
    "ag_gemm": (
        {"transport": "pull"},
        {"transport": "push"},
        {"layout": "nn", "transport": "pull"},
        {"layout": "nn", "transport": "push", "order": "naive"},
        {"policy": "two_way"},
        {"policy": "serial", "order": "chunk_major"},
    ),
    "gemm_rs": (
        {"policy": "one_way"},
        {"policy": "serial"},
        {"order": "row_major"},
        {"policy": "fixed", "split_k": 2},
        {"transport": "pull"},
        {"transport": "pull", "policy": "serial"},
        {"policy": "two_way"},
        {"transport": "pull", "policy": "two_way"},
        {"transport": "pull", "policy": "fixed", "split_k": 2, "order": "row_major"},
    ),
    "bulk_ag": (
        {"transport": "pull"},
        {"transport": "push"},
        {"transport": "pull", "policy": "two_way", "dx_to": "tensor"},
        {"transport": "push", "policy": "two_way"},
        {"policy": "serial"},
        {"policy": "fixed", "split_k": 2, "dx_to": "tensor"},
        {"transport": "push", "dx_to": "tensor"},
    ),
    "bulk_rs": (
        {},
        {"transport": "push"},
        {"policy": "serial"},
        {"transport": "push", "policy": "serial"},
        {"policy": "fixed", "split_k": 2},
        {"transport": "push", "policy": "fixed", "split_k": 2},
        {"split_k": 4},
        {"policy": "two_way"},
        {"transport": "push", "policy": "two_way", "split_k": 2},
    ),
    "bulk_column": (
        {"transport": "pull"},
        {"transport": "pull", "split_k": 2},
        {},
        {"transport": "push"},
        {"policy": "serial"},
        {"policy": "fixed", "transport": "pull"},
        {"policy": "two_way"},
        {"transport": "pull"},
    ),
}


def _options(op: str) -> list[Any]:
    return [DRIVERS[op].options(force=True, **choices) for choices in CHOICES[op]]


def sequence(count: int, op: str) -> list[Call]:
    """`count` calls: shapes, choices and operands by turns."""
    options = _options(op)
    if op != "ag_gemm":
        options = [*options, _options("ag_gemm")[1], *options]
    calls = []
    for i in range(count):
        chosen = options[i % len(options)]
        shape = driver_of(chosen).shape_of(*SHAPES[i % len(SHAPES)])
        calls.append(Call(*shape, i // 7 % DATA, chosen))
    return calls


def delay(rank: int, index: int) -> None:
    """One of the ranks sleeps on its stream before the call."""
    rng = random.Random(index)
    if rng.randrange(dist.get_world_size()) == rank:
        torch.cuda._sleep(rng.randrange(MAX_SLEEP))


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    with group_world() as world:
        calls = sequence(int(sys.argv[1]), sys.argv[2])
        if sys.argv[3:] == ["mxfp8"]:
            calls = [c.in_mxfp8(world.size) if i % 7 % 3 else c for i, c in enumerate(calls)]
        rig = Rig(calls, timeout_s=30.0, keep=256, delay=delay)
        run = run_on_devices(world, rig)
        if world.rank == 0:
            repeated = [v.repeated for v in run.verdicts if v.repeated is not None]
            found = {
                "calls": len(run.verdicts) // world.size,
                "different": len(set(rig.calls)),
                "problems": run.problems[:20],
                "paths": sorted({v.path for v in run.verdicts}),
                "repeated": len(repeated),
                "equal": sum(repeated),
            }
            print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
