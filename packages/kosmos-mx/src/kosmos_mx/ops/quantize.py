"""MXFP8 copies of a matrix."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from kosmos_core.errors import ArgumentError

from kosmos_mx import reference
from kosmos_mx.formats import (
    SCALE_DTYPE,
    SCALINGS,
    Format,
    format_of,
    num_groups,
    padded,
)
from kosmos_mx.kernels.quantize import (
    AS_SOURCE,
    NO_COLUMNS,
    TRANSPOSED,
    Copies,
    QuantizeConfig,
    Source,
    quantize_kernel,
)
from kosmos_mx.ops.launching import (
    EXECUTOR_TILE,
    QUANTIZE_TILE,
    as_bytes,
    constants,
    launch,
    runs_kernels,
    target_of,
)
from kosmos_mx.tensor import MXTensor

SOURCES = (torch.bfloat16, torch.float32)
SMALLEST_BLOCK_COLS = 32
# Fewer workgroups than this would leave parts of a GPU idle at the end, or all along.
MANY_WGS = 2048
# Columns, warps, steps and width of a workgroup, as `QuantizeConfig` has them.
Tile = tuple[int, int, int, int]


@dataclass(frozen=True)
class _Wanted:
    """What a call makes; see `quantize`."""

    rows: bool
    columns: bool
    transposed: bool
    form: Format
    scaling: str
    segments: tuple[int, ...]
    uniform: int | None
    target: int | None
    row_values: bool = False
    column_values: bool = False
    tile: Tile | None = None


def quantize(
    x: torch.Tensor,
    axis: str = "row",
    scale_rounding: str = "rceil",
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    segments: int | Sequence[int] | None = None,
    transposed: bool = False,
    values: str | None = None,
    target: int | None = None,
    tile: Tile | None = None,
) -> Any:
    """MXFP8 copies of a matrix, made in one pass over it.

    Args:
        x: [rows, cols] bfloat16 or float32, rows contiguous.
        axis: "row" (groups of 32 along each row: contraction over the columns), "col" (along each
            column: contraction over the rows), or "both". Either copy comes from `x`.
        scale_rounding: "rceil", the MXFP8 training recipe's, or "floor", the OCP specification's.
        dtype: of the elements, float8_e4m3fn or float8_e5m2.
        segments: rows that share no column-wise group with others (shards, experts): the rows of
            every segment, the last one perhaps less, or the rows of each. Each segment is padded
            with zeros to whole groups in the column-wise copy.
        transposed: store the column-wise copy with its groups together in memory, as
            [cols, padded rows] of which `data` is the transpose.
        values: "row", "col" or "both": of these copies return the dequantised values, [rows, cols]
            bfloat16 without padding, in place of elements and scales; in the same pass. As
            `MXTensor.dequantize` gives them: for a GEMM whose matrix units take no scales.
        target: vendor constant of the device functions, to run another vendor's code path. [this
            device's]
        tile: most columns of a tile (a power of two from 32 on), which has 32 rows; warps of a
            workgroup; tiles of it; elements that a thread stores at once: to measure others than
            the default.

    Returns:
        `MXTensor`, or values, or for "both" a pair of them, row-wise and column-wise.

    Raises:
        ArgumentError: a bad argument.

    On the CPU, outside an executor, the reference computes it. Source: OCP Microscaling Formats
    1.0; cuBLAS documentation, "1D block scaling".
    """
    wanted = _wanted(x, axis, scale_rounding, dtype, segments, transposed, target)
    if values is not None:
        wanted = _with_values(wanted, values)
    if tile is not None:
        wanted = replace(wanted, tile=_tile(tile))
    return _results(_make(x, None, wanted), wanted, x)


def swiglu_quantize(
    gate_up: torch.Tensor,
    axis: str = "both",
    scale_rounding: str = "rceil",
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    segments: int | Sequence[int] | None = None,
    transposed: bool = False,
    target: int | None = None,
) -> Any:
    """MXFP8 copies of silu(gate) * up, which is computed in FP32 and not rounded in between.

    Args:
        gate_up: [rows, 2 * cols] bfloat16 or float32, gates first.
        axis: as in `quantize`; likewise the others.
        scale_rounding: "rceil" or "floor".
        dtype: of the elements.
        segments: rows that share no column-wise group with others.
        transposed: store the column-wise copy with its groups together in memory.
        target: vendor constant of the device functions.

    Returns:
        As `quantize`, of a matrix [rows, cols].

    Raises:
        ArgumentError: a bad argument.
    """
    if gate_up.ndim != 2 or gate_up.shape[1] % 2:
        raise ArgumentError(
            f"gate_up: got shape {tuple(gate_up.shape)}, wanted [rows, gates and as many values]"
        )
    gate, up = gate_up.chunk(2, dim=1)
    wanted = _wanted(gate, axis, scale_rounding, dtype, segments, transposed, target)
    return _results(_make(gate, up, wanted), wanted, gate)


def _wanted(
    x: torch.Tensor,
    axis: str,
    scale_rounding: str,
    dtype: torch.dtype,
    segments: int | Sequence[int] | None,
    transposed: bool,
    target: int | None,
) -> _Wanted:
    if x.ndim != 2:
        raise ArgumentError(f"x: got shape {tuple(x.shape)}, wanted [rows, cols]")
    if x.dtype not in SOURCES:
        raise ArgumentError(f"x: got {x.dtype}, wanted {' or '.join(map(str, SOURCES))}")
    if x.numel() and x.shape[1] > 1 and x.stride(1) != 1:
        raise ArgumentError(
            f"x: got strides {x.stride()}, wanted contiguous rows; call contiguous()"
        )
    if axis not in ("row", "col", "both"):
        raise ArgumentError(f"axis: got {axis!r}, wanted row, col or both")
    if scale_rounding not in SCALINGS:
        raise ArgumentError(
            f"scale_rounding: got {scale_rounding!r}, wanted one of {', '.join(SCALINGS)}"
        )
    rows = x.shape[0]
    uniform: int | None = rows
    if segments is None:
        lengths: tuple[int, ...] = (rows,)
    elif isinstance(segments, int):
        if segments < 1:
            raise ArgumentError(f"segments: got {segments}, wanted rows of a segment, 1 or more")
        uniform = segments
        lengths = tuple(min(segments, rows - i) for i in range(0, rows, segments)) or (0,)
    else:
        uniform = None
        lengths = tuple(segments)
        if sum(lengths) != rows or min(lengths, default=0) < 0:
            raise ArgumentError(
                f"segments: got {lengths}, wanted lengths that add up to the {rows} rows of x"
            )
    return _Wanted(
        rows=axis != "col",
        columns=axis != "row",
        transposed=transposed,
        form=format_of(dtype),
        scaling=scale_rounding,
        segments=lengths,
        uniform=uniform,
        target=target,
    )


def _with_values(wanted: _Wanted, values: str) -> _Wanted:
    rows, columns = values in ("row", "both"), values in ("col", "both")
    if not (rows or columns):
        raise ArgumentError(f"values: got {values!r}, wanted row, col, both or None")
    if (rows and not wanted.rows) or (columns and not wanted.columns):
        raise ArgumentError(f"values: got {values!r}, wanted copies that axis asks for")
    if columns and wanted.transposed:
        raise ArgumentError("values: got transposed ones, wanted transposed=False; transpose them")
    return replace(wanted, row_values=rows, column_values=columns)


def _tile(tile: Tile) -> Tile:
    if len(tile) != 4 or min(tile) < 1 or any(part & (part - 1) for part in tile):
        raise ArgumentError(
            f"tile: got {tile}, wanted columns, warps, steps and width, powers of two"
        )
    if tile[0] < SMALLEST_BLOCK_COLS:
        raise ArgumentError(f"tile: got {tile[0]} columns, wanted {SMALLEST_BLOCK_COLS} or more")
    return tile


def _make(x: torch.Tensor, up: torch.Tensor | None, wanted: _Wanted) -> list[torch.Tensor]:
    """Elements and scales, uint8, of the copies that are made, as they lie in memory.

    Of a copy whose values are wanted these, and nothing for scales.
    """
    if runs_kernels(x.device):
        return _launch(x, up, wanted)
    if up is not None:
        gate = x.float()
        x = gate / (1.0 + torch.exp(-gate)) * up.float()
    made: list[torch.Tensor] = []
    if wanted.rows:
        made += _by_reference(x, (x.shape[1],), wanted, wanted.row_values)
    if wanted.columns:
        turned = _by_reference(x.t(), wanted.segments, wanted, wanted.column_values)
        made += turned if wanted.transposed else [part.t().contiguous() for part in turned]
    return made


def _by_reference(
    x: torch.Tensor, segments: tuple[int, ...], wanted: _Wanted, values: bool
) -> list[torch.Tensor]:
    """A copy whose groups lie along rows."""
    parts = reference.quantize_rows(x, wanted.form, wanted.scaling, segments)
    if not values:
        return [as_bytes(part) for part in parts]
    exact = reference.crop_segments(reference.dequantize_rows(*parts), segments)
    return [exact.to(torch.bfloat16), x.new_empty(0, 0)]


def _launch(x: torch.Tensor, up: torch.Tensor | None, wanted: _Wanted) -> list[torch.Tensor]:
    rows, cols = x.shape
    groups = sum(map(num_groups, wanted.segments))
    empty = torch.empty(0, dtype=torch.uint8, device=x.device)
    made = [empty] * 4
    if wanted.row_values:
        made[0] = empty.new_empty(rows, cols, dtype=torch.bfloat16)
    elif wanted.rows:
        made[0] = empty.new_empty(rows, padded(cols))
        made[1] = empty.new_empty(rows, num_groups(cols))
    if wanted.column_values:
        made[2] = empty.new_empty(rows, cols, dtype=torch.bfloat16)
    elif wanted.columns:
        shapes = [(padded(1) * groups, cols), (groups, cols)]
        made[2], made[3] = (
            empty.new_empty(shape[::-1] if wanted.transposed else shape) for shape in shapes
        )
    columns = NO_COLUMNS
    if wanted.columns:
        columns = TRANSPOSED if wanted.transposed else AS_SOURCE
    default = QUANTIZE_TILE if x.is_cuda else EXECUTOR_TILE
    block, num_warps, steps, width = wanted.tile or default
    while block > SMALLEST_BLOCK_COLS and block // 2 >= padded(cols):
        block //= 2
    blocks = -(-padded(cols) // block)
    if wanted.tile is None:
        while steps > 1 and (steps // 2 >= blocks or groups * -(-blocks // steps) < MANY_WGS):
            steps //= 2
    table = None if wanted.uniform is not None else _table(wanted.segments, x.device)
    segment_rows = max(1, wanted.uniform or 1)
    config = constants(
        QuantizeConfig,
        ROWS=int(wanted.rows),
        COLUMNS=columns.value,
        FORMAT=wanted.form.constant,
        SCALING=SCALINGS[wanted.scaling],
        SWIGLU=int(up is not None),
        SEGMENTS=0 if table is None else 1 << len(wanted.segments).bit_length(),
        BLOCK_COLS=block,
        STEPS=steps,
        WIDTH=width,
        TARGET=target_of(x.device) if wanted.target is None else wanted.target,
    )
    source = Source(
        ptr=x,
        up_ptr=x if up is None else up,
        rows=rows,
        cols=cols,
        stride=x.stride(0) if rows > 1 else cols,
        segment_rows=segment_rows,
        segment_groups=num_groups(segment_rows),
        table_ptr=empty if table is None else table,
    )
    copies = Copies(made[0], made[1], made[2], made[3], groups)
    num_wgs = groups * -(-blocks // steps)
    args = (source, copies, config)
    launch(quantize_kernel, num_wgs, args, x.device, num_warps=num_warps)
    return made[: 4 if wanted.columns else 2] if wanted.rows else made[2:]


# Kept, since copying it to a GPU waits for the GPU.
@functools.lru_cache(maxsize=256)
def _table(segments: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """int32 [2 * segments + 3], as `kernels.quantize.Source` has it."""
    rows, groups = [0], [0]
    for length in segments:
        rows.append(rows[-1] + length)
        groups.append(groups[-1] + num_groups(length))
    return torch.tensor([len(segments), *rows, *groups], dtype=torch.int32).to(device)


def _results(made: list[torch.Tensor], wanted: _Wanted, x: torch.Tensor) -> Any:
    shape = (x.shape[0], x.shape[1])
    results: list[MXTensor | torch.Tensor] = []
    if wanted.row_values:
        results.append(made[0])
    elif wanted.rows:
        data, scales = made[0].view(wanted.form.dtype), made[1].view(SCALE_DTYPE)
        results.append(MXTensor(data, scales, "row", shape, (shape[1],)))
    if wanted.column_values:
        results.append(made[-2])
    elif wanted.columns:
        data, scales = made[-2].view(wanted.form.dtype), made[-1].view(SCALE_DTYPE)
        if wanted.transposed:
            data, scales = data.t(), scales.t()
        results.append(MXTensor(data, scales, "col", shape, wanted.segments))
    return results[0] if len(results) == 1 else tuple(results)
