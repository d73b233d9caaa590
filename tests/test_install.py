"""The README's install command, for each package, from folders and from wheels.

Everything happens without a network. The package index that pip sees offers impostors under all
our names. The environments start with exactly those third-party distributions that the package
declares, and what they need in turn (symbolic links to the ones that run this test), so that an
undeclared one is missed.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import install
from install import PACKAGES, ROOT, siblings

VERSION = (ROOT / "VERSION").read_text().strip()
BUILD_TOOLS = ("pip", "hatchling")
SMALL = "kosmos-heuristics"
IMPOSTORS = ("0.1.0", "0.1.0.post1", "99.0")


def wheel(folder: Path, name: str, version: str) -> None:
    """Write a wheel of one module to `folder`."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    files = {
        f"{module}/__init__.py": "raise ImportError('this is the impostor')\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(folder / f"{module}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)


@pytest.fixture(scope="session")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of impostors, which stands in for a package index."""
    folder = tmp_path_factory.mktemp("index")
    for name in PACKAGES:
        for version in IMPOSTORS:
            wheel(folder, name, version)
    return folder


def build_wheels(tree: Path, folder: Path, packages: Iterable[str]) -> Path:
    """Build the wheels of packages in `tree`, each from its sdist, into `folder`."""
    for name in packages:
        command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder)]
        subprocess.run([*command, str(tree / "packages" / name)], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the wheel of every package, built by one worker for all."""
    base = tmp_path_factory.getbasetemp()
    run = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, built = run / "wheels", run / "wheels-built"
    with (run / "wheels-lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            build_wheels(ROOT, folder, PACKAGES)
            built.touch()
    return folder


def needs_no_gpu(requirement: str) -> bool:
    """Whether a requirement of torch is there whatever GPU it is built for.

    Builds for a GPU also demand one version of triton, which the tests replace, and the vendor's
    libraries through extras. What is tested is our demand.
    """
    return not requirement.startswith(("triton", "nvidia-", "cuda-", "pytorch-triton"))


def third_party(wheels: Path, package: str) -> set[str]:
    """Return the distributions, not ours, that `package` and its siblings need in the end."""
    waiting = [Requirement(name) for name in BUILD_TOOLS]
    for name in siblings(package):
        path = next(wheels.glob(f"{name.replace('-', '_')}-*.whl"))
        with zipfile.ZipFile(path) as archive:
            (member,) = (item for item in archive.namelist() if item.endswith("/METADATA"))
            lines = archive.read(member).decode().split("\n\n")[0].splitlines()
        needs = [line.partition(": ")[2] for line in lines if line.startswith("Requires-Dist: ")]
        waiting += [Requirement(line) for line in needs if not line.startswith("kosmos")]
    names: set[str] = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and name not in names:
            names.add(name)
            lines = importlib.metadata.requires(name) or []
            waiting += [
                Requirement(line) for line in lines if name != "torch" or needs_no_gpu(line)
            ]
    return names


@pytest.fixture
def small(tmp_path: Path, wheels: Path) -> Path:
    """Return a folder with the wheel of the package that needs least, and of what it needs.

    What it needs is empty: these tests install it and import nothing.
    """
    folder = tmp_path / "small"
    folder.mkdir()
    (ours,) = wheels.glob(f"{SMALL.replace('-', '_')}-*.whl")
    shutil.copy(ours, folder)
    waiting = third_party(wheels, SMALL) - {*BUILD_TOOLS}
    for name in waiting:
        wheel(folder, name, importlib.metadata.version(name))
    return folder


@dataclass(frozen=True)
class Environment:
    """A virtual environment in which pip sees no index but the folder of impostors."""

    python: Path
    variables: dict[str, str]

    def run(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        """Run `python COMMAND` outside the repository."""
        return subprocess.run(
            [self.python, *command],
            env=self.variables,
            cwd=self.python.parent,
            capture_output=True,
            text=True,
        )

    def ours(self) -> dict[str, str]:
        """Return name and version of each installed distribution with a name of ours."""
        code = (
            "import importlib.metadata as m; [print(d.name, d.version) for d in m.distributions()]"
        )
        lines = self.run("-c", code).stdout.splitlines()
        return dict(line.split() for line in lines if line.startswith("kosmos"))


def shelve_torch(place: Path, target: Path) -> None:
    """Copy torch's metadata without what it demands for a GPU."""
    shutil.copytree(place, target)
    lines = (target / "METADATA").read_text().splitlines(keepends=True)
    key = "Requires-Dist: "
    kept = [
        line for line in lines if not line.startswith(key) or needs_no_gpu(line.removeprefix(key))
    ]
    (target / "METADATA").write_text("".join(kept))


def environment(folder: Path, index: Path, wheels: Path, package: str) -> Environment:
    """Make the environment in which `package` is to be installed."""
    venv.create(folder / "venv", symlinks=True, with_pip=False)
    shelf = folder / "third-party"
    shelf.mkdir()
    for name in third_party(wheels, package):
        distribution = importlib.metadata.distribution(name)
        tops = {Path(file).parts[0] for file in distribution.files or []}
        for top in tops - {"..", "__pycache__"}:
            place = Path(str(distribution.locate_file(top)))
            if name == "torch" and top.endswith(".dist-info"):
                shelve_torch(place, shelf / top)
            # Two distributions may share a folder.
            elif not (shelf / top).exists():
                (shelf / top).symlink_to(place)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    (folder / "venv" / "lib" / version / "site-packages" / "shelf.pth").write_text(f"{shelf}\n")
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    pip = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index), "PIP_CONFIG_FILE": os.devnull}
    quiet = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONNOUSERSITE": "1"}
    return Environment(folder / "venv" / "bin" / "python", {**kept, **pip, **quiet})


def readme_command(source: str, package: str, wheels: Path) -> list[str]:
    """Return the README's command for `source`, for another package and folder of wheels."""
    lines = (ROOT / "README.md").read_text().splitlines()
    commands = [line.partition("#")[0].split() for line in lines]
    found = [words for words in commands if words[:2] == ["python3", "install.py"]]
    (words,) = (words for words in found if ("--wheels" in words) == (source == "wheel"))
    return [{"kosmos-tpsp": package, "DIR": str(wheels)}.get(word, word) for word in words[1:]]


@pytest.mark.parametrize("source", ["folder", "wheel"])
@pytest.mark.parametrize("package", [*PACKAGES, "kosmos-tpsp[mx]"])
def test_the_command_installs_ours(
    tmp_path: Path, index: Path, wheels: Path, package: str, source: str
) -> None:
    env = environment(tmp_path, index, wheels, package)
    script, *arguments = readme_command(source, package, wheels)
    done = env.run(ROOT / script, *arguments, "--", "--no-build-isolation")
    assert done.returncode == 0, done.stdout + done.stderr
    assert env.ours() == dict.fromkeys(siblings(package), VERSION)
    imports = "; ".join(f"import {name.replace('-', '_')}" for name in siblings(package))
    imported = env.run("-c", imports)
    assert imported.returncode == 0, imported.stderr


def test_plain_pip_installs_ours_from_wheels(tmp_path: Path, index: Path, wheels: Path) -> None:
    env = environment(tmp_path, index, wheels, "kosmos-tpsp")
    pin = f"kosmos-tpsp=={VERSION}"
    done = env.run("-m", "pip", "install", "--find-links", wheels, pin)
    assert done.returncode == 0, done.stdout + done.stderr
    assert env.ours() == dict.fromkeys(siblings("kosmos-tpsp"), VERSION)


def test_an_impostor_that_is_there_already_is_replaced(
    tmp_path: Path, index: Path, wheels: Path
) -> None:
    env = environment(tmp_path, index, wheels, "kosmos-tpsp")
    assert env.run("-m", "pip", "install", "kosmos-core").returncode == 0
    assert env.ours() == {"kosmos-core": "99.0"}
    done = env.run(ROOT / "install.py", "kosmos-tpsp", "--wheels", wheels)
    assert done.returncode == 0, done.stdout + done.stderr
    assert env.ours() == dict.fromkeys(siblings("kosmos-tpsp"), VERSION)


def test_one_folder_alone_fails_and_takes_no_impostor(
    tmp_path: Path, index: Path, wheels: Path
) -> None:
    env = environment(tmp_path, index, wheels, "kosmos-tpsp")
    folder = ROOT / "packages" / "kosmos-tpsp"
    done = env.run("-m", "pip", "install", "--no-build-isolation", folder)
    assert done.returncode != 0
    assert f"kosmos-core=={VERSION}" in done.stderr
    assert env.ours() == {}


def test_a_missing_pin_is_noticed(tmp_path: Path, index: Path, wheels: Path) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(ROOT / "packages", tree / "packages")
    for name in ("VERSION", "install.py"):
        shutil.copy(ROOT / name, tree)
    hook = tree / "packages" / "kosmos-tpsp" / "hatch_build.py"
    hook.write_text(hook.read_text().replace("{sibling}=={version}", "{sibling}"))
    loose = tmp_path / "loose"
    shutil.copytree(wheels, loose, ignore=shutil.ignore_patterns("kosmos_tpsp-*"))
    build_wheels(tree, loose, ["kosmos-tpsp"])
    env = environment(tmp_path, index, wheels, "kosmos-tpsp")
    done = env.run(tree / "install.py", "kosmos-tpsp", "--wheels", loose)
    assert env.ours()["kosmos-core"] == "99.0"
    assert done.returncode == 1
    assert f"kosmos-core: found 99.0, wanted {VERSION}" in done.stderr


def test_an_environment_is_made_where_one_is_asked_for(tmp_path: Path, small: Path) -> None:
    command = [ROOT / "install.py", SMALL, "--wheels", small, "--venv", tmp_path / "new"]
    variables = {**os.environ, "PIP_NO_INDEX": "1"}
    done = subprocess.run([sys.executable, *command], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *_, told, hint = done.stdout.splitlines()
    new = tmp_path / "new"
    assert told == f"{SMALL} {VERSION} is in {new}; its Python is {new / 'bin' / 'python'}"
    assert hint == f"activate it: . {new / 'bin' / 'activate'}"
    assert Environment(tmp_path / "new" / "bin" / "python", variables).ours() == {SMALL: VERSION}


def test_a_dry_run_says_that_nothing_was_installed(tmp_path: Path, small: Path) -> None:
    command = [ROOT / "install.py", SMALL, "--wheels", small, "--venv", tmp_path / "new"]
    variables = {**os.environ, "PIP_NO_INDEX": "1"}
    done = subprocess.run(
        [sys.executable, *command, "--", "--dry-run"], env=variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "Nothing was installed: --dry-run"
    assert Environment(tmp_path / "new" / "bin" / "python", variables).ours() == {}


def test_an_environment_that_cannot_be_made_is_a_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    command = [ROOT / "install.py", "kosmos-mx", "--venv", tmp_path / "file" / "new"]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith(f"No virtual environment can be made in {tmp_path / 'file' / 'new'}: ")


@pytest.mark.parametrize("managed", [False, True])
def test_the_python_of_the_operating_system_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, managed: bool
) -> None:
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    monkeypatch.setattr(install, "STDLIB", tmp_path)
    monkeypatch.setattr(install, "ROOT", tmp_path)
    if managed:
        (tmp_path / "EXTERNALLY-MANAGED").touch()
    own = tmp_path / ".venv" / "bin" / "python"
    assert install.target(None) == (own if managed else Path(sys.executable))
    assert own.exists() == managed


def test_bad_arguments_are_named() -> None:
    for arguments, told in (
        (["kosmos"], "invalid choice: 'kosmos'"),
        (["kosmos-mx", "--wheels", "nowhere"], "--wheels nowhere is not a folder"),
    ):
        command = [sys.executable, ROOT / "install.py", *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 2
        assert told in done.stderr
