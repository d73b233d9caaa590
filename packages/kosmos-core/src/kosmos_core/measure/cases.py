"""The measuring kernels for the compile guard, in every configuration that is launched."""

from __future__ import annotations

from typing import Any

import triton.language as tl

from kosmos_core.device.gemm import store_splits
from kosmos_core.device.layout import Context
from kosmos_core.device.target import AMD, NVIDIA
from kosmos_core.kernels import beside
from kosmos_core.kernels import measure as kernels
from kosmos_core.measure.budget import FULL, GEMM_TILES, GROUP_M
from kosmos_core.testing.compile_guard import CompileCase, Expectations
from kosmos_core.workspace import control_sizes

_SMALL_SPILL = Expectations(
    allow_spills=32,
    reason="ptxas keeps some steps to 128 registers; a few bytes in L1 do not show against a link",
)
TARGETS = {"sm_90": int(NVIDIA.value), "gfx950": int(AMD.value)}


def compile_cases() -> list[CompileCase]:
    """Every measuring kernel for sm_90 and gfx950."""
    return [case for target in TARGETS for case in _cases(target)]


def _cases(target: str) -> list[CompileCase]:
    vendor = TARGETS[target]
    nvidia = vendor == int(NVIDIA.value)
    cases = [
        CompileCase(
            f"copy {variant}",
            kernels.copy_kernel,
            {
                "routes": kernels.Routes("*i64"),
                "head_ptr": "*i32",
                "num_routes": "i32",
                "units": "i32",
            },
            target,
            constexprs={
                "UNIT": FULL.unit_elements,
                "BLOCK": variant.step_elements,
                "DEPTH": variant.depth,
            },
            divisible_by_16=("routes.table_ptr", "head_ptr"),
            options={"num_warps": variant.num_warps},
            expect=_SMALL_SPILL if nvidia and variant.depth == 2 else Expectations(),
        )
        for variant in FULL.variants
    ]
    tile = GEMM_TILES[vendor]
    cases.append(
        CompileCase(
            "gemm",
            kernels.gemm_kernel,
            {
                **dict.fromkeys(("a_ptr", "b_ptr", "c_ptr"), "*bf16"),
                "head_ptr": "*i32",
                **dict.fromkeys(("m", "n", "k"), "i32"),
            },
            target,
            constexprs={
                "BLOCK_M": tile.block_m,
                "BLOCK_N": tile.block_n,
                "BLOCK_K": tile.block_k,
                "STAGES": tile.num_stages,
                "GROUP_M": GROUP_M,
                "STORE_SPLITS": store_splits(tile.block_n),
                "TARGET": vendor,
            },
            divisible_by_16=("a_ptr", "b_ptr", "c_ptr", "head_ptr", "n", "k"),
            options={"num_warps": tile.num_warps, "num_stages": tile.num_stages},
            expect=Expectations(mma=1, tma_load=2 if nvidia else 0, tma_store=1 if nvidia else 0),
        )
    )
    cases += [*_sums(target), *_beside(target, vendor)]
    cases.append(
        CompileCase(
            "empty", kernels.empty_kernel, {"word_ptr": "*i32"}, target, options={"num_warps": 8}
        )
    )
    cases.append(
        CompileCase(
            "start order",
            kernels.start_order_kernel,
            {"head_ptr": "*i32", "tickets_ptr": "*i32", "times_ptr": "*i64", "hold_ns": "i32"},
            target,
            constexprs={"SPREAD": 8, "TARGET": vendor},
            divisible_by_16=("head_ptr", "tickets_ptr", "times_ptr"),
            options={"num_warps": 16},
        )
    )
    cases.append(
        CompileCase(
            "presence",
            kernels.presence_kernel,
            {"word_ptr": "*i32", "seen_ptr": "*i32", "bound_ns": "i32"},
            target,
            constexprs={"TARGET": vendor},
            divisible_by_16=("word_ptr", "seen_ptr"),
            options={"num_warps": 8},
            expect=Expectations(release_gpu=1, acquire_gpu=1, barrier=1),
        )
    )
    common: dict[str, Any] = {"elapsed_ptr": "*i64", "rounds": "i32", "call_hash": "i32"}
    cases += [
        CompileCase(
            "ping pong",
            kernels.ping_pong_kernel,
            {"ctx": _context(2, vendor), **common, "partner": "i32"},
            target,
            divisible_by_16=_CONTEXT_ALIGNED,
            options={"num_warps": 8},
            expect=Expectations(release_sys=2, acquire_sys=2, barrier=2),
        ),
        CompileCase(
            "local ping pong",
            kernels.local_ping_pong_kernel,
            {"ctx": _context(1, vendor), **common},
            target,
            divisible_by_16=_CONTEXT_ALIGNED,
            options={"num_warps": 8},
            expect=Expectations(release_gpu=2, acquire_gpu=1, barrier=2),
        ),
    ]
    return cases


def _sums(target: str) -> list[CompileCase]:
    return [
        CompileCase(
            f"sum of {sources}, {variant}",
            beside.sum_kernel,
            {"routes": kernels.Routes("*i64"), "head_ptr": "*i32", "units": "i32"},
            target,
            constexprs={
                "UNIT": FULL.unit_elements,
                "BLOCK": variant.step_elements >> (sources - 1).bit_length(),
                "SOURCES": sources,
            },
            divisible_by_16=("routes.table_ptr", "head_ptr"),
            options={"num_warps": variant.num_warps},
        )
        for variant in FULL.sum_variants
        for sources in (2, 8)
    ]


def _beside(target: str, vendor: int) -> list[CompileCase]:
    tile, added = GEMM_TILES[vendor], FULL.sum_variants[0].step_elements
    nvidia = vendor == int(NVIDIA.value)
    return [
        CompileCase(
            f"beside {f'a sum of {sources}' if sources else f'a copy, {depth} ahead'}",
            beside.beside_kernel,
            {
                "matrices": beside.Matrices("*bf16", "*bf16", "*bf16"),
                "routes": kernels.Routes("*i64"),
                "heads": beside.Heads("*i32", "*i32", "*i32"),
                **dict.fromkeys(("m", "n", "k", "num_movers", "units", "most"), "i32"),
            },
            target,
            constexprs={
                "UNIT": FULL.unit_elements,
                "BLOCK": added >> (sources - 1).bit_length() if sources else FULL.beside_step,
                "DEPTH": depth,
                "SOURCES": sources,
                "BLOCK_M": tile.block_m,
                "BLOCK_N": tile.block_n,
                "BLOCK_K": tile.block_k,
                "STAGES": tile.num_stages,
                "GROUP_M": GROUP_M,
                "STORE_SPLITS": store_splits(tile.block_n),
                "TARGET": vendor,
            },
            divisible_by_16=(
                "matrices.a_ptr", "matrices.b_ptr", "matrices.c_ptr", "routes.table_ptr",
                "heads.tiles_ptr", "heads.tickets_ptr", "heads.moved_ptr", "n", "k",
            ),
            options={"num_warps": tile.num_warps, "num_stages": tile.num_stages},
            expect=Expectations(mma=1, tma_load=2 if nvidia else 0, tma_store=1 if nvidia else 0),
        )
        for sources, depth in ((0, 2), (0, 3), (2, 0), (8, 0))
    ]  # fmt: skip


_CONTEXT_ALIGNED = (
    "ctx.table_ptr",
    "ctx.control_ptr",
    "ctx.status_ptr",
    "ctx.trace_ptr",
    "elapsed_ptr",
)


def _context(world: int, vendor: int) -> Context:
    stride, set_words, arrival_words = control_sizes(1)
    return Context(
        "*i64",
        "*i32",
        "*i64",
        "*i64",
        tl.constexpr(world),
        tl.constexpr(set_words),
        tl.constexpr(arrival_words),
        tl.constexpr(stride),
        tl.constexpr(vendor),
        tl.constexpr(0),
    )
