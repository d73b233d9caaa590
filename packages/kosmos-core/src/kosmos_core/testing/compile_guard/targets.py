"""The GPUs the compile guard knows, and a driver that stands in for one of them.

``triton.compile`` needs no GPU, but two things read the active driver while a kernel is
traced: ``target_info.is_hip()``/``is_cuda()`` and the libraries built on them. Without a driver
both answer False and the wrong variant of a kernel is compiled, so :func:`use_target` installs
one that answers for the target at hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime import driver


@dataclass(frozen=True)
class Target:
    """One GPU architecture and the limits a workgroup has on one of its CUs or SMs.

    Attributes:
        name: "sm_90", "sm_100", "gfx942" or "gfx950".
        backend: "cuda" or "hip".
        arch: What triton calls it: 90 or 100, or the gfx name.
        warp_size: Threads of a warp or wave.
        wg_shared_bytes: Most shared memory (LDS) one workgroup can have.
        unit_shared_bytes: Shared memory (LDS) of one SM or CU.
        wg_reserved_bytes: Shared memory the driver takes for each workgroup.
        unit_threads: Most resident threads of one SM or CU.
    """

    name: str
    backend: str
    arch: int | str
    warp_size: int
    wg_shared_bytes: int
    unit_shared_bytes: int
    wg_reserved_bytes: int
    unit_threads: int

    @property
    def is_amd(self) -> bool:
        """Whether it is compiled by the AMD backend."""
        return self.backend == "hip"

    def triton_target(self) -> GPUTarget:
        """The same in triton's words."""
        return GPUTarget(self.backend, self.arch, self.warp_size)


def _nvidia(name: str, arch: int) -> Target:
    # CUDA programming guide, compute capability 9.0 and 10.0: 228 KiB an SM, 227 KiB a block.
    return Target(name, "cuda", arch, 32, 227 * 1024, 228 * 1024, 1024, 2048)


def _amd(name: str, lds_bytes: int) -> Target:
    # CDNA3 and CDNA4 ISA guides: 4 SIMDs of 8 waves of 64 lanes a CU, all LDS usable by one WG.
    return Target(name, "hip", name, 64, lds_bytes, lds_bytes, 0, 2048)


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        _nvidia("sm_90", 90),
        _nvidia("sm_100", 100),
        _amd("gfx942", 64 * 1024),
        _amd("gfx950", 160 * 1024),
    )
}


class _StubDriver:
    """Answers what tracing asks a driver, for a GPU that is not there."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> str:
        return "cpu"

    def is_active(self) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return "void*"


def use_target(target: Target) -> None:
    """Makes this process believe that its GPU is `target`; the guard's own child processes do."""
    stub: Any = _StubDriver(target.triton_target())
    driver.set_active(stub)
