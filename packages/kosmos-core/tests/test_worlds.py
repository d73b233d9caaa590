"""Worlds: the same interface wherever the ranks live, and clear refusals where they cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from kosmos_core.errors import WorldError
from kosmos_core.workspace import Workspace
from kosmos_core.worlds import (
    World,
    cpu_world,
    gpu_world,
    group_world,
    parse_world,
    reference_world,
)


@triton.jit(do_not_specialize=["rank"])
def tell_peers_kernel(table_ptr, rank, WORLD: tl.constexpr):
    """Every rank writes its number into its place on every rank."""
    for peer in range(WORLD):
        base = tl.load(table_ptr + peer).to(tl.pointer_type(tl.int64), bitcast=True)
        tl.store(base + rank, (peer * 0 + 100 + rank).to(tl.int64))


def exercise(rank: int, world: World) -> dict[str, Any]:
    """Uses everything that a fused world offers."""
    buffer = world.symmetric("words", 8, torch.int64)
    buffer.local.zero_()
    table = world.local("table", 8, torch.int64)
    table.zero_()
    table[: world.size] = torch.tensor(buffer.addresses, dtype=torch.int64)
    status = world.host_visible(2)
    world.synchronize()
    world.barrier()
    args, key = (table, rank, world.size), ("tell", world.size)
    world.launch(tell_peers_kernel, 1, args, key, num_warps=1, num_stages=1)
    world.synchronize()
    world.barrier()
    x = torch.full((2, 3), float(rank), device=world.device)
    stacked = world.all_gather_tensor(x)
    sent = list(range(world.size))
    rows = torch.full((sum(sent), 2), float(rank), device=world.device)
    exchanged = world.all_to_all_rows(rows, sent, [rank] * world.size)
    return {
        "exchanged": exchanged[:, 0].tolist(),
        "rank": world.rank,
        "told": buffer.local[: world.size].tolist(),
        "own": buffer.addresses[rank] == buffer.local.data_ptr(),
        "objects": world.all_gather_object({"rank": rank}),
        "stacked": stacked[:, 0].tolist(),
        "status": status.tolist(),
        "capturing": world.is_capturing(),
        "wgs": world.num_wgs,
        "fused": world.fused,
    }


def expect(found: dict[str, Any], rank: int, size: int) -> None:
    assert found["rank"] == rank
    assert found["exchanged"] == [source for source in range(size) for _ in range(rank)]
    assert found["told"] == [100 + r for r in range(size)]
    assert found["own"] is True
    assert found["objects"] == [{"rank": r} for r in range(size)]
    assert found["stacked"] == [float(r) for r in range(size) for _ in range(2)]
    assert found["status"] == [0, 0]
    assert found["capturing"] is False
    assert found["wgs"] >= 2
    assert found["fused"] is True


@pytest.mark.parametrize("size", [1, 2, 8])
@pytest.mark.parametrize("vendor", ["nvidia", "amd"])
def test_virtual_ranks_on_the_cpu(size: int, vendor: str) -> None:
    with cpu_world(size, vendor=vendor, race="raise", strict=True) as world:
        for rank, found in enumerate(world.spmd(exercise, world)):
            expect(found, rank, size)
        assert world.describe() == f"cpu:{size}"
        assert world.device == torch.device("cpu")


def test_memory_that_is_released_is_forgotten() -> None:
    def host(rank: int, world: World) -> int:
        memory = world.executor.memory  # type: ignore[attr-defined]
        before = len(memory.regions)
        for _ in range(2000):
            world.release(world.local("scratch", 64, torch.float32))
        return len(memory.regions) - before

    with cpu_world(1) as world:
        # In batches.
        assert world.spmd(host, world)[0] < 800


def test_closing_twice_is_closing_once_and_another_world_may_follow() -> None:
    world = cpu_world(2)
    world.close()
    world.close()
    with cpu_world(3) as again:
        assert again.size == 3


def test_ranks_exist_only_inside_spmd_and_while_the_world_is_open() -> None:
    with cpu_world(2) as world:
        spaces = world.spmd(lambda rank: Workspace(world, (), 1))
        with pytest.raises(WorldError, match="only inside world"):
            spaces[0].agree("outside", 1)
    assert not world.is_running()
    with cpu_world(2) as other, pytest.raises(WorldError, match="world: it is closed"):
        other.spmd(lambda rank: spaces[rank].agree("elsewhere", 1))


def test_an_exception_of_one_rank_comes_out_with_its_rank() -> None:
    def host(rank: int) -> None:
        if rank == 2:
            raise KeyError("lost")

    with cpu_world(3) as world, pytest.raises(KeyError, match="lost") as caught:
        world.spmd(host)
    assert any("rank 2" in note for note in getattr(caught.value, "__notes__", ["rank 2"]))


@pytest.mark.parametrize("size", [0, 9, -1])
def test_groups_have_one_to_eight_ranks(size: int) -> None:
    with pytest.raises(WorldError, match=f"world size: got {size}, wanted 1 to 8"):
        cpu_world(size)


def test_choices_that_do_not_exist_are_refused() -> None:
    with pytest.raises(WorldError, match="vendor: got 'other'"):
        cpu_world(2, vendor="other")
    with pytest.raises(WorldError, match="wgs: got 1, wanted at least 2"):
        cpu_world(2, wgs=1)


@pytest.mark.parametrize("spec", ["", "cpu", "cpu:", "cpu:0", "cpu:9", "cpu:x", "gpu:12", "tpu:2"])
def test_names_that_are_no_world_are_refused(spec: str) -> None:
    with pytest.raises(WorldError, match="world: got") as caught:
        parse_world(spec)
    assert repr(spec) in str(caught.value)


def test_names_make_worlds() -> None:
    with parse_world("cpu:3", seed=4) as world:
        assert (world.size, world.describe()) == (3, "cpu:3")
    assert parse_world("reference").fused is False


def test_without_a_gpu_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(WorldError, match="no GPU is visible; use cpu:N"):
        gpu_world(2)
    world = group_world()
    assert world.fused is False
    assert world.why_not_fused == "no GPU is visible"


def test_the_reference_world_is_a_group_of_one_by_itself() -> None:
    world = reference_world()
    x = torch.ones(2, 3)
    assert (world.size, world.rank, world.num_wgs) == (1, 0, 0)
    gathered = world.all_gather_tensor(x.t())
    assert torch.equal(gathered, x.t())
    assert gathered.is_contiguous()
    assert gathered.data_ptr() != x.data_ptr()
    assert world.all_gather_object("x") == ["x"]
    world.barrier()
    world.synchronize()
    with pytest.raises(WorldError, match="symmetric memory 'words'"):
        world.symmetric("words", 8, torch.int64)
    with pytest.raises(WorldError, match="launches no fused kernel"):
        world.launch(tell_peers_kernel, 1, (), "key", num_warps=1, num_stages=1)
    with pytest.raises(WorldError, match="start one process a rank"):
        world.spmd(exercise)


GLOO = """
    import json
    import torch
    import torch.distributed as dist
    from kosmos_core.errors import WorldError
    from kosmos_core.worlds import group_world, reference_world

    dist.init_process_group("gloo")
    world = group_world()
    # A subgroup has ranks of its own.
    pair = dist.new_group([1, 2])
    told = []
    for wrong in (pair,) * (dist.get_rank() == 0) + ("pair",):
        try:
            group_world(wrong)
        except WorldError as error:
            told.append(str(error))
    small = reference_world(pair) if dist.get_rank() else None
    found = {
        "rank": world.rank, "size": world.size, "fused": world.fused,
        "objects": world.all_gather_object(world.rank),
        "rows": world.all_gather_tensor(torch.full((2, 1), world.rank).t()).tolist(),
        "told": told,
        "pair": None if small is None else [small.rank, small.size, small.all_gather_object("x")],
    }
    world.barrier()
    with open(f"{world.rank}.json", "w") as f:
        json.dump(found, f)
    dist.destroy_process_group()
"""


def torchrun(count: int, text: str, folder: Path, **environment: str) -> list[dict[str, Any]]:
    """Runs a program on `count` ranks and returns what each wrote."""
    program = folder / "program.py"
    program.write_text(textwrap.dedent(text))
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={count}"]
    run = subprocess.run(
        [*command, "--standalone", str(program)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]


def test_the_reference_world_of_a_gloo_group(tmp_path: Path) -> None:
    for rank, found in enumerate(torchrun(3, GLOO, tmp_path, CUDA_VISIBLE_DEVICES="")):
        assert (found["rank"], found["size"], found["fused"]) == (rank, 3, False)
        assert found["objects"] == [0, 1, 2]
        assert found["rows"] == [[0, 0], [1, 1], [2, 2]]
        assert len(found["told"]) == 1 + (rank == 0)
        assert rank or "this process is not a member of it" in found["told"][0]
        assert "group: got str, wanted a process group" in found["told"][-1]
        assert found["pair"] == (None if rank == 0 else [rank - 1, 2, ["x", "x"]])


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 2, 8])
def test_virtual_ranks_on_a_gpu(size: int) -> None:
    with gpu_world(size) as world:
        for rank, found in enumerate(world.spmd(exercise, world)):
            expect(found, rank, size)
        assert world.describe() == f"gpu:{size}"


@pytest.mark.gpu
def test_a_rank_that_fails_releases_the_others_of_a_gpu() -> None:
    def host(rank: int, world: World) -> None:
        if rank == 1:
            raise KeyError("lost")
        world.barrier()

    with gpu_world(3) as world:
        with pytest.raises(KeyError, match="lost"):
            world.spmd(host, world)
        # The world can be used again.
        assert world.spmd(lambda rank: rank) == [0, 1, 2]


GPUS = """
    import json, os, sys
    sys.path.insert(0, {folder!r})
    import torch
    import torch.distributed as dist
    from kosmos_core.worlds import group_world
    from test_worlds import exercise

    if {ipc}:
        import torch.distributed._symmetric_memory as symm_mem

        def refuse(*arguments):
            raise RuntimeError("no rendezvous here")

        symm_mem.rendezvous = refuse
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    world = group_world()
    found = exercise(world.rank, world)
    with open(f"{{world.rank}}.json", "w") as f:
        json.dump(found, f)
    dist.destroy_process_group()
"""


@pytest.mark.multi_gpu(2)
@pytest.mark.parametrize("ipc", [False, True])
def test_ranks_with_a_gpu_each(ipc: bool, tmp_path: Path) -> None:
    program = GPUS.format(folder=str(Path(__file__).parent), ipc=ipc)
    for rank, found in enumerate(torchrun(2, program, tmp_path)):
        expect(found, rank, 2)
