"""The rules that give the tree its shape, each shown to catch what it forbids.

A rule is a function from a tree (a folder laid out like this repository) to the list of its
breaches. Each is run on the repository, where it must find none, and on a small tree with one
planted breach, where it must find that one.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]

# What may import what among the packages, beyond itself.
MAY_IMPORT = {
    "kosmos_core": set(),
    "kosmos_heuristics": set(),
    "kosmos_mx": {"kosmos_core"},
    "kosmos_tpsp": {"kosmos_core", "kosmos_heuristics", "kosmos_mx"},
    "kosmos_moe": {"kosmos_core", "kosmos_heuristics", "kosmos_mx"},
}
# The ladder inside a package. A file imports from its own rung and the one below, nothing else on
# the ladder; files whose name is not here stand beside it.
RUNGS = {
    "device": 0,
    "kernels": 0,
    "ops": 1,
    "linear_autograd": 2,
    "functions": 2,
    "mx_functions": 2,
    "modules": 3,
}
ORDERED_ATOMICS = {f"kosmos_core/device/{name}.py" for name in ("flags", "queue", "barrier")}
DATA_POLLS = {"kosmos_core/device/sentinel.py"}
MAX_LINES = 500
SOURCES = (".py", ".cpp", ".hpp", ".toml", ".txt", ".md", ".sh", ".json", "run", "VERSION")
# Written in pieces, so that this file does not break its own rule.
FORBIDDEN = {
    "a thing put off": re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b"),
    "a machine's path": re.compile(r"(?<![\w.\]}])/(work|root|home|opt)/\w"),
    "a registry's host": re.compile(r"\b(py" + r"pi\.org|python" + r"hosted|registry\.npm)"),
    "an issue's number": re.compile(r"\bissue" + r" #?\d"),
}


def modules(tree: Path) -> Iterator[tuple[str, ast.Module]]:
    """Yield the path below src/, and the syntax tree, of each file of the packages."""
    for source in sorted(tree.glob("packages/*/src")):
        for path in sorted(source.rglob("*.py")):
            yield str(path.relative_to(source)), ast.parse(path.read_text(), str(path))


def imports(name: str, module: ast.Module) -> Iterator[str]:
    """Yield every module that file `name` imports, in absolute form."""
    package = Path(name).parent.parts
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join((*above, *([node.module] if node.module else [])))
            # `from a import b` may take a module of a, or a name in a: it counts as both.
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def packages_keep_to_their_siblings(tree: Path) -> list[str]:
    """Return imports of a sibling that MAY_IMPORT does not grant."""
    found = set()
    for name, module in modules(tree):
        own = Path(name).parts[0]
        for target in imports(name, module):
            top = target.split(".")[0]
            if top in MAY_IMPORT and top not in MAY_IMPORT[own] | {own}:
                found.add(f"{name} imports {top}")
    return sorted(found)


def folders_without_torch_have_none(tree: Path) -> list[str]:
    """Return imports of torch in device code, and of torch or triton in kosmos_heuristics."""
    found = set()
    for name, module in modules(tree):
        forbidden = {"torch"} if {"device", "kernels"} & set(Path(name).parts) else set()
        if name.startswith("kosmos_heuristics/"):
            forbidden = {"torch", "triton"}
        for target in imports(name, module):
            if target.split(".")[0] in forbidden:
                found.add(f"{name} imports {target.split('.')[0]}")
    return sorted(found)


def rung(parts: tuple[str, ...]) -> int | None:
    """Return the rung of the module with these name parts, package first."""
    return RUNGS.get(parts[1]) if len(parts) > 1 and parts[0] in MAY_IMPORT else None


def nothing_skips_a_rung(tree: Path) -> list[str]:
    """Return imports from above the importing file's rung, or from two or more rungs below."""
    found = set()
    for name, module in modules(tree):
        own = rung(Path(name).with_suffix("").parts)
        for target in imports(name, module):
            other = rung(tuple(target.split(".")))
            if own is not None and other is not None and other not in (own, own - 1):
                found.add(f"{name} imports {'.'.join(target.split('.')[:2])}")
    return sorted(found)


def references_stand_alone(tree: Path) -> list[str]:
    """Return imports from the ladder in a reference.py: an oracle shares nothing with its pupil."""
    found = set()
    for name, module in modules(tree):
        if Path(name).name == "reference.py":
            for target in imports(name, module):
                if rung(tuple(target.split("."))) is not None:
                    found.add(f"{name} imports {'.'.join(target.split('.')[:2])}")
    return sorted(found)


def ordering_stands_in_its_files(tree: Path) -> list[str]:
    """Return calls that say how memory is ordered outside the files that may.

    Those are calls with sem=, scope= or volatile=, and every call of an atomic: without sem= it is
    an acquire and a release. The executor models all of these, and pytest has a scope= of its own.
    """
    found = []
    for name, module in modules(tree):
        if name.startswith(("kosmos_core/executor/", "kosmos_core/testing/")):
            continue
        for node in ast.walk(module):
            if isinstance(node, ast.Call):
                words = {keyword.arg for keyword in node.keywords}
                called = getattr(node.func, "attr", "")
                ordered = words & {"sem", "scope"} or called.startswith("atomic_")
                if ordered and name not in ORDERED_ATOMICS:
                    found.append(f"{name}:{node.lineno} orders memory")
                if "volatile" in words and name not in DATA_POLLS:
                    found.append(f"{name}:{node.lineno} is a volatile access")
    return found


def declared(tree: Path, package: str) -> set[str]:
    """Return the names of the distributions that `package` declares that it needs."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    settings = tomllib.loads((tree / "packages" / package / "pyproject.toml").read_text())
    hook = settings.get("tool", {}).get("hatch", {}).get("metadata", {}).get("hooks", {})
    custom = hook.get("custom", {})
    lines = settings["project"].get("dependencies", [])
    extras = [name for names in custom.get("extras", {}).values() for name in names]
    written = [*lines, *custom.get("third-party", []), *custom.get("siblings", []), *extras]
    return {canonicalize_name(Requirement(line).name) for line in written}


def imports_are_declared(tree: Path) -> list[str]:
    """Return what a package imports but does not declare, or declares but does not import."""
    used: dict[str, set[str]] = {}
    for name, module in modules(tree):
        own = Path(name).parts[0]
        tops = {target.split(".")[0] for target in imports(name, module)}
        known = sys.stdlib_module_names | {own, "__future__"}
        used.setdefault(own, set()).update(canonicalize_name(top) for top in tops - known if top)
    found = []
    for own, names in sorted(used.items()):
        package = own.replace("_", "-")
        written = declared(tree, package)
        found += [f"{package} imports {name} undeclared" for name in sorted(names - written)]
        found += [f"{package} declares {name} unused" for name in sorted(written - names)]
    return found


def texts(tree: Path) -> Iterator[tuple[str, str]]:
    """Yield path and text of each file of the repository that people write."""
    for folder, names, files in os.walk(tree):
        kept = [name for name in names if name == ".ci" or name[0] not in "._"]
        names[:] = sorted(name for name in kept if name not in ("build", "dist"))
        for file in sorted(files):
            if file.endswith(SOURCES):
                path = Path(folder, file)
                yield str(path.relative_to(tree)), path.read_text()


def files_are_short(tree: Path) -> list[str]:
    """Return files of code that are longer than MAX_LINES."""
    code = (".py", ".cpp", ".hpp")
    lengths = {name: len(text.splitlines()) for name, text in texts(tree) if name.endswith(code)}
    return [f"{name}: {lines} lines" for name, lines in lengths.items() if lines > MAX_LINES]


def words_are_allowed(tree: Path) -> list[str]:
    """Return lines with something of FORBIDDEN in them."""
    return [
        f"{name}:{number} holds {what}"
        for name, text in texts(tree)
        for number, line in enumerate(text.splitlines(), start=1)
        for what, pattern in FORBIDDEN.items()
        if pattern.search(line)
    ]


Rule = Callable[[Path], list[str]]
CORE, TPSP, MOE, HEURISTICS = (
    f"packages/kosmos-{name}/src/kosmos_{name}" for name in ("core", "tpsp", "moe", "heuristics")
)
PLANTS: list[tuple[Rule, str, str, str]] = [
    (packages_keep_to_their_siblings, f"{TPSP}/a.py", "import kosmos_moe.ops", "kosmos_moe"),
    (packages_keep_to_their_siblings, f"{MOE}/a.py", "from kosmos_tpsp import x", "kosmos_tpsp"),
    (packages_keep_to_their_siblings, f"{CORE}/a.py", "def f():\n import kosmos_mx", "kosmos_mx"),
    (packages_keep_to_their_siblings, f"{HEURISTICS}/a.py", "import kosmos_core", "kosmos_core"),
    (folders_without_torch_have_none, f"{CORE}/device/a.py", "import torch", "torch"),
    (folders_without_torch_have_none, f"{TPSP}/kernels/a.py", "from torch.x import y", "torch"),
    (folders_without_torch_have_none, f"{HEURISTICS}/a.py", "import triton.language", "triton"),
    (nothing_skips_a_rung, f"{TPSP}/modules.py", "from . import ops", "kosmos_tpsp.ops"),
    (nothing_skips_a_rung, f"{TPSP}/functions.py", "from .kernels import x", "kosmos_tpsp.kernels"),
    (nothing_skips_a_rung, f"{TPSP}/ops/a.py", "from ..functions import x", "functions"),
    (nothing_skips_a_rung, f"{TPSP}/modules.py", "import kosmos_core.device.flags", "core.device"),
    (nothing_skips_a_rung, f"{TPSP}/kernels/a.py", "from kosmos_tpsp.ops import x", "tpsp.ops"),
    (references_stand_alone, f"{TPSP}/reference.py", "from . import ops", "kosmos_tpsp.ops"),
    (ordering_stands_in_its_files, f"{TPSP}/kernels/a.py", "tl.f(p, sem='acquire')", ":1 orders"),
    (ordering_stands_in_its_files, f"{CORE}/launch.py", "\nf(scope='sys')", ":2 orders"),
    (ordering_stands_in_its_files, f"{CORE}/device/roles.py", "tl.atomic_add(p, 1)", ":1 orders"),
    (ordering_stands_in_its_files, f"{CORE}/device/flags.py", "tl.load(p, volatile=True)", ":1 is"),
    (files_are_short, f"{CORE}/a.py", "x = 1\n" * 501, "501 lines"),
    (words_are_allowed, f"{CORE}/a.py", "# TO" + "DO later", ":1 holds a thing put off"),
    (words_are_allowed, "docs/a.md", "\nSee `/ro" + "ot/x`.", ":2 holds a machine's path"),
    (words_are_allowed, "README.md", "from py" + "pi.org", ":1 holds a registry's host"),
    (words_are_allowed, "README.md", "as issue" + " 7 says", ":1 holds an issue's number"),
]
DECLARED = '[project]\ndependencies = ["torch", "rich"]\n'
RULES: list[Rule] = [*dict.fromkeys(plant[0] for plant in PLANTS), imports_are_declared]


def plant(tree: Path, name: str, text: str) -> None:
    path = tree / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_repository_keeps(rule: Rule) -> None:
    assert rule(ROOT) == []


@pytest.mark.parametrize(("rule", "name", "text", "told"), PLANTS)
def test_a_breach_is_found(tmp_path: Path, rule: Rule, name: str, text: str, told: str) -> None:
    plant(tmp_path, name, text)
    (breach,) = rule(tmp_path)
    assert told in breach
    assert Path(name).name in breach


def test_undeclared_and_unused_imports_are_found(tmp_path: Path) -> None:
    plant(tmp_path, f"{MOE}/a.py", "import os, numpy\nfrom torch import nn\nfrom . import b\n")
    plant(tmp_path, "packages/kosmos-moe/pyproject.toml", DECLARED)
    told = ["kosmos-moe imports numpy undeclared", "kosmos-moe declares rich unused"]
    assert imports_are_declared(tmp_path) == told


def test_what_the_rules_allow_passes(tmp_path: Path) -> None:
    plant(tmp_path, f"{CORE}/device/flags.py", "tl.atomic_add(p, 1, sem='release', scope='sys')")
    plant(tmp_path, f"{CORE}/device/sentinel.py", "tl.load(p, volatile=True)")
    plant(tmp_path, f"{TPSP}/modules.py", "from .functions import x\nimport torch")
    plant(tmp_path, f"{TPSP}/ops/ag_gemm.py", "from ..kernels import x\nimport kosmos_core.launch")
    plant(tmp_path, f"{HEURISTICS}/plans.py", "import math\nfrom . import machine")
    rules = [rule for rule in RULES if rule is not imports_are_declared]
    assert [breach for rule in rules for breach in rule(tmp_path)] == []
