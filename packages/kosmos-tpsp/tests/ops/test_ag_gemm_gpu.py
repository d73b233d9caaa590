"""`ag_gemm` on GPUs: eight virtual ranks on one, and two real ones; soak, delays, a killed rank."""

from __future__ import annotations

import gc
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kosmos_core.errors import ArgumentError, PeerFaultError
from kosmos_core.worlds import World, gpu_world
from kosmos_tpsp import TpSpWorkspace, ag_gemm, reference
from kosmos_tpsp.__main__ import main
from kosmos_tpsp.cli.calls import Call
from kosmos_tpsp.cli.rig import Rig, run_on_devices
from kosmos_tpsp.ops.ag_gemm import AgGemmOptions

HERE = Path(__file__).parent
# (m, n, k) for eight ranks: whole tiles, ragged everywhere, one row a rank, few tiles.
SHAPES = ((4096, 1024, 1024), (8 * 301, 520, 1032), (8, 8, 8), (1024, 256, 2048))
CHOICES: tuple[dict[str, Any], ...] = (
    {"transport": "pull"},
    {"transport": "push"},
    {"layout": "nn", "transport": "pull"},
    {"layout": "nn", "transport": "push", "order": "naive"},
    {"policy": "two_way", "split_k": 2},
)
DATA = 3
MAX_SLEEP = 1 << 22


def sleep(rank: int, index: int) -> None:
    """One of the ranks sleeps on its stream before the call."""
    rng = random.Random(index)
    if rng.randrange(8) == rank:
        torch.cuda._sleep(rng.randrange(MAX_SLEEP))


@pytest.mark.gpu
def test_200_calls_of_eight_virtual_ranks_are_right_and_repeat_bit_by_bit() -> None:
    options = [AgGemmOptions(**choices) for choices in CHOICES]
    calls = [
        Call(*SHAPES[i % len(SHAPES)], i // 7 % DATA, options[i % len(options)]) for i in range(200)
    ]
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    rig = Rig(calls, timeout_s=30.0, keep=64, delay=sleep)
    with gpu_world(8) as world:
        run = run_on_devices(world, rig)
    assert run.problems == []
    assert {verdict.path for verdict in run.verdicts} == {"fused"}
    assert len(run.verdicts) == 8 * 200
    repeats = [v.repeated for v in run.verdicts if v.repeated is not None]
    assert len(repeats) == 8 * (200 - len(set(calls))) > 8 * 100
    assert all(repeats)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 2, 8])
def test_check_passes(size: int, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["check", "ag_gemm", "--world", f"gpu:{size}", "--m", "2048", "--n", "520"]
    assert main([*arguments, "--k", "520", "--delay", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert all(case["path"] == "fused" and case["passed"] for case in report["cases"])


@pytest.mark.gpu
@pytest.mark.parametrize("victim", [0, 5])
def test_a_killed_rank_is_named_within_the_bound(
    victim: int, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["check", "ag_gemm", "--world", "gpu:8", "--m", "1024", "--n", "256", "--k", "256"]
    assert main([*arguments, "--kill-rank", str(victim), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] is True
    assert all(f"for rank {victim}" in text for text in report["errors"])


@pytest.mark.gpu
def test_worlds_of_different_sizes_in_one_process_share_no_code() -> None:
    for size in (2, 4):
        with gpu_world(size) as world:
            world.spmd(declined_then_refused, world)


def call_and_wait(x: torch.Tensor, w: torch.Tensor, workspace: TpSpWorkspace) -> None:
    ag_gemm(x, w, workspace)
    workspace.synchronize()


def declined_then_refused(rank: int, world: World) -> None:
    """A call that only meets, a fused one, and one that a rank refuses: every rank hears of it."""
    device = world.device
    workspace = TpSpWorkspace(world, 1024, 256, timeout_s=20.0)
    x = torch.randn(1024 // world.size, 256, device=device).bfloat16()
    w = torch.randn(256, 256, device=device).bfloat16()
    workspace.agree("only to meet", 77)
    product, _ = reference.ag_gemm(x, w, world, "tn")
    out = ag_gemm(x, w, workspace)
    workspace.synchronize()
    assert isinstance(out, torch.Tensor)
    torch.testing.assert_close(out.float(), product.float(), rtol=2e-2, atol=0.3)
    world.barrier()
    with pytest.raises(ArgumentError if rank == 1 else PeerFaultError, match="dtype"):
        call_and_wait(x.float() if rank == 1 else x, w, workspace)
    world.barrier()
    workspace.reset()
    again = ag_gemm(x, w, workspace)
    # Comparing loads a module, which waits for a peer's kernel that still waits for this rank.
    workspace.synchronize()
    world.barrier()
    assert isinstance(again, torch.Tensor)
    assert torch.equal(again, out)
    workspace.destroy()


@pytest.mark.gpu
def test_200_workspaces_leave_no_memory() -> None:
    with gpu_world(2) as world:

        def host(rank: int, world: World) -> None:
            TpSpWorkspace(world, 1024, 256).destroy()

        world.spmd(host, world)
        gc.collect()
        before = torch.cuda.memory_allocated()
        for _ in range(200):
            world.spmd(host, world)
        gc.collect()
        assert torch.cuda.memory_allocated() <= before


def torchrun(
    count: int, *arguments: str, timeout_s: int = 1200
) -> subprocess.CompletedProcess[str]:
    """Runs a program or module on `count` GPUs."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={count}"]
    return subprocess.run(
        [*command, "--standalone", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def last_object(run: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The JSON object that a program printed last."""
    assert run.returncode == 0, run.stderr[-4000:]
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


@pytest.mark.multi_gpu(2)
def test_2000_calls_of_two_ranks_are_right_and_repeat_bit_by_bit() -> None:
    found = last_object(torchrun(2, str(HERE / "soak_group.py"), "2000", "ag_gemm"))
    assert found["problems"] == []
    assert found["calls"] == 2000
    assert found["paths"] == ["fused"]
    assert found["repeated"] == found["equal"] == 2 * (2000 - found["different"]) > 2 * 1800


@pytest.mark.multi_gpu(2)
def test_check_passes_on_two_ranks() -> None:
    shape = ["--m", "4096", "--n", "1032", "--k", "1032"]
    arguments = ["check", "ag_gemm", "--world", "group", *shape, "--calls", "4", "--delay"]
    for choices in (["--layout", "nn"], ["--transport", "pull"], ["--policy", "serial"]):
        run = torchrun(2, "-m", "kosmos_tpsp", "--", *arguments, *choices, "--json")
        assert last_object(run)["passed"] is True


@pytest.mark.multi_gpu(2)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_named_by_the_other(victim: int) -> None:
    shape = ["--m", "1024", "--n", "256", "--k", "256", "--kill-rank", str(victim)]
    run = torchrun(2, "-m", "kosmos_tpsp", "--", "check", "--world", "group", *shape, "--json")
    found = last_object(run)
    assert found["passed"] is True
    assert all(f"for rank {victim}" in text for text in found["errors"])


@pytest.mark.multi_gpu(2)
def test_captured_calls_replay_with_changing_contents() -> None:
    found = last_object(torchrun(2, str(HERE / "graph_group.py"), "20"))
    assert found == {"wrong": [], "refused_unprepared": True, "replays": 20}


@pytest.mark.multi_gpu(2)
def test_workspaces_on_streams_of_their_own_run_side_by_side() -> None:
    found = last_object(torchrun(2, str(HERE / "streams_group.py"), "60"))
    assert found["wrong"] == []
    assert found["calls"] == 4 * 60
