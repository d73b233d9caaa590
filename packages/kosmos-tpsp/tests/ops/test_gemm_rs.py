"""`gemm_rs` on the CPU executor, all checks on: every choice, 1 to 8 ranks, odd shapes, aborts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from kosmos_core.device.sentinel import SENTINEL
from kosmos_core.errors import ArgumentError, PeerError, WorkspaceError
from kosmos_core.testing.schedules import Schedule
from kosmos_core.worlds import World, cpu_world, reference_world
from kosmos_tpsp import AgGemmOptions, GemmRsOptions, TpSpWorkspace, ag_gemm, gemm_rs, reference
from kosmos_tpsp.ops.gemm_rs import describe_gemm_rs
from kosmos_tpsp.workspaces import TRANSPORTS

OnCpu = Callable[..., list[Any]]
# (rows of a rank, n, k): ragged everywhere, several tile rows, fewer rows than a unit.
SHAPES = ((40, 72, 64), (5, 24, 40), (72, 8, 8))


@dataclass(frozen=True)
class Made:
    """A call and what came of it on one rank.

    Attributes:
        shape: rows of a rank, n and k.
        out: the sums.
        wanted: sums of all ranks' products of this rank's rows, in FP64.
        path: "fused" or "reference".
    """

    shape: tuple[int, int, int]
    out: torch.Tensor
    wanted: torch.Tensor
    path: str

    @property
    def error(self) -> float:
        """Relative error."""
        return float((self.out.double() - self.wanted).norm() / self.wanted.norm())


def operands(rank: int, m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's operands, the same at every call."""
    source = torch.Generator().manual_seed(1000 * rank + m + n + k)
    x = torch.randn(m, k, generator=source).bfloat16()
    return x, torch.randn(n, k, generator=source).bfloat16()


def exact(size: int, rank: int, m: int, n: int, k: int) -> torch.Tensor:
    """The sum over ranks of the rows that `rank` owns, in FP64."""
    total = torch.zeros(m // size, n, dtype=torch.float64)
    for other in range(size):
        x, w = operands(other, m, n, k)
        total += x.double().chunk(size)[rank] @ w.double().t()
    return total


def make(workspace: TpSpWorkspace, shape: tuple[int, int, int], **choices: Any) -> Made:
    """One call, waited for."""
    world, (rows, n, k) = workspace.world, shape
    options = GemmRsOptions(**choices)
    m = rows * world.size
    x, w = operands(world.rank, m, n, k)
    out = torch.full((rows, n), float("nan")).bfloat16()
    assert gemm_rs(x, w, workspace, out=out, options=options) is out
    workspace.synchronize()
    described = describe_gemm_rs(x, w, workspace, options)
    path = "fused" if described.decline is None else "reference"
    return Made(shape, out, exact(world.size, world.rank, m, n, k), path)


def run(ranks: int, seed: int = 0, wgs: int = 4, vendor: str = "nvidia", **choices: Any) -> None:
    """Calls of several shapes, one of them twice, with calls of `ag_gemm` between them."""

    def host(rank: int, world: World) -> list[Made]:
        workspace = TpSpWorkspace(world, 1024, 128, reduce_transports=TRANSPORTS)
        made = []
        for shape in (*SHAPES, SHAPES[0]):
            made.append(make(workspace, shape, **choices))
            # Its rows land where the partial sums did.
            x = torch.full((8, 128), float(rank)).bfloat16()
            gathered = ag_gemm(x, torch.eye(128).bfloat16(), workspace, transport="push")
            workspace.synchronize()
            assert isinstance(gathered, torch.Tensor)
            assert gathered[:, 5].tolist() == [
                float(r) for r in range(world.size) for _ in range(8)
            ]
        workspace.destroy()
        return made

    schedule = Schedule.draw(seed, ranks, wgs)
    with cpu_world(ranks, wgs=wgs, vendor=vendor, jump_clock=False, **schedule.options()) as world:
        for made in world.spmd(host, world):
            assert all(one.path == "fused" for one in made)
            # Rounded once for each rank's product, and once more.
            assert all(one.error < 4e-3 for one in made), [one.error for one in made]
            assert torch.equal(made[0].out, made[-1].out)


each_transport = pytest.mark.parametrize("transport", TRANSPORTS)


@each_transport
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("order", ["band_major", "row_major"])
def test_shapes_and_orders(ranks: int, order: str, transport: str) -> None:
    run(ranks, seed=ranks, order=order, transport=transport)


@each_transport
@pytest.mark.parametrize("policy", ["one_way", "two_way", "fixed", "serial"])
@pytest.mark.parametrize("vendor", ["nvidia", "amd"])
def test_policies(policy: str, vendor: str, transport: str) -> None:
    for seed in range(3):
        run(3, seed, policy=policy, vendor=vendor, transport=transport)


@each_transport
@pytest.mark.parametrize(("split_k", "wgs"), list(product([1, 2, 4], [2, 5])))
def test_split_tiles_and_caps(split_k: int, wgs: int, transport: str) -> None:
    run(2, split_k, wgs, split_k=split_k, transport=transport)
    run(3, split_k, 6, split_k=split_k, cap=wgs, transport=transport)


@each_transport
def test_eight_ranks(transport: str) -> None:
    run(8, seed=3, transport=transport)


@each_transport
def test_many_schedules(transport: str) -> None:
    for seed in range(6):
        run(2 + seed % 3, 100 + seed, 2 + seed % 4, transport=transport)


# The third has the bits of a missing element; no arithmetic gives it.
@each_transport
@pytest.mark.parametrize("special", [0x7FC0, 0x7F80, int(SENTINEL.value)])
def test_what_is_no_number_stays_in_its_rows(special: int, transport: str, on_cpu: OnCpu) -> None:
    def host(rank: int, world: World) -> torch.Tensor:
        workspace = TpSpWorkspace(world, 64, 32, reduce_transports=(transport,))
        x, w = operands(rank, 64, 32, 16)
        if rank == 1:
            x.view(torch.int16)[33, 5] = special
        out = gemm_rs(x, w, workspace)
        workspace.destroy()
        return out

    first, second = on_cpu(2, host)
    assert first.isfinite().all()
    assert second.isfinite().all(1).tolist() == [row != 1 for row in range(32)]


def test_no_rows_are_no_error(on_cpu: OnCpu) -> None:
    def host(rank: int, world: World) -> list[tuple[int, ...]]:
        workspace = TpSpWorkspace(world, 64, 32)
        x, w = operands(rank, 0, 24, 16)
        shapes = [tuple(gemm_rs(x, w, workspace).shape)]
        shapes.append(tuple(make(workspace, (8, 24, 16)).out.shape))
        workspace.destroy()
        return shapes

    assert on_cpu(2, host) == [[(0, 24), (8, 24)]] * 2


def test_rows_that_are_not_aligned_take_the_reference_path(on_cpu: OnCpu) -> None:
    def host(rank: int, world: World) -> Made:
        workspace = TpSpWorkspace(world, 64, 32)
        made = make(workspace, (8, 20, 16))
        workspace.destroy()
        return made

    for made in on_cpu(3, host):
        assert made.path == "reference"
        assert made.error < 4e-3


def test_the_reference_alone_is_the_product() -> None:
    x, w = operands(0, 24, 16, 40)
    assert torch.equal(reference.gemm_rs(x, w, reference_world()), x @ w.t())


BAD: tuple[tuple[str, dict[str, Any], type[Exception], str], ...] = (
    ("rows", {"rows": 25}, ArgumentError, "x: got 25 rows, wanted a multiple of the 4 ranks"),
    ("contraction", {"k": 24}, ArgumentError, "wanted a contraction of 24"),
    ("dtype", {"dtype": torch.float32}, ArgumentError, "x: got dtype torch.float32"),
    ("room", {"rows": 256}, WorkspaceError, r"workspace: \[256, 32\] needs more than its"),
    ("policy", {"policy": "both"}, ArgumentError, "wanted one of one_way, two_way, fixed, serial"),
    ("transport", {"transport": "pull"}, ArgumentError, "wanted one of push"),
    ("cap", {"cap": 1}, ArgumentError, "cap: got 1, wanted at least 2"),
    ("split", {"split_k": 3}, ArgumentError, "split_k: got 3"),
    ("choice", {"movers": 3}, ArgumentError, "movers: got a choice of this name"),
    ("options", {"options": AgGemmOptions()}, ArgumentError, "wanted GemmRsOptions"),
)


@pytest.mark.parametrize(("name", "bad", "kind", "text"), BAD, ids=[case[0] for case in BAD])
def test_bad_input_is_told_to_all(
    name: str, bad: dict[str, Any], kind: type[Exception], text: str, on_cpu: OnCpu
) -> None:
    bad = dict(bad)
    rows, k, dtype = bad.pop("rows", 32), bad.pop("k", 16), bad.pop("dtype", torch.bfloat16)

    def host(rank: int, world: World) -> None:
        workspace = TpSpWorkspace(world, 64, 32)
        x, w = torch.ones(32, 16).bfloat16(), torch.ones(32, 16).bfloat16()
        if rank == 2:
            with pytest.raises(kind, match=text):
                gemm_rs(torch.ones(rows, k, dtype=dtype), w, workspace, **bad)
        else:
            with pytest.raises(PeerError, match="rank 2 refused its call before launch"):
                wait_for(x, w, workspace)
        workspace.reset()
        assert gemm_rs(x, w, workspace).tolist() == [[64.0] * 32] * 8
        workspace.destroy()

    on_cpu(4, host)


def wait_for(x: torch.Tensor, w: torch.Tensor, workspace: TpSpWorkspace, **arguments: Any) -> None:
    gemm_rs(x, w, workspace, **arguments)
    workspace.synchronize()


@each_transport
@pytest.mark.parametrize("policy", ["one_way", "two_way", "fixed", "serial"])
@pytest.mark.parametrize("kind", ["absent", "other call"])
def test_a_rank_that_does_not_come_is_named_and_nothing_wrong_is_left(
    policy: str, kind: str, transport: str, on_cpu: OnCpu
) -> None:
    def host(rank: int, world: World) -> bool:
        workspace = TpSpWorkspace(world, 192, 64, timeout_s=0.5, reduce_transports=(transport,))
        made = make(workspace, (40, 64, 32), policy=policy)
        world.barrier()
        out = torch.zeros(40, 64).bfloat16()
        if rank != 1:
            x, w = operands(rank, 120, 64, 32)
            with pytest.raises(PeerError) as caught:
                wait_for(x, w, workspace, policy=policy, out=out)
            assert 1 in (caught.value.peer, caught.value.raised_by)
        elif kind == "other call":
            x, w = operands(rank, 120, 48, 32)
            with pytest.raises(PeerError):
                wait_for(x, w, workspace, policy=policy)
        world.barrier()
        assert rank == 1 or out.isnan().all()
        workspace.reset()
        again = make(workspace, (40, 64, 32), policy=policy)
        workspace.destroy()
        return torch.equal(made.out, again.out)

    assert on_cpu(3, host, jump_clock=kind == "absent") == [True] * 3
