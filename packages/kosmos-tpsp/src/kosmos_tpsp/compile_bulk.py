"""Compile cases of the bulk operations."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from kosmos_core.device.gemm import NT
from kosmos_core.device.roles import FIXED, ONE_WAY, TWO_WAY
from kosmos_core.device.target import AMD, NVIDIA
from kosmos_core.testing.compile_guard import CompileCase, Expectations
from kosmos_heuristics import load_machine
from kosmos_heuristics.gemm_rs import UNIT_COLS, UNIT_ROWS
from kosmos_heuristics.tiles import CLAIM_RUNS

from kosmos_tpsp.compile_parts import (
    ROWS_OF_8,
    STAGED_SPILL,
    case,
    constexprs,
    copy_constants,
    tile_constants,
)
from kosmos_tpsp.device.config import (
    BF16,
    BUILD_ONLY,
    COLUMNS,
    FUSED,
    GATHER_ONLY,
    PULL,
    PUSH,
    REDUCE_ONLY,
    ROWS,
    UNPACKED,
    BulkAgConfig,
    BulkAgOperands,
    BulkRsConfig,
    GradientOperands,
    gradient_splits,
)
from kosmos_tpsp.kernels.bulk_ag import bulk_ag_kernel
from kosmos_tpsp.kernels.bulk_rs import bulk_rs_kernel
from kosmos_tpsp.ops.bulk_rs import reduce_elements
from kosmos_tpsp.ops.mx import has_mx

AG_OPERANDS = BulkAgOperands._make(["*bf16"] * 7 + ["*fp32"])
MX_OPERANDS = AG_OPERANDS._replace(x_ptr="*u8", x_scale_ptr="*u8")
MX = {"FORMAT": UNPACKED, "COPIES": COLUMNS}
AG_COUNTS = ("m", "n", "k", "num_movers", "split_tiles", "call_hash")
UNEVEN = {"EVEN_K": 0, "EVEN_N": 0}
RS_COUNTS = ("m", "n", "k", "num_movers", "max_movers", "split_tiles", "call_hash")
RAGGED = {**UNEVEN, "EVEN_M": 0}
# What a ragged tile that is split, or added to FP32, may spill on AMD.
ALLOWED: dict[str, Any] = {
    "allow_spills": 48,
    "reason": "tokens and features ragged at once, and the tile split or added to main_grad: masks "
    "of both factors and what the sum is added to take more registers than there are",
}
# What a split tile may spill on AMD.
ALLOWED_SPLIT: dict[str, Any] = {
    "allow_spills": 48,
    "reason": "split, a tile takes all registers already: what finds its partial sums, and what a "
    "two-way mover carries from tile to tile, stands beside it",
}


def bulk_ag_cases(target: str, machine_name: str) -> Iterator[CompileCase]:
    """Every configuration of `bulk_ag` that plans can choose."""
    machine = load_machine(machine_name)
    for tile in machine.tiles:
        base: dict[str, Any] = {
            **tile_constants(machine, tile),
            "TRANSPORT": PUSH,
            "LAYOUT": 1,
            "POLICY": ONE_WAY,
            "PHASE": FUSED,
            "HANDOVER": 1,
            "FORMAT": BF16,
            "COPIES": ROWS,
            "SCATTERS": 0,
            "SLICES": 4,
            "GROUP_M": 8,
            "CLAIM_RUN": CLAIM_RUNS[0] if machine.rule_set == "h200" else 1,
        }
        variants: list[tuple[dict[str, Any], int, int]] = [
            ({"TRANSPORT": t, "HANDOVER": h, "SPLIT_K": split}, 2, 0)
            for t, h, split in product((PULL, PUSH), (0, 1), (1, 2, 4))
        ]
        variants += [
            ({"TRANSPORT": t, "POLICY": p}, 8, 0)
            for t, p in product((PULL, PUSH), (FIXED, ONE_WAY, TWO_WAY))
        ]
        variants += [
            ({"TRANSPORT": t, "PHASE": p}, 2, 0)
            for t, p in product((PULL, PUSH), (GATHER_ONLY, BUILD_ONLY))
        ]
        variants += [
            (UNEVEN, 2, 0),
            *(({**UNEVEN, "TRANSPORT": t, **ROWS_OF_8}, 2, 0) for t in (PULL, PUSH)),
            ({"HANDOVER": 0}, 1, 0),
            ({"HANDOVER": 0, "SPLIT_K": 2}, 1, 0),
            ({"CLAIM_RUN": 1}, 2, 0),
            ({}, 2, 1024),
        ]
        if has_mx():
            variants += [
                *(({**MX, "TRANSPORT": t}, 2, 0) for t in (PULL, PUSH)),
                *(({**MX, "TRANSPORT": t, "POLICY": TWO_WAY}, 8, 0) for t in (PULL, PUSH)),
                ({**MX, "PHASE": GATHER_ONLY}, 2, 0),
                ({**MX, **UNEVEN, **ROWS_OF_8}, 2, 0),
                ({**MX, "HANDOVER": 0}, 1, 0),
            ]
        if tile is not machine.tile:
            variants = [({"SPLIT_K": split}, 2, 0) for split in (1, 2)]
        for changes, world, trace in variants:
            transport = "pull" if changes.get("TRANSPORT", PUSH) is PULL else "push"
            unpacks = changes.get("FORMAT") is UNPACKED
            steps = copy_constants(machine, transport, "mxfp8" if unpacks else "bf16")
            config = {**base, **changes, **steps}
            rows_of = config.pop("ROWS_OF", 16)
            yield case(
                bulk_ag_kernel, target, tile, MX_OPERANDS if unpacks else AG_OPERANDS, AG_COUNTS,
                constexprs(BulkAgConfig, config), changes, world, trace, rows_of,
                _expected(target, config, world),
            )  # fmt: skip


def _expected(target: str, config: dict[str, Any], world: int) -> Expectations:
    """Fewest ordered operations that the assembly must hold."""
    peers = world > 1
    gathers = config["PHASE"] is not BUILD_ONLY
    builds = config["PHASE"] is not GATHER_ONLY
    pushes = config["TRANSPORT"] is PUSH
    arrives = peers and gathers
    unpacks = gathers and config["FORMAT"] is UNPACKED
    return Expectations(
        release_sys=(1 + (arrives and pushes)) if peers else 0,
        release_gpu=1 + (unpacks or (arrives and not pushes)),
        acquire_sys=1 + (arrives and pushes) if peers else 0,
        keeps_subnormals=unpacks,
        # Movers and whoever completes the gather output hold COPY_DEPTH + 1 steps a thread.
        # AMD's steps of dequantised elements are 8 bytes a thread.
        wide_load=3 if gathers and not (unpacks and target == "gfx950") else 0,
        mma=1 if builds else 0,
        tma_load=1 if builds and target == "sm_90" else 0,
        tma_store=1 if builds and target == "sm_90" else 0,
        **(STAGED_SPILL if not (builds or pushes) and target == "sm_90" else {}),
    )


def bulk_rs_cases(target: str, machine_name: str) -> Iterator[CompileCase]:
    """Every configuration of `bulk_rs` that plans can choose."""
    machine = load_machine(machine_name)
    vendor = int((AMD if target.startswith("gfx") else NVIDIA).value)
    unit = UNIT_ROWS * UNIT_COLS[machine.rule_set]
    for tile in machine.tiles:
        base: dict[str, Any] = {
            **tile_constants(machine, tile),
            "TRANSPORT": PULL,
            "LAYOUT": NT,
            "POLICY": ONE_WAY,
            "PHASE": FUSED,
            "MAIN_GRAD": 0,
            "FORMAT": BF16,
            "COPIES": ROWS,
            "SCATTERS": 1,
            "SLICES": 16,
            **copy_constants(machine, "push"),
            "GROUP_M": 8,
            "CLAIM_RUN": CLAIM_RUNS[0] if machine.rule_set == "h200" else 1,
            "EVEN_M": 1,
        }
        variants: list[tuple[dict[str, Any], int, int]] = [
            ({"TRANSPORT": t, "MAIN_GRAD": main, "SPLIT_K": split}, world, 0)
            for t, main, split, world in product((PULL, PUSH), (0, 1), (1, 2, 4), (2, 8))
        ]
        variants += [({"MAIN_GRAD": main, "SPLIT_K": 2}, 1, 0) for main in (0, 1)]
        variants += [
            ({"TRANSPORT": t, **changes}, 2, 0)
            for t in (PULL, PUSH)
            for changes in (
                {"POLICY": FIXED},
                {"POLICY": TWO_WAY},
                {"POLICY": TWO_WAY, "SPLIT_K": 2, "MAIN_GRAD": 1},
                {"PHASE": BUILD_ONLY},
                {"PHASE": REDUCE_ONLY},
                RAGGED,
                {"EVEN_K": 0, "SPLIT_K": 2},
                {**RAGGED, "MAIN_GRAD": 1, "SPLIT_K": 2},
                {**RAGGED, "SPLIT_K": 4},
                {**RAGGED, **ROWS_OF_8},
                {**RAGGED, **ROWS_OF_8, "MAIN_GRAD": 1},
            )
        ]
        variants += [({"TRANSPORT": t, "POLICY": TWO_WAY}, 8, 0) for t in (PULL, PUSH)]
        variants += [({}, 3, 0), ({}, 4, 0), ({"CLAIM_RUN": 1}, 2, 0), ({}, 2, 1024)]
        if tile is not machine.tile:
            variants = [
                ({"MAIN_GRAD": main, "SPLIT_K": split}, 2, 0)
                for main, split in product((0, 1), (1, 2))
            ]
        for changes, world, trace in variants:
            config = {**base, **changes, "REDUCE_ELEMENTS": reduce_elements(world, unit)}
            adds = bool(config["MAIN_GRAD"])
            config["STORE_SPLITS"] = gradient_splits(tile.block_n, adds, vendor)
            rows_of = config.pop("ROWS_OF", 16)
            operands = GradientOperands._make(
                ["*bf16"] * 5 + ["*fp32" if adds else "*bf16", "*fp32"]
            )
            yield case(
                bulk_rs_kernel, target, tile, operands, RS_COUNTS,
                constexprs(BulkRsConfig, config), changes, world, trace, rows_of,
                _expected_rs(target, config, world), ("m", "n"),
            )  # fmt: skip


def _expected_rs(target: str, config: dict[str, Any], world: int) -> Expectations:
    """Fewest ordered operations that the assembly must hold, and what it may spill."""
    builds = config["PHASE"] is not REDUCE_ONLY
    reduces = config["PHASE"] is not BUILD_ONLY
    sends = world > 1 and reduces and config["TRANSPORT"] is PUSH
    ragged = not (config["EVEN_K"] or config["EVEN_M"])
    cornered = ragged and (config["SPLIT_K"] > 1 or config["MAIN_GRAD"])
    allowed = ALLOWED if cornered else ALLOWED_SPLIT if config["SPLIT_K"] > 1 else {}
    return Expectations(
        release_sys=1 + sends if world > 1 else 0,
        release_gpu=1,
        acquire_sys=1 + sends if world > 1 else 0,
        wide_load=2 if reduces else 0,
        mma=1 if builds else 0,
        tma_load=1 if builds and target == "sm_90" else 0,
        tma_store=1 if builds and target == "sm_90" else 0,
        **(allowed if target == "gfx950" else {}),
        **(STAGED_SPILL if target == "sm_90" and not builds else {}),
    )
