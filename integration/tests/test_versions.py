"""The packages are installed together, at one version, and each is the one of this repository."""

from __future__ import annotations

import importlib
import importlib.metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
VERSION = (ROOT / "VERSION").read_text().strip()
NAMES = sorted(folder.name for folder in (ROOT / "packages").glob("kosmos-*"))


@pytest.mark.parametrize("name", NAMES)
def test_version(name: str) -> None:
    module = importlib.import_module(name.replace("-", "_"))
    assert module.__version__ == VERSION
    assert importlib.metadata.version(name) == VERSION
