"""Rules on the repository as a whole: one version, one licence, what a package folder holds."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from install import WITH_EXTRAS, siblings

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = sorted((ROOT / "packages").glob("kosmos-*"))
NAMES = [folder.name for folder in FOLDERS]


def pyproject(folder: Path) -> dict:
    # Python 3.10 has no tomllib; hatchling brings a reader there.
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads((folder / "pyproject.toml").read_text())


def version() -> str:
    return (ROOT / "VERSION").read_text().strip()


def test_the_five_packages_are_there() -> None:
    assert " ".join(NAMES) == "kosmos-core kosmos-heuristics kosmos-moe kosmos-mx kosmos-tpsp"


def test_the_version_cannot_exist_on_a_public_index() -> None:
    # Public indexes refuse versions with a local label: docs/decisions/0001-distribution-names.md.
    assert Version(version()).local == "kosmos"
    assert str(Version(version())) == version()


@pytest.mark.parametrize("folder", FOLDERS, ids=NAMES)
def test_package_folder(folder: Path) -> None:
    project = pyproject(folder)["project"]
    module = folder / "src" / folder.name.replace("-", "_")
    assert project["name"] == folder.name
    assert "version" in project["dynamic"]
    assert project["requires-python"] == ">=3.10"
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert (folder / "README.md").read_text().startswith(f"# {folder.name}\n")
    assert (module / "__init__.py").is_file()
    assert (module / "py.typed").is_file()
    # A copy would win over the one VERSION as soon as somebody read it.
    assert not (folder / "VERSION").exists()


@pytest.mark.parametrize("folder", FOLDERS, ids=NAMES)
def test_no_dependency_names_a_sibling_without_the_pin(folder: Path) -> None:
    settings = pyproject(folder)
    hook = settings["tool"]["hatch"].get("metadata", {}).get("hooks", {}).get("custom", {})
    extras = settings["project"].get("optional-dependencies", {}).values()
    written = [
        *settings["project"].get("dependencies", []),
        *hook.get("third-party", []),
        *(line for extra in extras for line in extra),
    ]
    assert not [line for line in written if Requirement(line).name.startswith("kosmos")]
    needed = [name for sibling in hook.get("siblings", []) for name in siblings(sibling)]
    assert siblings(folder.name) == [*dict.fromkeys(needed), folder.name]
    for extra, added in hook.get("extras", {}).items():
        argument = f"{folder.name}[{extra}]"
        assert argument in WITH_EXTRAS
        more = [name for sibling in added for name in siblings(sibling)]
        assert siblings(argument) == [*dict.fromkeys([*needed, *more]), folder.name]


def test_the_newest_triton_that_packages_accept_is_the_one_that_is_tried() -> None:
    text = (ROOT / "noxfile.py").read_text()
    found = re.findall(r'^NEWEST_TRITON = "triton==(\d+)\.(\d+)\.\*"$', text, re.MULTILINE)
    [(major, minor)] = [(int(a), int(b)) for a, b in found]
    accepted = set()
    for folder in FOLDERS:
        settings = pyproject(folder)
        hook = settings["tool"]["hatch"].get("metadata", {}).get("hooks", {}).get("custom", {})
        needs = [*settings["project"].get("dependencies", []), *hook.get("third-party", [])]
        accepted |= {r.specifier for r in map(Requirement, needs) if r.name == "triton"}
    assert len(accepted) == 1
    [specifier] = accepted
    assert specifier.contains(f"{major}.{minor}.0")
    assert not specifier.contains(f"{major}.{minor + 1}.0")


def test_version_and_pins_follow_the_one_file_through_sdist_and_wheel(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "packages", tmp_path / "packages")
    (tmp_path / "VERSION").write_text("7.8.9+kosmos\n")
    for folder in FOLDERS:
        command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path)]
        source = tmp_path / "packages" / folder.name
        # Without the simulator's native core, which takes most of the time and has no version.
        variables = {**os.environ, "KOSMOS_SIMULATOR": "python"}
        subprocess.run([*command, str(source)], check=True, capture_output=True, env=variables)
        name = f"{folder.name.replace('-', '_')}-7.8.9+kosmos"
        unpacked = tmp_path / name
        (wheel,) = tmp_path.glob(f"{name}-*.whl")
        shutil.unpack_archive(wheel, unpacked, "zip")
        metadata = (unpacked / f"{name}.dist-info" / "METADATA").read_text()
        assert "\nVersion: 7.8.9+kosmos\n" in metadata
        assert (unpacked / f"{name}.dist-info" / "licenses" / "LICENSE").is_file()
        pins = re.findall(r"^Requires-Dist: (kosmos.*)$", metadata, re.MULTILINE)
        wanted = {f"{name}==7.8.9+kosmos" for name in siblings(folder.name)[:-1]}
        if folder.name == "kosmos-tpsp":
            wanted.add("kosmos-mx==7.8.9+kosmos; extra == 'mx'")
            assert "\nProvides-Extra: mx\n" in metadata
        assert set(pins) == wanted


def test_constraints_pin_every_tool() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {Requirement(line).name for line in lines if line and not line.startswith("#")}
    noxfile = (ROOT / "noxfile.py").read_text()
    tools = re.search(r"^TOOLS = \((.*?)\)", noxfile, re.MULTILINE | re.DOTALL)
    assert tools is not None
    assert pins == {"torch", "nox", *re.findall(r'"([^"]+)"', tools.group(1))}


def test_ci_runs_the_test_command_of_the_readme() -> None:
    ci = ROOT / ".ci" / "run"
    assert os.access(ci, os.X_OK)
    assert "\npython3 run.py tests 2>&1" in ci.read_text()
    assert "python3 run.py tests" in (ROOT / "README.md").read_text()


def run_ci(folder: Path, run_py: str) -> subprocess.CompletedProcess[str]:
    (folder / ".ci").mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "run", folder / ".ci" / "run")
    (folder / "run.py").write_text(run_py)
    return subprocess.run([folder / ".ci" / "run"], capture_output=True, text=True)


def test_ci_ends_with_the_line_of_pytest_and_fails_with_the_tests(tmp_path: Path) -> None:
    closing = "===== 1 failed, 2 passed, 3 skipped in 4.56s ====="
    script = f"print({closing!r}); print('nox > done'); raise SystemExit({{status}})"
    good = run_ci(tmp_path / "good", script.format(status=0))
    bad = run_ci(tmp_path / "bad", script.format(status=1))
    assert good.stdout.splitlines()[-1] == closing
    assert good.returncode == 0
    assert bad.stdout.splitlines()[-1] == closing
    assert bad.returncode == 1
