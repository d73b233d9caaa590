"""Compile cases of the bulk operations."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from kosmos_core.device.roles import FIXED, ONE_WAY, TWO_WAY
from kosmos_core.testing.compile_guard import CompileCase, Expectations
from kosmos_heuristics import load_machine
from kosmos_heuristics.plans import MAX_COPY_DEPTH
from kosmos_heuristics.tiles import CLAIM_RUNS, copy_step_bytes

from kosmos_tpsp.compile_parts import ROWS_OF_8, case, constexprs, tile_constants
from kosmos_tpsp.device.config import (
    BUILD_ONLY,
    FUSED,
    GATHER_ONLY,
    PULL,
    PUSH,
    BulkAgConfig,
    BulkAgOperands,
)
from kosmos_tpsp.kernels.bulk_ag import bulk_ag_kernel

AG_OPERANDS = BulkAgOperands._make(["*bf16"] * 6 + ["*fp32"])
AG_COUNTS = ("m", "n", "k", "num_movers", "split_tiles", "call_hash")
UNEVEN = {"EVEN_K": 0, "EVEN_N": 0}


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
            "SLICES": 4,
            "COPY_DEPTH": MAX_COPY_DEPTH,
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
        if tile is not machine.tile:
            variants = [({"SPLIT_K": split}, 2, 0) for split in (1, 2)]
        for changes, world, trace in variants:
            transport = "pull" if changes.get("TRANSPORT", PUSH) is PULL else "push"
            elements = copy_step_bytes(machine, transport) // 2
            config = {**base, **changes, "COPY_ELEMENTS": elements}
            rows_of = config.pop("ROWS_OF", 16)
            yield case(
                bulk_ag_kernel, target, tile, AG_OPERANDS, AG_COUNTS,
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
    return Expectations(
        release_sys=(1 + (arrives and pushes)) if peers else 0,
        release_gpu=1 + (arrives and not pushes),
        acquire_sys=1 + (arrives and pushes) if peers else 0,
        # Movers and whoever completes the gather output hold COPY_DEPTH + 1 steps a thread.
        wide_load=3 if gathers else 0,
        mma=1 if builds else 0,
        tma_load=1 if builds and target == "sm_90" else 0,
        tma_store=1 if builds and target == "sm_90" else 0,
    )
