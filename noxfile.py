"""The project's tasks. `python3 run.py --list` lists them; CONTRIBUTING.md says when to use which.

Most sessions run in one environment, made by the session `env`: all packages, editable, and the
tools. Sessions named after a package stand apart: `tests(...)` and `build(...)` install only what
that package declares; `gpu(...)`, `multi_gpu(...)` and `bench(...)` install nothing, because
machines with GPUs may be offline: they use the `python` on the path and the source tree.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nox

ROOT = Path(__file__).resolve().parent
VERSION = (ROOT / "VERSION").read_text(encoding="utf-8").strip()
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
TOOLS = (
    "build",
    "hatchling",
    "mypy",
    "nox",
    "pybind11",
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "ruff",
    "torchao",
)
TEST_TOOLS = ("pytest", "pytest-timeout", "pytest-xdist")
# What one package's tests compare with.
ORACLES = {"kosmos-mx": ("torchao",)}
CONSTRAINTS = ("--constraint", str(ROOT / "constraints.txt"))
# The version that the kernels are written for. Some builds of torch demand another one: hence it is
# put in by itself and not by constraint, before the rest so that builds of torch that demand none
# keep it, and again after the rest.
TRITON = ("--no-deps", "triton==3.6.0")
# The newest that packages accept; the session `newest_triton` shows that kernels work with it.
NEWEST_TRITON = "triton==3.9.*"
ENV_PYTHON = str(ROOT / ".nox" / "env" / "bin" / "python")
# What stays for sessions of its own.
CPU_TESTS = "not (gpu or multi_gpu or slow or compile)"
# One thread a worker: torch's own threads would only contend with the other workers.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}

nox.options.sessions = ["lint", "typing", "compile", "tests"]
nox.options.error_on_external_run = True
nox.options.default_venv_backend = "virtualenv"
# nox looks for uv even where nothing uses it, and would say in every run that it is not there.
logging.getLogger("nox").addFilter(lambda record: record.getMessage() != "uv binary not found.")


def siblings(package: str, extras: bool = False) -> list[str]:
    """Return `package` and every sibling it needs, the needed ones first; with its `extras`."""
    tool = nox.project.load_toml(ROOT / "packages" / package / "pyproject.toml")["tool"]
    hook = tool["hatch"].get("metadata", {}).get("hooks", {}).get("custom", {})
    wanted = list(hook.get("siblings", []))
    if extras:
        wanted += [name for added in hook.get("extras", {}).values() for name in added]
    names: list[str] = []
    for sibling in wanted:
        names += [name for name in siblings(sibling) if name not in names]
    return [*names, package]


def run_in_env(session: nox.Session, *command: str, **env: str) -> None:
    """Run `python COMMAND` in the environment that the session `env` has made."""
    session.run(ENV_PYTHON, *command, external=True, env={**ONE_THREAD, **env})


def run_pytest(session: nox.Session, *arguments: str) -> None:
    """Run pytest in that environment; what stands after `--` on nox's command line comes last."""
    run_in_env(session, "-m", "pytest", "--timeout=300", *arguments, *session.posargs)


def for_each_package(name: str, **options: Any) -> Callable[[Callable[..., None]], None]:
    """Register the decorated function as one session `name(package)` for each package.

    Not nox.parametrize: with it, `tests` alone would mean all of `tests(package)`.
    """

    def register(function: Callable[[nox.Session, str], None]) -> None:
        for package in PACKAGES:

            def run(session: nox.Session, package: str = package) -> None:
                function(session, package)

            run.__doc__ = function.__doc__
            nox.session(name=f"{name}({package})", **options)(run)

    return register


@nox.session(reuse_venv=True)
def env(session: nox.Session) -> None:
    """Make the environment that most sessions share."""
    folders = [argument for name in PACKAGES for argument in ("-e", f"packages/{name}")]
    session.install(*TRITON)
    # Siblings go into one pip call, else pip looks for one of them on the index.
    session.install(*CONSTRAINTS, *folders, *TOOLS)
    session.install(*TRITON)


@nox.session(venv_backend="none", requires=["env"])
def demo(session: nox.Session) -> None:
    """Train a small model on the fused layers, and show their workgroups."""
    command = ("-m", "integration.training", "--fresh", "--timeline", "--out", "kosmos-demo")
    run_in_env(session, *command, *session.posargs)


@nox.session(venv_backend="none", requires=["env"])
def tests(session: nox.Session) -> None:
    """Run every test that needs no GPU, of all packages, of the repository, of integration."""
    run_pytest(session, "-m", CPU_TESTS, "-n", "auto", "--durations=10")


@for_each_package("tests", reuse_venv=True)
def tests_of_package(session: nox.Session, package: str) -> None:
    """Run one package's tests where only that package and what it declares is installed.

    Its extras are: what it does without them a test of its own shows.
    """
    needed = siblings(package, extras=True)
    needs_triton = "kosmos-core" in needed
    if needs_triton:
        session.install(*TRITON)
    folders = [f"packages/{name}" for name in needed]
    session.install(*CONSTRAINTS, *folders, *TEST_TOOLS, *ORACLES.get(package, ()))
    if needs_triton:
        session.install(*TRITON)
    folder = f"packages/{package}/tests"
    if not any(Path(folder).glob("**/test_*.py")):
        module = package.replace("-", "_")
        session.run("python", "-c", f"import {module}", env={"PYTHONPATH": None})
        session.log(f"{package} has no tests yet: it installs and imports")
        return
    command = ("python", "-m", "pytest", "--timeout=300", "-m", CPU_TESTS, folder)
    session.run(*command, *session.posargs, env={**ONE_THREAD, "PYTHONPATH": None})


@nox.session(venv_backend="none", requires=["env"])
def lint(session: nox.Session) -> None:
    """Check style and formatting with ruff."""
    run_in_env(session, "-m", "ruff", "check", ".")
    run_in_env(session, "-m", "ruff", "format", "--check", ".")


@nox.session(venv_backend="none", requires=["env"])
def typing(session: nox.Session) -> None:
    """Check the types of host code with mypy, strictly."""
    run_in_env(session, "-m", "mypy")


@nox.session(venv_backend="none", requires=["env"])
def compile(session: nox.Session) -> None:
    """Compile every kernel for every target, without a GPU, and check what came out.

    Every pair of settings once; `-- -m compile` every configuration, which takes twice as long.
    """
    # One test at a time: each compiles two cases at a time.
    run_pytest(session, "-m", "compile and not slow", "packages")


@nox.session(reuse_venv=True, requires=["env"])
def newest_triton(session: nox.Session) -> None:
    """Run executor, device functions and compile guard on the newest triton that is supported."""
    session.install("--no-deps", NEWEST_TRITON)
    # All else is what the shared environment holds, found after what is installed here.
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    shared = str(session.run(ENV_PYTHON, "-c", code, external=True, silent=True)).strip()
    own = str(session.run("python", "-c", code, silent=True)).strip()
    Path(own, "shared.pth").write_text(f"import site; site.addsitedir({shared!r})\n")
    core, tpsp = "packages/kosmos-core/tests", "packages/kosmos-tpsp/tests"
    pytest = ("python", "-m", "pytest", "--timeout=900", *session.posargs)
    env = {**ONE_THREAD, "PYTHONPATH": None}
    kernels = (f"{core}/executor", f"{core}/device", f"{tpsp}/ops/test_ag_gemm.py")
    session.run(*pytest, "-m", CPU_TESTS, *kernels, env=env)
    guard = (f"{core}/testing", f"{core}/test_measure.py", f"{tpsp}/test_compile_cases.py")
    session.run(*pytest, "-m", "compile and not slow", *guard, env=env)


@nox.session(venv_backend="none", requires=["env"])
def integration(session: nox.Session) -> None:
    """Run the tests that put several packages together."""
    run_pytest(session, "-m", CPU_TESTS, "integration/tests")


@nox.session(venv_backend="none", requires=["env"])
def docs(session: nox.Session) -> None:
    """Check the links and the commands in the documentation."""
    run_pytest(session, "tests/test_docs.py")


@nox.session(venv_backend="none", requires=["env"])
def explore(session: nox.Session) -> None:
    """Explore schedules at length: `nox -s explore -- [kosmos_tpsp|kosmos_moe] [OPTIONS]`."""
    module, arguments = "kosmos_tpsp", session.posargs
    if arguments and arguments[0] in ("kosmos_tpsp", "kosmos_moe"):
        module, *arguments = arguments
    run_in_env(session, "-m", module, "explore", *arguments)


@for_each_package("build", reuse_venv=True)
def build(session: nox.Session, package: str) -> None:
    """Make sdist and wheel, install the wheel in an empty environment, import it."""
    session.install(*CONSTRAINTS, "build")
    tmp = Path(session.create_tmp()).resolve()
    dist, empty = tmp / "dist", tmp / "empty"
    for name in siblings(package):
        # Without --wheel or --sdist, the wheel is made from the sdist.
        session.run("python", "-m", "build", "--outdir", str(dist), f"packages/{name}")
    session.run("python", "-m", "venv", "--clear", str(empty))
    python = str(empty / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--quiet", *CONSTRAINTS, "--find-links", str(dist)]
    session.run(*pip, f"{package}=={VERSION}", external=True)
    module = package.replace("-", "_")
    check = f"import {module}; assert {module}.__version__ == {VERSION!r}, {module}.__version__"
    session.chdir(empty)
    session.run(python, "-c", check, external=True, env={"PYTHONPATH": None})


def run_on_gpus(session: nox.Session, package: str, *command: str) -> None:
    """Run `python COMMAND` with the python on the path and the source tree of `package`."""
    sources = [str(ROOT / "packages" / name / "src") for name in siblings(package)]
    env = {"PYTHONPATH": os.pathsep.join(sources)}
    session.run("python", *command, *session.posargs, external=True, env=env)


@for_each_package("gpu", venv_backend="none")
def gpu(session: nox.Session, package: str) -> None:
    """Run one package's tests that need one GPU; having none is a failure."""
    folder = f"packages/{package}/tests"
    run_on_gpus(session, package, "-m", "pytest", "-m", "gpu", "--require-gpu", folder)


@for_each_package("multi_gpu", venv_backend="none")
def multi_gpu(session: nox.Session, package: str) -> None:
    """Run one package's tests that need several GPUs; having none is a failure."""
    folder = f"packages/{package}/tests"
    run_on_gpus(session, package, "-m", "pytest", "-m", "multi_gpu", "--require-gpu", folder)


@for_each_package("bench", venv_backend="none")
def bench(session: nox.Session, package: str) -> None:
    """Run every benchmark of one package, with the arguments after `--`."""
    found = sorted(Path("packages", package, "benchmarks").glob("bench_*.py"))
    if not found:
        session.error(f"packages/{package}/benchmarks has no bench_*.py")
    for path in found:
        run_on_gpus(session, package, str(path))
