"""Every configuration that plans can choose, for the GPU-less compile guard.

`python -m kosmos_core.testing.compile_guard kosmos_tpsp.compile_cases:compile_cases`
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from kosmos_core.device.barrier import agree_kernel, fault_kernel
from kosmos_core.device.roles import FIXED, ONE_WAY, TWO_WAY
from kosmos_core.testing.compile_guard import CompileCase, Expectations
from kosmos_heuristics import load_machine
from kosmos_heuristics.gemm_rs import SOURCE_UNROLL, UNIT_COLS, UNIT_ROWS
from kosmos_heuristics.tiles import CLAIM_RUNS

from kosmos_tpsp.compile_bulk import bulk_ag_cases, bulk_rs_cases
from kosmos_tpsp.compile_parts import (
    CONTEXT_POINTERS,
    ROWS_OF_8,
    STAGED_SPILL,
    case,
    constexprs,
    context,
    copy_constants,
    tile_constants,
)
from kosmos_tpsp.device.config import (
    BF16,
    BUILD_ONLY,
    FUSED,
    GATHER_ONLY,
    PULL,
    PUSH,
    REDUCE_ONLY,
    ROWS,
    AgGemmConfig,
    GemmRsConfig,
    Operands,
    ScatterOperands,
)
from kosmos_tpsp.kernels.ag_gemm import ag_gemm_kernel
from kosmos_tpsp.kernels.gemm_rs import gemm_rs_kernel
from kosmos_tpsp.ops.gemm_rs import most_reduced
from kosmos_tpsp.ops.mx import has_mx

# Machine model whose tiles and settings a target compiles with.
TARGETS = {"sm_90": "h200", "gfx950": "mi350x"}
AG_OPERANDS = Operands._make(["*bf16"] * 7 + ["*fp32"])
RS_OPERANDS = ScatterOperands._make(["*bf16"] * 4 + ["*fp32"])
# Of a pulled, traced call on sm_90.
TRACED_SPILL: dict[str, Any] = {
    "allow_spills": 16,
    "reason": "a tracer's clock and place beside 255 registers of polls; compiled away when off",
}
AG_COUNTS = ("m", "n", "k", "num_movers", "split_tiles", "call_hash")
RS_COUNTS = ("m", "n", "k", "num_movers", "max_movers", "split_tiles", "call_hash")


def compile_cases() -> list[CompileCase]:
    """Cases of all kernels of this package and of the kernels of kosmos-core that it launches."""
    cases: list[CompileCase] = []
    for target, machine in TARGETS.items():
        cases += _ag_gemm_cases(target, machine)
        cases += _gemm_rs_cases(target, machine)
        cases += bulk_ag_cases(target, machine)
        cases += bulk_rs_cases(target, machine)
        if has_mx():
            # It needs the extra, too.
            from kosmos_tpsp.compile_mx import mx_cases, pair_cases

            cases += mx_cases(target, machine)
            cases += pair_cases(target, machine)
        cases += _small_cases(target)
    return cases


def _ag_gemm_cases(target: str, machine_name: str) -> Iterator[CompileCase]:
    machine = load_machine(machine_name)
    xcds = machine.num_xcds
    for tile in machine.tiles:
        base: dict[str, Any] = {
            **tile_constants(machine, tile),
            "FORMAT": BF16,
            "COPIES": ROWS,
            "ROW_SHIFT": 3,
            "TRANSPORT": PUSH,
            "LAYOUT": 0,
            "ORDER": 0,
            "POLICY": ONE_WAY,
            "PHASE": FUSED,
            "KEEP_GATHERED": 0,
            "SCATTERS": 0,
            "SLICES": 4,
            "GROUP_M": 8,
            "GROUP_ROWS": 1,
            "CLAIM_RUN": CLAIM_RUNS[0] if machine.rule_set == "h200" else 1,
            "XCDS": xcds,
        }
        variants: list[tuple[dict[str, Any], int, int]] = [
            ({"TRANSPORT": t, "LAYOUT": layout, "KEEP_GATHERED": keep, "SPLIT_K": split}, 2, 0)
            for t, layout, keep, split in product((PULL, PUSH), (0, 1), (0, 1), (1, 2, 4))
        ]
        variants += [
            ({"TRANSPORT": t, "POLICY": p}, 8, 0) for t in (PULL, PUSH) for p in (FIXED, TWO_WAY)
        ]
        variants += [
            ({"TRANSPORT": t, "PHASE": p}, 2, 0)
            for t in (PULL, PUSH)
            for p in (GATHER_ONLY, BUILD_ONLY)
        ]
        variants += [
            ({"ORDER": 1}, 8, 0),
            ({"ORDER": 2}, 8, 0),
            ({"EVEN_K": 0, "EVEN_N": 0}, 2, 0),
            ({"EVEN_K": 0, "EVEN_N": 0, "LAYOUT": 1}, 2, 0),
            *(
                ({"EVEN_K": 0, "EVEN_N": 0, "LAYOUT": layout, "TRANSPORT": t, **ROWS_OF_8}, 2, 0)
                for layout, t in ((0, PULL), (0, PUSH), (1, PUSH))
            ),
            ({"XCDS": 1, "CLAIM_RUN": 1, "GROUP_ROWS": 4}, 2, 0),
            ({}, 1, 0),
            ({"SPLIT_K": 2}, 1, 0),
            ({}, 2, 1024),
        ]
        if tile is not machine.tile:
            # A smaller tile differs in registers only: the layouts and splits suffice.
            variants = [
                ({"LAYOUT": layout, "SPLIT_K": split}, 2, 0)
                for layout, split in product((0, 1), (1, 2))
            ]
        for changes, world, trace in variants:
            transport = "pull" if changes.get("TRANSPORT", PUSH) is PULL else "push"
            config = {**base, **changes, **copy_constants(machine, transport)}
            rows_of = config.pop("ROWS_OF", 16)
            yield case(
                ag_gemm_kernel, target, tile, AG_OPERANDS, AG_COUNTS,
                constexprs(AgGemmConfig, config), changes, world, trace, rows_of,
                _expected(target, config, world),
            )  # fmt: skip


def _expected(target: str, config: dict[str, Any], world: int) -> Expectations:
    """Fewest ordered operations that the assembly must hold."""
    peers = world > 1
    gathers = peers and config["PHASE"] is not BUILD_ONLY
    builds = config["PHASE"] is not GATHER_ONLY
    pushes = config["TRANSPORT"] is PUSH
    return Expectations(
        release_sys=(1 + (gathers and pushes)) if peers else 0,
        release_gpu=1 + (gathers and not pushes),
        acquire_sys=1 if peers else 0,
        acquire_gpu=1 if gathers and builds and not pushes else 0,
        # Movers hold COPY_DEPTH + 1 steps of 16 bytes a thread; builders on AMD load wide as well.
        wide_load=3 if gathers else 0,
        mma=1 if builds else 0,
        tma_load=1 if builds and target == "sm_90" else 0,
        tma_store=1 if builds and target == "sm_90" else 0,
        **(STAGED_SPILL if not (builds or pushes) and target == "sm_90" else {}),
    )


def _gemm_rs_cases(target: str, machine_name: str) -> Iterator[CompileCase]:
    machine = load_machine(machine_name)
    for tile in machine.tiles:
        base: dict[str, Any] = {
            **tile_constants(machine, tile),
            "TRANSPORT": PUSH,
            "LAYOUT": 0,
            "ORDER": 0,
            "POLICY": ONE_WAY,
            "PHASE": FUSED,
            "SLICES": 16,
            "BAND_ROWS": 1,
        }
        variants: list[tuple[dict[str, Any], int, int]] = [
            *(({"SPLIT_K": split}, world, 0) for split in (1, 2, 4) for world in (1, 2, 8)),
            ({"POLICY": FIXED}, 8, 0),
            *(({"POLICY": TWO_WAY}, world, 0) for world in (2, 8)),
            ({"PHASE": BUILD_ONLY}, 2, 0),
            *(({"PHASE": REDUCE_ONLY}, world, 0) for world in (2, 4, 8)),
            ({"ORDER": 1}, 2, 0),
            ({"EVEN_K": 0, "EVEN_N": 0}, 2, 0),
            ({"EVEN_K": 0, "EVEN_N": 0, **ROWS_OF_8}, 2, 0),
            ({}, 2, 1024),
        ]
        if tile is not machine.tile:
            variants = [({"SPLIT_K": split}, 2, 0) for split in (1, 2)]
        variants += [({"TRANSPORT": PULL, **v}, world, t) for v, world, t in variants if world > 1]
        if tile is machine.tile:
            # The last ranks polled are fewer than are polled at a time.
            variants.append(({"TRANSPORT": PULL}, 3, 0))
        unit = UNIT_ROWS * UNIT_COLS[machine.rule_set]
        for changes, world, trace in variants:
            pulls = changes.get("TRANSPORT") is PULL
            unroll = min(SOURCE_UNROLL[machine.rule_set], world)
            most = most_reduced(world, unroll, pulls)
            config = {
                **base,
                "SOURCE_UNROLL": unroll,
                "REDUCE_ELEMENTS": min(most, unit) if pulls else most,
                **changes,
            }
            rows_of = config.pop("ROWS_OF", 16)
            builds = config["PHASE"] is not REDUCE_ONLY
            sends = builds and world > 1 and not pulls
            polls = pulls and config["PHASE"] is not BUILD_ONLY
            only_sums = not builds and not pulls and target == "sm_90"
            traced = trace > 0 and pulls and target == "sm_90"
            yield case(
                gemm_rs_kernel, target, tile, RS_OPERANDS, RS_COUNTS,
                constexprs(GemmRsConfig, config), changes, world, trace, rows_of,
                Expectations(
                    release_sys=1 + sends if world > 1 else 0,
                    release_gpu=1,
                    acquire_sys=1 + sends if world > 1 else 0,
                    volatile_load=config["SOURCE_UNROLL"] if polls else 0,
                    **(STAGED_SPILL if only_sums else TRACED_SPILL if traced else {}),
                    mma=1 if builds else 0,
                    tma_load=1 if builds and target == "sm_90" else 0,
                    tma_store=1 if builds and target == "sm_90" else 0,
                ),
            )  # fmt: skip


def _small_cases(target: str) -> Iterator[CompileCase]:
    for kernel, extra in ((agree_kernel, ("call_hash",)), (fault_kernel, ("code", "reason"))):
        yield CompileCase(
            name=kernel.fn.__name__,
            kernel=kernel,
            signature={"ctx": context(target, 8), **dict.fromkeys(extra, "i32")},
            divisible_by_16=tuple(f"ctx.{f}" for f in CONTEXT_POINTERS),
            target=target,
            options={"num_warps": 8, "num_stages": 1},
            expect=Expectations(release_sys=1),
        )
