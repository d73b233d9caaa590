"""What checks and benchmarks must know of each op: operands, outputs, choices, the op itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from kosmos_heuristics.problems import wire_bytes

from kosmos_tpsp import exact
from kosmos_tpsp.exact import Draw, Wanted
from kosmos_tpsp.ops import custom, mx, prepared
from kosmos_tpsp.ops.ag_gemm import AgGemmOptions, ag_gemm, describe_call
from kosmos_tpsp.ops.bulk_ag import TENSOR, BulkAgOptions, bulk_ag, describe_bulk_ag
from kosmos_tpsp.ops.bulk_column import BulkColumnOptions, bulk_column, describe_bulk_column
from kosmos_tpsp.ops.bulk_rs import BulkRsOptions, bulk_rs, describe_bulk_rs
from kosmos_tpsp.ops.gemm_rs import GemmRsOptions, describe_gemm_rs, gemm_rs
from kosmos_tpsp.ops.prepared import Prepared
from kosmos_tpsp.workspaces import TpSpWorkspace

# (m, n, k) of a call's GEMM.
Shape = tuple[int, int, int]
Tensors = dict[str, torch.Tensor]


class Sizes(NamedTuple):
    """What the shapes of operands and outputs depend on.

    Attributes:
        m: rows of the GEMM's output.
        n: its columns.
        k: its contraction.
        ranks: number of ranks.
        layout: of the GEMM.
    """

    m: int
    n: int
    k: int
    ranks: int
    layout: str


Shapes = Mapping[str, Callable[[Sizes], tuple[int, int]]]


def _as_given(
    given: Mapping[str, torch.Tensor], workspace: TpSpWorkspace, options: Any, copies: bool
) -> Tensors:
    return dict(given)


def _handed_over(
    given: Mapping[str, torch.Tensor], workspace: TpSpWorkspace, options: Any, copies: bool
) -> Tensors:
    """Dx in the workspace's handover, where `bulk_ag` leaves it, unless it is to be pushed."""
    dx = given["dx"]
    fits = (
        workspace.hands_over
        and isinstance(dx, torch.Tensor)
        and dx.dim() == 2
        and dx.dtype is torch.bfloat16
        and 0 < dx.shape[0] <= workspace.max_tokens
        and dx.shape[1] <= workspace.max_features
    )
    if options.transport == "push" or not fits or workspace.is_handover(dx):
        return dict(given)
    place = workspace.handover(*dx.shape)
    if copies:
        if workspace.last_op.startswith("bulk_rs"):
            # Peers may still read there: they have left that call once they make another.
            workspace.agree("bulk_rs handover", 0)
        if workspace.world.device.type != "cuda":
            workspace.synchronize()
        place.copy_(dx)
    return {**given, "dx": place}


@dataclass(frozen=True)
class Driver:
    """One op.

    Attributes:
        name: the op.
        title: the op as pictures show it.
        options: its choices.
        layouts: of its GEMM, the default first.
        orders: its queue orders, the default first; none where there is nothing to choose.
        transports: its transports.
        crew: the choice that says how many workgroups move for each peer.
        tokens: which of m, n and k is shared out among the ranks.
        operands: its operands in order, and their shapes.
        outputs: what it returns, in order, and their shapes.
        into: the outputs that a call with these options may be given memory for, and the arguments
            that take it.
        op: (*operands, workspace, options=) makes a call.
        describe_op: (*operands, workspace, options) plans one.
        operator: (options) the operator of the dispatcher, which takes (*operands, handle).
        wanted: what a call must give, in FP64.
        width: features of the workspace that a call takes.
        crossings: how often its tokens cross between ranks.
        calls: the ops that it is made of, if of others.
        quantised: (options) the operands that may be in MXFP8, and along which axis; none where
            there is no such call.
        carries: which of them crosses ranks in it; "" where what does is bf16.
        place: (operands, workspace, options, copies) gives the operands where a call wants them;
            without `copies` only the places.
    """

    name: str
    title: str
    options: type[Any]
    layouts: tuple[str, ...]
    orders: tuple[str, ...]
    transports: tuple[str, ...]
    crew: str
    tokens: str
    operands: Shapes
    outputs: Shapes
    into: Callable[[Any], dict[str, str]]
    op: Callable[..., Any]
    describe_op: Callable[..., Prepared]
    operator: Callable[[Any], Callable[..., Any]]
    wanted: Callable[[Draw, int, int, Any], dict[str, Wanted]]
    width: Callable[[Shape], int]
    crossings: int = 1
    calls: tuple[str, ...] = ()
    quantised: Callable[[Any], dict[str, str]] = lambda options: {}
    carries: str = ""
    place: Callable[[Mapping[str, torch.Tensor], TpSpWorkspace, Any, bool], Tensors] = _as_given

    def call(
        self,
        given: Mapping[str, torch.Tensor],
        workspace: TpSpWorkspace,
        outs: Tensors,
        options: Any,
    ) -> Tensors:
        """Makes a call.

        Args:
            given: the operands by name.
            workspace: of the group.
            outs: memory for outputs, by name; what the op takes none for is left out.
            options: the choices.

        Returns:
            The outputs by name, those that the choices leave out missing.
        """
        given = self.place(given, workspace, options, True)
        memory = {key: outs[name] for name, key in self.into(options).items() if name in outs}
        made = self.op(*self._in_order(given), workspace, **memory, options=options)
        return self.named(made)

    def named(self, made: Any) -> Tensors:
        """What the op or its operator returned, by name."""
        found = made if isinstance(made, tuple) else (made,)
        return {n: t for n, t in zip(self.outputs, found, strict=False) if t is not None}

    def describe(
        self, given: Mapping[str, torch.Tensor], workspace: TpSpWorkspace, options: Any
    ) -> Prepared:
        """The plan and verdict of a call without making it."""
        given = self.place(given, workspace, options, False)
        return self.describe_op(*self._in_order(given), workspace, options)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Of its operands."""
        return ("bf16", "mxfp8") if self.quantised(self.options()) else ("bf16",)

    def prepare(
        self, workspace: TpSpWorkspace, shape: Shape, options: Any, dtype: str = "bf16"
    ) -> None:
        """Collective: compiles and loads what a call of a shape needs."""
        shapes = self.operand_shapes(shape, workspace.world.size, options)

        def call(*given: Any, options: Any) -> None:
            *operands, workspace = given
            # Where the op wants them: what runs depends on it.
            self.call(dict(zip(self.operands, operands, strict=True)), workspace, {}, options)

        quantised = self.quantised(options) if dtype == "mxfp8" else {}
        axes = [quantised.get(name) for name in shapes]
        prepared.warm(call, shapes.values(), workspace, options, axes)

    def operand_shapes(self, shape: Shape, size: int, options: Any) -> dict[str, tuple[int, int]]:
        """Shapes of the operands on each of `size` ranks, by name and in order."""
        sizes = Sizes(*shape, size, self.layout_of(options))
        return {name: of(sizes) for name, of in self.operands.items()}

    def output_shapes(self, shape: Shape, size: int, options: Any) -> dict[str, tuple[int, int]]:
        """Shapes of all outputs on each of `size` ranks, by name and in order."""
        sizes = Sizes(*shape, size, self.layout_of(options))
        return {name: of(sizes) for name, of in self.outputs.items()}

    def layout_of(self, options: Any) -> str:
        """The layout that a call has, chosen or not."""
        return str(getattr(options, "layout", self.layouts[0]))

    def num_tokens(self, shape: Shape) -> int:
        """Tokens of a call over all ranks."""
        return shape["mnk".index(self.tokens)]

    def other_of(self, shape: Shape) -> int:
        """The one of m and k that is not the tokens."""
        return shape[2] if self.tokens == "m" else shape[0]

    def shape_of(self, tokens: int, n: int, other: int) -> Shape:
        """(m, n, k) of a call on so many tokens; `other`: as in `other_of`."""
        return (tokens, n, other) if self.tokens == "m" else (other, n, tokens)

    def room(self, shape: Shape, dtype: str) -> int:
        """Features of the workspace that a call takes."""
        if dtype == "mxfp8" and self._carried_axis == "row":
            return mx.padded(self.width(shape))
        return self.width(shape)

    @property
    def _carried_axis(self) -> str:
        return self.quantised(self.options()).get(self.carries, "")

    def granule(self, dtype: str) -> int:
        """What the tokens of a rank must be a multiple of."""
        return mx.padded(1) if dtype == "mxfp8" and self._carried_axis == "col" else 1

    def remote_bytes(self, shape: Shape, size: int, dtype: str = "bf16") -> int:
        """Bytes that cross ranks, into and out of each one."""
        elements = (size - 1) * (self.num_tokens(shape) // size) * self.room(shape, dtype)
        return self.crossings * wire_bytes(elements, dtype if self.carries else "bf16")

    def _in_order(self, given: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        return [given[name] for name in self.operands]


def _weights(s: Sizes) -> tuple[int, int]:
    return (s.n, s.k) if s.layout == "tn" else (s.k, s.n)


def _out(options: Any) -> dict[str, str]:
    return {"out": "out"}


DRIVERS = {
    driver.name: driver
    for driver in (
        Driver(
            name="ag_gemm",
            title="AG+GEMM",
            options=AgGemmOptions,
            layouts=("tn", "nn"),
            orders=("local_first", "chunk_major", "naive"),
            transports=("pull", "push"),
            crew="movers_per_peer",
            tokens="m",
            operands={"x": lambda s: (s.m // s.ranks, s.k), "w": _weights},
            outputs={"out": lambda s: (s.m, s.n), "gathered": lambda s: (s.m, s.k)},
            into=_out,
            op=ag_gemm,
            describe_op=describe_call,
            operator=lambda options: (
                custom.ag_gemm_gathered_op if options.keeps_gathered else custom.ag_gemm_op
            ),
            wanted=exact.ag_gemm,
            width=lambda shape: shape[2],
            quantised=lambda o: {"x": "row", "w": "row" if o.layout == "tn" else "col"},
            carries="x",
        ),
        Driver(
            name="gemm_rs",
            title="GEMM+RS",
            options=GemmRsOptions,
            layouts=("tn",),
            orders=("band_major", "row_major"),
            transports=("pull", "push"),
            crew="reducers_per_peer",
            tokens="m",
            operands={"x": lambda s: (s.m, s.k), "w": _weights},
            outputs={"out": lambda s: (s.m // s.ranks, s.n)},
            into=_out,
            op=gemm_rs,
            describe_op=describe_gemm_rs,
            operator=lambda options: custom.gemm_rs_op,
            wanted=exact.gemm_rs,
            width=lambda shape: shape[1],
            quantised=lambda o: {"x": "row", "w": "row"},
        ),
        Driver(
            name="bulk_ag",
            title="bulk AG",
            options=BulkAgOptions,
            layouts=("nn",),
            orders=(),
            transports=("pull", "push"),
            crew="movers_per_peer",
            tokens="m",
            operands={
                "x": lambda s: (s.m // s.ranks, s.n),
                "dy": lambda s: (s.m, s.k),
                "w": _weights,
            },
            outputs={"gathered": lambda s: (s.m, s.n), "dx": lambda s: (s.m, s.n)},
            into=lambda options: {
                "gathered": "gathered",
                **({"dx": "out"} if options.dx_to == TENSOR else {}),
            },
            op=bulk_ag,
            describe_op=describe_bulk_ag,
            operator=lambda options: custom.bulk_ag_op,
            wanted=exact.bulk_ag,
            width=lambda shape: shape[1],
            quantised=lambda o: {"x": "col", "dy": "row", "w": "col"},
            carries="x",
        ),
        Driver(
            name="bulk_rs",
            title="bulk RS",
            options=BulkRsOptions,
            layouts=("nt",),
            orders=(),
            transports=("pull", "push"),
            crew="reducers_per_peer",
            tokens="k",
            operands={
                "dx": lambda s: (s.k, s.n),
                "dy": lambda s: (s.k, s.m),
                "x": lambda s: (s.k, s.n),
            },
            outputs={"dx_shard": lambda s: (s.k // s.ranks, s.n), "dw": lambda s: (s.m, s.n)},
            into=lambda options: {"dx_shard": "out", "dw": "dw"},
            op=bulk_rs,
            describe_op=describe_bulk_rs,
            operator=lambda options: custom.bulk_rs_op,
            wanted=exact.bulk_rs,
            width=lambda shape: shape[1],
            quantised=lambda o: {"dy": "col", "x": "col"},
            place=_handed_over,
        ),
        Driver(
            name="bulk_column",
            title="bulk AG, bulk RS",
            options=BulkColumnOptions,
            layouts=("nn",),
            orders=(),
            transports=("pull", "push"),
            crew="movers_per_peer",
            tokens="m",
            operands={
                "x": lambda s: (s.m // s.ranks, s.n),
                "dy": lambda s: (s.m, s.k),
                "w": _weights,
            },
            outputs={"dx_shard": lambda s: (s.m // s.ranks, s.n), "dw": lambda s: (s.k, s.n)},
            into=lambda options: {"dx_shard": "out", "dw": "dw"},
            op=bulk_column,
            describe_op=describe_bulk_column,
            operator=lambda options: custom.bulk_column_backward_op,
            wanted=exact.bulk_column,
            width=lambda shape: shape[1],
            crossings=2,
            calls=("bulk_ag", "bulk_rs"),
        ),
    )
}


def driver_of(options: object) -> Driver:
    """The op that choices are of."""
    return next(d for d in DRIVERS.values() if isinstance(options, d.options))


# Choices of any op, for command lines.
LAYOUTS = tuple(dict.fromkeys(layout for d in DRIVERS.values() for layout in d.layouts))
ORDERS = tuple(dict.fromkeys(order for d in DRIVERS.values() for order in d.orders))


def choose(op: str, choices: Mapping[str, Any]) -> Any:
    """Options of an op from choices of which it may not have all; None leaves a default."""
    kind = DRIVERS[op].options
    known = kind.__dataclass_fields__
    return kind(**{k: v for k, v in choices.items() if k in known and v is not None})
