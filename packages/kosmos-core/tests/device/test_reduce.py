"""Sums over sources: order, rounding, and nothing beside the run."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from kosmos_core.device.reduce import reduce_run
from kosmos_core.executor import Executor, MemoryFault


@triton.jit
def reduce_kernel(
    src_ptr,
    stride,
    dst_ptr,
    count,
    SOURCES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    sources = (src_ptr,)
    for source in tl.static_range(1, SOURCES):
        sources = sources + (src_ptr + source * stride,)  # noqa: RUF005
    reduce_run(sources, dst_ptr, count, SOURCES, BLOCK)


@pytest.mark.parametrize("sources", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 33, 80])
def test_a_run_is_added_up_in_order_and_nothing_beside_it(count: int, sources: int) -> None:
    generator = torch.Generator().manual_seed(count)
    # Of very different sizes: another order of summation gives other bits.
    sizes = 10.0 ** torch.randint(-3, 4, (sources, 1), generator=generator)
    data = (torch.randn(sources, max(count, 1), generator=generator) * sizes).bfloat16()
    wanted = data[0].float()
    for row in data[1:]:
        wanted = wanted + row.float()
    with Executor() as ex:
        # Exactly as long as the runs: a step beyond the last one is a memory fault.
        src = ex.tensor(0, data, "src")
        dst = ex.tensor(0, torch.full((count + 8,), -7).bfloat16(), "dst")
        reduce_kernel[(1,)](src, data.shape[1], dst, count, sources, 16)
        ex.run()
    assert torch.equal(dst[:count], wanted.bfloat16()[:count])
    assert dst[count:].eq(-7).all()


def test_a_run_that_is_too_long_is_found() -> None:
    with Executor() as ex:
        src = ex.empty(0, 127, torch.bfloat16, "parts")
        dst = ex.empty(0, 64, torch.bfloat16, "sums")
        reduce_kernel[(1,)](src, 64, dst, 64, 2, 16)
        with pytest.raises(MemoryFault, match="parts"):
            ex.run()
