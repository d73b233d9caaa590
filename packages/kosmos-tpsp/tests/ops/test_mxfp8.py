"""MXFP8 operands of `ag_gemm`, all checks on: on the link, on arrival, in the matrix units."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from kosmos_core.errors import KosmosError
from kosmos_core.testing.schedules import Schedule
from kosmos_core.worlds import World
from kosmos_mx import MXTensor
from kosmos_mx.formats import SCALE_DTYPE
from kosmos_tpsp import reference
from kosmos_tpsp.cli.calls import Call
from kosmos_tpsp.cli.plant_list import PLANTS
from kosmos_tpsp.cli.plants import Plant
from kosmos_tpsp.cli.rig import Rig, Run, run_on_cpu
from kosmos_tpsp.ops import mx
from kosmos_tpsp.ops.ag_gemm import AgGemmOptions, ag_gemm
from kosmos_tpsp.ops.bulk_ag import BulkAgOptions, bulk_ag
from kosmos_tpsp.ops.bulk_rs import BulkRsOptions, bulk_rs
from kosmos_tpsp.ops.gemm_rs import GemmRsOptions, gemm_rs
from kosmos_tpsp.workspaces import TpSpWorkspace

OnCpu = Callable[..., list[Any]]
# (rows of a rank, n, k): ragged everywhere, a contraction that is padded, several tile rows.
SHAPES = ((40, 40, 64), (5, 24, 40), (72, 8, 8))
WORLDS = [(ranks, t) for ranks in (1, 2, 3, 4) for t in ("pull", "push")]


def run_calls(ranks: int, seed: int, calls: list[Call], **choices: Any) -> Run:
    """One schedule of these calls, the first of them once more at the end."""
    rig = Rig([*calls, calls[0]], seed)
    return run_on_cpu(ranks, rig, Schedule.draw(seed, ranks, 4), wgs=4, **choices)


def run(ranks: int, seed: int, shapes: tuple[Any, ...] = SHAPES, **choices: Any) -> Run:
    """One schedule of calls of several shapes, a bf16 one among them, in one workspace."""
    vendor, wgs = choices.pop("vendor", "nvidia"), choices.pop("wgs", 4)
    options = AgGemmOptions(**choices)
    calls = [
        Call(rows * ranks, n, k, data, options, "mxfp8")
        for data, (rows, n, k) in enumerate((*shapes, shapes[0]))
    ]
    plain = replace(options, block_scaled=None)
    calls.insert(2, Call(shapes[0][0] * ranks, 24, 64, 9, plain))
    rig = Rig([*calls, calls[0]], seed)
    return run_on_cpu(ranks, rig, Schedule.draw(seed, ranks, wgs), wgs=wgs, vendor=vendor)


@pytest.mark.parametrize("block_scaled", [False, True])
@pytest.mark.parametrize(("ranks", "transport"), WORLDS)
def test_shapes_by_turns_in_one_workspace(ranks: int, transport: str, block_scaled: bool) -> None:
    layout = ("tn", "nn")[ranks % 2]
    found = run(ranks, ranks, transport=transport, layout=layout, block_scaled=block_scaled)
    assert found.problems == []
    assert {verdict.transport for verdict in found.verdicts} == {transport}
    assert {(verdict.path, verdict.launches) for verdict in found.verdicts} == {("fused", 1)}


@pytest.mark.parametrize(
    ("policy", "transport", "layout", "order", "vendor"),
    [
        ("two_way", "push", "tn", "chunk_major", "amd"),
        ("two_way", "pull", "nn", "local_first", "nvidia"),
        ("fixed", "push", "nn", "naive", "nvidia"),
        ("serial", "push", "tn", "local_first", "nvidia"),
        ("serial", "pull", "nn", "local_first", "amd"),
    ],
)
def test_policies_orders_and_vendors(
    policy: str, transport: str, layout: str, order: str, vendor: str
) -> None:
    choices = {"policy": policy, "transport": transport, "layout": layout, "order": order}
    assert run(3, 5, SHAPES[:2], vendor=vendor, **choices).problems == []


@pytest.mark.parametrize("transport", ["pull", "push"])
def test_eight_ranks_few_workgroups_and_splits(transport: str) -> None:
    assert run(8, 1, ((24, 24, 24), (8, 8, 16)), transport=transport, wgs=2).problems == []
    assert run(2, 2, split_k=2, transport=transport, cap=2).problems == []
    assert run(2, 3, split_k=2, transport=transport, block_scaled=True, cap=3).problems == []


@pytest.mark.parametrize("transport", ["pull", "push"])
def test_the_dequantised_input_is_returned_where_that_is_asked_for(transport: str) -> None:
    for ranks in (1, 3):
        found = run(ranks, ranks, SHAPES[:2], keep_gathered=True, transport=transport)
        assert found.problems == []


@pytest.mark.parametrize(
    ("ranks", "transport", "policy", "vendor"),
    [
        (1, "push", "one_way", "nvidia"),
        (2, "push", "two_way", "amd"),
        (2, "pull", "serial", "nvidia"),
        (3, "push", "fixed", "nvidia"),
        (3, "pull", "one_way", "amd"),
        (4, "push", "serial", "nvidia"),
    ],
)
def test_columns_are_gathered_beside_a_gemm(
    ranks: int, transport: str, policy: str, vendor: str
) -> None:
    options = BulkAgOptions(transport=transport, policy=policy)
    calls = [
        Call(rows * ranks, n, k, data, options, dtype)
        for data, (rows, n, k, dtype) in enumerate(
            ((64, 40, 40, "mxfp8"), (40, 24, 24, "bf16"), (32, 72, 8, "mxfp8"))
        )
    ]
    found = run_calls(ranks, ranks, calls, vendor=vendor)
    assert found.problems == []
    assert {verdict.path for verdict in found.verdicts} == {"fused"}


def test_reductions_take_the_values_of_local_operands() -> None:
    calls = [
        Call(48, 40, 40, 0, GemmRsOptions(), "mxfp8"),
        Call(24, 40, 40, 1, BulkRsOptions(), "mxfp8"),
        Call(24, 24, 64, 2, GemmRsOptions(), "mxfp8"),
        Call(24, 24, 66, 3, BulkRsOptions(), "mxfp8"),
    ]
    assert run_calls(2, 3, calls).problems == []


ROWS, N, K = 40, 24, 96


def every_code(rank: int, rows: int = ROWS) -> MXTensor:
    """Random elements, and scales of which every code that BF16 holds exactly comes up."""
    generator = torch.Generator().manual_seed(rank)
    elements = torch.randint(0, 256, (rows, K), generator=generator, dtype=torch.uint8)
    elements[(elements & 0x7F) == 0x7F] = 0
    codes = 3 + (torch.arange(rows * K // 32) * 7 + rank) % 244
    scales = codes.to(torch.uint8).view(rows, K // 32).view(SCALE_DTYPE)
    return MXTensor(elements.view(torch.float8_e4m3fn), scales, "row", (rows, K), (K,))


@pytest.mark.parametrize("transport", ["pull", "push"])
def test_the_product_has_the_bits_of_the_one_of_dequantised_operands(
    on_cpu: OnCpu, transport: str
) -> None:
    def host(rank: int, world: World) -> tuple[torch.Tensor, torch.Tensor]:
        x, w = every_code(rank), mx.quantized(torch.randn(N, K).bfloat16(), "row")
        with TpSpWorkspace(world, ROWS * world.size, K) as workspace:
            found = ag_gemm(x, w, workspace, transport=transport)
            plain = ag_gemm(reference.plain(x), reference.plain(w), workspace, transport=transport)
            workspace.synchronize()
            assert workspace.launches["ag_gemm"] == 2
        return found, plain

    for found, plain in on_cpu(2, host, seed=4):
        assert torch.equal(found.view(torch.int16), plain.view(torch.int16))
        assert not bool(found.isnan().all())


@pytest.mark.parametrize("block_scaled", [False, True])
def test_a_nan_scale_spoils_its_row_and_no_other(on_cpu: OnCpu, block_scaled: bool) -> None:
    def host(rank: int, world: World) -> torch.Tensor:
        x = mx.quantized(torch.ones(ROWS, K).bfloat16(), "row")
        x.scales.view(torch.uint8)[3 + rank, 1] = 255
        w = mx.quantized(torch.ones(N, K).bfloat16(), "row")
        with TpSpWorkspace(world, ROWS * world.size, K) as workspace:
            out = ag_gemm(x, w, workspace, block_scaled=block_scaled)
            workspace.synchronize()
        return out

    for out in on_cpu(2, host):
        spoilt = out.isnan()
        assert spoilt.all(dim=1).nonzero().flatten().tolist() == [3, ROWS + 4]
        assert int(spoilt.sum()) == 2 * N
        assert out[~spoilt].unique().tolist() == [K]


def test_operands_may_lie_in_memory_as_they_like(on_cpu: OnCpu) -> None:
    def host(rank: int, world: World) -> None:
        x, w = every_code(rank), mx.quantized(torch.randn(K, N).bfloat16(), "col")
        turned = w.t()
        turned = replace(
            turned, data=turned.data.contiguous(), scales=turned.scales.contiguous()
        ).t()
        wide = x.t()
        wide = replace(wide, data=wide.data.contiguous(), scales=wide.scales.contiguous()).t()
        assert (wide.is_transposed, turned.is_k_major, w.is_k_major) == (True, True, False)
        with TpSpWorkspace(world, ROWS * world.size, K) as workspace:
            outs = [
                ag_gemm(left, right, workspace, layout="nn", block_scaled=scaled)
                for left, right in ((x, w), (wide, turned), (x, mx.as_operand(turned, False)))
                for scaled in (False, True)
                if not scaled or mx.is_mx(right)
            ]
            workspace.synchronize()
        for out in outs[::2]:
            assert torch.equal(out, outs[0])
        assert torch.equal(outs[1], outs[3])

    on_cpu(2, host)


def test_a_declined_call_gives_the_same_product(on_cpu: OnCpu) -> None:
    def host(rank: int, world: World) -> float:
        x, w = every_code(rank), mx.quantized(torch.randn(N + 4, K).bfloat16(), "row")
        with TpSpWorkspace(world, ROWS * world.size, K) as workspace:
            out = ag_gemm(x, w, workspace)
            assert workspace.launches["ag_gemm"] == 0
        rows = torch.cat([every_code(r).dequantize(torch.float64) for r in range(world.size)])
        wanted = rows @ w.dequantize(torch.float64).t()
        assert isinstance(out, torch.Tensor)
        return float((out.double() - wanted).norm() / wanted.norm())

    assert max(on_cpu(2, host)) < 4e-3


def test_without_rows_nothing_is_launched(on_cpu: OnCpu) -> None:
    def host(rank: int, world: World) -> None:
        x, w = mx.zeros((0, K), "row", world.device), mx.zeros((N, K), "row", world.device)
        with TpSpWorkspace(world, ROWS, K) as workspace:
            out = ag_gemm(x, w, workspace)
            assert isinstance(out, torch.Tensor)
            assert out.shape == (0, N)
            assert workspace.launches["ag_gemm"] == 0

    on_cpu(2, host)


def test_the_room_for_dequantised_rows_is_counted(on_cpu: OnCpu) -> None:
    def host(rank: int, world: World) -> None:
        with TpSpWorkspace(world, ROWS * world.size, K) as workspace:
            before = workspace.num_bytes()
            w = mx.zeros((N, K), "row", world.device)
            for transport, more in (("pull", 0), ("push", ROWS * world.size * K * 2)):
                ag_gemm(every_code(rank), w, workspace, transport=transport)
                assert workspace.num_bytes() - before == more
            needed = TpSpWorkspace.required_bytes(
                world.size, ROWS * world.size, K, workspace.machine, mxfp8=1
            )
            assert needed == workspace.num_bytes()
            workspace.synchronize()

    on_cpu(2, host)


X = every_code(0)
W = mx.quantized(torch.ones(N, K).bfloat16(), "row")
CPU = torch.device("cpu")
BAD: dict[str, tuple[Callable[[TpSpWorkspace], Any], str]] = {
    "column-wise x": (
        lambda ws: ag_gemm(mx.quantized(torch.ones(ROWS, K).bfloat16(), "col"), W, ws),
        "x: got a col-wise copy, wanted the row-wise one",
    ),
    "row-wise w of nn": (
        lambda ws: ag_gemm(X, mx.quantized(torch.ones(K, N).bfloat16(), "row"), ws, layout="nn"),
        "w: got a row-wise copy, wanted the col-wise one",
    ),
    "contraction": (
        lambda ws: ag_gemm(X, mx.quantized(torch.ones(N, 64).bfloat16(), "row"), ws),
        r"w: got shape \(24, 64\) for layout 'tn', wanted a contraction of 96",
    ),
    "unpadded values": (
        lambda ws: ag_gemm(
            mx.quantized(torch.ones(ROWS, 40).bfloat16(), "row"), torch.ones(N, 40).bfloat16(), ws
        ),
        "wanted a contraction of 64 .* dequantise it with padding=True",
    ),
    "bf16 x": (
        lambda ws: ag_gemm(torch.ones(ROWS, K).bfloat16(), W, ws),
        "w: got MXFP8 beside a bf16 x, wanted both in MXFP8",
    ),
    "bf16 w of scaled": (
        lambda ws: ag_gemm(X, torch.ones(N, K).bfloat16(), ws, block_scaled=True),
        "w: got torch.bfloat16, wanted an MXTensor",
    ),
    "scaled bf16": (
        lambda ws: ag_gemm(
            torch.ones(ROWS, K).bfloat16(), torch.ones(N, K).bfloat16(), ws, block_scaled=True
        ),
        "block_scaled: got True for bf16 operands",
    ),
    "room": (
        lambda ws: ag_gemm(mx.zeros((8, K + 1), "row", CPU), mx.zeros((N, K + 1), "row", CPU), ws),
        r"workspace: \[8, 128\] needs more than its \[40, 96\]",
    ),
    "e5m2": (
        lambda ws: ag_gemm(replace(X, data=X.data.to(torch.float8_e5m2)), W, ws),
        "x: got elements of torch.float8_e5m2, wanted torch.float8_e4m3fn",
    ),
    "segments": (
        lambda ws: ag_gemm(replace(X, segments=(64, 32)), W, ws), r"x: got segments \(64, 32\)"
    ),
    "kept": (
        lambda ws: ag_gemm(X, W, ws, keep_gathered=True, block_scaled=True),
        "keep_gathered: got True for MXFP8 that is multiplied as it is",
    ),
    "row-wise x of bulk_ag": (
        lambda ws: bulk_ag(X, torch.ones(ROWS, 8).bfloat16(), torch.ones(8, K).bfloat16(), ws),
        "x: got a row-wise copy, wanted the col-wise one, whose groups lie along the tokens",
    ),
    "rows of half a group": (
        lambda ws: bulk_ag(
            mx.zeros((ROWS, K), "col", CPU), torch.ones(ROWS, 32).bfloat16(),
            torch.ones(32, K).bfloat16(), ws,
        ),
        "x: got 40 rows on each rank, wanted a multiple of 32",
    ),
    "bf16 x of bulk_ag": (
        lambda ws: bulk_ag(torch.ones(ROWS, N).bfloat16(), X, W.t(), ws),
        "dy: got MXFP8 beside a bf16 x",
    ),
    "column-wise w of gemm_rs": (
        lambda ws: gemm_rs(X, mx.zeros((N, K), "col", CPU), ws), "w: got a col-wise copy"
    ),
    "row-wise x of bulk_rs": (
        lambda ws: bulk_rs(torch.ones(ROWS, K).bfloat16(), torch.ones(ROWS, 8).bfloat16(), X, ws),
        "x: got a row-wise copy, wanted the col-wise one",
    ),
    "not a flag": (lambda ws: ag_gemm(X, W, ws, block_scaled=1), "block_scaled: got 1"),
    "out over x": (
        lambda ws: ag_gemm(
            X, W, ws, out=torch.empty(0, dtype=torch.bfloat16).set_(
                X.data.untyped_storage(), 0, (ROWS, N)
            ),
        ),
        "out: got memory that x or w lies in",
    ),
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD)
def test_bad_operands_are_refused_before_the_launch(on_cpu: OnCpu, bad: str) -> None:
    call, told = BAD[bad]

    def host(rank: int, world: World) -> None:
        with TpSpWorkspace(world, ROWS, K) as workspace:
            with pytest.raises(KosmosError, match=told):
                call(workspace)
            assert workspace.launches["ag_gemm"] == 0

    on_cpu(1, host)


# Defects of the bf16 kernel that take the least time; the rest: `-m slow`, `check --plant`.
QUICK = (
    "no_barrier", "flag_before_data", "arrival_polled_relaxed", "count_too_high",
    "start_before_copy_in", "peer_read_before_start", "roles_by_program_id", "claim_without_atomic",
)  # fmt: skip
# Those of what only bf16 calls do: they keep rows, and builders poll what peers count.
BF16_ONLY = ("kept_before_arrival", "gather_left_early", "arrival_polled_gpu_scope")
SHARED = [
    pytest.param(plant, id=plant.name, marks=[] if plant.name in QUICK else pytest.mark.slow)
    for plant in PLANTS.values()
    if plant.op == "ag_gemm" and plant.dtype == "bf16" and plant.name not in BF16_ONLY
]


@pytest.mark.parametrize("plant", SHARED)
def test_defects_of_the_bf16_kernel_show_in_mxfp8(plant: Plant) -> None:
    plant = plant.in_mxfp8()
    caught = plant.catch()
    assert caught is not None
    assert re.fullmatch(r"rank\d\.wg\d", caught.wg), caught.report
    assert plant.false_alarms(caught.seed) == []


def test_without_the_extra_bf16_works_and_mxfp8_is_refused() -> None:
    script = """
import sys
sys.modules["kosmos_mx"] = None
import torch
from kosmos_core.worlds import cpu_world
from kosmos_tpsp.ops import mx
from kosmos_tpsp.ops.ag_gemm import ag_gemm
from kosmos_tpsp.workspaces import TpSpWorkspace
from kosmos_tpsp.__main__ import main
def host(rank, world):
    with TpSpWorkspace(world, 32, 32) as workspace:
        out = ag_gemm(torch.ones(16, 32).bfloat16(), torch.ones(8, 32).bfloat16(), workspace)
        workspace.synchronize()
        return float(out.sum()), workspace.launches["ag_gemm"]
with cpu_world(2) as world:
    print(world.spmd(host, world), mx.has_mx())
raise SystemExit(main(["check", "ag_gemm", "--dtype", "mxfp8"]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == f"{[(float(32 * 8 * 32), 1)] * 2} False\n"
    assert done.returncode == 2
    assert "kosmos-tpsp[mx]" in done.stderr
