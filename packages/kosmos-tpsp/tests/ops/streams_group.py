"""Program for torchrun: workspaces on streams of their own, at once, with and without room for all.

`torchrun --nproc-per-node=2 streams_group.py CALLS` prints one JSON object from rank 0.
"""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist
from kosmos_core.worlds import group_world
from kosmos_tpsp import AgGemmOptions, TpSpWorkspace, ag_gemm, prepare_ag_gemm, reference

SHAPE = (512, 1032, 2048)  # chunk rows, n, k
# The first two fit side by side; each of the others needs the whole GPU.
CAPS = (64, 64, None, None)


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    # The second group has the same ranks in the same process, and words of its own.
    worlds = [group_world(reserve_sms=0), group_world(dist.new_group([0, 1]), reserve_sms=0)]
    rows, n, k = SHAPE
    device = worlds[0].device
    torch.manual_seed(dist.get_rank())
    lanes = []
    for i, cap in enumerate(CAPS):
        workspace = TpSpWorkspace(worlds[i % 2], 2 * rows, k, timeout_s=30.0)
        options = AgGemmOptions(cap=cap, transport=("push", "pull")[i // 2], force=True)
        x = torch.randn(rows, k, device=device).bfloat16()
        w = torch.randn(n, k, device=device).bfloat16()
        prepare_ag_gemm(workspace, rows, n, k, options)
        product, _ = reference.ag_gemm(x, w, worlds[0], "tn")
        lanes.append((workspace, torch.cuda.Stream(), options, x, w, product, []))
    torch.cuda.synchronize()
    for call in range(int(sys.argv[1])):
        # In another order each time, and in the same one on every rank, as the calls of any two
        # communicators must be.
        for lane in lanes[call % 4 :] + lanes[: call % 4]:
            workspace, stream, options, x, w, _, outs = lane
            with torch.cuda.stream(stream):
                outs.append(ag_gemm(x, w, workspace, options=options))
    wrong = []
    for number, (workspace, _, _, _, _, product, outs) in enumerate(lanes):
        workspace.synchronize()
        error = float((outs[0].float() - product.float()).norm() / product.float().norm())
        if not error < 4e-3:
            wrong.append(f"lane {number}: relative error {error:.1e}")
        wrong += [
            f"lane {number} call {i}" for i, o in enumerate(outs) if not torch.equal(o, outs[0])
        ]
    everybody = worlds[0].all_gather_object(wrong)
    for workspace, *_ in lanes:
        workspace.destroy()
    if dist.get_rank() == 0:
        calls = sum(len(lane[-1]) for lane in lanes)
        print(
            json.dumps({"wrong": [line for lines in everybody for line in lines], "calls": calls})
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
