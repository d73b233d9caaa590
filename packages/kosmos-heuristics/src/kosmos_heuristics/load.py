"""Finding a machine: by the name of a packaged one, from a file, or from JSON data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from kosmos_heuristics.curves import is_measurement, machine_from_measurement
from kosmos_heuristics.errors import MachineError
from kosmos_heuristics.machine import Machine
from kosmos_heuristics.packaged import MACHINE_NAMES, packaged_machine


def load_machine(source: str | Path | Mapping[str, object] | Machine) -> Machine:
    """Load a machine from whatever describes one.

    Args:
        source: The name of a packaged machine, the path of a JSON file, the data of such a file,
            or a machine. File and data may be a machine (``Machine.to_dict``) or a measurement
            (``python -m kosmos_core measure``).

    Returns:
        The validated machine.

    Raises:
        MachineError: Unknown name, unreadable file, malformed JSON, or fields out of range.
    """
    if isinstance(source, Machine):
        return source
    if isinstance(source, Mapping):
        return _from_data(source)
    if not isinstance(source, (str, Path)):
        raise MachineError("machine", source, "a name, a path or data", "pass one of them")
    if isinstance(source, str) and source.lower() in MACHINE_NAMES:
        return packaged_machine(source.lower())
    return _from_data(_read_json(Path(source)))


def _read_json(path: Path) -> object:
    wanted = "one of " + ", ".join(MACHINE_NAMES) + ", or the path of a readable JSON file"
    try:
        data: object = json.loads(path.read_text("utf-8"))
    except OSError as error:
        remedy = f"check the name or path ({error.strerror or type(error).__name__})"
        raise MachineError("machine", str(path), wanted, remedy) from None
    except (ValueError, RecursionError) as error:
        raise MachineError("machine", str(path), wanted, f"repair the file ({error})") from None
    return data


def _from_data(data: object) -> Machine:
    if is_measurement(data):
        return machine_from_measurement(data)
    return Machine.from_dict(data)
