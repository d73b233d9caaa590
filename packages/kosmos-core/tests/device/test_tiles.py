"""Tiles: numbering, claims, and loads, products and stores on both vendors."""

from __future__ import annotations

import random

import pytest
import torch
import triton
import triton.language as tl
from kosmos_core.device.gemm import NN, NT, TN, add_accumulator, gemm_tile, store_accumulator
from kosmos_core.device.target import AMD, NVIDIA, clock_ns, load_tile, matrix_view, store_tile
from kosmos_core.device.tiles import (
    CHUNK_MAJOR,
    LOCAL_FIRST,
    NAIVE,
    Grid,
    claim_bucketed,
    gathered_tile,
    num_gathered_tiles,
)
from kosmos_core.executor import Executor, Random

TARGETS = [NVIDIA, AMD]


@triton.jit
def number_kernel(
    out_ptr,
    chunk_rows,
    tile_rows,
    columns,
    rank,
    ORDER: tl.constexpr,
    WORLD: tl.constexpr,
    TILE_ROW_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    GROUP_M: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
):
    grid = Grid(chunk_rows, tile_rows, columns)
    total = num_gathered_tiles(grid, ORDER, WORLD, TILE_ROW_ROWS, BLOCK_M)
    tl.store(out_ptr, total)
    for index in range(total):
        tile = gathered_tile(
            index, grid, rank, ORDER, WORLD, TILE_ROW_ROWS, BLOCK_M, GROUP_M, GROUP_ROWS
        )
        tl.store(out_ptr + 4 * index + 4, tile.src_rank)
        tl.store(out_ptr + 4 * index + 5, tile.row_block)
        tl.store(out_ptr + 4 * index + 6, tile.column)
        tl.store(out_ptr + 4 * index + 7, tile.tile_row)


@pytest.mark.parametrize("order", [LOCAL_FIRST, CHUNK_MAJOR, NAIVE])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_every_tile_has_one_number_and_the_arrival_of_its_rows(
    world: int, order: tl.constexpr
) -> None:
    rng = random.Random(world)
    for _ in range(4):
        rank, rows, columns = rng.randrange(world), rng.choice((1, 16, 40, 100)), rng.randint(1, 4)
        per_row, group_m, group_rows = rng.choice((1, 2, 4)), rng.randint(1, 4), rng.randint(1, 3)
        blocks, tile_rows = -(-rows // 16), -(-rows // (16 * per_row))
        # The own chunk has no empty row blocks but in the naive order.
        local = blocks if order is not NAIVE else tile_rows * per_row
        total = (local + (world - 1) * tile_rows * per_row) * columns
        with Executor() as ex:
            out = ex.empty(0, 4 * total + 4, torch.int32, "out")
            number_kernel[(1,)](
                out, rows, tile_rows, columns, rank, order, world, 16 * per_row, 16, group_m,
                group_rows,
            )  # fmt: skip
            ex.run()
        assert int(out[0]) == total
        places = [tuple(place) for place in out[4:].view(-1, 4).tolist()]
        real = [place for place in places if place[1] < blocks]
        wanted = {(s, b, c) for s in range(world) for b in range(blocks) for c in range(columns)}
        assert len(real) == len(wanted)
        assert {place[:3] for place in real} == wanted
        assert all(tile_row == block // per_row for _, block, _, tile_row in places)
        if order is not NAIVE:
            own = [place[0] == rank for place in places]
            assert own == sorted(own, reverse=True)


@triton.jit
def claim_kernel(heads_ptr, order_ptr, count_ptr, total, XCDS: tl.constexpr, RUN: tl.constexpr):
    own = tl.program_id(0) % XCDS
    index, bucket = claim_bucketed(heads_ptr, own, total, XCDS, RUN)
    while index < total:
        place = tl.atomic_add(count_ptr, 1, sem="relaxed", scope="gpu")
        tl.store(order_ptr + 2 * place, index)
        tl.store(order_ptr + 2 * place + 1, own)
        index, bucket = claim_bucketed(heads_ptr, bucket, total, XCDS, RUN)


@pytest.mark.parametrize("xcds", [1, 2, 4])
@pytest.mark.parametrize("total", [1, 7, 32, 50])
def test_bucketed_claims_cover_the_queue_and_keep_neighbours_together(
    xcds: int, total: int
) -> None:
    run = 4
    for seed in range(4):
        with Executor(policy=Random(seed)) as ex:
            heads = ex.symmetric(xcds, torch.int32, "heads")[0]
            count = ex.symmetric(1, torch.int32, "count")[0]
            order = ex.empty(0, 2 * total, torch.int32, "order")
            claim_kernel[(4,)](heads, order, count, total, xcds, run)
            ex.run()
        claims = order.view(-1, 2).tolist()
        assert sorted(index for index, _ in claims) == list(range(total))
        # As long as a workgroup's own bucket has work, that is where it claims.
        for bucket in range(xcds):
            own = [index for index, own in claims if own == bucket]
            inside = [index // run % xcds == bucket for index in own]
            assert inside == sorted(inside, reverse=True)


@triton.jit
def copy_tile_kernel(
    src_ptr,
    dst_ptr,
    chunks,
    rows,
    cols,
    chunk,
    row,
    col,
    R: tl.constexpr,
    C: tl.constexpr,
    EVEN: tl.constexpr,
    TARGET: tl.constexpr,
):
    src = matrix_view(src_ptr, chunks, rows, cols, R, C, TARGET)
    dst = matrix_view(dst_ptr, chunks, rows, cols, R, C, TARGET)
    value = load_tile(src, chunk, row, col, R, C, True, EVEN, TARGET)
    store_tile(dst, chunk, row, col, value, R, C, TARGET)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("row", "col"), [(0, 0), (16, 16), (32, 32), (0, 32), (32, 0)])
def test_a_tile_ends_with_its_chunk(row: int, col: int, target: tl.constexpr) -> None:
    # Chunks of 40 rows and 40 columns: the last tile of either holds 8.
    data = torch.randn(3, 40, 40, generator=torch.Generator().manual_seed(1)).bfloat16()
    with Executor() as ex:
        src = ex.tensor(0, data, "src")
        dst = ex.tensor(0, torch.full_like(data, -7), "dst")
        copy_tile_kernel[(1,)](src, dst, 3, 40, 40, 1, row, col, 16, 16, 0, target)
        ex.run()
    wanted = torch.full_like(data, -7)
    wanted[1, row : row + 16, col : col + 16] = data[1, row : row + 16, col : col + 16]
    assert torch.equal(dst, wanted)


@triton.jit
def load_kernel(
    src_ptr, out_ptr, rows, cols, row, col, R: tl.constexpr, C: tl.constexpr, TARGET: tl.constexpr
):
    view = matrix_view(src_ptr, 1, rows, cols, R, C, TARGET)
    value = load_tile(view, 0, row, col, R, C, 0, 0, TARGET)
    offsets = tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :]
    tl.store(out_ptr + offsets, value)


@pytest.mark.parametrize("target", TARGETS)
def test_columns_past_the_end_are_zero(target: tl.constexpr) -> None:
    data = torch.randn(16, 24, generator=torch.Generator().manual_seed(2)).bfloat16()
    with Executor() as ex:
        src, out = ex.tensor(0, data, "src"), ex.empty(0, (16, 16), torch.bfloat16, "out")
        load_kernel[(1,)](src, out, 16, 24, 0, 16, 16, 16, target)
        ex.run()
    assert torch.equal(out[:, :8], data[:, 16:])
    assert out[:, 8:].eq(0).all()


@pytest.mark.parametrize("target", TARGETS)
def test_rows_past_the_end_are_zero(target: tl.constexpr) -> None:
    # The last row is infinite: had it been read again for the rows past it, 0 times it is NaN.
    data = torch.randn(24, 16, generator=torch.Generator().manual_seed(2)).bfloat16()
    data[-1] = float("inf")
    with Executor() as ex:
        src, out = ex.tensor(0, data, "src"), ex.empty(0, (16, 16), torch.bfloat16, "out")
        load_kernel[(1,)](src, out, 24, 16, 16, 0, 16, 16, target)
        ex.run()
    assert torch.equal(out[:8], data[16:])
    assert out[8:].eq(0).all()


@triton.jit
def gemm_kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    rows,
    n,
    k,
    k_begin,
    k_end,
    begin_with,
    LAYOUT: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    TARGET: tl.constexpr,
):
    if LAYOUT == 2:
        a = matrix_view(a_ptr, 2, k, rows, BLOCK, BLOCK, TARGET)
    else:
        a = matrix_view(a_ptr, 2, rows, k, BLOCK, BLOCK, TARGET)
    if LAYOUT == 0:
        b = matrix_view(b_ptr, 1, n, k, BLOCK, BLOCK, TARGET)
    else:
        b = matrix_view(b_ptr, 1, k, n, BLOCK, BLOCK, TARGET)
    c = matrix_view(c_ptr, 2, rows, n, BLOCK, BLOCK // SPLITS, TARGET)
    for chunk in range(2):
        for row in range(0, rows, BLOCK):
            for col in range(0, n, BLOCK):
                acc = gemm_tile(
                    a, b, chunk, row, col, k_begin, k_end, begin_with, LAYOUT, BLOCK, BLOCK, BLOCK,
                    1, EVEN_K, False, EVEN_N, TARGET,
                )  # fmt: skip
                store_accumulator(c, chunk, row, col, acc, BLOCK, BLOCK, SPLITS, TARGET)


def multiply(
    layout: tl.constexpr,
    target: tl.constexpr,
    k: int,
    splits: int,
    begin: int,
    end: int,
    begin_with: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(product, FP64 product) of two chunks of 40 rows, 56 columns."""
    generator = torch.Generator().manual_seed(k)
    a = torch.randn(2, *((k, 40) if layout is NT else (40, k)), generator=generator).bfloat16()
    b = torch.randn(*((56, k) if layout is TN else (k, 56)), generator=generator).bfloat16()
    with Executor() as ex:
        given = [ex.tensor(0, t, name) for t, name in ((a, "a"), (b, "b"))]
        c = ex.empty(0, (2, 40, 56), torch.bfloat16, "c")
        even_k, even_n = int(k % 32 == 0), 0
        gemm_kernel[(1,)](
            *given, c, 40, 56, k, begin, end, begin_with, layout, 32, splits, even_k, even_n, target
        )
        ex.run()
    weights = b.double().t() if layout is TN else b.double()
    rows = a.double().transpose(1, 2) if layout is NT else a.double()
    return c, rows[..., begin:end] @ weights[begin:end]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("layout", [TN, NN, NT])
@pytest.mark.parametrize("k", [32, 40, 96])
def test_tiles_of_a_product(k: int, layout: tl.constexpr, target: tl.constexpr) -> None:
    for splits in (1, 2):
        product, wanted = multiply(layout, target, k, splits, 0, k)
        assert (product.double() - wanted).norm() <= 4e-3 * wanted.norm()


@pytest.mark.parametrize("target", TARGETS)
def test_part_of_a_contraction(target: tl.constexpr) -> None:
    product, wanted = multiply(TN, target, 96, 1, 32, 96)
    assert (product.double() - wanted).norm() <= 4e-3 * wanted.norm()
    nothing, _ = multiply(TN, target, 96, 1, 64, 64)
    assert nothing.eq(0).all()


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_past_the_contraction_enters_a_sum(target: tl.constexpr) -> None:
    # Rows past k lie in the second chunk, and the last columns before k are infinite: a row that
    # came in twice, or with weights of 0, would leave an Inf or a NaN elsewhere.
    generator = torch.Generator().manual_seed(5)
    a = torch.randn(2, 40, 40, generator=generator).bfloat16()
    b = torch.randn(40, 56, generator=generator).bfloat16()
    a[0, 39] = float("inf")
    b[39] = b[39].abs()
    a[1] = float("nan")
    with Executor() as ex:
        given = [ex.tensor(0, t, name) for t, name in ((a, "a"), (b, "b"))]
        c = ex.empty(0, (2, 40, 56), torch.bfloat16, "c")
        gemm_kernel[(1,)](*given, c, 40, 56, 40, 0, 40, 0.0, NT, 32, 1, 0, 0, target)
        ex.run()
    assert c[0].isposinf().all()
    assert c[1].isnan().all()


@triton.jit
def add_kernel(
    a_ptr,
    c_ptr,
    rows,
    cols,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    TARGET: tl.constexpr,
):
    c = matrix_view(c_ptr, 2, rows, cols, BLOCK, BLOCK // SPLITS, TARGET)
    offsets = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    for row in range(0, rows, BLOCK):
        for col in range(0, cols, BLOCK):
            acc = tl.load(a_ptr + offsets)
            add_accumulator(c, CHUNK, row, col, acc, BLOCK, BLOCK, SPLITS, TARGET)


@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize("target", TARGETS)
def test_a_tile_is_added_to_what_is_there(target: tl.constexpr, splits: int) -> None:
    generator = torch.Generator().manual_seed(6)
    tile = torch.randn(32, 32, generator=generator)
    held = torch.randn(2, 40, 56, generator=generator)
    with Executor() as ex:
        a, c = ex.tensor(0, tile, "a"), ex.tensor(0, held.clone(), "c")
        add_kernel[(1,)](a, c, 40, 56, 1, 32, splits, target)
        ex.run()
    rows, cols = torch.arange(40) % 32, torch.arange(56) % 32
    assert torch.equal(c[0], held[0])
    assert torch.equal(c[1], held[1] + tile[rows][:, cols])


@triton.jit
def clock_kernel(out_ptr, flag_ptr, TARGET: tl.constexpr):
    for i in range(4):
        tl.store(out_ptr + i, clock_ns(TARGET))
        tl.atomic_add(flag_ptr, 1, sem="relaxed", scope="gpu")


@pytest.mark.parametrize("target", TARGETS)
def test_device_time_goes_forward(target: tl.constexpr) -> None:
    with Executor() as ex:
        out, flag = ex.empty(0, 4, torch.int64, "out"), ex.symmetric(1, torch.int32, "flag")[0]
        clock_kernel[(1,)](out, flag, target)
        ex.run()
        times = out.tolist()
    assert times == sorted(set(times))
