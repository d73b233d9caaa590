"""`ag_gemm` against NCCL and cuBLAS, torch's async-TP op and fixed splits.

    python bench_ag_gemm.py [--shapes llama3] [--sweep] [--json FILE] [--png FILE]

Runs `python -m kosmos_tpsp bench ag_gemm` with the same arguments, on every GPU of this machine
unless torchrun has started it.
"""

from __future__ import annotations

import sys

import torch
from kosmos_tpsp.__main__ import main
from kosmos_tpsp.cli.relaunch import relaunch, under_torchrun

if __name__ == "__main__":
    arguments = ["bench", "ag_gemm", *sys.argv[1:]]
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus < 2 or under_torchrun():
        sys.exit(main(arguments))
    sys.exit(relaunch(arguments, min(gpus, 8)))
