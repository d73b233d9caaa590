"""Program for torchrun: which kernels a layer launches, and that its host waits for none of them.

`torchrun --nproc-per-node=2 layers_profile.py` prints one JSON object from rank 0: for each layer
and direction the number of kernels by name, and of copies.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable

import torch
import torch.distributed as dist
from kosmos_tpsp import (
    ColumnParallelLinear,
    ParallelAttention,
    ParallelMLP,
    RowParallelLinear,
    destroy_workspaces,
)
from kosmos_tpsp.sharing import world_of
from torch.profiler import ProfilerActivity, profile

TOKENS, HIDDEN, INNER = 1024, 1024, 2048


def kernels_of(fn: Callable[[], object]) -> dict[str, int]:
    """Everything that ran on the GPU during a call whose host may not wait, by name."""
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        torch.cuda.set_sync_debug_mode("error")
        try:
            fn()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    on_gpu = (e.name for e in found.events() if e.device_type == torch.autograd.DeviceType.CUDA)
    return dict(Counter(name for name in on_gpu if "ProfilerStep" not in name))


def launches_of(layer: torch.nn.Module, x: torch.Tensor) -> dict[str, dict[str, int]]:
    """Kernels of a forward and a backward of a warm layer."""
    dy = torch.randn_like(layer(x))
    for _ in range(3):
        layer(x).backward(dy)
    for t in (x, *layer.parameters()):
        t.grad = None
    outputs: list[torch.Tensor] = []
    forward = kernels_of(lambda: outputs.append(layer(x)))
    return {"forward": forward, "backward": kernels_of(lambda: outputs[0].backward(dy))}


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    world = world_of(None)
    common = {"max_tokens": TOKENS, "bias": False, "force": True}
    layers = {
        "column": ColumnParallelLinear(HIDDEN, INNER, **common),
        "row": RowParallelLinear(INNER, HIDDEN, **common),
        "mlp": ParallelMLP(HIDDEN, INNER, **common),
        "attention": ParallelAttention(HIDDEN, 8, **common),
    }
    found = {}
    for name, layer in layers.items():
        rows, features = TOKENS // world.size, HIDDEN
        if name == "row":
            rows, features = TOKENS, INNER // world.size
        x = torch.randn(rows, features, device=world.device).bfloat16().requires_grad_()
        found[name] = launches_of(layer, x)
        for weight in layer.parameters():
            weight.main_grad = torch.zeros(weight.shape, device=world.device)
        found[f"{name} main_grad"] = launches_of(layer, x)
    everybody = world.all_gather_object(found)
    destroy_workspaces()
    if world.rank == 0:
        print(json.dumps({"kernels": everybody[0], "alike": everybody[0] == everybody[1]}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
