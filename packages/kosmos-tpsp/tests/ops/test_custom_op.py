"""The dispatcher's operators: the function's results, right fake shapes, clear handle errors."""

from __future__ import annotations

import gc

import kosmos_tpsp.ops.custom  # noqa: F401  (registers the operators)
import pytest
import torch
from kosmos_core.errors import WorkspaceError
from kosmos_core.worlds import cpu_world
from kosmos_tpsp import (
    AgGemmOptions,
    BulkAgOptions,
    BulkColumnOptions,
    BulkRsOptions,
    GemmRsOptions,
    TpSpWorkspace,
    ag_gemm,
    bulk_ag,
    bulk_column,
    bulk_rs,
    gemm_rs,
)
from kosmos_tpsp.ops.registry import HANDLE_STRIDE, call_handle, resolve
from torch._subclasses.fake_tensor import FakeTensorMode

ROWS, N, K = 40, 48, 64


def operands(rank: int, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(7 + rank)
    x = torch.randn(ROWS, K, generator=g).bfloat16()
    w = torch.randn(*((N, K) if layout == "tn" else (K, N)), generator=g).bfloat16()
    return x, w


@pytest.mark.parametrize("layout", ["tn", "nn"])
def test_operator_equals_the_function(layout):
    def host(rank, world):
        with TpSpWorkspace(world, 2 * ROWS, K) as workspace:
            options = AgGemmOptions(layout=layout)
            x, w = operands(rank, layout)
            handle = call_handle(workspace, options)
            expected = ag_gemm(x, w, workspace, options=options)
            if layout == "tn":
                assert torch.equal(torch.ops.kosmos.ag_gemm(x, w, handle), expected)
                return
            out, gathered = torch.ops.kosmos.ag_gemm_gathered(x, w, handle)
            assert torch.equal(out, expected[0])
            assert torch.equal(gathered, expected[1])
            assert torch.equal(gathered[rank * ROWS : (rank + 1) * ROWS], x)

    with cpu_world(2, race="raise", strict=True) as world:
        world.spmd(host, world)


def test_the_operator_of_gemm_rs_equals_the_function():
    def host(rank, world):
        with TpSpWorkspace(world, 2 * ROWS, N) as workspace:
            g = torch.Generator().manual_seed(rank)
            x, w = (torch.randn(rows, K, generator=g).bfloat16() for rows in (2 * ROWS, N))
            handle = call_handle(workspace, GemmRsOptions())
            expected = gemm_rs(x, w, workspace)
            assert expected.shape == (ROWS, N)
            assert torch.equal(torch.ops.kosmos.gemm_rs(x, w, handle), expected)
            with FakeTensorMode():
                fake = torch.empty(2 * ROWS, K, dtype=torch.bfloat16)
                shape = torch.ops.kosmos.gemm_rs(fake, torch.empty(N, K).bfloat16(), handle).shape
            assert shape == expected.shape

    with cpu_world(2, race="raise", strict=True) as world:
        world.spmd(host, world)


def test_the_operator_of_bulk_ag_gives_tensors_of_its_own():
    def host(rank, world):
        with TpSpWorkspace(world, 2 * ROWS, N) as workspace:
            g = torch.Generator().manual_seed(rank)
            shapes = ((ROWS, N), (2 * ROWS, K), (K, N))
            given = [torch.randn(shape, generator=g).bfloat16() for shape in shapes]
            handle = call_handle(workspace, BulkAgOptions(dx_to="handover"))
            expected = [t.clone() for t in bulk_ag(*given, workspace)]
            made = torch.ops.kosmos.bulk_ag(*given, handle)
            assert [torch.equal(*pair) for pair in zip(made, expected, strict=True)] == [True, True]
            assert not any(workspace.holds(t) for t in made)
            with FakeTensorMode():
                fakes = [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes]
                fakes = torch.ops.kosmos.bulk_ag(*fakes, handle)
            assert [fake.shape for fake in fakes] == [t.shape for t in expected]

    with cpu_world(2, race="raise", strict=True) as world:
        world.spmd(host, world)


def bulk_operands(rank):
    """dx, dy, x of `bulk_rs`: 2 * ROWS tokens, N features, width K."""
    g = torch.Generator().manual_seed(rank)
    return [torch.randn(2 * ROWS, cols, generator=g).bfloat16() for cols in (N, K, N)]


def test_the_operators_of_bulk_rs_equal_the_function():
    def host(rank, world):
        with TpSpWorkspace(world, 2 * ROWS, N) as workspace:
            given = bulk_operands(rank)
            handle = call_handle(workspace, BulkRsOptions())
            shard, dw = bulk_rs(*given, workspace)
            got, gradient = torch.ops.kosmos.bulk_rs(*given, handle)
            assert torch.equal(got, shard)
            assert torch.equal(gradient, dw)
            held, added = torch.ones(K, N), torch.ones(K, N)
            bulk_rs(*given, workspace, main_grad=held)
            assert torch.equal(torch.ops.kosmos.bulk_rs_added(*given, added, handle), shard)
            assert torch.equal(added, held)
            assert not added.eq(1).all()
            with FakeTensorMode():
                fakes = [torch.empty(t.shape, dtype=t.dtype) for t in given]
                shapes = [t.shape for t in torch.ops.kosmos.bulk_rs(*fakes, handle)]
                assert shapes == [shard.shape, dw.shape]
                alone = torch.ops.kosmos.bulk_rs_added(*fakes, torch.empty(K, N), handle)
                assert alone.shape == shard.shape

    with cpu_world(2, race="raise", strict=True) as world:
        world.spmd(host, world)


def test_the_operator_of_a_column_backward_makes_both_calls():
    def host(rank, world):
        with TpSpWorkspace(world, 2 * ROWS, N) as workspace:
            g = torch.Generator().manual_seed(rank)
            shapes = ((ROWS, N), (2 * ROWS, K), (K, N))
            given = [torch.randn(shape, generator=g).bfloat16() for shape in shapes]
            handle = call_handle(workspace, BulkColumnOptions())
            wanted = bulk_column(*given, workspace)
            got = torch.ops.kosmos.bulk_column_backward(*given, handle)
            assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
            with FakeTensorMode():
                fakes = [torch.empty(t.shape, dtype=t.dtype) for t in given]
                fake = torch.ops.kosmos.bulk_column_backward(*fakes, handle)
            assert [t.shape for t in fake] == [t.shape for t in wanted]

    with cpu_world(2, race="raise", strict=True) as world:
        world.spmd(host, world)


def test_fake_shapes_and_handles():
    def host(rank, world):
        with TpSpWorkspace(world, 2 * ROWS, K) as workspace:
            plain = call_handle(workspace, AgGemmOptions())
            kept = call_handle(workspace, AgGemmOptions(layout="nn"))
            assert plain == call_handle(workspace, AgGemmOptions()) != kept
            assert resolve(kept)[0] is workspace
            # Whatever keeps compiled graphs tells those of other numbers of ranks apart.
            assert plain % HANDLE_STRIDE == kept % HANDLE_STRIDE == world.size
            with FakeTensorMode():
                x = torch.empty(ROWS, K, dtype=torch.bfloat16)
                w = torch.empty(N, K, dtype=torch.bfloat16)
                assert torch.ops.kosmos.ag_gemm(x, w, plain).shape == (2 * ROWS, N)
                out, gathered = torch.ops.kosmos.ag_gemm_gathered(x, w.t(), kept)
                assert (out.shape, gathered.shape) == ((2 * ROWS, N), (2 * ROWS, K))

    with cpu_world(2) as world:
        world.spmd(host, world)


def test_handle_of_a_workspace_that_is_gone_is_refused():
    def host(rank, world):
        workspace = TpSpWorkspace(world, 2 * ROWS, K)
        handle = call_handle(workspace, AgGemmOptions())
        workspace.destroy()
        x, w = operands(rank, "tn")
        with pytest.raises(WorkspaceError, match="destroyed"):
            torch.ops.kosmos.ag_gemm(x, w, handle)
        return handle

    with cpu_world(2) as world:
        handle = world.spmd(host, world)[0]
    gc.collect()
    with pytest.raises(WorkspaceError, match="no longer exists"):
        resolve(handle)
    with pytest.raises(WorkspaceError, match="no longer exists"):
        resolve(10**6)
