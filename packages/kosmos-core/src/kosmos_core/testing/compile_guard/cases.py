"""What is compiled, what is expected of it, and what came out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from kosmos_core.testing.compile_guard.targets import TARGETS

# Every kind of finding. An Allowance names one of them.
CHECKS: dict[str, str] = {
    "compile": "the kernel compiles",
    "spills": "no register spills to memory",
    "shared": "shared memory (LDS) fits one workgroup",
    "residency": "one workgroup fits a CU or SM",
    "expectation": "the assembly holds at least what the case expects",
    "barrier": "a workgroup barrier stands between the stores and the release",
    "drain": "AMD: s_waitcnt vmcnt(0) stands between the stores and that barrier",
    "write-back": "AMD: the release waits for its cache write-back before it sets the word",
    "bulk-wait": "TMA stores are waited for in full before the release",
    "proxy-fence": "fence.proxy.async stands between an acquire and TMA loads",
    "lost": "an ordered atomic or volatile load of the source is in the assembly",
    "scope": "an ordered atomic keeps its order and scope in the assembly",
    "volatile": "a polled load is volatile in the assembly",
    "narrow-poll": "a polled load reads at least 4 bytes",
    "k-loop": "no acquire inside a loop that the pipeliner reorders",
    "warp-specialize": "warp specialization clones no atomic",
    "serial-mma": "NVIDIA: the tensor-core instructions of a K loop are not serialized",
    "clock": "no branch depends on a clock that every warp reads for itself",
    "subnormals": "where a case asks for it, FP32 arithmetic keeps subnormals",
    "divergence": "AMD: no barrier is reached by only some lanes of a wave",
}


@dataclass(frozen=True)
class Allowance:
    """A recorded exception: up to `count` findings of `check` do not fail the case.

    Raises:
        ValueError: unknown check, a count below 1, or no reason.
    """

    check: str
    count: int
    reason: str

    def __post_init__(self) -> None:
        if self.check not in CHECKS or self.check in ("compile", "spills"):
            known = ", ".join(c for c in CHECKS if c not in ("compile", "spills"))
            raise ValueError(f"Allowance check={self.check!r} is not one of: {known}")
        if self.count < 1:
            raise ValueError(f"Allowance count={self.count} must be 1 or more")
        if not self.reason.strip():
            raise ValueError(f"Allowance of {self.check!r} needs a reason")


@dataclass(frozen=True)
class Expectations:
    """Fewest instructions of each kind in the assembly, and the recorded exceptions.

    An acq_rel atomic counts as a release and as an acquire. On NVIDIA an acquire is ``ld.acquire``
    or an ordered ``atom``; on AMD a release is ``buffer_wbl2`` and an acquire ``buffer_inv``, so
    that scope is what the caches are told. ``tma_*``, ``proxy_fence`` and ``bulk_wait`` are
    NVIDIA's alone. ``wide_load``: plain loads of 16 bytes a thread, to registers
    or to shared memory, which also count as ``load``.
    ``scaled_mma``: matrix instructions that apply block scales, which also count as ``mma``.

    Attributes:
        keeps_subnormals: Whether no FP32 instruction may flush subnormals to zero.
        allow_spills: Bytes a thread may spill; above 0 `reason` is required.
        reason: Why spilling is accepted; printed with the report.
        allow: Other accepted findings.

    Raises:
        ValueError: a negative number, or a spill budget without a reason.
    """

    release_sys: int = 0
    release_gpu: int = 0
    acquire_sys: int = 0
    acquire_gpu: int = 0
    volatile_load: int = 0
    wide_load: int = 0
    barrier: int = 0
    proxy_fence: int = 0
    bulk_wait: int = 0
    tma_load: int = 0
    tma_store: int = 0
    mma: int = 0
    scaled_mma: int = 0
    keeps_subnormals: bool = False
    allow_spills: int = 0
    reason: str = ""
    allow: tuple[Allowance, ...] = ()

    def __post_init__(self) -> None:
        for name, count in {**self.minimums(), "allow_spills": self.allow_spills}.items():
            if count < 0:
                raise ValueError(f"Expectations {name}={count} must not be negative")
        if self.allow_spills and not self.reason.strip():
            raise ValueError(
                f"Expectations allow_spills={self.allow_spills} needs reason=: "
                "say why this kernel may spill"
            )

    def minimums(self) -> dict[str, int]:
        """Pattern name -> fewest instructions, the patterns left at 0 included."""
        other = ("allow_spills", "reason", "allow", "keeps_subnormals")
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in other}


@dataclass(frozen=True)
class CompileCase:
    """One kernel in one configuration on one target.

    Attributes:
        name: Unique together with `target`.
        kernel: A ``@triton.jit`` function.
        signature: Argument name -> triton type ("*bf16", "i32", "constexpr",
            "tensordesc<bf16[128, 64]>"), or for a device struct an instance of its NamedTuple
            class that holds type strings, nested as deep as the struct is. Arguments that are
            in `constexprs` may be left out.
        constexprs: Argument name or path ("queue.SCOPE") -> value. A constexpr of a struct may
            also stand in the signature itself as ``tl.constexpr(value)``.
        divisible_by_16: Names or paths of pointers and integers known divisible by 16.
        pointer_range_32: Names or paths of pointers whose buffer is under 2 GiB
            (``tt.pointer_range=32``: buffer instructions); ignored on NVIDIA.
        target: A name in ``TARGETS``.
        options: Backend options: num_warps, num_stages, matrix_instr_nonkdim, ...
        expect: What the assembly must hold.

    Raises:
        ValueError: no name, or unknown target.
    """

    name: str
    kernel: Any
    signature: Mapping[str, Any]
    target: str
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    divisible_by_16: tuple[str, ...] = ()
    pointer_range_32: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    expect: Expectations = field(default_factory=Expectations)

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("CompileCase name must not be empty")
        if self.target not in TARGETS:
            known = ", ".join(TARGETS)
            raise ValueError(f"CompileCase target={self.target!r} is not one of: {known}")

    @property
    def label(self) -> str:
        """Name and target, unique in a run."""
        return f"{self.name} [{self.target}]"


@dataclass(frozen=True)
class Finding:
    """One violated check: which, where in the kernel's source ("file:line" or ""), and what."""

    check: str
    where: str
    message: str

    def __str__(self) -> str:
        place = f" at {self.where}" if self.where else ""
        return f"{self.check}{place}: {self.message}"


@dataclass
class CompileReport:
    """What compiling one case gave.

    Attributes:
        registers: Registers a thread (AMD: VGPRs and AGPRs together).
        spills: Bytes a thread spills to memory.
        shared_bytes: Shared memory (LDS) of a workgroup.
        occupancy: Workgroups that fit one CU or SM.
        compile_seconds: Wall time of ``triton.compile``.
        counts: Pattern name -> instructions found.
        findings: Violations, the allowed ones included.
        reasons: Why the case failed; empty when it passed.
        notes: What a reader should know and does not fail the case (allowances with their
            reasons, SGPR spills, assembler warnings).
        resources: Further figures of the backend.
    """

    name: str
    target: str
    passed: bool = False
    registers: int = 0
    spills: int = 0
    shared_bytes: int = 0
    occupancy: int = 0
    compile_seconds: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    resources: dict[str, int] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Name and target, unique in a run."""
        return f"{self.name} [{self.target}]"

    def as_dict(self) -> dict[str, Any]:
        """The report as plain JSON types."""
        return asdict(self)


def judge(report: CompileReport, expect: Expectations) -> None:
    """Fills `passed`, `reasons` and the allowance notes of `report` from its findings."""
    left = {allowance.check: allowance for allowance in expect.allow}
    for check, allowance in left.items():
        found = sum(f.check == check for f in report.findings)
        report.notes.append(
            f"allowed: {found} of at most {allowance.count} {check} ({allowance.reason})"
        )
    if expect.allow_spills:
        report.notes.append(
            f"allowed: {report.spills} of at most {expect.allow_spills} B of spills "
            f"({expect.reason})"
        )
    for finding in report.findings:
        allowance_of = left.get(finding.check)
        total = sum(f.check == finding.check for f in report.findings)
        if allowance_of is None or total > allowance_of.count:
            report.reasons.append(str(finding))
    report.passed = not report.reasons
