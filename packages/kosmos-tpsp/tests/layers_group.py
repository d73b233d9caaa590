"""Program for torchrun: layers against FP64 in a process group, gloo or NCCL.

`torchrun --nproc-per-node=N layers_group.py BACKEND` prints one JSON object from rank 0.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial

import torch
import torch.distributed as dist
from kosmos_tpsp import destroy_workspaces
from kosmos_tpsp.bench.rivals import RIVALS, with_rivals
from kosmos_tpsp.cli.layer_check import KINDS, LayerCase, layer_errors
from kosmos_tpsp.sharing import world_of

SMALL = (
    *(LayerCase(kind, bias=True) for kind in KINDS),
    LayerCase(main_grad=True, steps=2, uses=2),
    LayerCase("attention", checkpointed=True, main_grad=True),
    LayerCase(frozen="w"),
    LayerCase(frozen="x"),
    LayerCase("attention", compiler="aot_eager"),
    LayerCase(tokens=20, hidden=40, inner=28),  # no rows of 16 bytes
)
FORCED = (("force", True),)
LARGE = (
    *(LayerCase(kind, 1024, 512, 1024, bias=True, options=FORCED) for kind in KINDS),
    LayerCase("mlp", 1024, 512, 1024, main_grad=True, steps=3, uses=2, options=FORCED),
    LayerCase("attention", 1024, 512, checkpointed=True, main_grad=True, options=FORCED),
    LayerCase("mlp", 1024, 512, 1024, frozen="w", options=FORCED),
    LayerCase("mlp", 1024, 512, 1024, frozen="x", options=FORCED),
    LayerCase("mlp", 1024, 512, 1024, compiler="inductor", options=FORCED),
    LayerCase("attention", 1024, 512, compiler="inductor", main_grad=True, options=FORCED),
    LayerCase("mlp", 1000, 520, 328, options=(("force", True), ("cap", 64))),
)


def main() -> None:
    backend = sys.argv[1]
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend)
    world = world_of(None)
    found = {}
    for case in LARGE if backend == "nccl" else SMALL:
        torch._dynamo.reset()
        errors = world.all_gather_object(layer_errors(case, world))
        found[str(case)] = max(max(rank.values()) for rank in errors)
    for name in RIVALS if backend == "nccl" else ("plain", "overlapped"):
        case = LayerCase("mlp", 1024, 512, 1024)
        made = partial(with_rivals, name=name, group=dist.group.WORLD)
        errors = world.all_gather_object(layer_errors(case, world, made))
        found[name] = max(max(rank.values()) for rank in errors)
    destroy_workspaces()
    if world.rank == 0:
        print(json.dumps({"world": world.describe(), "errors": found}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
