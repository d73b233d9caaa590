"""Addresses of regions on other ranks."""

import triton
import triton.language as tl

from kosmos_core.device.layout import MAX_RANKS


@triton.jit
def peer_ptr(ctx, region, peer, dtype: tl.constexpr):
    """Pointer to a region on rank `peer`.

    Regions are 16-byte aligned, which the compiler must be told.
    """
    address = tl.load(ctx.table_ptr + region * MAX_RANKS + peer)
    return tl.multiple_of(address.to(tl.pointer_type(dtype), bitcast=True), 16)


@triton.jit
def peer_at(rank, step, WORLD: tl.constexpr):
    """The peer `step` places after `rank`; step may be negative down to -WORLD."""
    return (rank + step + WORLD) % WORLD
