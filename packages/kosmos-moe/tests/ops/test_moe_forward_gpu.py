"""The forward on GPUs: virtual ranks of one, and a process a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from kosmos_core.worlds import gpu_world
from kosmos_moe.cli.calls import Call
from kosmos_moe.cli.rig import Rig, run_on_devices
from kosmos_moe.router import RouterOptions

GROUPED = RouterOptions(4, score="sigmoid", normalize=True, groups=4, group_topk=2, scaling=2.5)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_virtual_ranks_of_one_gpu(ranks: int) -> None:
    tokens = tuple((517, 0, 90, 333)[r % 4] for r in range(ranks))
    losses = RouterOptions(6, aux_coefficient=0.1, z_coefficient=0.01)
    calls = [
        Call(tokens, 512, 384, 16, losses, shared_inter=256),
        Call(tokens[::-1], 520, 136, 32, GROUPED, biased=True, padded=True, data=1),
        Call(tokens, 512, 384, 16, RouterOptions(2), routing="one-expert", data=2),
        Call(tokens, 512, 384, 16, RouterOptions(16), routing="zipf:1.0", data=3),
    ]
    with gpu_world(ranks) as world:
        run = run_on_devices(world, Rig([*calls, *calls], timeout_s=30.0))
    assert run.problems == []
    assert sum(v.repeated is True for v in run.verdicts) == len(calls) * ranks


@pytest.mark.multi_gpu(2)
@pytest.mark.parametrize("extra", [[], ["--score", "sigmoid", "--bias", "--shared", "1"]])
def test_a_process_for_each_gpu(extra: list[str]) -> None:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m",
        "kosmos_moe", "--", "check", "--world", "group", "--tokens", "2048,1500", "--hidden",
        "1024", "--inter", "768", "--experts", "32", "--topk", "6", "--delay", "--calls", "4",
        "--json", *extra,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["passed"]
    assert found["bitwise_repeat"]
