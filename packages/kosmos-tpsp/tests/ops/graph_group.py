"""Program for torchrun: captured calls replayed with changing contents, eager calls in between.

`torchrun --nproc-per-node=2 graph_group.py REPLAYS` prints one JSON object from rank 0.
"""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist
from kosmos_core.errors import WorldError
from kosmos_core.worlds import group_world
from kosmos_tpsp import AgGemmOptions, TpSpWorkspace, ag_gemm, prepare_ag_gemm, reference

# Chunk rows, n and k of the calls of one graph; the last one has the split tiles.
CALLS = ((1024, 1032, 1024), (301, 520, 2048), (128, 256, 4096))
FORMS = ({"transport": "push"}, {"transport": "pull"}, {"layout": "nn", "keep_gathered": True})


def refuses_unprepared(workspace: TpSpWorkspace, x: torch.Tensor, w: torch.Tensor) -> bool:
    """Whether a capture of a call that was never made says so, rather than capture a compile."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            ag_gemm(x, w, workspace, transport="push", order="naive", force=True)
    except WorldError as error:
        return "graph capture" in str(error)
    return False


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    world = group_world()
    device = world.device
    torch.manual_seed(world.rank)
    with TpSpWorkspace(world, 4096, 4096, timeout_s=30.0) as workspace:
        calls = []
        for (rows, n, k), form in zip(CALLS, FORMS, strict=True):
            options = AgGemmOptions(force=True, **form)
            x = torch.randn(rows, k, device=device).bfloat16()
            w = torch.randn(*((n, k) if options.layout == "tn" else (k, n)), device=device)
            prepare_ag_gemm(workspace, rows, n, k, options)
            calls.append((x, w.bfloat16(), options))
        refused = refuses_unprepared(workspace, calls[0][0], calls[0][1])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = [ag_gemm(x, w, workspace, options=options) for x, w, options in calls]
        wrong = []
        for replay in range(int(sys.argv[1])):
            for (x, _, _), result in zip(calls, captured, strict=True):
                x.normal_()
                for t in result if isinstance(result, tuple) else (result,):
                    t.fill_(float("nan"))
            graph.replay()
            # Of another shape each time, so that it leaves other counters behind than the graph.
            between = torch.randn(64 * (1 + replay % 5), 512, device=device).bfloat16()
            weights = torch.randn(264, 512, device=device).bfloat16()
            eager = ag_gemm(between, weights, workspace, force=True)
            workspace.synchronize()
            results = [*captured, eager]
            made = [*calls, (between, weights, AgGemmOptions())]
            for i, ((x, w, options), result) in enumerate(zip(made, results, strict=True)):
                out, gathered = result if isinstance(result, tuple) else (result, None)
                product, rows_in = reference.ag_gemm(x, w, world, options.layout)
                error = (out.float() - product.float()).norm() / product.float().norm()
                if not float(error) < 4e-3:
                    wrong.append(f"rank {world.rank} replay {replay} call {i}: {float(error):.1e}")
                if gathered is not None and not torch.equal(gathered, rows_in):
                    wrong.append(f"rank {world.rank} replay {replay} call {i}: gathered rows")
        everybody = world.all_gather_object((wrong, refused))
        if world.rank == 0:
            found = {
                "wrong": [line for lines, _ in everybody for line in lines],
                "refused_unprepared": all(said for _, said in everybody),
                "replays": int(sys.argv[1]),
            }
            print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
