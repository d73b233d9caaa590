"""What checks and benchmarks must know of each op: shapes, choices, and the op itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kosmos_tpsp.ops.ag_gemm import AgGemmOptions, ag_gemm, describe_call, prepare_ag_gemm
from kosmos_tpsp.ops.gemm_rs import GemmRsOptions, describe_gemm_rs, gemm_rs, prepare_gemm_rs
from kosmos_tpsp.ops.prepared import Prepared

# (m, n, k) of a call.
Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Driver:
    """One op; `size` is the number of ranks.

    Attributes:
        name: the op.
        options: its choices.
        orders: its queue orders, the default first.
        policies: its policies, the default first.
        transports: its transports.
        call: (x, w, workspace, out=, options=) makes a call.
        describe: (x, w, workspace, options) plans one.
        prepare: (workspace, x's rows, n, k, options) compiles and loads one. Collective.
        x_rows: (m, size) rows of x.
        out_rows: (m, size) rows of the output.
        width: features of the workspace that a call takes.
        crew: the choice that says how many workgroups move for each peer.
    """

    name: str
    options: type[Any]
    orders: tuple[str, ...]
    policies: tuple[str, ...]
    transports: tuple[str, ...]
    call: Callable[..., Any]
    describe: Callable[..., Prepared]
    prepare: Callable[..., None]
    x_rows: Callable[[int, int], int]
    out_rows: Callable[[int, int], int]
    width: Callable[[Shape], int]
    crew: str

    def remote_bytes(self, shape: Shape, size: int) -> int:
        """Bytes that cross ranks, into and out of each one."""
        return (size - 1) * _chunk(shape[0], size) * self.width(shape) * 2


def _chunk(m: int, size: int) -> int:
    return m // size


def _all(m: int, size: int) -> int:
    return m


DRIVERS = {
    driver.name: driver
    for driver in (
        Driver(
            "ag_gemm", AgGemmOptions, ("local_first", "chunk_major", "naive"),
            ("one_way", "two_way", "fixed", "serial"), ("pull", "push"),
            ag_gemm, describe_call, prepare_ag_gemm,
            x_rows=_chunk, out_rows=_all, width=lambda shape: shape[2],
            crew="movers_per_peer",
        ),
        Driver(
            "gemm_rs", GemmRsOptions, ("band_major", "row_major"), ("one_way", "fixed", "serial"),
            ("push",), gemm_rs, describe_gemm_rs, prepare_gemm_rs,
            x_rows=_all, out_rows=_chunk, width=lambda shape: shape[1],
            crew="reducers_per_peer",
        ),
    )
}  # fmt: skip


def driver_of(options: object) -> Driver:
    """The op that choices are of."""
    return next(d for d in DRIVERS.values() if isinstance(options, d.options))


def layout_of(options: Any) -> str:
    """The layout that a call has, chosen or not."""
    return str(getattr(options, "layout", "tn"))


def outputs(made: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(output, kept gathered input or None) of what a call returned."""
    return made if isinstance(made, tuple) else (made, None)
