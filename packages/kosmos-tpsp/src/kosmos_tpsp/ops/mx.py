"""MXFP8 operands, which come with the extra `mx`: what operations ask of them, and how they lie.

Without it there are no such operands. Beside this file only the `mx_*.py` of the layers import
kosmos-mx on the host, and they once a layer asks for MXFP8.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from kosmos_core.arguments import ARGUMENT, DEVICE, DTYPE, SHAPE, SIZE, dense, reject

from kosmos_tpsp.device import config as codes
from kosmos_tpsp.workspaces import TpSpWorkspace

if TYPE_CHECKING:
    from kosmos_mx import MXTensor
    from kosmos_mx.ops.gemm import Tile

    Operand: TypeAlias = torch.Tensor | MXTensor
else:
    Operand = Any

try:
    import kosmos_mx
    from kosmos_mx.formats import E4M3, GROUP, SCALE_DTYPE
    from kosmos_mx.ops.dequantize import dequantize
    from kosmos_mx.ops.gemm import SCALED_TILE, TURNED_TILE
    from kosmos_mx.ops.launching import as_bytes, has_block_scaled_mma
    from kosmos_mx.reference import quantize_rows
except ImportError:
    kosmos_mx = None  # type: ignore[assignment]

INSTALL = "install the extra: kosmos-tpsp[mx]"


def has_mx() -> bool:
    """Whether kosmos-mx is installed."""
    return kosmos_mx is not None


def is_mx(t: object) -> bool:
    """Whether an operand is in MXFP8."""
    return kosmos_mx is not None and isinstance(t, kosmos_mx.MXTensor)


def key_of(t: Any) -> Any:
    """What a plan depends on in an operand."""
    if is_mx(t):
        return tuple(t.shape), t.axis, t.is_k_major, t.data.dtype, t.segments
    return t.shape


def parts(t: Any) -> tuple[torch.Tensor, ...]:
    """The memory of an operand: the matrix, or elements and scales."""
    return (t.data, t.scales) if is_mx(t) else (t,)


def check_mx(name: str, t: Any, device: torch.device) -> None:
    """A matrix of E4M3 elements on the rank's device."""
    if t.data.dtype is not torch.float8_e4m3fn:
        raise reject(
            DTYPE,
            f"{name}: got elements of {t.data.dtype}, wanted torch.float8_e4m3fn; quantise to it",
        )
    if t.device != device:
        raise reject(DEVICE, f"{name}: got device {t.device}, wanted {device}; move it there")


def check_axis(name: str, t: Any, axis: str, contracted: bool = True) -> None:
    """Groups lie along `axis`, in one segment."""
    if t.axis != axis:
        why = "the contraction" if contracted else "the tokens"
        raise reject(
            ARGUMENT,
            f"{name}: got a {t.axis}-wise copy, wanted the {axis}-wise one, whose groups lie along "
            f"{why}; quantise the high-precision source along it",
        )
    if len(t.segments) != 1:
        raise reject(
            SHAPE,
            f"{name}: got segments {t.segments}, wanted one; quantise it without segments",
        )


def format_of(x: Any, workspace: TpSpWorkspace, block_scaled: bool | None) -> Any:
    """How a call runs whose gathered operand is `x`: BF16, UNPACKED or SCALED.

    block_scaled: as the caller says; None takes what the device has.
    """
    if not is_mx(x):
        if block_scaled is not None:
            raise reject(
                ARGUMENT,
                f"block_scaled: got {block_scaled} for bf16 operands, wanted None; or pass MXFP8",
            )
        return codes.BF16
    scaled = block_scaled
    if scaled is None:
        scaled = takes_scales(workspace.world.device)
    return codes.SCALED if scaled else codes.UNPACKED


def padded(length: int) -> int:
    """A length rounded up to whole groups."""
    return -(-length // GROUP) * GROUP


def features(x: Any, w: Any, layout: str, form: Any, name: str = "x") -> tuple[int, int, str]:
    """(n, padded k, layout in memory) of MXFP8 operands that fit together.

    Args:
        x: [rows, k] along rows.
        w: [n, k] along rows ("tn") or [k, n] along columns ("nn") in MXFP8; or its values in bf16,
            padded along the contraction, where `form` is UNPACKED.
        layout: "tn" or "nn".
        form: BF16, UNPACKED or SCALED.
        name: of x.
    """
    if form is codes.BF16:
        raise reject(
            DTYPE,
            f"w: got MXFP8 beside a bf16 {name}, wanted both in MXFP8; quantise {name}, or "
            "dequantise w",
        )
    check_axis(name, x, "row")
    k = x.segments[0]
    along = 1 if layout == "tn" else 0
    if is_mx(w):
        check_axis("w", w, "row" if layout == "tn" else "col")
        got, wanted = w.segments[0], k
        shape = tuple(w.data.shape)
        in_memory = "tn" if w.is_k_major else "nn"
    elif form is codes.SCALED:
        raise reject(
            DTYPE,
            f"w: got {w.dtype}, wanted an MXTensor: MXFP8 is multiplied as it is here; quantise w",
        )
    else:
        got, wanted = w.shape[along], padded(k)
        shape = tuple(w.shape)
        in_memory = layout
    if got != wanted:
        remedy = "; dequantise it with padding=True" if wanted != k else ""
        raise reject(
            SHAPE,
            f"w: got shape {tuple(w.shape)} for layout {layout!r}, wanted a contraction of "
            f"{wanted} as in {name} {tuple(x.shape)}{remedy}",
        )
    n = shape[1 - along]
    if k == 0 or n == 0:
        raise reject(SIZE, f"features: got k = {k} and n = {n}, wanted positive sizes")
    return n, padded(k), in_memory if form is codes.SCALED else layout


def as_operand(w: Any, scaled: bool, padding: bool = True) -> Any:
    """What an operation multiplies without a launch of its own.

    Where matrix units take no scales, that is the dequantised matrix, bf16, with or without the
    padding to whole groups: worth keeping for an operand that is used again.
    """
    if scaled or not is_mx(w):
        return w
    if w.device.type == "cpu":
        # In FP64 nothing is launched on the executor.
        return w.dequantize(torch.float64, padding=padding).to(torch.bfloat16).contiguous()
    return w.dequantize(torch.bfloat16, padding=padding).contiguous()


def values(name: str, t: Any, axis: str) -> torch.Tensor:
    """A local operand in bf16: as it is, or dequantised; of MXFP8 along `axis`."""
    if is_mx(t):
        t = as_operand(_local(name, t, axis), scaled=False, padding=False)
    plain: torch.Tensor = t
    return plain


def values_beside(name: str, t: Any, axis: str, x: Any) -> torch.Tensor:
    """As `values`, padded to whole groups, beside the operand x that crosses ranks in MXFP8."""
    if not is_mx(t):
        return values(name, t, axis)
    if not is_mx(x):
        raise reject(
            DTYPE,
            f"{name}: got MXFP8 beside a bf16 x, wanted both in MXFP8; quantise x, or dequantise "
            f"{name}",
        )
    padded_values: torch.Tensor = as_operand(_local(name, t, axis), scaled=False)
    return padded_values


def _local(name: str, t: Any, axis: str) -> Any:
    check_mx(name, t, t.device)
    check_axis(name, t, axis)
    return t


def dense_rows(x: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, their scales) as a kernel takes them; bf16 ones stand for scales that they lack."""
    if is_mx(x):
        return as_stored(x)
    x = dense(x)
    return x, x


def as_stored(t: Any, transposed: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements and scales as bytes, dense and aligned, row by row or of the transpose."""
    upright = t.t() if transposed else t
    return dense(as_bytes(upright.data)), dense(as_bytes(upright.scales))


def quantized(x: torch.Tensor, axis: str) -> MXTensor:
    """The copy of a bf16 matrix whose groups lie along `axis`; on the CPU nothing is launched."""
    if x.device.type != "cpu":
        copy: MXTensor = kosmos_mx.quantize(x, axis)
        return copy
    source = x if axis == "row" else x.t()
    parts_of = quantize_rows(source, E4M3, "rceil", [source.shape[1]])
    rows, cols = source.shape
    row_wise = kosmos_mx.MXTensor(*parts_of, "row", (rows, cols), (cols,))
    if axis == "row":
        return row_wise
    # Stored as the source is.
    data, scales = row_wise.data.t().contiguous(), row_wise.scales.t().contiguous()
    return kosmos_mx.MXTensor(data, scales, "col", (cols, rows), (cols,))


def dequantized(t: MXTensor, out: torch.Tensor) -> torch.Tensor:
    """The bf16 values of a matrix, its padding included, in memory that is there already."""
    if out.device.type == "cpu":
        return out.copy_(as_operand(t, scaled=False))
    values: torch.Tensor = dequantize(t, torch.bfloat16, padding=True, out=out)
    return values


def takes_scales(device: torch.device) -> bool:
    """Whether the matrix units of a device take scales."""
    return bool(has_block_scaled_mma(device))


def of_bytes(elements: torch.Tensor, scales: torch.Tensor, axis: str) -> MXTensor:
    """As `whole`, of bytes."""
    return whole(elements.view(E4M3.dtype), scales.view(SCALE_DTYPE), axis)


def whole(elements: torch.Tensor, scales: torch.Tensor, axis: str) -> MXTensor:
    """A matrix of padded elements and their scales as they lie in memory."""
    rows, cols = elements.shape
    made: MXTensor = kosmos_mx.MXTensor(
        elements, scales, axis, (rows, cols), (cols if axis == "row" else rows,)
    )
    return made


def zeros(shape: tuple[int, int], axis: str, device: torch.device) -> MXTensor:
    """A matrix of zeros."""
    rows, cols = shape
    stored = (rows, padded(cols)) if axis == "row" else (padded(rows), cols)
    groups = (rows, stored[1] // GROUP) if axis == "row" else (stored[0] // GROUP, cols)
    data = torch.zeros(stored, dtype=torch.uint8, device=device).view(E4M3.dtype)
    scales = torch.zeros(groups, dtype=torch.uint8, device=device).view(SCALE_DTYPE)
    segments = (cols,) if axis == "row" else (rows,)
    return kosmos_mx.MXTensor(data, scales, axis, (rows, cols), segments)


def scaled_tile(layout: str) -> Tile:
    """The tile that matrix units take with scales, by layout in memory.

    Weights whose contraction does not lie together are turned in registers: they leave fewer.
    """
    return SCALED_TILE if layout == "tn" else TURNED_TILE


def tile_fields(form: Any, layout: str, workspace: TpSpWorkspace) -> dict[str, int]:
    """Fields of a plan where matrix units want another tile than in bf16."""
    if form is not codes.SCALED or workspace.world.device.type != "cuda":
        return {}
    return asdict(scaled_tile(layout))
