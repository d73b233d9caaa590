"""The machines that ship with the package, ``data/NAME.json``."""

from __future__ import annotations

import json
from importlib import resources

from kosmos_heuristics.errors import MachineError
from kosmos_heuristics.machine import Machine

MACHINE_NAMES = ("executor", "h200", "mi350x", "mi355x")


def packaged_machine(name: str) -> Machine:
    """Load a packaged machine.

    Raises:
        MachineError: No machine of that name is packaged.
    """
    if name not in MACHINE_NAMES:
        wanted = "one of " + ", ".join(MACHINE_NAMES)
        raise MachineError("machine", name, wanted, "or pass the path of a machine file")
    path = resources.files("kosmos_heuristics") / "data" / f"{name}.json"
    return Machine.from_dict(json.loads(path.read_text("utf-8")))
