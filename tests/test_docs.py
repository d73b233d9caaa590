"""The documentation's links lead somewhere, and the commands it gives exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import run
from run import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "packages/*/*.md", "integration/**/*.md")
    for path in ROOT.glob(pattern)
)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
NOX = re.compile(r"(?:nox -s|run\.py -s|run\.py --session) \"?([a-z_]+(?:\([a-z-]+\))?)")


def dead_links(page: Path) -> list[str]:
    """Return the relative links of `page` that lead to no file or heading."""
    dead = []
    for link in LINK.findall(page.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        path = (page.parent / name) if name else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            dead.append(link)
    return dead


def anchors(page: Path) -> set[str]:
    """Return the anchors that a forge makes of the headings of `page`."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page: Path) -> None:
    assert dead_links(page) == []


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One heading\n[a](#one-heading) [b](page.md) [c](gone.md) ![d](#two)\n")
    assert dead_links(page) == ["gone.md", "#two"]


def test_every_session_that_a_page_names_exists() -> None:
    named = {name for page in PAGES for name in NOX.findall(page.read_text())}
    named |= {name for names in COMMANDS.values() for name in names}
    noxfile = (ROOT / "noxfile.py").read_text()
    plain = set(re.findall(r"^def (\w+)\(session: nox.Session\)", noxfile, re.MULTILINE))
    of_packages = re.findall(r'^@for_each_package\("(\w+)"', noxfile, re.MULTILINE)
    packages = [path.name for path in (ROOT / "packages").iterdir()]
    known = plain | {f"{name}({package})" for name in of_packages for package in packages}
    assert named <= known


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        (["docs"], ["--session", "docs"]),
        (["demo", "--", "--seed", "1"], ["--session", "demo", "--", "--seed", "1"]),
        (["-s", "docs"], ["-s", "docs"]),
        (["--list"], ["--list"]),
    ],
)
def test_run_py_takes_names_of_sessions_and_options(
    arguments: list[str], given: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def start(command: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(run, "bootstrap", lambda folder: Path("python"))
    monkeypatch.setattr(run.subprocess, "run", start)
    assert run.main(arguments) == 0
    assert commands[0][5:] == given


def test_run_py_explains_itself() -> None:
    told = subprocess.run([sys.executable, ROOT / "run.py"], capture_output=True, text=True)
    assert told.returncode == 2
    assert all(f"run.py {command}" in told.stdout for command in COMMANDS)
