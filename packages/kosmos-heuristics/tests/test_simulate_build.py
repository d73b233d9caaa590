"""The build hook: without a compiler the wheel is pure, unless the native core is demanded."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def hook_module() -> ModuleType:
    pytest.importorskip("hatchling")
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class App:
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def display_warning(self, text: str) -> None:
        self.warnings.append(text)


def hook(module: ModuleType) -> tuple[Any, App]:
    app = App()
    return module.NativeCore(str(ROOT), {}, None, None, str(ROOT), "wheel", app), app


def without_cmake(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: object())
    monkeypatch.setattr(shutil, "which", lambda name: None)


def data() -> dict[str, Any]:
    return {"force_include": {}, "pure_python": True}


def test_without_a_compiler_the_wheel_is_pure_and_says_so(
    hook_module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_cmake(monkeypatch, hook_module)
    monkeypatch.delenv("KOSMOS_SIMULATOR", raising=False)
    built, app = hook(hook_module)
    build_data = data()
    assert built.dependencies() == []
    built.initialize("standard", build_data)
    assert build_data == data()
    assert app.warnings == ["simulator without its native core: no cmake on the PATH"]


def test_where_the_tools_are_the_binding_library_is_fetched(
    hook_module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = {"cmake", "g++"}
    monkeypatch.setattr(shutil, "which", lambda name: name if name in tools else None)
    monkeypatch.delenv("KOSMOS_SIMULATOR", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    built, _ = hook(hook_module)
    assert built.dependencies() == ["pybind11>=2.13"]
    monkeypatch.setenv("KOSMOS_SIMULATOR", "python")
    assert built.dependencies() == []
    monkeypatch.delenv("KOSMOS_SIMULATOR")
    tools.remove("g++")
    assert built.dependencies() == []


def test_a_demanded_core_that_cannot_be_built_fails_the_build(
    hook_module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_cmake(monkeypatch, hook_module)
    monkeypatch.setenv("KOSMOS_SIMULATOR", "native")
    built, _ = hook(hook_module)
    assert built.dependencies() == ["pybind11>=2.13"]
    with pytest.raises(RuntimeError, match="no cmake on the PATH"):
        built.initialize("standard", data())


def test_python_mode_builds_nothing_and_other_modes_are_refused(
    hook_module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, app = hook(hook_module)
    monkeypatch.setattr(hook_module, "build", lambda root, scratch: pytest.fail("built"))
    monkeypatch.setenv("KOSMOS_SIMULATOR", "python")
    built.initialize("standard", data())
    assert app.warnings == []
    monkeypatch.setenv("KOSMOS_SIMULATOR", "rust")
    with pytest.raises(ValueError, match="KOSMOS_SIMULATOR: got 'rust'"):
        built.initialize("standard", data())


def test_a_built_core_goes_into_the_wheel_and_the_scratch_folder_away(
    hook_module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders: list[Path] = []

    def build(root: Path, scratch: Path) -> Path:
        folders.append(scratch)
        core = scratch / "_core.so"
        core.write_bytes(b"")
        return core

    monkeypatch.delenv("KOSMOS_SIMULATOR", raising=False)
    monkeypatch.setattr(hook_module, "build", build)
    built, _ = hook(hook_module)
    build_data = data()
    built.initialize("standard", build_data)
    assert list(build_data["force_include"].values()) == ["kosmos_heuristics/simulate/_core.so"]
    assert build_data["pure_python"] is False
    built.finalize("standard", build_data, "")
    assert not folders[0].exists()
