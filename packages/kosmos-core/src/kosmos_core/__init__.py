"""Worlds, symmetric memory, device functions, the CPU executor: what every KOSMOS kernel uses."""

from importlib.metadata import PackageNotFoundError, version

__all__ = ["__version__"]

try:
    __version__ = version("kosmos-core")
except PackageNotFoundError:  # run from a source tree that is on the path but not installed
    __version__ = "0+source"
