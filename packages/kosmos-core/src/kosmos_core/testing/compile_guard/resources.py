"""Registers, spills, shared memory and occupancy of a compiled kernel, read from its listing."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from kosmos_core.testing.compile_guard.cases import Finding
from kosmos_core.testing.compile_guard.targets import Target


@dataclass
class Resources:
    """Figures of one kernel; see CompileReport for units."""

    registers: int
    spills: int
    shared_bytes: int
    threads: int
    occupancy: int
    other: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_resources(kernel: Any, target: Target, assembler_log: str) -> Resources:
    """Reads the figures of a triton CompiledKernel.

    Args:
        kernel: What ``triton.compile`` returned.
        target: What it was compiled for.
        assembler_log: What ``ptxas -v`` said (NVIDIA).
    """
    if target.is_amd:
        return _read_amd(kernel, target)
    return _read_nvidia(kernel, target, assembler_log)


def _read_amd(kernel: Any, target: Target) -> Resources:
    asm = kernel.asm["amdgcn"]

    def metadata(name: str) -> int:
        match = re.search(rf"\.{name}:\s+(\d+)", asm)
        return int(match.group(1)) if match else 0

    threads = kernel.metadata.num_warps * target.warp_size
    shared = max(int(kernel.metadata.shared), metadata("group_segment_fixed_size"))
    registers = metadata("vgpr_count")
    # A SIMD holds 512 registers a lane, given out in eights, for at most 8 waves.
    waves_per_simd = min(8, 512 // max(8, -(-registers // 8) * 8))
    by_registers = waves_per_simd * 4 // kernel.metadata.num_warps
    spilled_registers = metadata("vgpr_spill_count")
    sgpr_spills = metadata("sgpr_spill_count")
    notes = []
    if sgpr_spills:
        # LLVM keeps spilled scalars in lanes of vector registers, so no memory traffic follows.
        notes.append(f"{sgpr_spills} SGPRs spilled to VGPR lanes")
    return Resources(
        registers=registers,
        spills=4 * spilled_registers,
        shared_bytes=shared,
        threads=threads,
        occupancy=_occupancy(target, threads, shared, by_registers),
        other={
            "agprs": metadata("agpr_count"),
            "sgprs": metadata("sgpr_count"),
            "sgpr_spills": sgpr_spills,
            "scratch_bytes": metadata("private_segment_fixed_size"),
        },
        notes=notes,
    )


def _read_nvidia(kernel: Any, target: Target, assembler_log: str) -> Resources:
    ptx = kernel.asm["ptx"]
    # .reqntid also counts the worker warps of a warp-specialized kernel.
    required = re.search(r"\.reqntid\s+(\d+)", ptx)
    threads = int(required.group(1)) if required else kernel.metadata.num_warps * 32
    registers = max((int(n) for n in re.findall(r"Used (\d+) registers", assembler_log)), default=0)
    if not registers:
        raise RuntimeError(
            "the assembler's -v report is missing, so spills are unknown; "
            f"it said: {assembler_log[-300:]!r}"
        )
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", assembler_log)
    stack = [int(n) for n in re.findall(r"(\d+) bytes stack frame", assembler_log)]
    shared = int(kernel.metadata.shared)
    # Registers are given out to warps in units of 256, a quarter of 65536 to each scheduler.
    per_warp = -(-registers * 32 // 256) * 256
    by_registers = 65536 // 4 // per_warp * 4 // max(1, threads // 32)
    return Resources(
        registers=registers,
        spills=max((max(int(a), int(b)) for a, b in spills), default=0),
        shared_bytes=shared,
        threads=threads,
        occupancy=_occupancy(target, threads, shared, by_registers),
        other={
            "threads": threads,
            "stack_bytes": max(stack, default=0),
            "global_scratch_bytes": int(getattr(kernel.metadata, "global_scratch_size", 0) or 0),
            "tensor_memory_columns": int(getattr(kernel.metadata, "tmem_size", 0) or 0),
        },
        notes=sorted(set(re.findall(r"Potential Performance Loss.*", assembler_log))),
    )


def _occupancy(target: Target, threads: int, shared: int, by_registers: int) -> int:
    if shared > target.wg_shared_bytes or threads > 1024:
        return 0
    by_shared = target.unit_shared_bytes // max(1, shared + target.wg_reserved_bytes)
    return min(by_registers, by_shared, target.unit_threads // threads, 32)


def check_resources(found: Resources, target: Target, allow_spills: int) -> list[Finding]:
    """Spill budget, shared memory limit, and that one workgroup can be resident."""
    findings = []
    if found.spills > allow_spills:
        findings.append(
            Finding("spills", "", f"{found.spills} B a thread spilled, budget {allow_spills} B")
        )
    if any("serialized" in note for note in found.notes):
        message = "wgmma instructions are serialized: something touches the sums between them"
        findings.append(Finding("serial-mma", "", message))
    if found.shared_bytes > target.wg_shared_bytes:
        message = f"{found.shared_bytes} B wanted, {target.name} has {target.wg_shared_bytes} B"
        findings.append(Finding("shared", "", message))
    if found.occupancy < 1:
        message = (
            f"no workgroup fits one {'CU' if target.is_amd else 'SM'}: {found.threads} threads, "
            f"{found.registers} registers a thread, {found.shared_bytes} B shared"
        )
        findings.append(Finding("residency", "", message))
    return findings
