"""Program for torchrun: a captured training step of two layers, replayed with changing contents.

`torchrun --nproc-per-node=2 layers_graph.py REPLAYS PRECISION` prints one JSON object from rank 0.
"""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist
from kosmos_core.errors import KosmosError
from kosmos_tpsp import ColumnParallelLinear, ParallelMLP, destroy_workspaces
from kosmos_tpsp.sharing import world_of

TOKENS, HIDDEN, INNER = 1024, 512, 1024


def refuses_unprepared(x: torch.Tensor) -> bool:
    """Whether the capture of a layer that was never called says so."""
    layer = ColumnParallelLinear(HIDDEN, 264, max_tokens=4 * TOKENS, force=True)
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()), torch.no_grad():
            layer(x)
    except KosmosError as error:
        return "graph capture" in str(error)
    return False


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    world = world_of(None)
    device = world.device
    common = {"max_tokens": TOKENS, "force": True, "precision": sys.argv[2]}
    layers = [ParallelMLP(HIDDEN, INNER, seed=i, **common) for i in range(2)]
    weights = [p for layer in layers for p in layer.parameters()]
    # The second layer's weights have a main_grad.
    for p in layers[1].parameters():
        p.main_grad = torch.zeros(p.shape, device=device)
    torch.manual_seed(world.rank)
    x, dy = (torch.randn(TOKENS // world.size, HIDDEN, device=device).bfloat16() for _ in range(2))
    x.requires_grad_()

    def step() -> torch.Tensor:
        for p in layers[1].parameters():
            p.main_grad.zero_()
        y = layers[1](x + layers[0](x))
        y.backward(dy)
        return y

    def gradients() -> list[torch.Tensor]:
        return [x.grad] + [getattr(p, "main_grad", p.grad) for p in weights]

    def clear() -> None:
        for p in (x, *weights):
            p.grad = None

    for layer in layers:
        layer.gate_up.prepare(TOKENS)
        layer.down.prepare(TOKENS)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
            clear()
    torch.cuda.current_stream().wait_stream(side)
    refused = refuses_unprepared(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    captured = [y, *gradients()]
    wrong = []
    for replay in range(int(sys.argv[1])):
        with torch.no_grad():
            x.normal_()
            dy.normal_()
            for p in weights:
                p.mul_(0.99)
            for t in captured[:2]:
                t.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        replayed = [t.clone() for t in captured]
        clear()
        eager = [step(), *gradients()]
        for i, (a, b) in enumerate(zip(replayed, eager, strict=True)):
            if not torch.equal(a, b) or not torch.isfinite(a).all():
                wrong.append(f"rank {world.rank} replay {replay} result {i}")
    everybody = world.all_gather_object((wrong, refused))
    if world.rank == 0:
        found = {
            "wrong": [line for lines, _ in everybody for line in lines],
            "refused_unprepared": all(said for _, said in everybody),
            "replays": int(sys.argv[1]),
        }
        print(json.dumps(found))
    del graph
    destroy_workspaces()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
