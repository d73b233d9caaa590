"""Program for one process of a group that torchrun does not watch; one of them kills itself.

`python sigkill_group.py RANK SIZE STORE VICTIM OP WHEN` prints one JSON object from each rank that
is left. The ranks meet at the file STORE. WHEN: "before" a call, or "during" one that is launched.
GPUs are used where there are enough of them, else gloo.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from kosmos_core.worlds import group_world
from kosmos_tpsp.ops.catalog import DRIVERS
from kosmos_tpsp.workspaces import TpSpWorkspace

TIMEOUT_S = 3.0
TOKENS, N, OTHER = 1024, 256, 264


def main() -> None:
    rank, size, victim = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[4])
    store = dist.FileStore(sys.argv[3], size)  # type: ignore[attr-defined]
    op, when = sys.argv[5], sys.argv[6]
    on_gpus = torch.cuda.device_count() >= size
    if on_gpus:
        torch.cuda.set_device(rank)
    backend = "nccl" if on_gpus else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    world, driver = group_world(), DRIVERS[op]
    workspace = TpSpWorkspace(world, TOKENS * size, 264, timeout_s=TIMEOUT_S)
    options = driver.options(force=True)
    shape = driver.shape_of(TOKENS * size if on_gpus else 8 * size, N, OTHER)
    given = [
        torch.randn(of, device=world.device).bfloat16()
        for of in driver.operand_shapes(shape, size, options).values()
    ]

    def call() -> None:
        driver.op(*given, workspace, options=options)
        workspace.synchronize()

    for _ in range(3):
        call()
    world.barrier()
    # One rank may leave a barrier in which another still waits to hear from it.
    store.set(f"left the barrier {rank}", "")
    if rank == victim:
        store.wait([f"left the barrier {other}" for other in range(size)])
        if when == "during":
            driver.op(*given, workspace, options=options)
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    found: dict[str, Any] = {"world": world.describe(), "error": "", "text": ""}
    try:
        # The victim's last call may have come to its end.
        for _ in range(1 + (when == "during")):
            begin = time.monotonic()
            call()
    except RuntimeError as error:  # a `KosmosError` is one, too
        found |= {"error": type(error).__name__, "text": str(error)}
    found["seconds"] = time.monotonic() - begin
    workspace.destroy()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
