"""Program for torchrun: Megatron-core's own linear layers beside ours, the same weights and data.

`torchrun --nproc-per-node=2 megatron_group.py BACKEND` prints one JSON object from rank 0: relative
differences of outputs and gradients. Megatron-core must be installed.
"""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist
from kosmos_tpsp.cli.layer_check import distance
from kosmos_tpsp.megatron import parallel_linears
from megatron.core import ModelParallelConfig, parallel_state
from megatron.core.tensor_parallel import layers

SEQUENCE, BATCH, HIDDEN, INNER = 32, 2, 64, 96


def pair(kinds: tuple[type, type], config: ModelParallelConfig) -> list[torch.nn.Module]:
    """The two layers of an MLP."""
    init = torch.nn.init.xavier_normal_
    group = parallel_state.get_tensor_model_parallel_group()
    column = kinds[0](HIDDEN, INNER, config=config, init_method=init, tp_group=group, bias=True)
    row = kinds[1](
        INNER, HIDDEN, config=config, init_method=init, tp_group=group, bias=True,
        input_is_parallel=True, skip_bias_add=True,
    )  # fmt: skip
    return [column, row]


def results(
    mlp: list[torch.nn.Module], x: torch.Tensor, dy: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Outputs and gradients; weights that have a main_grad are read there."""
    x = x.detach().requires_grad_()
    hidden, none = mlp[0](x)
    assert none is None
    y, bias = mlp[1](torch.nn.functional.silu(hidden))
    (y + bias).backward(dy)
    found = {"y": y, "dx": x.grad}
    for i, layer in enumerate(mlp):
        found[f"dw {i}"] = getattr(layer.weight, "main_grad", layer.weight.grad)
        found[f"db {i}"] = layer.bias.grad
    return {name: t.detach().clone() for name, t in found.items()}


class HostBuffer:
    """Megatron-core's buffer of gathered inputs, which lies on a GPU, for hosts without one."""

    def get_tensor(self, shape: list[int], dtype: torch.dtype, *name: str) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)


def main() -> None:
    backend = sys.argv[1]
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        # Megatron-core names a GPU wherever it allocates.
        layers.get_global_memory_buffer = HostBuffer
        torch.cuda.current_device = lambda: "cpu"
    dist.init_process_group(backend)
    size = dist.get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    config = ModelParallelConfig(
        tensor_model_parallel_size=size, sequence_parallel=True, params_dtype=torch.bfloat16,
        use_cpu_initialization=backend == "gloo",
    )  # fmt: skip
    theirs = pair((layers.ColumnParallelLinear, layers.RowParallelLinear), config)
    ours = pair(parallel_linears(SEQUENCE * BATCH), config)
    for layer, other in zip(ours, theirs, strict=True):
        layer.load_state_dict(other.state_dict())
        layer.weight.main_grad = torch.zeros(layer.weight.shape, device=layer.weight.device)
    torch.manual_seed(dist.get_rank())
    shape = (SEQUENCE // size, BATCH, HIDDEN)
    x, dy = (torch.randn(shape).bfloat16().to(ours[0].weight.device) for _ in range(2))
    wanted, found = (results(mlp, x, dy) for mlp in (theirs, ours))
    apart = {name: distance(found[name], wanted[name]) for name in wanted}
    everybody: list[dict[str, float]] = [{}] * size
    dist.all_gather_object(everybody, apart)
    if dist.get_rank() == 0:
        report = {
            "apart": {name: max(of[name] for of in everybody) for name in wanted},
            "marked": getattr(ours[1].bias, "sequence_parallel", None),
            "state": sorted(ours[0].state_dict()) == sorted(theirs[0].state_dict()),
        }
        print(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
