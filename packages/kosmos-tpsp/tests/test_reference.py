"""The oracle itself, against FP64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kosmos_core.worlds import World, reference_world
from kosmos_tpsp import BulkAgOptions, GemmRsOptions, reference
from kosmos_tpsp.cli.calls import (
    TOLERANCE,
    Call,
    Ledger,
    Operands,
    compare,
    compare_all,
    same_bits,
)
from kosmos_tpsp.exact import Wanted


def draw(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(torch.bfloat16)


@pytest.mark.parametrize("layout", ["tn", "nn"])
@pytest.mark.parametrize("size", [1, 3])
def test_ag_gemm_gathers_and_multiplies(
    size: int, layout: str, on_cpu: Callable[..., list[Any]]
) -> None:
    def host(rank: int, world: World) -> None:
        x = draw(17, 50, seed=rank)
        w = draw(*((33, 50) if layout == "tn" else (50, 33)), seed=9 + rank)
        out, gathered = reference.ag_gemm(x, w, world, layout)
        wanted = torch.cat([draw(17, 50, seed=r) for r in range(world.size)])
        assert torch.equal(gathered, wanted)
        product = wanted.double() @ (w.double().t() if layout == "tn" else w.double())
        assert compare(out, Wanted.of(product)) == (pytest.approx(0, abs=TOLERANCE), "")

    on_cpu(size, host)


@pytest.mark.parametrize("size", [1, 3])
def test_gemm_rs_multiplies_and_sums_what_a_rank_owns(
    size: int, on_cpu: Callable[..., list[Any]]
) -> None:
    def host(rank: int, world: World) -> None:
        call = Call(17 * world.size, 33, 50, 0, GemmRsOptions())
        operands = Operands(0, world.size, torch.device("cpu"))
        out = reference.gemm_rs(*operands.given(call, rank).values(), world)
        every = [operands.given(call, r) for r in range(world.size)]
        total = sum(given["x"].double() @ given["w"].double().t() for given in every)
        wanted = operands.wanted(call, rank)["out"]
        assert isinstance(total, torch.Tensor)
        torch.testing.assert_close(wanted.values, total[17 * rank : 17 * rank + 17])
        assert compare(out, wanted)[1] == ""
        # Without one rank's part it is wrong.
        assert size == 1 or compare(out - out.roll(1, 0), wanted)[1] != ""

    on_cpu(size, host)


@pytest.mark.parametrize("size", [1, 3, 4])
def test_bulk_ag_gathers_beside_an_independent_product(
    size: int, on_cpu: Callable[..., list[Any]]
) -> None:
    def host(rank: int, world: World) -> None:
        x, w = draw(17, 33, seed=rank), draw(50, 33, seed=20 + rank)
        dy = draw(17 * world.size, 50, seed=40 + rank)
        gathered, dx = reference.bulk_ag(x, dy, w, world)
        assert torch.equal(gathered, torch.cat([draw(17, 33, seed=r) for r in range(world.size)]))
        wanted = Wanted.of(dy.double() @ w.double())
        assert compare(dx, wanted)[1] == ""
        # The product is of this rank's own operands.
        other = draw(50, 33, seed=20 + (rank + 1) % world.size)
        assert size == 1 or compare(dy @ other, wanted)[1] != ""

    on_cpu(size, host)


@pytest.mark.parametrize("size", [1, 3, 4])
def test_bulk_rs_sums_what_a_rank_owns_beside_the_weight_gradient(
    size: int, on_cpu: Callable[..., list[Any]]
) -> None:
    def host(rank: int, world: World) -> None:
        tokens = 17 * world.size
        dy, x = draw(tokens, 50, seed=20 + rank), draw(tokens, 33, seed=7)
        parts = [draw(tokens, 33, seed=r) for r in range(world.size)]
        shard, dw = reference.bulk_rs(parts[rank], dy, x, world)
        own = slice(17 * rank, 17 * rank + 17)
        total = sum(part.double()[own] for part in parts)
        assert isinstance(total, torch.Tensor)
        # One rounding: no further from FP64 than half a unit in the last place.
        assert bool(((shard.double() - total).abs() <= total.abs() * 2**-8).all())
        assert compare(dw, Wanted.of(dy.double().t() @ x.double()))[1] == ""
        assert size == 1 or compare(shard, Wanted.of(parts[rank].double()[own]))[1] != ""

    on_cpu(size, host)


def test_what_is_sent_is_dense(
    on_cpu: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch.distributed wants it: a rank that it refuses would leave the others waiting."""
    send = World.all_to_all_tensor

    def strict(world: World, x: torch.Tensor) -> torch.Tensor:
        assert x.is_contiguous(), x.stride()
        return send(world, x)

    def host(rank: int, world: World) -> None:
        dx, dy, x = draw(12, 20, seed=rank), draw(20, 8, seed=7), draw(20, 12, seed=8)
        sums = reference.bulk_rs(dx.t(), dy, x, world)[0]
        assert torch.equal(sums, reference.bulk_rs(dx.t().contiguous(), dy, x, world)[0])

    monkeypatch.setattr(World, "all_to_all_tensor", strict)
    on_cpu(2, host)


def test_sums_are_rounded_once() -> None:
    """Parts that cancel leave what is far below their last place."""

    class Three:
        size = 3

        @staticmethod
        def all_to_all_tensor(x: torch.Tensor) -> torch.Tensor:
            return torch.tensor([[256.0], [1.0], [-256.0]], dtype=torch.bfloat16)

    x = torch.zeros(3, 1, dtype=torch.bfloat16)
    shard, _ = reference.bulk_rs(x, x, x, Three())  # type: ignore[arg-type]
    assert shard.item() == 1.0
    assert (x[:1] + 256 + 1 - 256).item() == 0.0  # rounded after every addition


def test_no_tokens_leave_a_weight_gradient_of_zeros() -> None:
    none = torch.zeros(0, 5, dtype=torch.bfloat16)
    shard, dw = reference.bulk_rs(none, torch.zeros(0, 3).bfloat16(), none, reference_world())
    assert shard.shape == (0, 5)
    assert torch.equal(dw, torch.zeros(3, 5, dtype=torch.bfloat16))


def test_outputs_that_are_wrong_or_missing_are_named() -> None:
    call, operands = Call(34, 33, 50, 0, BulkAgOptions()), Operands(0, 2, torch.device("cpu"))
    wanted = operands.wanted(call, 1)
    right = {name: one.values.to(torch.bfloat16) for name, one in wanted.items()}
    assert compare_all(right, wanted)[1] == ""
    other = {name: out.clone() for name, out in right.items()}
    other["gathered"][0, 3] += 1
    other["dx"][:2] = 0
    assert compare_all({**right, "gathered": other["gathered"]}, wanted) == (
        float("inf"), "gathered: 1 of 34 rows differ, the first is row 0",
    )  # fmt: skip
    assert compare_all({**right, "dx": other["dx"]}, wanted)[1].startswith("dx: 2 of 34 rows wrong")
    assert compare_all({"gathered": right["gathered"]}, wanted)[1] == "dx: missing"


def test_a_world_without_distributed_is_a_group_of_one() -> None:
    x, w = draw(8, 16, seed=0), draw(24, 16, seed=1)
    out, gathered = reference.ag_gemm(x, w, reference_world())
    assert torch.equal(gathered, x)
    assert torch.equal(out, x @ w.t())


def test_one_wrong_row_does_not_hide() -> None:
    wanted = torch.randn(4096, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    out = wanted.to(torch.bfloat16)
    assert compare(out, Wanted.of(wanted))[1] == ""
    out[1234] = out[1235]
    error, problem = compare(out, Wanted.of(wanted))
    # Over all rows it is little more than the rounding; in its own it is everything.
    assert error < 0.05
    assert "1 of 4096 rows wrong, row 1234" in problem


def test_one_wrong_element_of_a_row_does_not_hide() -> None:
    wanted = torch.ones(64, 128, dtype=torch.float64)
    out = wanted.to(torch.bfloat16)
    out[5, 7] *= 1.1
    assert "row 5" in compare(out, Wanted.of(wanted))[1]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_element_that_was_never_written_does_not_hide(value: float) -> None:
    wanted = torch.ones(64, 32, dtype=torch.float64)
    out = wanted.to(torch.bfloat16)
    out[63, 31] = value
    error, problem = compare(out, Wanted.of(wanted))
    assert error == float("inf")
    assert "row 63" in problem


def test_another_shape_is_wrong_and_an_empty_one_is_right() -> None:
    assert "shape" in compare(torch.zeros(3, 4), Wanted.of(torch.zeros(4, 3)))[1]
    assert compare(torch.zeros(0, 4), Wanted.of(torch.zeros(0, 4))) == (0.0, "")


def test_bits_are_compared_and_not_values() -> None:
    zero = torch.zeros(2, dtype=torch.bfloat16)
    nan = torch.full((2,), float("nan"), dtype=torch.bfloat16)
    assert not same_bits(zero, -zero)
    assert same_bits(nan, nan.clone())
    one, other = Call(1, 1, 2), Call(1, 1, 2, data=1)
    ledger = Ledger()
    assert ledger.repeats(one, 0, {"out": zero}) is None
    assert ledger.repeats(one, 0, {"out": zero.clone()}) is True
    assert ledger.repeats(one, 0, {"out": -zero}) is False
    assert ledger.repeats(one, 0, {}) is False
    assert ledger.repeats(one, 1, {"out": -zero}) is None
    assert ledger.repeats(other, 0, {"out": -zero}) is None
    only = Ledger({other})
    assert [only.repeats(one, 0, {"out": zero}) for _ in range(2)] == [None, None]
    assert [only.repeats(other, 0, {"out": zero}) for _ in range(2)] == [None, True]
