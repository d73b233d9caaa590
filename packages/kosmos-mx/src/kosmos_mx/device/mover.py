"""Transport: runs of groups with their scales, copied as they are or dequantised on arrival."""

import triton
import triton.language as tl

from kosmos_mx.device.decode import dequantize_groups, to_bf16
from kosmos_mx.device.encode import E4M3, GROUP


@triton.jit
def load_groups(ptr, scale_ptr, first, num_groups, GROUPS: tl.constexpr):
    """Elements [GROUPS, 32] and codes [GROUPS], uint8, of groups from `first` on."""
    groups = first + tl.arange(0, GROUPS)
    inside = groups < num_groups
    offsets = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    elements = tl.load(ptr + offsets, mask=inside[:, None], other=0)
    return elements, tl.load(scale_ptr + groups, mask=inside, other=0)


@triton.jit
def move_groups(
    src_ptr,
    src_scale_ptr,
    dst_ptr,
    dst_scale_ptr,
    num_groups,
    GROUPS: tl.constexpr,
    DEPTH: tl.constexpr,
    UNPACK: tl.constexpr,
    TARGET: tl.constexpr,
):
    """Moves groups that lie together, GROUPS a step, their scales beside them.

    dst_ptr: elements as they are; with UNPACK bf16 [num_groups * 32], exact for scale codes 3 to
        246, and no scales.
    DEPTH: further steps whose loads are in flight, 1 or 2, as in `copy_run` of kosmos-core. Both
        loads of a step are in flight at once: the scales cost no latency of their own.
    """
    tl.static_assert(DEPTH <= 2, "of more steps ahead no registers are left")
    elements, codes = load_groups(src_ptr, src_scale_ptr, 0, num_groups, GROUPS)
    if DEPTH == 2:
        second, second_codes = load_groups(src_ptr, src_scale_ptr, GROUPS, num_groups, GROUPS)
    for i in range(0, num_groups, GROUPS):
        following, following_codes = load_groups(
            src_ptr, src_scale_ptr, i + DEPTH * GROUPS, num_groups, GROUPS
        )
        groups = i + tl.arange(0, GROUPS)
        inside = groups < num_groups
        offsets = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        if UNPACK:
            code = codes.to(tl.int32)[:, None]
            value = to_bf16(dequantize_groups(elements, code, E4M3, TARGET), TARGET)
            tl.store(dst_ptr + offsets, value, mask=inside[:, None])
        else:
            tl.store(dst_ptr + offsets, elements, mask=inside[:, None])
            tl.store(dst_scale_ptr + groups, codes, mask=inside)
        if DEPTH == 2:
            elements = second
            codes = second_codes
            second = following
            second_codes = following_codes
        else:
            elements = following
            codes = following_codes


@triton.jit
def load_column_groups(ptr, scale_ptr, step, blocks, cols, limit, COLS: tl.constexpr):
    """Elements [32, COLS] and codes [COLS], uint8, of groups that lie along columns.

    Step `step` is of a row of groups, `blocks` steps a row; past `limit` there is none.
    """
    band = step // blocks
    col = (step - band * blocks) * COLS + tl.arange(0, COLS)
    inside = (col < cols) & (step < limit)
    offsets = (band * GROUP + tl.arange(0, GROUP))[:, None] * cols + col[None, :]
    elements = tl.load(ptr + offsets, mask=inside[None, :], other=0)
    return elements, tl.load(scale_ptr + band * cols + col, mask=inside, other=0)


@triton.jit
def unpack_columns(
    src_ptr,
    src_scale_ptr,
    dst_ptr,
    bands,
    cols,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    TARGET: tl.constexpr,
):
    """Dequantises whole rows of `bands` rows of groups that lie along columns, to bf16.

    src_ptr: [bands * 32, cols], its scales [bands, cols].
    DEPTH: as in `move_groups`.
    """
    blocks = (cols + COLS - 1) // COLS
    steps = bands * blocks
    elements, codes = load_column_groups(src_ptr, src_scale_ptr, 0, blocks, cols, steps, COLS)
    if DEPTH == 2:
        second, second_codes = load_column_groups(
            src_ptr, src_scale_ptr, 1, blocks, cols, steps, COLS
        )
    for step in range(steps):
        following, following_codes = load_column_groups(
            src_ptr, src_scale_ptr, step + DEPTH, blocks, cols, steps, COLS
        )
        band = step // blocks
        col = (step - band * blocks) * COLS + tl.arange(0, COLS)
        offsets = (band * GROUP + tl.arange(0, GROUP))[:, None] * cols + col[None, :]
        code = codes.to(tl.int32)[None, :]
        value = to_bf16(dequantize_groups(elements, code, E4M3, TARGET), TARGET)
        tl.store(dst_ptr + offsets, value, mask=(col < cols)[None, :])
        if DEPTH == 2:
            elements = second
            codes = second_codes
            second = following
            second_codes = following_codes
        else:
            elements = following
            codes = following_codes
