"""Forward and backward of the parallel linear layers in MXFP8.

Every operand of the six products is quantised along the contraction, from its BF16 source: the
table "MXFP8 in the layers" in docs/numerics.md says which, and what crosses ranks. Of its input a
forward keeps the column-wise copy, made in the same pass as the row-wise one.
"""

from __future__ import annotations

from typing import Any

import torch
from kosmos_core.main_grad import stand_in
from kosmos_mx import MXTensor, quantize
from kosmos_mx.formats import E4M3, SCALE_DTYPE, num_groups, padded

from kosmos_tpsp.ops import mx_carriers, prepared, validate
from kosmos_tpsp.ops.bulk_rs import bulk_rs
from kosmos_tpsp.ops.gemm_rs import gemm_rs
from kosmos_tpsp.ops.linear import LinearOptions, main_grad_of, weight_grad
from kosmos_tpsp.ops.mx_weights import COLUMNS, ROWS, weight_copies
from kosmos_tpsp.precision import MXFP8
from kosmos_tpsp.workspaces import TpSpWorkspace

# Elements and scales of an input's column-wise copy, as bytes.
Kept = tuple[torch.Tensor, torch.Tensor]
# (row-wise, column-wise) as `quantize` calls them.
_WORDS = {(True, True): "both", (True, False): ROWS, (False, True): COLUMNS, (False, False): None}
Grads = tuple[torch.Tensor | None, torch.Tensor | None]


def column_forward(
    x: torch.Tensor, w: torch.Tensor, workspace: TpSpWorkspace, options: LinearOptions, keep: bool
) -> tuple[torch.Tensor, Kept]:
    """Output of the column-parallel linear, and what its backward needs of the input.

    Args:
        x: [m / world size, k] bfloat16, this rank's rows.
        w: [n, k] bfloat16.
        workspace: of the group.
        options: of the layer.
        keep: whether a backward will want the weight gradient.

    Returns:
        out [m, n] bfloat16, and the bytes of the column-wise copy of x, none unless kept.
    """
    x_rows, kept = _input("column_linear", x, w, workspace, options, keep, travels=True)
    weight = _weight(w, workspace, options, ROWS, *[COLUMNS] * keep)
    out, _ = mx_carriers.gather_and_multiply(x_rows, weight, workspace, options.gather)
    return out, kept


def row_forward(
    x: torch.Tensor, w: torch.Tensor, workspace: TpSpWorkspace, options: LinearOptions, keep: bool
) -> tuple[torch.Tensor, Kept]:
    """Output of the row-parallel linear, and what its backward needs of the input.

    Args:
        x: [m, k] bfloat16, all rows of this rank's features.
        w: [n, k] bfloat16.
        workspace: of the group.
        options: of the layer.
        keep: whether a backward will want the weight gradient.

    Returns:
        out [m / world size, n] bfloat16, and the bytes of the column-wise copy of x,
        whose groups straddle no rank's rows of dY; none unless kept.
    """
    x_rows, kept = _input("row_linear", x, w, workspace, options, keep, travels=False)
    weight = _weight(w, workspace, options, ROWS, *[COLUMNS] * keep)
    return gemm_rs(x_rows, weight, workspace, options=options.scatter), kept


def column_backward(
    kept: Kept,
    dy: torch.Tensor,
    w: torch.Tensor,
    workspace: TpSpWorkspace,
    options: LinearOptions,
    needs: tuple[bool, bool],
) -> Grads:
    """Gradients of the column-parallel linear.

    Args:
        kept: bytes of the input's column-wise copy [m / world size, n].
        dy: [m, k] bfloat16, gradient of this rank's columns of the output.
        w: [k, n] bfloat16; `w.main_grad` as in `linear.column_backward`.
        workspace: of the group.
        options: of the layer.
        needs: whether the gradients of x and of w are wanted, equal on all ranks.

    Returns:
        (dx [m / world size, n], dw [k, n]), None for what is not wanted; a dw that went into
        main_grad is a stand-in of zeros.

    Communication: gathers x and reduces dx in BF16. With a frozen weight the latter, with a frozen
    input the former.
    """
    needs_dx, needs_dw = needs
    rows = dy.shape[0] // workspace.world.size
    # All of it is here: the GEMMs take its values.
    dy_rows, dy_columns = _quantised(
        "column_linear", "dy", dy, w, workspace, options, needs, rows, values=needs
    )
    if not needs_dw:
        if not needs_dx:
            return None, None
        # dY W is the product of a row-parallel linear whose weight is W^T.
        weight = _weight(w, workspace, options, COLUMNS)
        return gemm_rs(dy_rows, weight.t(), workspace, options=options.scatter), None
    x = _restored(kept, rows, (rows,))
    main_grad = main_grad_of(w, workspace, options)
    if not needs_dx:
        gathered = mx_carriers.gather(x, workspace)
        return None, weight_grad(dy_columns, gathered, w, main_grad)
    weight = _weight(w, workspace, options, COLUMNS)
    both = options.column_back
    gathered, dx = mx_carriers.gather_beside(x, dy_rows, weight, workspace, both.gather)
    dx_shard, dw = bulk_rs(
        dx, dy_columns, gathered, workspace, main_grad=main_grad, options=both.reduce
    )
    return dx_shard, stand_in(w) if dw is None else dw


def row_backward(
    kept: Kept,
    dy: torch.Tensor,
    w: torch.Tensor,
    workspace: TpSpWorkspace,
    options: LinearOptions,
    needs: tuple[bool, bool],
) -> Grads:
    """Gradients of the row-parallel linear.

    Args:
        kept: bytes of the input's column-wise copy [m, n].
        dy: [m / world size, k] bfloat16, gradient of the output's own rows.
        w: [k, n] bfloat16; `w.main_grad` as in `linear.column_backward`.
        workspace: of the group.
        options: of the layer.
        needs: whether the gradients of x and of w are wanted, equal on all ranks.

    Returns:
        (dx [m, n], dw [k, n]), None for what is not wanted; a dw that went into main_grad is a
        stand-in of zeros.

    Communication: gathers dy row-wise for dx, column-wise for dw, as they are wanted, both in one
    `ag_gemm_pair`; once where the weight gradient takes the row-wise copy (`MXFP8.column_dy`).
    """
    needs_dx, needs_dw = needs
    derive = _recipe(options).column_dy == "derive"
    wanted = (needs_dx or (needs_dw and derive), needs_dw and not derive)
    rows, size = dy.shape[0], workspace.world.size
    # What it refuses it refuses before a peer can wait for this rank.
    main_grad = main_grad_of(w, workspace, options) if needs_dw else None
    dy_rows, dy_columns = _quantised("row_linear", "dy", dy, w, workspace, options, wanted, rows)
    x, weight = w, w
    if needs_dw:
        x = _restored(kept, rows * size, (rows,) * size).dequantize()
    if needs_dx:
        weight = _weight(w, workspace, options, COLUMNS)
    if all(wanted):
        both = mx_carriers.gather_pair(
            dy_rows, dy_columns, weight, x, workspace, main_grad, options.pair
        )
        if both is not None:
            return both[0], stand_in(w) if both[1] is None else both[1]
    gathered, dx = None, None
    if needs_dx:
        chosen = options.gather_back if needs_dw and derive else options.gather_only
        dx, gathered = mx_carriers.gather_and_multiply(dy_rows, weight, workspace, chosen)
    if not needs_dw:
        return dx, None
    if gathered is None:
        gathered = mx_carriers.gather(dy_rows if derive else dy_columns, workspace)
    return dx, weight_grad(gathered, x, w, main_grad)


def kept_shapes(rows: Any, features: Any, chunks: int, keep: bool) -> tuple[Any, Any]:
    """Shapes of elements and scales of a column-wise copy.

    Args:
        rows: of the source; symbolic where a graph is traced.
        features: of the source.
        chunks: parts of the rows that share no group with another.
        keep: whether there is a copy.
    """
    if not keep:
        return (0,), (0,)
    part = rows // chunks
    return (padded(part) * chunks, features), (num_groups(part) * chunks, features)


def _input(
    op: str,
    x: torch.Tensor,
    w: torch.Tensor,
    workspace: TpSpWorkspace,
    options: LinearOptions,
    keep: bool,
    travels: bool,
) -> tuple[Any, Kept]:
    """The row-wise copy of a layer's input, and the column-wise one if kept.

    The first is an `MXTensor` where it crosses ranks; else the GEMM takes its values.
    """
    chunks = 1 if travels else workspace.world.size
    # The ops refuse rows that the ranks do not divide.
    rows = x.shape[0] // chunks if x.dim() else 1
    x_rows, x_columns = _quantised(
        op, "x", x, w, workspace, options, (True, keep), rows, values=(not travels, False)
    )
    if keep:
        return x_rows, (x_columns.data.view(torch.uint8), x_columns.scales.view(torch.uint8))
    none = x.new_empty(0, dtype=torch.uint8)
    return x_rows, (none, none.clone())


def _quantised(
    op: str,
    name: str,
    t: torch.Tensor,
    w: torch.Tensor,
    workspace: TpSpWorkspace,
    options: LinearOptions,
    wanted: tuple[bool, bool],
    segment: int,
    values: tuple[bool, bool] = (False, False),
) -> tuple[Any, Any]:
    """Row-wise and column-wise copy of an activation, in one pass; None for what is not wanted.

    Each is an `MXTensor`, or its values in BF16 where `values` says so.
    """
    with prepared.TellingPeers(workspace, lambda: prepared.shown_call(op, t, w)):
        validate.check_matrix(name, t, workspace.world.device)
        validate.check_matrix("w", w, workspace.world.device)
        axis, as_values = _WORDS[wanted], _WORDS[values]
        if axis is None:
            return None, None
        made = quantize(
            validate.dense(t), axis, _recipe(options).scale_rounding, segments=max(1, segment),
            values=as_values,
        )  # fmt: skip
    if axis == "both":
        return made[0], made[1]
    return (made, None) if axis == "row" else (None, made)


def _weight(
    w: torch.Tensor, workspace: TpSpWorkspace, options: LinearOptions, *axes: str
) -> torch.Tensor:
    """The copy of the weight along the first axis.

    Those along others are made in the same pass, for later; not during capture, when none is kept.
    """
    lasting = not workspace.world.is_capturing()
    axes = axes if lasting else axes[:1]
    return weight_copies(w, axes, _recipe(options).scale_rounding, lasting=lasting)[0]


def _restored(kept: Kept, rows: int, segments: tuple[int, ...]) -> MXTensor:
    """A column-wise copy from what a forward has kept of it."""
    elements, scales = kept[0].view(E4M3.dtype), kept[1].view(SCALE_DTYPE)
    return MXTensor(elements, scales, "col", (rows, elements.shape[1]), segments)


def _recipe(options: LinearOptions) -> MXFP8:
    assert options.mx is not None
    return options.mx
