"""Program for torchrun: layers beside other work on the same GPUs.

`torchrun --nproc-per-node=2 layers_beside.py` prints one JSON object from rank 0:

- `all_reduce`: a data-parallel group's all-reduces on their own stream during training steps;
- `half`: a kernel that holds half of the SMs on another stream, with layers capped to the others.
"""

from __future__ import annotations

import json
import os
import time

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from kosmos_core.device.target import clock_ns, is_over
from kosmos_core.worlds import World, group_world
from kosmos_tpsp import ParallelMLP, TpSpWorkspace

TOKENS, HIDDEN, INNER = 4096, 1024, 2048
STEPS = 40
BUCKET = 1 << 26  # elements of a bucket of gradients
TIMEOUT_S = 30.0
HELD_MS = 1500


@triton.jit
def hold_kernel(out_ptr, nanoseconds, TARGET: tl.constexpr):
    """Spins for so long; beside its 32 warps no workgroup of a layer fits on an SM."""
    begin = clock_ns(TARGET)
    while not is_over(begin, nanoseconds, TARGET):
        pass
    tl.store(out_ptr + tl.program_id(0), begin)


def steps_of(mlp: ParallelMLP, x: torch.Tensor, dy: torch.Tensor, count: int) -> list[torch.Tensor]:
    """The results of the last of so many training steps."""
    for _ in range(count):
        y = mlp(x)
        results = [y.detach(), *torch.autograd.grad(y, (x, *mlp.parameters()), dy)]
    return results


def beside_all_reduce(world: World, data_group: dist.ProcessGroup) -> dict[str, object]:
    """Training steps while buckets are reduced over another group."""
    device = world.device
    with TpSpWorkspace(world, TOKENS, HIDDEN, timeout_s=TIMEOUT_S) as workspace:
        mlp = ParallelMLP(HIDDEN, INNER, workspace=workspace, seed=1, force=True)
        x, dy = inputs(world)
        alone = steps_of(mlp, x, dy, 3)
        bucket = torch.ones(BUCKET, device=device)
        dist.all_reduce(bucket, group=data_group)
        torch.cuda.synchronize()
        begin = time.monotonic()
        wrong = 0
        for _ in range(STEPS):
            bucket.fill_(1.0)
            work = dist.all_reduce(bucket, group=data_group, async_op=True)
            results = steps_of(mlp, x, dy, 2)
            work.wait()
            wrong += int(not bool((bucket == world.size).all()))
            wrong += sum(not torch.equal(a, b) for a, b in zip(results, alone, strict=True))
        workspace.synchronize()
        return {"wrong": wrong, "seconds": time.monotonic() - begin}


def beside_half(world: World) -> dict[str, object]:
    """Capped layers while the other half of the SMs is held."""
    device = world.device
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    with TpSpWorkspace(world, TOKENS, HIDDEN, timeout_s=TIMEOUT_S) as workspace:
        mlp = ParallelMLP(
            HIDDEN, INNER, workspace=workspace, seed=1, force=True, cap=sms - sms // 2
        )
        x, dy = inputs(world)
        alone = steps_of(mlp, x, dy, 3)
        stream = torch.cuda.Stream()
        ended = torch.empty(sms // 2, dtype=torch.int64, device=device)
        hold_kernel[(sms // 2,)](ended, 16, world.target, num_warps=32)
        torch.cuda.synchronize()
        world.barrier()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        marks[0].record()
        stream.wait_event(marks[0])
        with torch.cuda.stream(stream):
            hold_kernel[(sms // 2,)](ended, HELD_MS * 1_000_000, world.target, num_warps=32)
            marks[2].record()
        # Its workgroups are resident before the first layer's are.
        time.sleep(0.05)
        results = steps_of(mlp, x, dy, STEPS)
        marks[1].record()
        workspace.synchronize()
        torch.cuda.synchronize()
        return {
            "wrong": sum(not torch.equal(a, b) for a, b in zip(results, alone, strict=True)),
            "layers_ms": marks[0].elapsed_time(marks[1]),
            "held_ms": marks[0].elapsed_time(marks[2]),
        }


def inputs(world: World) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(world.rank)
    shape = (TOKENS // world.size, HIDDEN)
    x, dy = (torch.randn(shape, device=world.device).bfloat16() for _ in range(2))
    return x.requires_grad_(), dy


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    ranks = list(range(dist.get_world_size()))
    data_group = dist.new_group(ranks)
    # With another group about, SMs are reserved for NCCL.
    world = group_world()
    found = {
        "all_reduce": beside_all_reduce(world, data_group),
        "reserved": torch.cuda.get_device_properties(world.device).multi_processor_count
        - world.num_wgs,
    }
    found["half"] = beside_half(world)
    everybody = world.all_gather_object(found)
    if world.rank == 0:
        print(json.dumps(everybody))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
