"""The fused MoE layer against NCCL all-to-all and grouped GEMMs.

    python bench_moe.py [--models Qwen3-30B] [--direction both] [--json FILE]

Runs `python -m kosmos_moe bench` with the same arguments, on every GPU of this machine unless
torchrun has started it.
"""

from __future__ import annotations

import os
import sys

import torch
from kosmos_moe.__main__ import main
from torch.distributed.run import main as torchrun

if __name__ == "__main__":
    arguments = ["bench", *sys.argv[1:]]
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus < 2 or "WORLD_SIZE" in os.environ:
        sys.exit(main(arguments))
    launcher = ["--standalone", f"--nproc-per-node={min(gpus, 8)}", "-m", "kosmos_moe", "--"]
    torchrun([*launcher, *arguments])
