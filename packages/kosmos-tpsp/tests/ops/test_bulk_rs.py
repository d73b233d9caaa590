"""`bulk_rs` on the CPU executor, all checks on: every choice, 1 to 8 ranks, odd shapes, aborts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
from kosmos_core.device import gemm
from kosmos_core.device import reduce as core_reduce
from kosmos_core.errors import ArgumentError, PeerError, PeerMismatchError, WorkspaceError
from kosmos_core.executor import Mutation
from kosmos_core.testing.schedules import Schedule
from kosmos_core.worlds import World, cpu_world, reference_world
from kosmos_tpsp import AgGemmOptions, BulkRsOptions, TpSpWorkspace, ag_gemm, bulk_rs
from kosmos_tpsp.device import gather, gradient
from kosmos_tpsp.kernels.bulk_rs import bulk_rs_kernel
from kosmos_tpsp.ops.bulk_rs import describe_bulk_rs, reduce_elements

OnCpu = Callable[..., list[Any]]
Shape = tuple[int, int, int]
# (m, n, tokens of a rank): ragged everywhere, several tile rows, fewer rows than a unit.
SHAPES: tuple[Shape, ...] = ((40, 72, 40), (24, 40, 5), (72, 24, 72))


def operands(rank: int, shape: Shape, size: int) -> list[torch.Tensor]:
    """A rank's dx, dy and x, the same at every call; x is the same on all ranks."""
    m, n, rows = shape
    source = torch.Generator().manual_seed(1000 * rank + 100 * size + m + n + rows)
    dx = torch.randn(rows * size, n, generator=source)
    dy = torch.randn(rows * size, m, generator=source)
    common = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(rows * size, n, generator=common)
    if rank % 2 == 0:
        # Every second part of some sums is huge, by turns positive and negative: what lies between
        # is lost when it is added in this order, and in no other.
        huge = torch.rand(dx.shape, generator=common) < 0.2
        dx[huge] = 2.0**40 if rank % 4 == 0 else -(2.0**40)
    return [t.bfloat16() for t in (dx, dy, x)]


def summed(rank: int, shape: Shape, size: int) -> torch.Tensor:
    """The sum of the rows that `rank` owns, as it must be bit by bit."""
    parts = [operands(r, shape, size)[0].chunk(size)[rank].float() for r in range(size)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total.bfloat16()


@dataclass(frozen=True)
class Made:
    """A call and what came of it on one rank.

    Attributes:
        shard: the sums.
        right: whether they are what they must be, bit by bit.
        gradient: the weight gradient, in main_grad's type if there is one.
        error: its relative error.
        path: "fused" or "reference".
        transport: of the plan.
    """

    shard: torch.Tensor
    right: bool
    gradient: torch.Tensor
    error: float
    path: str
    transport: str


def placed(workspace: TpSpWorkspace, dx: torch.Tensor) -> torch.Tensor:
    """dx in the handover, once nobody reads there any longer."""
    workspace.synchronize()
    workspace.world.barrier()
    return workspace.handover(*dx.shape).copy_(dx)


def make(
    workspace: TpSpWorkspace, shape: Shape, adds: bool = False, pulled: bool = False, **choices: Any
) -> Made:
    """One call, waited for."""
    world, (m, n, rows) = workspace.world, shape
    options = BulkRsOptions(**choices)
    dx, dy, x = operands(world.rank, shape, world.size)
    if pulled:
        dx = placed(workspace, dx)
    wanted = dy.double().t() @ x.double()
    out = torch.full((rows, n), float("nan")).bfloat16()
    memory: dict[str, Any] = {"dw": torch.full((m, n), float("nan")).bfloat16()}
    if adds:
        held = torch.randn(m, n, generator=torch.Generator().manual_seed(world.rank))
        wanted += held.double()
        memory = {"main_grad": held}
    shard, dw = bulk_rs(dx, dy, x, workspace, out=out, **memory, options=options)
    workspace.synchronize()
    assert shard is out
    assert dw is memory.get("dw")
    gradient = memory["main_grad"] if adds else dw
    described = describe_bulk_rs(dx, dy, x, workspace, options, adds)
    return Made(
        shard,
        torch.equal(shard, summed(world.rank, shape, world.size)),
        gradient,
        float((gradient.double() - wanted).norm() / wanted.norm()),
        "fused" if described.decline is None else "reference",
        described.plan.transport,
    )


def run(ranks: int, seed: int = 0, wgs: int = 4, vendor: str = "nvidia", **choices: Any) -> None:
    """Calls of several shapes, two of them twice, with calls of `ag_gemm` between them."""

    def host(rank: int, world: World) -> list[Made]:
        workspace = TpSpWorkspace(world, 1024, 128)
        made = []
        for i, shape in enumerate((*SHAPES, *SHAPES[:2])):
            # Equal shapes stand three places apart: pulled once, pushed once.
            pulled = (i + seed) % 2 == 0 and choices.get("transport") != "push"
            adds = (i + seed) % 3 == 0
            made.append(make(workspace, shape, adds, pulled, **choices))
            # Its rows land where pushed ones do.
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
            assert all(one.path == "fused" and one.right for one in made)
            # An FP32 sum is not rounded.
            most = [1e-5 if one.gradient.dtype is torch.float32 else 4e-3 for one in made]
            assert all(one.error < m for one, m in zip(made, most, strict=True))
            for first, again in ((made[0], made[3]), (made[1], made[4])):
                assert torch.equal(first.gradient, again.gradient)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("transport", [None, "push"])
def test_shapes_and_transports(ranks: int, transport: str | None) -> None:
    run(ranks, seed=ranks, transport=transport)


@pytest.mark.parametrize("policy", ["one_way", "two_way", "fixed", "serial"])
@pytest.mark.parametrize("vendor", ["nvidia", "amd"])
def test_policies(policy: str, vendor: str) -> None:
    run(1, 3, policy=policy, vendor=vendor)
    for seed in range(2):
        run(3, seed, policy=policy, vendor=vendor)


@pytest.mark.parametrize(("split_k", "wgs"), list(product([1, 2, 4], [2, 5])))
def test_split_tiles_and_caps(split_k: int, wgs: int) -> None:
    run(2, split_k, wgs, split_k=split_k)
    run(3, split_k, 6, split_k=split_k, cap=wgs)


@pytest.mark.parametrize("transport", [None, "push"])
def test_eight_ranks(transport: str | None) -> None:
    run(8, seed=4, wgs=3, transport=transport)


def test_many_schedules() -> None:
    for seed in range(6):
        run(2 + seed % 3, 100 + seed, 2 + seed % 4)


def test_where_dx_lies_decides_the_transport(on_cpu: OnCpu) -> None:
    def host(rank: int, world: World) -> list[str]:
        workspace = TpSpWorkspace(world, 192, 72)
        ways = [make(workspace, SHAPES[0], pulled=p).transport for p in (True, False)]
        ways.append(make(workspace, SHAPES[0], pulled=True, transport="push").transport)
        # Half of the columns of a matrix lie apart, and are copied.
        dx, dy, x = operands(rank, SHAPES[0], world.size)
        strided = torch.cat([dx, dx], dim=1)[:, : dx.shape[1]]
        shard, _ = bulk_rs(strided, dy, x, workspace)
        workspace.synchronize()
        parts = [operands(r, SHAPES[0], 2)[0].chunk(2)[rank].float() for r in range(2)]
        assert torch.equal(shard, (parts[0] + parts[1]).bfloat16())
        workspace.destroy()
        return ways

    assert on_cpu(2, host) == [["pull", "push", "push"]] * 2


def test_ranks_that_differ_in_where_dx_lies_are_told(on_cpu: OnCpu) -> None:
    def host(rank: int, world: World) -> None:
        workspace = TpSpWorkspace(world, 192, 72)
        with pytest.raises(PeerMismatchError):
            make(workspace, SHAPES[0], pulled=rank == 1) if rank else pushed(workspace)
        workspace.reset()
        assert make(workspace, SHAPES[0], pulled=True).right
        workspace.destroy()

    def pushed(workspace: TpSpWorkspace) -> None:
        workspace.world.barrier()
        make(workspace, SHAPES[0])

    on_cpu(2, host, jump_clock=False)


@pytest.mark.parametrize("pulled", [True, False])
@pytest.mark.parametrize("special", [float("nan"), float("inf")])
def test_what_is_no_number_stays_where_it_is(special: float, pulled: bool, on_cpu: OnCpu) -> None:
    def host(rank: int, world: World) -> tuple[torch.Tensor, torch.Tensor]:
        workspace = TpSpWorkspace(world, 192, 72)
        dx, dy, x = operands(rank, SHAPES[0], 2)
        if rank == 1:
            dx[3, 5] = special
            dy[7, 11] = special
        if pulled:
            dx = placed(workspace, dx)
        shard, dw = bulk_rs(dx, dy, x, workspace)
        workspace.synchronize()
        workspace.destroy()
        assert dw is not None
        return shard, dw

    (first, dw), (second, other) = on_cpu(2, host)
    assert (~first.isfinite()).nonzero().tolist() == [[3, 5]]
    assert second.isfinite().all()
    assert dw.isfinite().all()
    # dw = dy.T @ x: a column of dy is a row of it.
    assert other.isfinite().all(1).tolist() == [row != 11 for row in range(40)]


def test_no_tokens_are_no_error(on_cpu: OnCpu) -> None:
    def host(rank: int, world: World) -> None:
        workspace = TpSpWorkspace(world, 192, 72)
        none = (40, 24, 0)
        dx, dy, x = operands(rank, none, 2)
        shard, dw = bulk_rs(dx, dy, x, workspace)
        assert shard.shape == (0, 24)
        assert dw is not None
        assert dw.tolist() == [[0.0] * 24] * 40
        held = torch.ones(40, 24)
        # Nothing lies anywhere: either transport will do.
        assert bulk_rs(dx, dy, x, workspace, main_grad=held, transport="pull")[1] is None
        assert held.eq(1).all()
        assert make(workspace, SHAPES[0]).right
        workspace.destroy()

    on_cpu(2, host)


@pytest.mark.parametrize("shape", [(20, 24, 8), (24, 20, 8)])
@pytest.mark.parametrize("adds", [False, True])
def test_rows_that_are_not_aligned_take_the_reference_path(
    shape: Shape, adds: bool, on_cpu: OnCpu
) -> None:
    def host(rank: int, world: World) -> Made:
        workspace = TpSpWorkspace(world, 64, 32)
        made = make(workspace, shape, adds)
        workspace.destroy()
        return made

    for made in on_cpu(3, host):
        assert (made.path, made.right) == ("reference", True)
        assert made.error < 4e-3


def test_in_the_reference_world_all_is_as_in_others() -> None:
    with TpSpWorkspace(reference_world(), 192, 72) as workspace:
        for adds, choices in ((False, {}), (True, {}), (False, {"transport": "pull"})):
            made = make(workspace, SHAPES[0], adds, pulled=True, **choices)
            assert (made.path, made.right) == ("reference", True)
            assert made.error < 4e-3


def test_steps_are_shorter_with_more_sources() -> None:
    assert [reduce_elements(size, 1 << 20) for size in (1, 2, 3, 4, 5, 8)] == [
        8192, 8192, 4096, 4096, 2048, 2048,
    ]  # fmt: skip
    assert reduce_elements(2, 512) == 512


BAD: tuple[tuple[str, dict[str, Any], type[Exception], str], ...] = (
    ("tokens", {"rows": 25}, ArgumentError, "dx: got 25 rows, wanted a multiple of the 4 ranks"),
    ("dy", {"dy": (24, 16)}, ArgumentError, r"dy: got shape \(24, 16\), wanted \(32, 16\)"),
    ("x", {"x": (32, 24)}, ArgumentError, r"x: got shape \(32, 24\), wanted \(32, 32\)"),
    ("width", {"dy": (32, 0)}, ArgumentError, "features: got m = 0 and n = 32"),
    ("dtype", {"dtype": torch.float32}, ArgumentError, "dx: got dtype torch.float32"),
    ("room", {"rows": 256}, WorkspaceError, r"workspace: \[256, 32\] needs more than its"),
    ("policy", {"policy": "both"}, ArgumentError, "wanted one of one_way, two_way, fixed, serial"),
    ("transport", {"transport": "ring"}, ArgumentError, "wanted one of pull, push"),
    ("pull", {"transport": "pull"}, ArgumentError, "got 'pull' for a dx of its own memory"),
    ("cap", {"cap": 1}, ArgumentError, "cap: got 1, wanted at least 2"),
    ("split", {"split_k": 3}, ArgumentError, "split_k: got 3"),
    ("crew", {"reducers_per_peer": 0}, ArgumentError, "reducers_per_peer: got 0"),
    ("choice", {"movers": 3}, ArgumentError, "movers: got a choice of this name"),
    ("options", {"options": AgGemmOptions()}, ArgumentError, "wanted BulkRsOptions"),
    ("out", {"out": torch.empty(8, 32)}, ArgumentError, "out: got torch.float32"),
    ("dw", {"dw": torch.empty(16, 31).bfloat16()}, ArgumentError, r"dw: got torch.bfloat16 \(16"),
    (
        "main_grad", {"main_grad": torch.empty(16, 32).bfloat16()}, ArgumentError,
        "main_grad: got torch.bfloat16",
    ),
    (
        "both", {"main_grad": torch.empty(16, 32), "dw": torch.empty(16, 32).bfloat16()},
        ArgumentError, "dw: got together with main_grad",
    ),
)  # fmt: skip


@pytest.mark.parametrize(("name", "bad", "kind", "text"), BAD, ids=[case[0] for case in BAD])
def test_bad_input_is_told_to_all(
    name: str, bad: dict[str, Any], kind: type[Exception], text: str, on_cpu: OnCpu
) -> None:
    bad = dict(bad)
    rows, dtype = bad.pop("rows", 32), bad.pop("dtype", torch.bfloat16)
    shapes = {"dx": (rows, 32), "dy": (rows, 16), "x": (rows, 32)}
    shapes |= {key: bad.pop(key) for key in ("dy", "x") if key in bad}

    def host(rank: int, world: World) -> None:
        workspace = TpSpWorkspace(world, 64, 32)
        good = [torch.ones(32, cols).bfloat16() for cols in (32, 16, 32)]
        if rank == 2:
            given = {key: torch.ones(shape).bfloat16() for key, shape in shapes.items()}
            given["dx"] = given["dx"].to(dtype)
            with pytest.raises(kind, match=text):
                bulk_rs(**given, workspace=workspace, **bad)
        else:
            with pytest.raises(PeerError, match="rank 2 refused its call before launch"):
                wait_for(good, workspace)
        workspace.reset()
        shard, dw = bulk_rs(*good, workspace)
        workspace.synchronize()
        assert dw is not None
        assert shard.tolist() == [[4.0] * 32] * 8
        assert dw.tolist() == [[32.0] * 32] * 16
        workspace.destroy()

    on_cpu(4, host)


def test_memory_that_something_else_lies_in_is_refused(on_cpu: OnCpu) -> None:
    def host(rank: int, world: World) -> None:
        workspace = TpSpWorkspace(world, 64, 32)
        good = [torch.ones(32, cols).bfloat16() for cols in (32, 16, 32)]
        shared = torch.empty(32, 32).bfloat16()
        for name, memory in (
            ("out", {"out": good[0]}),
            ("dw", {"dw": good[1].view(-1)[:512].view(16, 32)}),
            ("dw", {"out": shared, "dw": shared[:16]}),
        ):
            with pytest.raises(ArgumentError, match=f"{name}: got memory that dx or dy"):
                bulk_rs(*good, workspace, **memory)
            workspace.reset()
        workspace.destroy()

    on_cpu(1, host)


def wait_for(
    given: list[torch.Tensor], workspace: TpSpWorkspace, **arguments: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    made = bulk_rs(*given, workspace, **arguments)
    workspace.synchronize()
    return made


@pytest.mark.parametrize("policy", ["one_way", "two_way", "fixed", "serial"])
@pytest.mark.parametrize("pulled", [True, False])
@pytest.mark.parametrize("kind", ["absent", "other call"])
def test_a_rank_that_does_not_come_is_named_and_nothing_wrong_is_left(
    policy: str, pulled: bool, kind: str, on_cpu: OnCpu
) -> None:
    def host(rank: int, world: World) -> bool:
        workspace = TpSpWorkspace(world, 192, 72, timeout_s=0.5)
        made = make(workspace, SHAPES[0], pulled=pulled, policy=policy)
        dx, dy, x = operands(rank, SHAPES[0], 3)
        if pulled:
            dx = placed(workspace, dx)
        world.barrier()
        out, held = torch.zeros(40, 72).bfloat16(), torch.zeros(40, 72)
        if rank != 1:
            with pytest.raises(PeerError) as caught:
                wait_for([dx, dy, x], workspace, policy=policy, out=out, main_grad=held)
            assert 1 in (caught.value.peer, caught.value.raised_by)
        elif kind == "other call":
            given = [t[:, :24].contiguous() for t in (dx, dy, x)]
            with pytest.raises(PeerError):
                wait_for(given, workspace, policy=policy)
        world.barrier()
        # What needs no other rank may have been done; all else is NaN.
        right = dy.double().t() @ x.double()
        assert rank == 1 or out.isnan().all()
        assert rank == 1 or (held.isnan() | (held - right).abs().lt(1e-2)).all()
        workspace.reset()
        again = make(workspace, SHAPES[0], pulled=pulled, policy=policy)
        workspace.destroy()
        return again.right and torch.equal(made.gradient, again.gradient)

    assert on_cpu(3, host, jump_clock=kind == "absent") == [True] * 3


def test_a_later_call_knows_another_place_of_dx(on_cpu: OnCpu) -> None:
    # The plan of the first call must not serve the second, which has the same shapes and options.
    def host(rank: int, world: World) -> None:
        workspace = TpSpWorkspace(world, 192, 72)
        for adds, pulled in product((False, True), (True, False)):
            made = make(workspace, SHAPES[0], adds, pulled)
            assert made.right
            assert made.transport == ("pull" if pulled else "push")
            assert made.gradient.dtype is (torch.float32 if adds else torch.bfloat16)
        assert len(workspace.prepared) == 4
        options = replace(BulkRsOptions(), cap=2)
        assert describe_bulk_rs(*operands(rank, SHAPES[0], 2), workspace, options).plan.cap == 2
        workspace.destroy()

    on_cpu(2, host)


# Defects that no other rank sees, so that only the values show them.
WRONG: dict[str, tuple[Any, str, str, dict[str, Any]]] = {
    "chunk of the source": (
        gradient.handed_over, "(region_ptr + call.rank * chunk,)", "(region_ptr + source * chunk,)",
        {"pulled": True},
    ),
    "order of arrival": (
        gradient.handed_over, "region_ptr = peer_ptr(ctx, HANDOVER, call.rank * 0 + source",
        "region_ptr = peer_ptr(ctx, HANDOVER, ctx.WORLD - source", {"pulled": True},
    ),
    "stale step": (
        core_reduce.reduce_run, "tl.load(sources[source] + i + offsets",
        "tl.load(sources[source] + offsets", {"pulled": True},
    ),
    "rounded on the way": (
        core_reduce.reduce_run, "total += ", "total = total.to(tl.bfloat16).to(tl.float32) + ", {},
    ),
    "own chunk sent": (
        gather.sent_rows, "peer * chunk + offset", "offset", {},
    ),
    "own slot": (
        gradient.own_or_landed, "if call.rank == source:", "if call.rank == source + 8:", {},
    ),
    "nobody joins": (
        bulk_rs_kernel, "queue_claim(call.set_ptr + JOIN_QUEUE) < max_movers - num_movers",
        "queue_claim(call.set_ptr + JOIN_QUEUE) < 0", {"ranks": 1},
    ),
    "claimed and left": (
        bulk_rs_kernel, "standing, place = build_gradient(", "standing, _ = build_gradient(",
        {"pulled": True, "choices": {"policy": "two_way"}},
    ),
    "tokens left out": (
        gemm.gemm_step, "a = load_tile(a_view, chunk, k, row, BLOCK_K, BLOCK_M, EVEN_K, EVEN_M",
        "a = load_tile(a_view, chunk, k + 1, row, BLOCK_K, BLOCK_M, EVEN_K, EVEN_M", {},
    ),
    "added twice": (
        gradient.store, "CONFIG.STORE_SPLITS, ctx.TARGET,\n        )",
        "CONFIG.STORE_SPLITS, ctx.TARGET,\n        )\n"
        "        add_accumulator(\n            job.gradient, 0, tile.row_block * CONFIG.BLOCK_M, "
        "tile.column * CONFIG.BLOCK_N, acc, CONFIG.BLOCK_M, CONFIG.BLOCK_N, CONFIG.STORE_SPLITS, "
        "ctx.TARGET,\n        )",
        {"adds": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize("defect", WRONG)
def test_a_wrong_value_is_seen(defect: str) -> None:
    fn, old, new, how = WRONG[defect]
    ranks = how.get("ranks", 3)

    def host(rank: int, world: World) -> list[bool]:
        workspace = TpSpWorkspace(world, 192, 72)
        found = []
        for shape in SHAPES[:2]:
            placed = how.get("adds", False), how.get("pulled", False)
            made = make(workspace, shape, *placed, **how.get("choices", {}))
            most = 1e-5 if how.get("adds") else 4e-3
            found.append(made.right and made.error < most)
        workspace.destroy()
        return found

    for planted in (True, False):
        mutations = [Mutation(fn, old, new)] if planted else []
        with cpu_world(ranks, mutations=mutations) as world:
            right = [all(of) for of in world.spmd(host, world)]
        assert all(right) != planted
