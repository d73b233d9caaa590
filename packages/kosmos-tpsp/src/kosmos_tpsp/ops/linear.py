"""Forward and backward of the parallel linear layers, made of the fused ops.

The paper's Figure 5: `ag_gemm` TN and, backward, `bulk_ag` then `bulk_rs` for the column-parallel
layer; `gemm_rs` and, backward, `ag_gemm` NN then a plain GEMM for the row-parallel one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import torch
from kosmos_core.main_grad import stand_in

from kosmos_tpsp import reference
from kosmos_tpsp.ops import mx, prepared, validate
from kosmos_tpsp.ops.ag_gemm import AgGemmOptions, ag_gemm
from kosmos_tpsp.ops.ag_gemm_pair import AgGemmPairOptions
from kosmos_tpsp.ops.bulk_column import BulkColumnOptions, bulk_column
from kosmos_tpsp.ops.gemm_rs import GemmRsOptions, gemm_rs
from kosmos_tpsp.precision import MXFP8
from kosmos_tpsp.workspaces import TpSpWorkspace


@dataclass(frozen=True)
class LinearOptions:
    """What a layer chooses for all its calls.

    Attributes:
        cap: most workgroups that a fused call uses.
        main_grad: add weight gradients into the weight's `main_grad` where it has one in FP32 and
            aligned to 16 bytes.
        force: run fused although a plan would decline for speed.
        traced: record role spans into the workspace's trace buffer.
        mx: how the operands are quantised; None for BF16.
    """

    cap: int | None = None
    main_grad: bool = True
    force: bool = False
    traced: bool = False
    mx: MXFP8 | None = None

    @property
    def _shared(self) -> dict[str, Any]:
        return {"cap": self.cap, "force": self.force, "traced": self.traced}

    @cached_property
    def gather(self) -> AgGemmOptions:
        """Choices of the column layer's forward."""
        return AgGemmOptions(layout="tn", **self._shared)

    @cached_property
    def gather_back(self) -> AgGemmOptions:
        """Choices of the row layer's backward, whose gathered dY the weight gradient needs."""
        return AgGemmOptions(layout="nn", keep_gathered=True, **self._shared)

    @cached_property
    def pair(self) -> AgGemmPairOptions:
        """Choices of the row layer's backward in MXFP8."""
        return AgGemmPairOptions(**self._shared)

    @cached_property
    def gather_only(self) -> AgGemmOptions:
        """Choices of the row layer's backward where the weight is frozen."""
        return AgGemmOptions(layout="nn", keep_gathered=False, **self._shared)

    @cached_property
    def column_back(self) -> BulkColumnOptions:
        """Choices of the column layer's backward."""
        return BulkColumnOptions(**self._shared)

    @cached_property
    def scatter(self) -> GemmRsOptions:
        """Choices of the row layer's forward."""
        return GemmRsOptions(**self._shared)


def column_backward(
    x: torch.Tensor,
    dy: torch.Tensor,
    w: torch.Tensor,
    workspace: TpSpWorkspace,
    options: LinearOptions,
    needs: tuple[bool, bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Gradients of the column-parallel linear.

    Args:
        x: [m / world size, n], the input's own rows.
        dy: [m, k], gradient of this rank's columns of the output.
        w: [k, n]; with `options.main_grad` and an FP32 `w.main_grad` [k, n] the weight gradient is
            added into that, and `w.grad_added_to_main_grad` is set.
        workspace: of the group.
        options: of the layer.
        needs: whether the gradients of x and of w are wanted, equal on all ranks.

    Returns:
        (dx [m / world size, n], dw [k, n]), None for what is not wanted; a dw that went into
        main_grad is a stand-in of zeros.

    Communication: gathers x and reduces dx: `bulk_ag` and `bulk_rs`. With a frozen weight one
    `gemm_rs`, with a frozen input one gather.
    Synchronizes: with a frozen input the host waits for the peers, as in a declined call; else as
    the ops.
    """
    needs_dx, needs_dw = needs
    if not needs_dw:
        # dY W is the product of a row-parallel linear whose weight is W^T.
        return (
            (gemm_rs(dy, w.t(), workspace, options=options.scatter), None)
            if needs_dx
            else (None, None)
        )
    main_grad = main_grad_of(w, workspace, options)
    if not needs_dx:
        return None, weight_grad(dy, gather(x, workspace), w, main_grad)
    dy = validate.dense(dy)  # once for both launches
    dx_shard, dw = bulk_column(
        x, dy, w, workspace, main_grad=main_grad, options=options.column_back
    )
    return dx_shard, stand_in(w) if dw is None else dw


def row_backward(
    x: torch.Tensor,
    dy: torch.Tensor,
    w: torch.Tensor,
    workspace: TpSpWorkspace,
    options: LinearOptions,
    needs: tuple[bool, bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Gradients of the row-parallel linear.

    Args:
        x: [m, n], all rows of this rank's features.
        dy: [m / world size, k], gradient of the output's own rows.
        w: [k, n]; `w.main_grad` as in `column_backward`.
        workspace: of the group.
        options: of the layer.
        needs: whether the gradients of x and of w are wanted, equal on all ranks.

    Returns:
        (dx [m, n], dw [k, n]), None for what is not wanted; a dw that went into main_grad is a
        stand-in of zeros.

    Communication: gathers dy, in `ag_gemm` NN unless the input is frozen.
    Synchronizes: as `column_backward`.
    """
    needs_dx, needs_dw = needs
    if not needs_dw:
        if not needs_dx:
            return None, None
        dx = ag_gemm(dy, w, workspace, options=options.gather_only)
        return (dx[0] if isinstance(dx, tuple) else dx), None
    main_grad = main_grad_of(w, workspace, options)
    if not needs_dx:
        return None, weight_grad(gather(dy, workspace), x, w, main_grad)
    dx, gathered = ag_gemm(dy, w, workspace, options=options.gather_back)
    return dx, weight_grad(gathered, x, w, main_grad)


def refuse(
    workspace: TpSpWorkspace, op: str, x: torch.Tensor, w: torch.Tensor, why: str
) -> NoReturn:
    """Raises for a bad argument that only a layer can see, and tells the peers.

    Raises:
        ArgumentError: always.
    """
    with prepared.TellingPeers(workspace, lambda: prepared.shown_call(op, x, w)):
        raise validate.reject(validate.SHAPE, why)


def gather(x: Any, workspace: TpSpWorkspace) -> Any:
    """All ranks' rows of a matrix, in MXFP8 or not, where no GEMM of this call would hide that.

    As before the collective of a declined call, all ranks have to make this same call.
    """
    if x.shape[0] == 0:
        workspace.pass_over()
        return x
    kind = f"{x.axis} of MXFP8" if mx.is_mx(x) else str(x.dtype)
    call_hash = prepared.agreed_hash("gather", tuple(x.shape), kind)
    workspace.agree(prepared.shown_call("gather", x), workspace.start_hash(call_hash))
    return reference.gather(x, workspace.world)


def main_grad_of(
    w: torch.Tensor, workspace: TpSpWorkspace, options: LinearOptions
) -> torch.Tensor | None:
    """The buffer that the weight gradient is added into; None to return it."""
    found: torch.Tensor | None = getattr(w, "main_grad", None) if options.main_grad else None
    if found is None or found.dtype != torch.float32 or found.data_ptr() % 16:
        return None  # whoever keeps it otherwise adds the returned gradient
    if found.shape != w.shape or found.device != w.device or not found.is_contiguous():
        refuse(
            workspace, "main_grad", found, w,
            f"weight.main_grad: got {tuple(found.shape)} on {found.device}, strides "
            f"{found.stride()}, wanted a contiguous {tuple(w.shape)} on {w.device}",
        )  # fmt: skip
    return found


def weight_grad(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, main_grad: torch.Tensor | None
) -> torch.Tensor:
    """dY^T X [k, n] by the vendor's GEMM; into main_grad, unrounded, where there is one."""
    if main_grad is None:
        return dy.t() @ x
    if dy.is_cuda:
        torch.addmm(main_grad, dy.t(), x, out_dtype=torch.float32, out=main_grad)
    else:
        main_grad.addmm_(dy.t().float(), x.float())
    return stand_in(w)
