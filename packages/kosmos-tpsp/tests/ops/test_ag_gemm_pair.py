"""`ag_gemm_pair` on the CPU executor, all checks on: both gradients behind one gather."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kosmos_core.errors import KosmosError
from kosmos_core.executor import ExecutorError, Mutation
from kosmos_core.testing.schedules import Schedule
from kosmos_core.worlds import World, cpu_world, gpu_world
from kosmos_tpsp.device import gather, pair, rows, unpack
from kosmos_tpsp.kernels.ag_gemm_pair import ag_gemm_pair_kernel
from kosmos_tpsp.ops import mx
from kosmos_tpsp.ops.ag_gemm import ag_gemm
from kosmos_tpsp.ops.ag_gemm_pair import AgGemmPairOptions, ag_gemm_pair, prepare_ag_gemm_pair
from kosmos_tpsp.workspaces import TpSpWorkspace

# (rows of a rank, n, k), several of them in one workspace: several tile rows, ragged columns.
SHAPES = ((64, 40, 64), (32, 24, 32), (96, 8, 32))
PUSH = {"transport": "push"}
PULL = {"transport": "pull"}


def matrix(*shape: int, seed: int, device: Any = "cpu") -> torch.Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return drawn.bfloat16().to(device)


def call(
    rank: int, workspace: TpSpWorkspace, shape: tuple[int, int, int], adds: bool, **choices: Any
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """One call: (result, what it must be, float64) of both products."""
    (chunk, n, k), size, device = shape, workspace.world.size, workspace.world.device
    grads = [matrix(chunk, k, seed=source, device=device) for source in range(size)]
    w = mx.quantized(matrix(k, n, seed=10 + rank, device=device), "col")
    x = mx.quantized(matrix(chunk * size, n, seed=20 + rank, device=device), "col")
    copies = [mx.quantized(grads[rank], axis) for axis in ("row", "col")]
    main_grad = torch.ones(k, n, device=device) if adds else None
    # As values and as they are: the same product.
    left = w if rank % 2 else mx.as_operand(w, scaled=False)
    dx, dw = ag_gemm_pair(*copies, left, x, workspace, main_grad=main_grad, **choices)
    workspace.synchronize()
    by_row, by_column = (
        torch.cat([mx.quantized(g, axis).dequantize(torch.float64) for g in grads])
        for axis in ("row", "col")
    )
    made = dw if main_grad is None else main_grad - 1
    assert made is not None
    return [
        (dx, by_row @ w.dequantize(torch.float64)),
        (made, by_column.t() @ x.dequantize(torch.float64)),
    ]


def steps(rank: int, world: World, shapes: Any, adds: bool, choices: dict[str, Any]) -> None:
    """Calls of all shapes, by turns with an `ag_gemm` on the same memory, each judged."""
    workspace = TpSpWorkspace(world, 96 * world.size, 66)
    for shape in shapes:
        for found, wanted in call(rank, workspace, shape, adds, **choices):
            assert float((found.double() - wanted).norm()) <= 4e-3 * float(wanted.norm())
        ag_gemm(matrix(40, 32, seed=1), matrix(24, 32, seed=2), workspace)
    workspace.synchronize()
    assert workspace.launches["ag_gemm_pair"] == len(shapes) * (
        2 if choices.get("policy") == "serial" else 1
    )
    workspace.destroy()


def run(ranks: int, seed: int, shapes: Any = SHAPES, adds: bool = False, **more: Any) -> None:
    """One schedule, every check on."""
    vendor, mutations = more.pop("vendor", "nvidia"), more.pop("mutations", ())
    wgs = more.pop("wgs", 4)
    settings = {"jump_clock": False, **Schedule.draw(seed, ranks, wgs).options()}
    with cpu_world(ranks, wgs=wgs, vendor=vendor, mutations=mutations, **settings) as world:
        world.spmd(steps, world, shapes, adds, more)


@pytest.mark.parametrize("transport", ["pull", "push"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_both_products(ranks: int, transport: str) -> None:
    vendor = ("nvidia", "amd")[ranks % 2]
    run(ranks, ranks, adds=ranks == 2, transport=transport, vendor=vendor)


@pytest.mark.parametrize(
    ("policy", "transport", "cap"),
    [
        ("two_way", "push", None),
        ("fixed", "pull", 3),
        ("serial", "push", None),
        ("one_way", "push", 2),
    ],
)  # fmt: skip
def test_policies_and_caps(policy: str, transport: str, cap: int | None) -> None:
    run(2, 5, SHAPES[:2], policy=policy, transport=transport, cap=cap)


def test_many_ranks() -> None:
    run(4, 1, SHAPES[1:2], transport="push")
    run(8, 2, SHAPES[1:2], transport="pull")


@pytest.mark.gpu
@pytest.mark.parametrize("transport", ["pull", "push"])
def test_eight_virtual_ranks_on_a_gpu(transport: str) -> None:
    shapes = ((512, 520, 1056), (96, 256, 2048))

    def host(rank: int, world: World) -> None:
        workspace = TpSpWorkspace(world, 512 * world.size, 2112, timeout_s=30.0)
        options = AgGemmPairOptions(transport=transport)
        for chunk, n, k in shapes:
            prepare_ag_gemm_pair(workspace, chunk, n, k, options)
        for shape in shapes * 10:
            for found, wanted in call(rank, workspace, shape, False, options=options):
                assert float((found.double() - wanted).norm()) <= 4e-3 * float(wanted.norm())
        workspace.destroy()

    with gpu_world(8) as world:
        world.spmd(host, world)


def test_declined_empty_and_repeated_calls(on_cpu: Callable[..., list[Any]]) -> None:
    def host(rank: int, world: World) -> None:
        with TpSpWorkspace(world, 64, 66) as workspace:
            for found, wanted in call(rank, workspace, (32, 12, 32), rank == 0):
                assert float((found.double() - wanted).norm()) <= 6e-3 * float(wanted.norm())
            assert workspace.launches["ag_gemm_pair"] == 0
            nothing = [mx.zeros((0, 32), axis, world.device) for axis in ("row", "col")]
            dx, dw = ag_gemm_pair(
                *nothing, matrix(32, 16, seed=0), matrix(0, 16, seed=0), workspace
            )
            assert (tuple(dx.shape), dw.tolist()) == ((0, 16), torch.zeros(32, 16).tolist())
            prepare_ag_gemm_pair(workspace, *SHAPES[1], AgGemmPairOptions())
            first, again = (call(rank, workspace, SHAPES[1], False) for _ in range(2))
            for (a, _), (b, _) in zip(first, again, strict=True):
                assert torch.equal(a, b)
            copies = 2 * 2 * 64 * 66
            assert workspace.num_bytes() == TpSpWorkspace.required_bytes(
                world.size, 64, 66, workspace.machine, mxfp8=2
            )
            assert workspace.num_bytes() > copies

    on_cpu(2, host)


DEFECTS: dict[str, tuple[Any, str, str, dict[str, Any]]] = {
    "no wait": (pair.await_every_row, "if ok != 0:", "if ok == 2:", {}),
    "one slice less": (
        pair.build_second, "ctx.WORLD * grid.tile_rows * CONFIG.SLICES",
        "ctx.WORLD * grid.tile_rows * CONFIG.SLICES - 1", PUSH,
    ),
    "one slice more": (
        pair.build_second, "ctx.WORLD * grid.tile_rows * CONFIG.SLICES",
        "ctx.WORLD * grid.tile_rows * CONFIG.SLICES + 1", PULL,
    ),
    "pulled columns are not counted": (
        gather.carry_unit, 'flag_arrive(call.set_ptr + ALL_READY, "gpu", ctx.TARGET)', "pass", PULL,
    ),
    "columns lie where the other copy's scales do": (
        rows.columns_after, "rows.ptr + elements + elements // GROUP", "rows.ptr + elements", PUSH,
    ),
    "columns come before the start": (
        gather.copy_in, "if CONFIG.FORMAT == UNPACKED and CONFIG.COPIES == BOTH:", "if False:",
        PULL,
    ),
    "counted before the columns are dequantised": (
        unpack.unpack_slice, "        if CONFIG.COPIES == BOTH:\n            unpack_elements(",
        '        flag_arrive(call.set_ptr + ALL_READY, "gpu", ctx.TARGET)\n'
        "        if CONFIG.COPIES == BOTH:\n            unpack_elements(", PUSH,
    ),
    "the own rows are nobody's": (
        ag_gemm_pair_kernel, "unpack_own(ops, ctx, call, standing, grid, k, CONFIG)", "pass", PUSH,
    ),
    "one queue for both products": (
        pair.build_second, "await_every_row, SECOND_QUEUE", "await_every_row, 160", PUSH,
    ),
}  # fmt: skip


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_planted_defect_is_caught(defect: str) -> None:
    fn, old, new, choices = DEFECTS[defect]
    # Builders enough that some come to the second product while others wait for the last rows.
    settings = {"wgs": 6, "movers_per_peer": 1, "mutations": [Mutation(fn, old, new)]}

    def try_some() -> None:
        for seed in (2, 0, 1):
            run(2, seed, ((64, 8, 64), (32, 24, 32)), **settings, **choices)

    with pytest.raises((ExecutorError, AssertionError)):
        try_some()


ROWS, N, K = 32, 24, 64
DY = [mx.quantized(matrix(ROWS, K, seed=1), axis) for axis in ("row", "col")]
W, X = matrix(K, N, seed=2), matrix(ROWS, N, seed=3)
BAD: dict[str, tuple[Callable[[TpSpWorkspace], Any], str]] = {
    "bf16": (lambda ws: ag_gemm_pair(X, DY[1], W, X, ws), "dy: got torch.bfloat16, wanted an MXT"),
    "swapped": (lambda ws: ag_gemm_pair(*DY[::-1], W, X, ws), "dy: got a col-wise copy"),
    "tokens": (
        lambda ws: ag_gemm_pair(
            *(mx.zeros((40, K), axis, X.device) for axis in ("row", "col")), W, X, ws
        ),
        "dy_columns: got shape (40, 64)",
    ),
    "x": (lambda ws: ag_gemm_pair(*DY, W, X[:-1], ws), "x: got shape (31, 24), wanted (32, 24)"),
    "w": (lambda ws: ag_gemm_pair(*DY, W[:-1], X, ws), "w: got shape (63, 24), wanted (64, 24)"),
    "both": (
        lambda ws: ag_gemm_pair(*DY, W, X, ws, dw=W.clone(), main_grad=torch.zeros(K, N)),
        "dw: got together with main_grad",
    ),
    "out": (lambda ws: ag_gemm_pair(*DY, W, X, ws, out=X), "out: got memory that"),
    "choice": (lambda ws: ag_gemm_pair(*DY, W, X, ws, order="any"), "order: got 'any'"),
    "room": (
        lambda ws: ag_gemm_pair(
            *(mx.zeros((ROWS, 96), axis, X.device) for axis in ("row", "col")),
            matrix(96, N, seed=0), X, ws,
        ),
        "[32, 99] needs more than its [32, 66]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD)
def test_bad_operands_are_refused(on_cpu: Callable[..., list[Any]], bad: str) -> None:
    wrong, told = BAD[bad]

    def host(rank: int, world: World) -> None:
        with TpSpWorkspace(world, ROWS, 66) as workspace:
            with pytest.raises(KosmosError) as caught:
                wrong(workspace)
            assert told in str(caught.value)

    on_cpu(1, host)
