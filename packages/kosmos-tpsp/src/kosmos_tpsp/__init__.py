"""Tensor- and sequence-parallel operations that run their collective inside the GEMM kernel."""

from importlib.metadata import PackageNotFoundError, version

__all__ = ["__version__"]

try:
    __version__ = version("kosmos-tpsp")
except PackageNotFoundError:  # run from a source tree that is on the path but not installed
    __version__ = "0+source"
