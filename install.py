"""Installs one KOSMOS package and what it needs.

    python3 install.py kosmos-tpsp                 from this repository
    python3 install.py kosmos-tpsp --wheels DIR    from wheels in DIR
    python3 install.py 'kosmos-tpsp[mx]'           with MXFP8
    python3 install.py kosmos-tpsp -- OPTIONS      hand OPTIONS on to pip

It goes into the Python that runs this file. Where that one belongs to the operating system (PEP
668) or has no pip, it goes into .venv beside this file, or where --venv says.

One pip call names the package and all the siblings that it needs, and the version they are pinned
to cannot exist on a public index, so the unrelated project that is called kosmos-core on PyPI is
never taken; the result is checked. docs/decisions/0001-distribution-names.md has the reasons.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent
STDLIB = Path(sysconfig.get_path("stdlib"))
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
# Those with an extra are written as pip writes them.
WITH_EXTRAS = ["kosmos-tpsp[mx]"]

# Runs in the environment installed into: prints each distribution that is missing or not ours.
CHECK = """
import sys
from importlib.metadata import PackageNotFoundError, version
wanted, *names = sys.argv[1:]
for name in names:
    try:
        found = version(name)
    except PackageNotFoundError:
        found = "nothing"
    if found != wanted:
        print(f"{name}: found {found}, wanted {wanted}")
"""


def siblings(package: str) -> list[str]:
    """Return `package`, perhaps with an extra, and every sibling it needs, the needed ones first.

    Reads the list by pattern, because Python 3.10 has no TOML reader of its own.
    """
    package, _, extra = package.rstrip("]").partition("[")
    text = (ROOT / "packages" / package / "pyproject.toml").read_text(encoding="utf-8")
    patterns = [r"^siblings = \[(.*?)\]"]
    if extra:
        patterns.append(rf"^extras = \{{.*?\b{extra} = \[(.*?)\]")
    names: list[str] = []
    for pattern in patterns:
        found = re.search(pattern, text, re.MULTILINE | re.DOTALL)
        for sibling in re.findall(r'"([^"]+)"', found.group(1)) if found else []:
            names += [name for name in siblings(sibling) if name not in names]
    return [*names, package]


def target(folder: Path | None) -> Path:
    """Return the Python to install into, making a virtual environment where one is needed."""
    in_venv = sys.prefix != sys.base_prefix
    managed = (STDLIB / "EXTERNALLY-MANAGED").exists() and not in_venv
    if folder is None and not managed and importlib.util.find_spec("pip") is not None:
        return Path(sys.executable)
    folder = folder or ROOT / ".venv"
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"Making a virtual environment in {folder}", flush=True)
        try:
            venv.create(folder, symlinks=True, with_pip=True)
        except subprocess.CalledProcessError:
            sys.exit("Python lacks ensurepip: on Debian or Ubuntu, run 'apt install python3-venv'")
        except OSError as error:
            sys.exit(f"No virtual environment can be made in {folder}: {error.strerror}")
    return python


def main(command_line: list[str]) -> int:
    """Install what `command_line` names and return the exit status."""
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("package", choices=[*PACKAGES, *WITH_EXTRAS])
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="take our packages from DIR")
    parser.add_argument("--venv", type=Path, metavar="DIR", help="install into this environment")
    # argparse accepts `--` only before positional arguments, not after an option's value.
    split = command_line.index("--") if "--" in command_line else len(command_line)
    arguments = parser.parse_args(command_line[:split])
    options = command_line[split + 1 :]

    version = (ROOT / "VERSION").read_text(encoding="utf-8").strip()
    names = siblings(arguments.package)
    if arguments.wheels is None:
        sources = [str(ROOT / "packages" / name) for name in names]
    elif arguments.wheels.is_dir():
        sources = ["--find-links", str(arguments.wheels), f"{arguments.package}=={version}"]
    else:
        parser.error(f"--wheels {arguments.wheels} is not a folder: name the one with the wheels")

    python = target(arguments.venv)
    pip = [str(python), "-m", "pip", "install", *options, *sources]
    if (status := subprocess.run(pip).returncode) != 0:
        return status
    if "--dry-run" in options:
        print("Nothing was installed: --dry-run")
        return 0
    check = [str(python), "-c", CHECK, version, *names]
    wrong = subprocess.run(check, capture_output=True, text=True, check=True).stdout
    if wrong:
        print(f"Installed, but not what was asked for:\n{wrong}", end="", file=sys.stderr)
        return 1
    verb, whose = ("is", "its") if len(names) == 1 else ("are", "their")
    place = python.parent.parent
    print(f"{', '.join(names)} {version} {verb} in {place}; {whose} Python is {python}")
    activate = python.parent / "activate"
    if activate.exists():
        print(f"activate it: . {activate}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
