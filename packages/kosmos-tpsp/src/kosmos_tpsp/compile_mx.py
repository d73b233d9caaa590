"""Configurations of the kernels with MXFP8 operands, for the GPU-less compile guard."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import product
from typing import Any

from kosmos_core.device.gemm import NT
from kosmos_core.device.roles import ONE_WAY, TWO_WAY
from kosmos_core.device.target import AMD, NVIDIA
from kosmos_core.testing.compile_guard import CompileCase, Expectations
from kosmos_heuristics import load_machine
from kosmos_heuristics.tiles import CLAIM_RUNS, COPY_DEPTH, copy_step_bytes

from kosmos_tpsp.compile_parts import case, constexprs, tile_constants
from kosmos_tpsp.device.config import (
    BOTH,
    BUILD_ONLY,
    FUSED,
    GATHER_ONLY,
    PULL,
    PUSH,
    ROWS,
    SCALED,
    UNPACKED,
    AgGemmConfig,
    GradientConfig,
    Operands,
    PairOperands,
    gradient_splits,
)
from kosmos_tpsp.kernels.ag_gemm import ag_gemm_kernel
from kosmos_tpsp.kernels.ag_gemm_pair import ag_gemm_pair_kernel
from kosmos_tpsp.ops.mx import scaled_tile

UNPACKED_OPERANDS = Operands("*u8", "*u8", "*bf16", "*bf16", "*bf16", "*bf16", "*bf16", "*fp32")
SCALED_OPERANDS = Operands("*u8", "*u8", "*u8", "*u8", "*bf16", "*u8", "*u8", "*fp32")
PAIR_OPERANDS = PairOperands._make(["*u8"] * 4 + ["*bf16"] * 6 + ["*fp32"])
PAIR_COUNTS = ("m", "n", "k", "num_movers", "call_hash")
COUNTS = ("m", "n", "k", "num_movers", "split_tiles", "call_hash")
# gfx950 takes scales, and stands for AMD GPUs that do not.
FORMS = {"sm_90": (UNPACKED,), "gfx950": (SCALED, UNPACKED)}


def mx_cases(target: str, machine_name: str) -> Iterator[CompileCase]:
    """Cases of a target whose plans are of a machine model."""
    machine = load_machine(machine_name)
    for form in FORMS[target]:
        base: dict[str, Any] = {
            "FORMAT": form,
            "COPIES": ROWS,
            "ROW_SHIFT": 9,
            "TRANSPORT": PUSH,
            "LAYOUT": 0,
            "ORDER": 0,
            "POLICY": ONE_WAY,
            "PHASE": FUSED,
            "KEEP_GATHERED": 0,
            "SCATTERS": 0,
            "SLICES": 4,
            "COPY_DEPTH": COPY_DEPTH,
            "GROUP_M": 8,
            "GROUP_ROWS": 1,
            "CLAIM_RUN": CLAIM_RUNS[0] if machine.rule_set == "h200" else 1,
            "XCDS": machine.num_xcds,
        }
        variants: list[tuple[dict[str, Any], int]] = [
            ({"TRANSPORT": t, "LAYOUT": layout, "SPLIT_K": 1 + layout}, 2)
            for t, layout in product((PULL, PUSH), (0, 1))
        ]
        variants.append(({"ROW_SHIFT": 5, "EVEN_K": 0, "EVEN_N": 0}, 8))
        if target == "sm_90" or form is SCALED:
            variants += [
                ({"TRANSPORT": PULL, "ROW_SHIFT": 5, "EVEN_K": 0, "EVEN_N": 0, "LAYOUT": 1}, 8),
                ({"POLICY": TWO_WAY}, 2),
                ({"PHASE": GATHER_ONLY}, 2),
                ({"PHASE": BUILD_ONLY}, 2),
                ({}, 1),
            ]
        for changes, world in variants:
            transport = "pull" if changes.get("TRANSPORT", PUSH) is PULL else "push"
            tile: Any = machine.tile
            if form is SCALED:
                layout = "nn" if changes.get("LAYOUT") else "tn"
                tile = replace(tile, **asdict(scaled_tile(layout)))
            config = {
                **tile_constants(machine, tile),
                **base,
                **changes,
                "COPY_ELEMENTS": copy_step_bytes(machine, transport)
                // (2 if form is UNPACKED else 1),
            }
            yield case(
                ag_gemm_kernel, target, tile,
                SCALED_OPERANDS if form is SCALED else UNPACKED_OPERANDS, COUNTS,
                constexprs(AgGemmConfig, config), {"FORMAT": form, **changes}, world, 0, 16,
                _expected(target, config, world),
            )  # fmt: skip


def pair_cases(target: str, machine_name: str) -> Iterator[CompileCase]:
    """Cases of `ag_gemm_pair`."""
    machine = load_machine(machine_name)
    tile = machine.tile
    shared = tile_constants(machine, tile)
    base: dict[str, Any] = {
        **shared,
        "FORMAT": UNPACKED,
        "COPIES": BOTH,
        "ROW_SHIFT": 9,
        "TRANSPORT": PUSH,
        "LAYOUT": 1,
        "ORDER": 0,
        "POLICY": ONE_WAY,
        "PHASE": FUSED,
        "KEEP_GATHERED": 0,
        "SCATTERS": 0,
        "SLICES": 4,
        "COPY_DEPTH": COPY_DEPTH,
        "GROUP_M": 8,
        "GROUP_ROWS": 1,
        "CLAIM_RUN": CLAIM_RUNS[0] if machine.rule_set == "h200" else 1,
        "XCDS": machine.num_xcds,
    }
    uneven = {"ROW_SHIFT": 5, "EVEN_K": 0, "EVEN_N": 0}
    variants: list[tuple[dict[str, Any], int]] = [
        ({"TRANSPORT": PULL, "MAIN_GRAD": 0}, 2),
        ({"TRANSPORT": PUSH, "MAIN_GRAD": 1}, 2),
        ({**uneven, "POLICY": TWO_WAY, "MAIN_GRAD": 0}, 8),
        ({"PHASE": GATHER_ONLY, "MAIN_GRAD": 0}, 2),
        ({"PHASE": BUILD_ONLY, "MAIN_GRAD": 1}, 2),
        ({"MAIN_GRAD": 0}, 1),
    ]
    vendor = (AMD if target == "gfx950" else NVIDIA).value
    for changes, world in variants:
        transport = "pull" if changes.get("TRANSPORT", PUSH) is PULL else "push"
        config = {**base, **changes, "COPY_ELEMENTS": copy_step_bytes(machine, transport) // 2}
        adds = config.pop("MAIN_GRAD")
        even = config["EVEN_K"]
        second = {
            **{name: config[name] for name in GradientConfig._fields if name in config},
            "MAIN_GRAD": adds,
            "LAYOUT": NT,
            "CLAIM_RUN": 1,
            "STORE_SPLITS": gradient_splits(tile.block_n, bool(adds), vendor),
            "EVEN_M": even,
        }
        made = case(
            ag_gemm_pair_kernel, target, tile,
            PAIR_OPERANDS._replace(gradient_ptr="*fp32" if adds else "*bf16"), PAIR_COUNTS,
            constexprs(AgGemmConfig, config), changes, world, 0, 16,
            _expected(target, config, world),
        )  # fmt: skip
        given = dict(made.signature)
        last = {name: given.pop(name) for name in ("call_hash", "CONFIG")}
        signature = {**given, "GRADIENT": constexprs(GradientConfig, second), **last}
        yield replace(made, signature=signature)


def _expected(target: str, config: dict[str, Any], world: int) -> Expectations:
    """Fewest ordered operations that the assembly must hold."""
    unpacks, peers = config["FORMAT"] is UNPACKED, world > 1
    gathers = peers and config["PHASE"] is not BUILD_ONLY
    builds = config["PHASE"] is not GATHER_ONLY
    pushes = config["TRANSPORT"] is PUSH
    readies = unpacks and config["PHASE"] is not BUILD_ONLY
    descriptors = builds and unpacks and target == "sm_90"
    return Expectations(
        release_sys=(1 + (gathers and pushes)) if peers else 0,
        release_gpu=1 + (readies or (gathers and not pushes)),
        acquire_sys=1 + (gathers and pushes) if peers else 0,
        acquire_gpu=1 if builds and (readies or (gathers and not pushes)) else 0,
        # Builders load wide; AMD's steps of dequantised elements are 8 bytes a thread.
        wide_load=3 if gathers and (builds or target == "sm_90" or not unpacks) else 0,
        keeps_subnormals=readies,
        mma=1 if builds else 0,
        scaled_mma=1 if builds and not unpacks else 0,
        tma_load=int(descriptors),
        tma_store=1 if builds and target == "sm_90" else 0,
    )
