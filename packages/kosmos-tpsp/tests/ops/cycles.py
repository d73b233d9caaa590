"""Program: 200 workspaces made, used and destroyed one after the other, and what is left of them.

`python cycles.py gpu:2`, or `torchrun --nproc-per-node=2 cycles.py group`, prints one JSON object.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from typing import Any

import torch
from kosmos_core.testing.worlds import open_world
from kosmos_core.worlds import World
from kosmos_tpsp.cli.rig import on_all_ranks
from kosmos_tpsp.ops.catalog import DRIVERS
from kosmos_tpsp.workspaces import TRANSPORTS, TpSpWorkspace

CYCLES = 200


def cycle(rank: int, world: World, op: str, tokens: int, width: int) -> None:
    """A workspace with everything that one can have, one call of an op on it, and its end."""
    driver = DRIVERS[op]
    options = driver.options(force=True, split_k=2)
    with TpSpWorkspace(
        world, tokens, width, reduce_transports=TRANSPORTS, trace_events=8
    ) as workspace:
        shape = driver.shape_of(tokens, width, width)
        given = [
            torch.ones(of, device=world.device).bfloat16()
            for of in driver.operand_shapes(shape, world.size, options).values()
        ]
        workspace.synchronize()
        world.barrier()
        driver.op(*given, workspace, options=options)
        workspace.synchronize()


def held(world: World) -> dict[str, int]:
    """What this process holds: bytes of its GPU that are gone, bytes of tensors, open files."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(world.device)
    return {
        "device": total - free,
        "tensors": torch.cuda.memory_allocated(world.device),
        "files": len(os.listdir("/proc/self/fd")),
    }


def measure(rank: int, world: World) -> dict[str, Any]:
    """What a rank, or with virtual ranks the process, holds after few and after all cycles."""
    ops = list(DRIVERS)
    for op in ops:  # each op compiles and loads here
        cycle(rank, world, op, 1024, 256)
    world.barrier()
    before = held(world)
    world.barrier()  # nobody makes one while others count
    for i in range(CYCLES):
        cycle(rank, world, ops[i % len(ops)], 1024, 256)
    world.barrier()
    return {"before": before, "after": held(world)}


def main() -> None:
    with open_world(sys.argv[1]) as (world, prints):
        found = on_all_ranks(world, lambda rank: measure(rank, world))
        if prints:
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
