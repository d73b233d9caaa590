"""The four worlds: where the ranks of a group live.

Operations see only `World` and never ask which it is.
"""

from kosmos_core.worlds.base import SymmetricBuffer, World
from kosmos_core.worlds.factory import (
    cpu_world,
    gpu_world,
    group_world,
    parse_world,
    reference_world,
)

__all__ = [
    "SymmetricBuffer",
    "World",
    "cpu_world",
    "gpu_world",
    "group_world",
    "parse_world",
    "reference_world",
]
