"""Runs the project on a machine that has only Python 3.10 or newer, its venv module and git.

    python3 run.py demo     train a small model on the fused layers, with or without GPUs
    python3 run.py tests    lint, types, compile guard, and every test that needs no GPU
    python3 run.py NAME     another session, for example: python3 run.py docs
    python3 run.py ...      options go to nox, for example: python3 run.py --list

The first call makes a virtual environment for nox under .nox/ and touches nothing outside the
repository. nox then makes what the session itself needs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent
COMMANDS = {"demo": ["demo"], "tests": ["lint", "typing", "compile", "tests"]}


def bootstrap(folder: Path) -> Path:
    """Return a Python that has nox, made in `folder` unless a working one is there already."""
    python = folder / "bin" / "python"
    works = [str(python), "-m", "nox", "--version"]
    if python.exists() and subprocess.run(works, capture_output=True).returncode == 0:
        return python
    print(f"Making an environment for nox in {folder.relative_to(ROOT)}", flush=True)
    try:
        venv.create(folder, clear=True, symlinks=True, with_pip=True)
    except subprocess.CalledProcessError:
        sys.exit("Python lacks ensurepip: on Debian or Ubuntu, run 'apt install python3-venv'")
    nox = ["-m", "pip", "install", "--quiet", "--constraint", str(ROOT / "constraints.txt"), "nox"]
    if subprocess.run([str(python), *nox]).returncode != 0:
        sys.exit("nox could not be installed: pip's message above says why")
    return python


def main(arguments: list[str]) -> int:
    """Run nox with `arguments` and return its exit status."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if arguments else 2
    # The check is for those whose Python is older than what this file is written for.
    if sys.version_info < (3, 10):  # noqa: UP036
        sys.exit(f"Python 3.10 or newer is needed, this is {sys.version.split()[0]}")
    command, *rest = arguments
    if command.startswith("-"):
        sessions = [command]
    elif command in COMMANDS:
        sessions = ["--session", *COMMANDS[command]]
    else:
        # The name of a session; nox says which there are where it is none.
        sessions = ["--session", command]
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    python = bootstrap(ROOT / ".nox" / f"nox-{version}")
    nox = [str(python), "-m", "nox", "--noxfile", str(ROOT / "noxfile.py"), *sessions, *rest]
    # Sessions run what is installed for them, never what the caller's shell puts on the path.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(nox, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
