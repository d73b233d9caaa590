"""Build hook: the simulator's native core, where it can be built.

It needs CMake and a C++20 compiler; where both are, pybind11 is fetched into the build environment.
Without one of them the wheel is pure Python and the simulator's Python core serves.
KOSMOS_SIMULATOR decides:

- ``auto`` (default): build it if everything is at hand, say so if not;
- ``native``: fetch pybind11 and fail if it cannot be built;
- ``python``: do not build it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

MODES = ("auto", "native", "python")
PACKAGE = "kosmos_heuristics/simulate"


class NativeCore(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the built extension to the wheel."""

    def dependencies(self) -> list[str]:
        """What the build environment needs: nothing where the core is not wanted or cannot be."""
        wanted = _mode() == "native" or (_mode() == "auto" and _has_tools())
        return ["pybind11>=2.13"] if wanted else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the core and register it, or leave the wheel pure."""
        if _mode() == "python":
            return
        self._scratch = tempfile.mkdtemp(prefix="kosmos-simulator-")
        try:
            core = build(Path(self.root), Path(self._scratch))
        except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
            shutil.rmtree(self._scratch, ignore_errors=True)
            if _mode() == "native":
                raise RuntimeError(f"the simulator's native core: {error}") from error
            self.app.display_warning(f"simulator without its native core: {error}")
            return
        if version == "editable":
            shutil.copy2(core, Path(self.root) / "src" / PACKAGE / core.name)
            return
        build_data["force_include"][str(core)] = f"{PACKAGE}/{core.name}"
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the build directory."""
        shutil.rmtree(getattr(self, "_scratch", ""), ignore_errors=True)


def _has_tools() -> bool:
    compilers = (os.environ.get("CXX", "c++"), "g++", "clang++")
    return bool(shutil.which("cmake")) and any(shutil.which(name) for name in compilers)


def _mode() -> str:
    mode = os.environ.get("KOSMOS_SIMULATOR", "auto")
    if mode not in MODES:
        raise ValueError(f"KOSMOS_SIMULATOR: got {mode!r}, wanted one of {', '.join(MODES)}")
    return mode


def build(root: Path, scratch: Path) -> Path:
    """Build the extension in ``scratch`` and return its path.

    Raises:
        RuntimeError: A tool is missing.
        CalledProcessError: CMake or the compiler failed.
    """
    if find_spec("pybind11") is None:
        raise RuntimeError("pybind11 is not installed in the build environment")
    cmake = shutil.which("cmake")
    if cmake is None:
        raise RuntimeError("no cmake on the PATH")
    import pybind11

    where = pybind11.get_cmake_dir()
    configure = [cmake, "-S", str(root), "-B", str(scratch), "-DCMAKE_BUILD_TYPE=Release"]
    configure += [f"-Dpybind11_DIR={where}", f"-DPython_EXECUTABLE={sys.executable}"]
    for command in (configure, [cmake, "--build", str(scratch)]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            last = " ".join((done.stderr or done.stdout).split())[-300:]
            raise RuntimeError(f"{Path(command[0]).name} failed: {last}")
    built = [path for path in scratch.glob("_core*") if path.suffix in (".so", ".pyd")]
    if len(built) != 1:
        raise RuntimeError(f"the build left {len(built)} extensions, wanted 1")
    return built[0]
