"""Every configuration that is launched, for the GPU-less compile guard.

`python -m kosmos_core.testing.compile_guard kosmos_mx.compile_cases:compile_cases`
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import triton.language as tl
from kosmos_core.device.target import AMD, NVIDIA
from kosmos_core.testing.compile_guard import CompileCase, Expectations

from kosmos_mx.formats import FORMATS, SCALINGS
from kosmos_mx.kernels.dequantize import DequantizeConfig, dequantize_kernel
from kosmos_mx.kernels.gemm import GemmConfig, GemmOperands, gemm_kernel
from kosmos_mx.kernels.quantize import (
    AS_SOURCE,
    NO_COLUMNS,
    TRANSPOSED,
    Copies,
    QuantizeConfig,
    Source,
    quantize_kernel,
)
from kosmos_mx.ops.gemm import GROUP_M, tile_of
from kosmos_mx.ops.launching import BLOCK_COLS, NUM_WARPS, QUANTIZE_TILE, constants

TARGETS = {"sm_90": NVIDIA, "gfx950": AMD}
# Those whose matrix units take scales.
SCALED_TARGETS = ("gfx950", "sm_100")
COPIES = (
    ("row", 1, NO_COLUMNS),
    ("col", 0, AS_SOURCE),
    ("both", 1, AS_SOURCE),
    ("col turned", 0, TRANSPOSED),
    ("both turned", 1, TRANSPOSED),
)
SOURCE_ALIGNED = ("ptr", "up_ptr", "cols", "stride", "table_ptr")
COPIES_ALIGNED = ("row_ptr", "row_scale_ptr", "column_ptr", "column_scale_ptr")


def compile_cases() -> list[CompileCase]:
    """Cases of all kernels of this package."""
    cases: list[CompileCase] = []
    for target in TARGETS:
        cases += _quantize_cases(target)
        cases += _dequantize_cases(target)
        cases += _cases_of_one(target)
    for target in ("sm_90", *SCALED_TARGETS):
        cases += _gemm_cases(target)
    return cases


def _quantize_cases(target: str) -> Iterator[CompileCase]:
    for (copies, rows, columns), form, scaling, swiglu in product(
        COPIES, FORMATS.values(), SCALINGS.items(), (0, 1)
    ):
        # Format and scaling change constants and a few integers: what makes most shows them all.
        plain = form.name == "e4m3" and scaling[0] == "rceil"
        if not plain and not (rows and columns is not NO_COLUMNS):
            continue
        words = f"{copies} {form.name} {scaling[0]}{' swiglu' if swiglu else ''}"
        changes = {
            "ROWS": rows,
            "COLUMNS": columns.value,
            "FORMAT": form.constant,
            "SCALING": scaling[1],
            "SWIGLU": swiglu,
        }
        yield _quantize_case(target, words, "bf16", changes)
    base = {"ROWS": 1, "COLUMNS": AS_SOURCE.value}
    yield _quantize_case(target, "both of fp32", "fp32", base)
    yield _quantize_case(target, "both in a table of segments", "bf16", {**base, "SEGMENTS": 8})
    yield _quantize_case(target, "both narrow", "bf16", {**base, "BLOCK_COLS": 32})
    yield _quantize_case(target, "both of odd columns", "bf16", base, aligned=False)
    values = {"both": ("*bf16", "*bf16"), "row": ("*bf16", "*u8"), "col": ("*u8", "*bf16")}
    for which, (rows, columns) in values.items():
        case = _quantize_case(target, f"both, values of {which}", "bf16", base)
        copies = Copies(rows, "*u8", columns, "*u8", "i32")
        yield replace(case, signature={**case.signature, "copies": copies})


def _quantize_case(
    target: str, words: str, source: str, changes: dict[str, Any], aligned: bool = True
) -> CompileCase:
    block, num_warps, steps, width = QUANTIZE_TILE
    config = {
        "FORMAT": 0,
        "SCALING": 0,
        "SWIGLU": 0,
        "SEGMENTS": 0,
        "BLOCK_COLS": block,
        "STEPS": steps,
        "WIDTH": width,
        "TARGET": TARGETS[target].value,
        **changes,
    }
    kind = f"*{source}"
    return CompileCase(
        name=f"quantize {words}",
        kernel=quantize_kernel,
        signature={
            "source": Source(kind, kind, "i32", "i32", "i32", "i32", "i32", "*i32"),
            "copies": Copies("*u8", "*u8", "*u8", "*u8", "i32"),
            "CONFIG": constants(QuantizeConfig, **config),
        },
        divisible_by_16=(
            *(f"source.{f}" for f in SOURCE_ALIGNED if aligned or f not in ("cols", "stride")),
            *(f"copies.{f}" for f in COPIES_ALIGNED),
        ),
        target=target,
        options={"num_warps": num_warps, "num_stages": 1},
        expect=Expectations(
            keeps_subnormals=True,
            wide_load=1 if aligned and config["BLOCK_COLS"] == block else 0,
        ),
    )


def _dequantize_cases(target: str) -> Iterator[CompileCase]:
    for columns, form, out in product((0, 1), FORMATS.values(), ("bf16", "fp32")):
        config = constants(
            DequantizeConfig,
            COLUMNS=columns,
            FORMAT=form.constant,
            BLOCK_COLS=BLOCK_COLS,
            TARGET=TARGETS[target].value,
        )
        yield CompileCase(
            name=f"dequantize {'col' if columns else 'row'} {form.name} {out}",
            kernel=dequantize_kernel,
            signature={
                **dict.fromkeys(("element_ptr", "scale_ptr"), "*u8"),
                "out_ptr": f"*{out}",
                "rows": "i32",
                "cols": "i32",
                "CONFIG": config,
            },
            divisible_by_16=("element_ptr", "scale_ptr", "out_ptr", "cols"),
            target=target,
            options={"num_warps": NUM_WARPS, "num_stages": 1},
            expect=Expectations(keeps_subnormals=True, wide_load=1),
        )


def _cases_of_one(target: str) -> Iterator[CompileCase]:
    """Sizes of 1, which triton compiles in."""
    one = tl.constexpr(1)
    vendor = TARGETS[target].value
    case = _quantize_case(target, "both of one", "bf16", {"ROWS": 1, "COLUMNS": AS_SOURCE.value})
    source = Source("*bf16", "*bf16", one, one, one, one, one, "*u8")
    copies = Copies("*u8", "*u8", "*u8", "*u8", one)
    yield replace(
        case,
        signature={**case.signature, "source": source, "copies": copies},
        divisible_by_16=(),
        expect=Expectations(keeps_subnormals=True),
    )
    config = {"COLUMNS": 1, "FORMAT": 0, "BLOCK_COLS": BLOCK_COLS, "TARGET": vendor}
    yield CompileCase(
        name="dequantize col of one",
        kernel=dequantize_kernel,
        signature={
            **dict.fromkeys(("element_ptr", "scale_ptr"), "*u8"),
            "out_ptr": "*bf16",
            "rows": "i32",
            "cols": one,
            "CONFIG": constants(DequantizeConfig, **config),
        },
        target=target,
        options={"num_warps": NUM_WARPS, "num_stages": 1},
    )
    tile = next(iter(c for c in _gemm_cases(target) if "gemm nn bf16 even_k=0" in c.name))
    sizes = {"m": one, "n": one, "k": "i32"}
    yield replace(
        tile,
        name="gemm nn bf16 of one",
        signature={**tile.signature, **sizes},
        divisible_by_16=tuple(f for f in tile.divisible_by_16 if f not in ("m", "n")),
    )


def _gemm_cases(target: str) -> Iterator[CompileCase]:
    for scaled, (a_major, b_major), even, form in product(
        (0, 1), ((1, 1), (1, 0), (0, 0)), (0, 1), FORMATS.values()
    ):
        # gfx950 stands for itself and for AMD GPUs without block-scaled MMA.
        if (target not in SCALED_TARGETS) if scaled else (target == "sm_100" or form.constant):
            continue
        if form.constant and not even:
            continue
        tile = tile_of(bool(scaled), bool(a_major), bool(b_major))
        kind = "*u8" if scaled else "*bf16"
        config = constants(
            GemmConfig,
            SCALED=scaled,
            A_FORMAT=form.constant,
            B_FORMAT=form.constant,
            A_K_MAJOR=a_major,
            B_K_MAJOR=b_major,
            EVEN_K=even,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            GROUP_M=GROUP_M,
            STAGES=tile.num_stages,
        )
        layout = {(1, 1): "tn", (1, 0): "nn", (0, 0): "nt"}[a_major, b_major]
        yield CompileCase(
            name=f"gemm {layout} {form.name if scaled else 'bf16'} even_k={even}",
            kernel=gemm_kernel,
            signature={
                "ops": GemmOperands(kind, kind, kind, kind, "*bf16"),
                **dict.fromkeys(("m", "n", "k"), "i32"),
                "CONFIG": config,
            },
            divisible_by_16=(*(f"ops.{f}" for f in GemmOperands._fields), "m", "n", "k"),
            target=target,
            options={"num_warps": tile.num_warps, "num_stages": tile.num_stages},
            expect=Expectations(mma=1, scaled_mma=scaled),
        )
