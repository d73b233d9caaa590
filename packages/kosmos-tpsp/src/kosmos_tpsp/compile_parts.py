"""What the compile cases of all kernels have in common."""

from __future__ import annotations

from typing import Any

import triton.language as tl
from kosmos_core.device.gemm import store_splits
from kosmos_core.device.layout import Context
from kosmos_core.device.target import AMD, NVIDIA
from kosmos_core.testing.compile_guard import CompileCase, Expectations
from kosmos_core.workspace import control_sizes
from kosmos_heuristics import Machine
from kosmos_heuristics.tiles import choose_copy_depth, copy_step_bytes

CONTEXT_POINTERS = ("table_ptr", "control_ptr", "status_ptr", "trace_ptr")
# Marks a case whose row sizes are multiples of 8, not 16: triton specialises them on 16.
ROWS_OF_8 = {"ROWS_OF": 8}
# Launches that only move, of the serial policy, with loads that the pipeliner stages.
STAGED_SPILL: dict[str, Any] = {
    "allow_spills": 16,
    "reason": "ptxas keeps to the registers of several workgroups an SM; a few bytes in L1",
}


def context(target: str, world: int, trace: int = 0) -> Context:
    """The context of a world of so many ranks."""
    stride, set_words, arrival_words = control_sizes(128)
    vendor = AMD if target.startswith("gfx") else NVIDIA
    constants = (world, set_words, arrival_words, stride, int(vendor.value), trace)
    return Context("*i64", "*i32", "*i64", "*i64", *(tl.constexpr(c) for c in constants))


def tile_constants(machine: Machine, tile: Any) -> dict[str, Any]:
    """Constants of a tile that every kernel takes, whole and even."""
    return {
        "TILE_ROW_ROWS": machine.tile_row_rows,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "STAGES": tile.num_stages,
        "SPLIT_K": 1,
        "CLAIM_RUN": 1,
        "XCDS": 1,
        "XCD_RUN": 4,
        "STORE_SPLITS": store_splits(tile.block_n),
        "EVEN_K": 1,
        "EVEN_N": 1,
    }


def copy_constants(machine: Machine, transport: str, dtype: str = "bf16") -> dict[str, Any]:
    """Constants of a mover's steps; of MXFP8 that it dequantises."""
    depth, _ = choose_copy_depth(machine, transport, dtype)
    return {"COPY_ELEMENTS": copy_step_bytes(machine, transport) // 2, "COPY_DEPTH": depth}


def case(
    kernel: Any,
    target: str,
    tile: Any,
    operands: Any,
    counts: tuple[str, ...],
    config: Any,
    changes: dict[str, Any],
    world: int,
    trace: int,
    rows_of: int,
    expect: Expectations,
    row_sizes: tuple[str, ...] = ("n", "k"),
) -> CompileCase:
    """A case of a kernel that takes (ops, ctx, *counts, CONFIG).

    Args:
        kernel: the kernel.
        target: what to compile for.
        tile: of the machine model.
        operands: struct of pointer types.
        counts: names of its integers.
        config: struct of constants.
        changes: constants that the case is named after.
        world: ranks.
        trace: events that a workgroup may record.
        rows_of: what divides the row sizes.
        expect: what the machine code must hold.
        row_sizes: integers that are elements of a row.
    """
    words = [f"{k.lower()}={getattr(v, 'value', v)}" for k, v in changes.items()]
    shape = f"{tile.block_m}x{tile.block_n} world={world} trace={trace}"
    op = kernel.fn.__name__.removesuffix("_kernel")
    return CompileCase(
        name=f"{op} {shape} {' '.join(words)}".strip(),
        kernel=kernel,
        signature={
            "ops": operands,
            "ctx": context(target, world, trace),
            **dict.fromkeys(counts, "i32"),
            "CONFIG": config,
        },
        divisible_by_16=(
            *(f"ops.{f}" for f in operands._fields),
            *(f"ctx.{f}" for f in CONTEXT_POINTERS),
            *(row_sizes if rows_of == 16 else ()),
        ),
        target=target,
        # What `World.launch` passes, and no more.
        options={"num_warps": tile.num_warps, "num_stages": tile.num_stages},
        expect=expect,
    )


def constexprs(kind: Any, values: dict[str, Any]) -> Any:
    """A struct of constants."""
    return kind(
        **{k: v if isinstance(v, tl.constexpr) else tl.constexpr(v) for k, v in values.items()}
    )
