"""Program for torchrun: layers against FP64 in a process group, gloo or NCCL.

`torchrun --nproc-per-node=N layers_group.py BACKEND` prints one JSON object from rank 0.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from kosmos_tpsp import MXFP8, destroy_workspaces
from kosmos_tpsp.bench.rivals import RIVALS, with_rivals
from kosmos_tpsp.cli.layer_check import KINDS, LayerCase, layer_errors
from kosmos_tpsp.cli.mx_layer_check import MxCase, mx_layer_problems
from kosmos_tpsp.sharing import world_of

MX = (("precision", "mxfp8"),)
SMALL = (
    *(LayerCase(kind, bias=True) for kind in KINDS),
    LayerCase(main_grad=True, steps=2, uses=2),
    LayerCase("attention", checkpointed=True, main_grad=True),
    LayerCase(frozen="w"),
    LayerCase(frozen="x"),
    LayerCase("attention", compiler="aot_eager"),
    LayerCase(tokens=20, hidden=40, inner=28),  # no rows of 16 bytes
    LayerCase(main_grad=True, steps=2, uses=2, options=MX),
    LayerCase("attention", checkpointed=True, bias=True, options=MX),
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
    *(LayerCase(kind, 1024, 512, 1024, bias=True, options=FORCED + MX) for kind in KINDS),
    LayerCase("mlp", 1024, 512, 1024, main_grad=True, steps=3, uses=2, options=FORCED + MX),
    LayerCase("attention", 1024, 512, compiler="inductor", main_grad=True, options=FORCED + MX),
    LayerCase("mlp", 1024, 512, 1024, frozen="w", options=FORCED + MX),
)
DERIVE = MXFP8(column_dy="derive")
PRODUCTS = (
    MxCase("column", tokens=512, inputs=256, outputs=384),
    MxCase("row", tokens=512, inputs=256, outputs=384, main_grad=True),
    MxCase("row", tokens=512, inputs=256, outputs=384, recipe=DERIVE),
    MxCase("column", tokens=40, inputs=72, outputs=80, recipe=MXFP8("floor")),
)


def main() -> None:
    backend = sys.argv[1]
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend)
    world = world_of(None)
    found, limits = {}, {}
    for case in LARGE if backend == "nccl" else SMALL:
        torch._dynamo.reset()
        errors = world.all_gather_object(layer_errors(case, world))
        found[str(case)] = max(max(rank.values()) for rank in errors)
        limits[str(case)] = case.tolerance
    problems = []
    for product in PRODUCTS:
        large = (("force", True),) if backend == "nccl" else ()
        told = mx_layer_problems(replace(product, options=large), world, steps=2)
        problems += [f"{product} {told}" for told in world.all_gather_object(told) if told]
    for name in RIVALS if backend == "nccl" else ("plain", "overlapped"):
        case = LayerCase("mlp", 1024, 512, 1024)
        made = partial(with_rivals, name=name, group=dist.group.WORLD)
        errors = world.all_gather_object(layer_errors(case, world, made))
        found[name] = max(max(rank.values()) for rank in errors)
        limits[name] = case.tolerance
    destroy_workspaces()
    if world.rank == 0:
        report = {"world": world.describe(), "errors": found, "limits": limits}
        print(json.dumps({**report, "problems": problems}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
