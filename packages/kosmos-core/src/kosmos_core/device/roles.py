"""Roles by order of arrival.

Workgroups of a grid do not start in the order of their ids, and with fewer slots than workgroups
some start only when others end. A role that others wait for must therefore be taken by whoever
arrives first.
"""

import triton
import triton.language as tl

FIXED = tl.constexpr(0)
ONE_WAY = tl.constexpr(1)
TWO_WAY = tl.constexpr(2)


@triton.jit
def is_mover_first(call, num_movers):
    """AG and dispatch: the first `num_movers` to arrive move data, since builders wait for them."""
    return call.ticket < num_movers


@triton.jit
def is_builder_last(call, num_movers, POLICY: tl.constexpr):
    """Who builds once the movers have moved: all but the movers with fixed roles, else all."""
    if POLICY == FIXED:
        return call.ticket >= num_movers
    else:
        return call.ticket >= 0


@triton.jit
def is_mover_last(call, num_movers):
    """RS: the last `num_movers` to arrive reduce; they wait for builders, who must come first."""
    return call.ticket >= tl.num_programs(0) - num_movers
