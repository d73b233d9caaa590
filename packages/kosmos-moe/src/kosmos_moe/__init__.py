"""Mixture-of-experts layers in one kernel launch a direction.

Nothing is in this package yet: it holds its name and its version.
"""

from importlib.metadata import PackageNotFoundError, version

__all__ = ["__version__"]

try:
    __version__ = version("kosmos-moe")
except PackageNotFoundError:  # run from a source tree that is on the path but not installed
    __version__ = "0+source"
