"""Tiles of the experts' gradients, and the matrices that they are made of."""

from typing import NamedTuple

import triton
import triton.language as tl
from kosmos_core.device.gemm import add_accumulator, column_parts
from kosmos_core.device.peers import peer_ptr
from kosmos_core.device.target import CLAMPED, load_tile, matrix_view, store_tile

from kosmos_moe.device.layout import ARENA, INPUTS


class GradientViews(NamedTuple):
    """Matrices of one set of experts as its tiles load and store them.

    Attributes:
        dy_rows, dy_columns: gradients of results, for dgrad2 and for wgrad2.
        w2: weights for dgrad2.
        act: gate and up.
        h, dgu: what dgrad2 stores.
        dgu_rows, dgu_columns: gradients of gate and up, for dgrad1 and for wgrad1.
        w1: weights for dgrad1.
        dx: what dgrad1 stores.
        h_columns, x_columns: right operands of wgrad2 and of wgrad1.
        dw2, dw1: what they store.
    """

    dy_rows: tl.tensor
    dy_columns: tl.tensor
    w2: tl.tensor
    act: tl.tensor
    h: tl.tensor
    dgu: tl.tensor
    dgu_rows: tl.tensor
    dgu_columns: tl.tensor
    w1: tl.tensor
    dx: tl.tensor
    h_columns: tl.tensor
    x_columns: tl.tensor
    dw2: tl.tensor
    dw1: tl.tensor


@triton.jit
def views_of(
    dy_ptr, x_ptr, w1_ptr, w2_ptr, act_ptr, h_ptr, dgu_ptr, dx_ptr, dw1_ptr, dw2_ptr, experts, rows,
    inter, hidden, CONFIG, T: tl.constexpr,
):  # fmt: skip
    """The matrices of some experts."""
    M: tl.constexpr = CONFIG.BLOCK_M
    N: tl.constexpr = CONFIG.BLOCK_N
    HALF: tl.constexpr = CONFIG.BLOCK_N // 2
    WIDTH: tl.constexpr = HALF // CONFIG.PARTS
    K: tl.constexpr = CONFIG.BLOCK_K
    R: tl.constexpr = CONFIG.WGRAD_K
    STORED: tl.constexpr = N // CONFIG.PARTS if CONFIG.MAIN_GRAD else N
    return GradientViews(
        matrix_view(dy_ptr, 1, rows, hidden, M, K, T),
        matrix_view(dy_ptr, 1, rows, hidden, R, M, T),
        matrix_view(w2_ptr, experts, hidden, inter, K, HALF, T),
        matrix_view(act_ptr, 2, rows, inter, M, WIDTH, T),
        matrix_view(h_ptr, 1, rows, inter, M, WIDTH, T),
        matrix_view(dgu_ptr, 2, rows, inter, M, WIDTH, T),
        matrix_view(dgu_ptr, 2, rows, inter, M, K, T),
        matrix_view(dgu_ptr, 2, rows, inter, R, M, T),
        matrix_view(w1_ptr, 2 * experts, inter, hidden, K, N, T),
        matrix_view(dx_ptr, 1, rows, hidden, M, N, T),
        matrix_view(h_ptr, 1, rows, inter, R, N, T),
        matrix_view(x_ptr, 1, rows, hidden, R, N, T),
        matrix_view(dw2_ptr, experts, hidden, inter, M, STORED, T),
        matrix_view(dw1_ptr, 2 * experts, inter, hidden, M, STORED, T),
    )


@triton.jit
def gradient_views(ops, ctx, call, size, IS_SHARED: tl.constexpr, CONFIG):
    """Matrices of the routed experts, or of the shared one; built once, before a tile loop."""
    T: tl.constexpr = ctx.TARGET
    if IS_SHARED:
        return views_of(
            ops.dy_ptr, ops.x_ptr, ops.shared1_ptr, ops.shared2_ptr, ops.shared_act_ptr,
            ops.shared_h_ptr, ops.shared_dgu_ptr, ops.shared_y_ptr, ops.dshared1_ptr,
            ops.dshared2_ptr, 1, size.tokens, size.shared_inter, size.hidden, CONFIG, T,
        )  # fmt: skip
    else:
        arena_ptr = peer_ptr(ctx, ARENA, call.rank, tl.bfloat16)
        inputs_ptr = peer_ptr(ctx, INPUTS, call.rank, tl.bfloat16)
        return views_of(
            arena_ptr, inputs_ptr, ops.w1_ptr, ops.w2_ptr, ops.act_ptr, ops.h_ptr, ops.dgu_ptr,
            ops.y2_ptr, ops.dw1_ptr, ops.dw2_ptr, CONFIG.LOCAL_EXPERTS,
            size.arena_blocks * CONFIG.BLOCK_M, size.inter, size.hidden, CONFIG, T,
        )  # fmt: skip


@triton.jit
def dgrad2_tile(views, weight, chunk, row, col, hidden, inter, valid, CONFIG, T: tl.constexpr):
    """A dgrad2 tile with the SwiGLU backward in its epilogue.

    weight: [BLOCK_M] routing weights of the rows.
    valid: rows that are no padding.
    Returns [BLOCK_M] fp32 parts of dw: the products of h and the gradient before it is weighted.
    """
    M: tl.constexpr = CONFIG.BLOCK_M
    HALF: tl.constexpr = CONFIG.BLOCK_N // 2
    WIDTH: tl.constexpr = HALF // CONFIG.PARTS
    K: tl.constexpr = CONFIG.BLOCK_K
    acc = tl.zeros((M, HALF), tl.float32)
    for k in tl.range(0, hidden, K, num_stages=CONFIG.STAGES):
        a = load_tile(views.dy_rows, 0, row, k, M, K, CLAMPED, CONFIG.EVEN_H, T)
        b = load_tile(views.w2, chunk, k, col, K, HALF, CONFIG.EVEN_H, False, T)
        acc = tl.dot(a, b, acc)
    inside = (tl.arange(0, M) < valid)[:, None]
    part = tl.zeros((M,), tl.float32)
    parts = column_parts(acc, M, HALF, CONFIG.PARTS)
    for i in tl.static_range(0, CONFIG.PARTS):
        place = col + i * WIDTH
        # A branch each, as in `swiglu_tile`.
        if place < inter:
            gate = load_tile(views.act, 0, row, place, M, WIDTH, False, False, T).to(tl.float32)
            up = load_tile(views.act, 1, row, place, M, WIDTH, False, False, T).to(tl.float32)
            gradient = tl.where(inside, parts[i], 0.0)
            sigmoid = 1.0 / (1.0 + tl.exp(-gate))
            silu = gate * sigmoid
            h = tl.where(inside, silu * up, 0.0)
            part += tl.sum(gradient * h, axis=1)
            store_tile(views.h, 0, row, place, (h * weight[:, None]).to(tl.bfloat16), M, WIDTH, T)
            gradient = gradient * weight[:, None]
            slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
            dgate = tl.where(inside, gradient * up * slope, 0.0)
            store_tile(views.dgu, 0, row, place, dgate.to(tl.bfloat16), M, WIDTH, T)
            dup = tl.where(inside, gradient * silu, 0.0)
            store_tile(views.dgu, 1, row, place, dup.to(tl.bfloat16), M, WIDTH, T)
    return part


@triton.jit
def dgrad1_tile(views, chunk, row, col, inter, CONFIG, T: tl.constexpr):
    """A dgrad1 tile: gradients of gate times W1's gate half, plus those of up times the other."""
    M: tl.constexpr = CONFIG.BLOCK_M
    N: tl.constexpr = CONFIG.BLOCK_N
    K: tl.constexpr = CONFIG.BLOCK_K
    acc = tl.zeros((M, N), tl.float32)
    for half in range(2):
        for k in tl.range(0, inter, K, num_stages=CONFIG.STAGES):
            a = load_tile(views.dgu_rows, half, row, k, M, K, CLAMPED, CONFIG.EVEN_I, T)
            b = load_tile(views.w1, chunk + half, k, col, K, N, CONFIG.EVEN_I, False, T)
            acc = tl.dot(a, b, acc)
    store_tile(views.dx, 0, row, col, acc.to(tl.bfloat16), M, N, T)


@triton.jit
def wgrad_tile(views, second, half, chunk, row, col, begin, end, CONFIG, T: tl.constexpr):
    """A wgrad tile: rows [begin, end) of a left operand transposed times a right one.

    Rounded once, or added to what the parameter has gathered.
    second: whether it is of W2, else of half `half` of W1.
    """
    M: tl.constexpr = CONFIG.BLOCK_M
    N: tl.constexpr = CONFIG.BLOCK_N
    R: tl.constexpr = CONFIG.WGRAD_K
    left = views.dgu_columns
    right = views.x_columns
    out = views.dw1
    if second:
        left = views.dy_columns
        right = views.h_columns
        out = views.dw2
    acc = tl.zeros((M, N), tl.float32)
    for k in tl.range(begin, end, R, num_stages=CONFIG.STAGES):
        a = load_tile(left, half, k, row, R, M, False, False, T)
        b = load_tile(right, 0, k, col, R, N, False, False, T)
        acc = tl.dot(a.T, b, acc)
    if CONFIG.MAIN_GRAD:
        add_accumulator(out, chunk, row, col, acc, M, N, CONFIG.PARTS, T)
    else:
        store_tile(out, chunk, row, col, acc.to(tl.bfloat16), M, N, T)
